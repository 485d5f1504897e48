from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import REAL, SETTINGS, STEPS

from gna_utils.training import curriculum as lessons
from gna_utils.training import evaluation, loop, recipes, saving, train


@pytest.fixture(scope="module", autouse=True)
def small_recipes():
    """The recipes with models and runs so small that a run takes a second; 4 examples for an accuracy."""
    with pytest.MonkeyPatch.context() as patch:
        for name, settings in SETTINGS.items():
            made = replace(REAL[name], settings=settings, steps=STEPS, batch=4, length=30, warm_up=2)
            patch.setitem(recipes.RECIPES, name, made)
        patch.setattr(loop, "EVERY", 2)
        patch.setattr(lessons, "PART", 3)  # so that the 4 documents of a step are two parts
        patch.setattr(evaluation, "SIZES", {"key_value": (2,), "letter": (2,), "cloze": (2,)})
        measure, measure_all = loop.held_out, saving.evaluate
        patch.setattr(loop, "held_out", lambda model, **options: measure(model, **options | {"n": 4}))
        patch.setattr(saving, "evaluate", lambda model: measure_all(model, n=4))
        yield


@pytest.fixture(scope="module")
def finished(small_recipes, tmp_path_factory) -> Path:
    return train("tiny-transformer", out=tmp_path_factory.mktemp("runs") / "finished")
