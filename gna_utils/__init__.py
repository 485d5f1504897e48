"""Gather and Aggregate: find, read and repair the retrieval heads of any sequence model.

Names are loaded on first use, so that ``import gna_utils`` stays instant and needs no torch.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "GnaError": "errors",
    "Head": "heads",
    "parse_heads": "heads",
    "load": "models",
    "info": "models",
    "key_value": "tasks",
    "mqar": "tasks",
    "encode": "tasks",
    "score": "scoring",
    "accuracy": "scoring",
    "layers": "mixers",
    "transfer_matrix": "mixers",
    "ablate": "trace",
    "keep_only": "trace",
    "mask_rows": "trace",
    "drop_layers": "trace",
    "keep_layers": "trace",
    "patch": "trace",
    "sweep": "sweeps",
    "cumulative": "sweeps",
    "keep_top": "sweeps",
    "pairs": "sweeps",
    "pattern_scores": "patterns",
    "interchange": "patterns",
    "agreement": "patterns",
    "random_heads": "patterns",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'gna_utils' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
