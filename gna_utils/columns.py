"""The columns that every table of results has, whatever made it."""

from __future__ import annotations

COLUMNS = (
    "model",
    "task",
    "layer",
    "head",
    "mixer",
    "ablation",
    "positions",
    "n",
    "metric",
    "baseline",
    "value",
    "drop",
    "drop_low",
    "drop_high",
    "seed",
)
"""One row per measurement; ``drop_low`` and ``drop_high`` are a 95 % paired bootstrap over examples."""
