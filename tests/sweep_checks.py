"""Examples for the tests of sweeps, and the numbers that a sweep must give, found in another way."""

from __future__ import annotations

import numpy as np

from gna_utils import ablate, key_value, score
from gna_utils.tasks import Example

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7 w9", "w8 w9 w10", "w11 w12 w13 w14 w15 w16", "w17 w18 w19"]
WORDS = (" w40", " w41", " w42")
EXAMPLES = [Example("test", prompt, WORDS, i % 3) for i, prompt in enumerate(PROMPTS)]


def dictionaries(model):
    """Questions that the model of :mod:`circuit` answers."""
    words = [f"w{i}" for i in range(1, 60)]
    return key_value(12, 5, tokenizer=model.tokenizer, keys=words[:29], values=words[29:])


def expected(model, examples, group, **options):
    """What :func:`ablate` and :func:`score` say: an independent way to the same numbers."""
    with ablate(model, group, **options):
        frame = score(model, examples).frame
    return {"accuracy": frame["correct"].to_numpy(), "logprob": frame["logprob"].to_numpy()}


def values(found, unit):
    rows = found.examples[found.examples["unit"] == unit]
    return {metric: part["value"].to_numpy() for metric, part in rows.groupby("metric")}


def same(found, unit, truth, tolerance=1e-4):
    for metric, numbers in truth.items():
        assert np.abs(values(found, unit)[metric] - numbers).max() <= tolerance
