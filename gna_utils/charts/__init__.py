"""Charts of the book: accuracy curves, bars, maps over tokens and heads, prompts with their segments marked.

Every function takes tidy rows (a pandas frame or a list of dicts) or a matrix, and returns a plain Altair
chart that can be layered and configured further. ``title`` and ``description`` are required: the description
is what a reader hears who cannot see the chart.

>>> from gna_utils import charts
>>> charts.setup()
"""

from .intervals import interval_bars, interval_line
from .maps import head_grid, heatmap
from .style import setup
from .tokens import TokenStrip, show_token, token_roles, token_strip, token_texts

__all__ = [
    "TokenStrip",
    "head_grid",
    "heatmap",
    "interval_bars",
    "interval_line",
    "setup",
    "show_token",
    "token_roles",
    "token_strip",
    "token_texts",
]
