"""Run chapters, keep their results and build the site.

>>> from gna_utils.runs import save, load_frame   # in a chapter

"""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "run": "execute",
    "build_site": "build",
    "save": "records",
    "load_frame": "records",
    "table": "records",
    "COLUMNS": "records",
    "RunRecord": "records",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'gna_utils.runs' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
