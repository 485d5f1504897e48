"""Recipes so small that a run takes a second, and what tests ask of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gna_utils.training import loop, recipes, train

STEPS = 6
REAL = dict(recipes.RECIPES)
FROM_DATA = [name for name, made in REAL.items() if made.objective == "answers"]
_TINY = {"hidden_size": 16, "num_hidden_layers": 2}
_LLAMBA = {
    **REAL["tiny-llamba"].settings,
    "d_model": 16,
    "n_layer": 2,
    "ssm_cfg": {"n_v_heads": 2, "n_qk_heads": 2, "d_state": 4},
    "mlp_cfg": {"intermediate_size": 24},
}
SETTINGS = {
    "tiny-transformer": {
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        **_TINY,
    },
    "tiny-mamba": {"state_size": 4, **_TINY},
    "tiny-mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 4, "chunk_size": 8, **_TINY},
    "tiny-llamba": _LLAMBA,
    "tiny-llamba-aligned": _LLAMBA,
}


def record(folder: Path) -> dict:
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def without_seconds(content):
    if isinstance(content, dict):
        return {key: without_seconds(value) for key, value in content.items() if key != "seconds"}
    return [without_seconds(value) for value in content] if isinstance(content, list) else content


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def interrupted(step: int, *args, **options) -> None:
    """A run that is stopped before ``step``, as by Ctrl-C."""
    step_of_run = loop.Run.step

    def step_or_stop(run):
        if run.progress.step == step:
            raise KeyboardInterrupt
        return step_of_run(run)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Run, "step", step_or_stop)
        train(*args, **options)
