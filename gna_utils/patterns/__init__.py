"""How heads look: scores of their maps, what their output carries, and how well looks agree with effects."""

from .controls import random_heads
from .exchange import interchange
from .maps import map_scores, row_shares
from .ranks import agreement
from .scores import pattern_scores, repeated_tokens

__all__ = [
    "agreement",
    "interchange",
    "map_scores",
    "pattern_scores",
    "random_heads",
    "repeated_tokens",
    "row_shares",
]
