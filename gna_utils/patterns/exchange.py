"""The interchange test: heads put out what they put out in a prompt with another answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..columns import COLUMNS
from ..errors import GnaError
from ..forward import encode_prompts, forward, require_eval, tokens
from ..heads import parse_heads
from ..mixers.table import layers
from ..models import name_of
from ..scoring import TIE
from ..stats import paired_bootstrap
from ..sweeps.units import units_of
from ..tasks import Encoded, Example, batches
from ..tasks.encoding import listed, whole
from ..tasks.example import generator
from ..trace import patch

POSITIONS = ("value", "summary", "query")
FRAME = ["unit", *COLUMNS, "n_heads", "ceiling", "chance"]


def interchange(
    model,
    examples: Example | Iterable[Example],
    heads,
    positions: str = "value",
    *,
    donors: Iterable[Example] | None = None,
    mixer: str | None = None,
    max_tokens: int = 4096,
    seed: int = 0,
    remote: bool | str = False,
) -> pd.DataFrame:
    """Whether heads carry the answer: patch them from a donor prompt in which only the answer differs.

    >>> interchange(model, key_value(40, 10, tokenizer=model.tokenizer), "L17H3", positions="query")

    The donor of an example is the same prompt with another candidate written over its ``"value"`` span. At
    the marked ``positions`` (``"value"``, all ``"summary"`` tokens, or the ``"query"``) all ``heads``
    together put out what they put out in the donor. Two metrics, read from the first token of the candidates:

    - ``follows``: how often the donor's answer is the most likely candidate (ties count 1/k). Its ``drop`` is
      negative when heads carry the answer.
    - ``log_odds``: log-probability of the right answer minus that of the donor's. Its ``drop`` is positive
      when heads carry the answer.

    Returns two rows per metric, ``ablation="interchange"`` and its twin ``"own"``, where the donor of a
    prompt is the prompt itself and the drop must be 0: ``unit, model, task, layer, head, n_heads, mixer,
    ablation, positions, n, metric, baseline, value, drop, drop_low, drop_high, ceiling, chance, seed``.
    ``baseline`` is the plain prompt, ``ceiling`` the plain donor, both measured against the same two answers;
    intervals are paired bootstrap over examples, 95 %. ``layer`` and ``head`` are missing where there are
    several. Which candidate an example gets depends on ``seed`` and its place in the list. Your own
    ``donors`` are examples with the same candidates and another answer.

    Raises :class:`GnaError` for examples without a ``"value"`` span, where no candidate fits into the place
    of the value, where first tokens do not tell candidates apart, and as :func:`~gna_utils.patch` does.
    Source: interchange interventions, Geiger et al. 2021 (arXiv:2106.02997).
    """
    require_eval(model)
    if positions not in POSITIONS:
        raise GnaError(f"positions={positions!r} is not possible: choose {', '.join(map(repr, POSITIONS))}.")
    [unit] = units_of(layers(model), [sorted(parse_heads(heads))], mixer)
    examples = listed(examples, Example)
    _, _, rows = encode_prompts(model, examples)
    if donors is None:
        whole("seed", seed, 0)
        others = [_other_answer(model, e, row, i, seed) for i, (e, row) in enumerate(zip(examples, rows))]
    else:
        _, _, others = encode_prompts(model, listed(donors, Example))
    _check_pairs(rows, others)
    found: dict[str, list] = {name: [None] * len(rows) for name in ("plain", "donor", "interchange", "own")}
    for batch in batches(rows, max_tokens=max_tokens):
        pair = [others[i] for i in batch.index]
        logits = {
            "plain": _forward(model, batch.rows, remote),
            "donor": _forward(model, pair, remote),
            "interchange": patch(model, heads, batch.rows, pair, positions, mixer=mixer, remote=remote),
            "own": patch(model, heads, batch.rows, batch.rows, positions, mixer=mixer, remote=remote),
        }
        for name, lines in logits.items():
            for i, line in zip(batch.index, lines):
                found[name][i] = _candidates(line, rows[i])
    first = {
        **unit.columns(),
        "model": name_of(model),
        "task": ", ".join(sorted({example.task for example in examples})),
        "positions": positions,
        "n": len(rows),
        "seed": seed,
    }
    frame = pd.DataFrame([first | measured for measured in _compared(found, rows, others, seed)])[FRAME]
    return frame.astype({"layer": "Int64", "head": "Int64"})


def _forward(model, rows: list[Encoded], remote) -> Tensor:
    ids, mask = tokens(model, rows)
    return forward(model, ids, mask, rows=rows, remote=remote)


def _other_answer(model, example: Example, row: Encoded, i: int, seed: int) -> Encoded:
    """The example with the first candidate, in random order, that fits where the value stands."""
    if "value" not in example.spans:
        raise GnaError(f"example {i} has no span 'value', where the donor would differ: give donors=[...].")
    start, end = example.spans["value"]
    if example.prompt[start:end] != example.candidates[example.answer].strip():
        raise GnaError(
            f"example {i} holds {example.prompt[start:end]!r} as its value, which is not its answer "
            f"{example.candidates[example.answer]!r}: give donors=[...]."
        )
    for k in generator(seed, i).permutation(len(example.candidates)).tolist():
        if k == example.answer:
            continue
        [other] = encode_prompts(model, [_rewritten(example, k)])[2]
        if len(other.input_ids) == len(row.input_ids) and other.spans == row.spans:
            return other
    raise GnaError(
        f"no other candidate of example {i} has as many tokens as its value {example.prompt[start:end]!r}: "
        "give donors=[...]."
    )


def _rewritten(example: Example, answer: int) -> Example:
    """The same prompt with another candidate in the place of the value, and as the answer."""
    start, end = example.spans["value"]
    word = example.candidates[answer].strip()
    shift = len(word) - (end - start)

    def moved(place: int) -> int:
        return place + shift if place >= end else place

    return replace(
        example,
        prompt=example.prompt[:start] + word + example.prompt[end:],
        answer=answer,
        segments=tuple(s._replace(start=moved(s.start), end=moved(s.end)) for s in example.segments),
        spans={name: (moved(a), moved(b)) for name, (a, b) in example.spans.items()},
    )


def _check_pairs(rows: list[Encoded], others: list[Encoded]) -> None:
    if len(rows) != len(others):
        raise GnaError(f"{len(rows)} examples and {len(others)} donors were given: each needs one donor.")
    for i, (row, other) in enumerate(zip(rows, others)):
        if row.candidate_ids != other.candidate_ids or row.answer == other.answer:
            raise GnaError(f"the donor of example {i} must have the same candidates and another answer.")
        if len({ids[0] for ids in row.candidate_ids}) < len(row.candidate_ids):
            raise GnaError(
                f"the first token does not tell all candidates of example {i} apart, and interchange reads "
                "no more: use values that start with different tokens."
            )


def _candidates(logits: Tensor, row: Encoded) -> np.ndarray:
    """Log-probabilities of the candidates' first tokens; logits: (vocabulary,)."""
    firsts = torch.tensor([ids[0] for ids in row.candidate_ids], device=logits.device)
    return (logits[firsts] - logits.logsumexp(-1)).double().cpu().numpy()


def _compared(found: dict[str, list], rows, others, seed: int) -> Iterator[dict]:
    right, wrong = [row.answer for row in rows], [other.answer for other in others]
    metrics = {
        "follows": (_best, float(np.mean([1 / len(row.candidate_ids) for row in rows]))),
        "log_odds": (lambda line, answer, donor: line[answer] - line[donor], 0.0),
    }
    for ablation in ("interchange", "own"):
        for metric, (measure, chance) in metrics.items():
            plain, value, donor = (
                np.array([measure(*given) for given in zip(found[name], right, wrong)])
                for name in ("plain", ablation, "donor")
            )
            drop = paired_bootstrap(plain, value, seed=seed)
            yield {
                "ablation": ablation,
                "metric": metric,
                "baseline": plain.mean(),
                "value": value.mean(),
                "drop": drop.value,
                "drop_low": drop.low,
                "drop_high": drop.high,
                "ceiling": donor.mean(),
                "chance": chance,
            }


def _best(line: np.ndarray, answer: int, donor: int) -> float:
    best = line >= line.max() - TIE
    return float(best[donor]) / best.sum()
