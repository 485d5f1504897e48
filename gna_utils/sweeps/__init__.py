"""Which heads matter: the effect of each head, layer or group on a task, measured in minutes.

>>> from gna_utils.sweeps import sweep, cumulative, keep_top, pairs
"""

from __future__ import annotations

from .combine import cumulative, keep_top, pairs
from .effects import Sweep, sweep

__all__ = ["Sweep", "cumulative", "keep_top", "pairs", "sweep"]
