"""The sequence mixers of a model: which there are, and what they move between positions."""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "MixerInfo": "table",
    "LayerTable": "table",
    "layers": "table",
    "transfer_matrix": "transfer",
    "values": "transfer",
    "mixing": "transfer",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'gna_utils.mixers' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
