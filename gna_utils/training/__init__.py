"""Train the tiny models of this book, and measure them on what they have not seen."""

from .loop import train

__all__ = ["train"]
