"""The one error class of the package."""

from __future__ import annotations


class GnaError(ValueError):
    """Something was asked that cannot be done; the message says what was asked and what is possible."""
