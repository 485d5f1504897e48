"""Run chapters, keep their results and build the site.

>>> from gna_utils.runs import save, load_frame    # in a chapter
>>> from gna_utils.runs import run, build_site     # what ``gna run`` and ``gna build`` call
"""

from __future__ import annotations

from importlib import import_module

from ..columns import COLUMNS

# Not on first use, as the others: nnsight gives every object a method `save`, and a module is an object.
from .records import RunRecord, load_frame, save, table

_HOME = {"run": "execute", "build_site": "build"}

__all__ = ["COLUMNS", "RunRecord", "build_site", "load_frame", "run", "save", "table"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'gna_utils.runs' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
