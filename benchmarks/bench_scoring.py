"""Scoring all candidates from one forward per example, against one forward per candidate.

Prints the ratio of the two durations and the largest difference between their log-probabilities, at 20
pairs on SmolLM2-135M: words (one token each) and numbers (three tokens each).
"""

from __future__ import annotations

import time

import numpy as np
import torch

import gna_utils as gna
from gna_utils.forward import forward
from gna_utils.tasks import encode, key_value

PAIRS, EXAMPLES = 20, 3


def one_forward_per_candidate(model, rows) -> list[np.ndarray]:
    """Run prompt and candidate as a row of its own, for each candidate in turn."""
    found = []
    for row in rows:
        sums = []
        for ids in row.candidate_ids:
            text = torch.tensor([row.input_ids + ids])
            places = torch.arange(len(row.input_ids) - 1, text.shape[1] - 1)[None]
            # over 49,152 tokens a float32 log_softmax is off by 1e-4: the reference is taken in float64
            logits = forward(model, text, torch.ones_like(text), positions=places)[0].double()
            sums.append(float(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()))
        found.append(np.array(sums))
    return found


def timed(function, *arguments):
    start = time.perf_counter()
    return function(*arguments), time.perf_counter() - start


def main() -> None:
    model = gna.load("smollm2-135m", device="cpu")
    for values in ("words", "numbers"):
        examples = key_value(EXAMPLES, PAIRS, tokenizer=model.tokenizer, values=values)
        rows = encode(examples, model.tokenizer)
        gna.score(model, rows[:1])  # the first trace of a process pays for imports
        shared, fast = timed(gna.score, model, rows)
        plain, slow = timed(one_forward_per_candidate, model, rows)
        difference = max(np.abs(a - b).max() for a, b in zip(shared.logprobs, plain))
        print(
            f"{values}, {PAIRS} pairs, {len(rows[0].candidate_ids[0])} tokens per candidate "
            f"({shared.method}): {slow / fast:.1f} times faster than one forward per candidate, "
            f"largest difference {difference:.1e}"
        )


if __name__ == "__main__":
    main()
