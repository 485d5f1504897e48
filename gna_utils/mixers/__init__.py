"""The sequence mixers of a model: which there are, and what they move between positions."""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "MixerInfo": "layers",
    "LayerTable": "layers",
    "layers": "layers",
    "transfer_matrix": "transfer",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'gna_utils.mixers' has no attribute '{name}'")
    module = import_module(f".{_HOME[name]}", __name__)
    for exported, home in _HOME.items():
        if home == _HOME[name]:  # `layers` names a function and its module: the function must win
            globals()[exported] = getattr(module, exported)
    return globals()[name]
