"""Held-out accuracies of a model of the small world."""

from __future__ import annotations

import warnings

from nnsight.modeling.transformers import TransformersModel
from transformers import PreTrainedModel

from ..scoring import GnaWarning, accuracy, score
from ..stats import Estimate
from ..tasks import world
from ..tasks.scenes import small_world

# task: sizes that are measured; the first one stands for the task while a model is trained
SIZES = {
    "key_value": (8, 2, 4, 12, 16, 24),
    "cloze": (4,),
    "letter": (4, 2),
    "arithmetic": (4,),
    "tracking": (1, 0, 2),
    "dialogue": (4, 2),
}


def evaluate(
    model: TransformersModel, *, n: int = 500, seed: int = 0, short: bool = False
) -> dict[str, dict[int, Estimate]]:
    """Accuracy on held-out examples of every task, by size.

    >>> evaluate(load("tiny-mamba2"))["key_value"][8]
    Estimate(value=..., low=..., high=..., n=500, chance=0.125)

    ``short`` measures the usual size of each task only.
    """
    found: dict[str, dict[int, Estimate]] = {}
    with warnings.catch_warnings():
        # early in training a model expects other words than the candidates; that is what is being measured
        warnings.simplefilter("ignore", GnaWarning)
        for task, sizes in SIZES.items():
            for size in sizes[:1] if short else sizes:
                examples = small_world(task, n, size=size, seed=seed)
                found.setdefault(task, {})[size] = accuracy(score(model, examples))
    return found


def held_out(model: PreTrainedModel, *, n: int, seed: int, short: bool) -> dict[str, float]:
    """Accuracies of a model in training, which is left in eval mode."""
    model.eval()
    wrapped = TransformersModel(model, tokenizer=world.tokenizer(), device=model.device)
    return {
        task: sizes[SIZES[task][0]].value
        for task, sizes in evaluate(wrapped, n=n, seed=seed, short=short).items()
    }
