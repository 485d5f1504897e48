"""From logits to answers: every candidate of an example is scored from one forward of its prompt."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import Cache

from .errors import GnaError
from .forward import check_tokens, forward, require_model, window
from .stats import Estimate, bootstrap
from .tasks import Encoded, Example, batches, encode
from .tasks.encoding import listed, whole

METHODS = ("auto", "full", "first_token")
TIE = 1e-5  # log-probabilities this close count as equal: it is what batching may move them
LOW_MASS = 0.1

Node = tuple[int, ...]  # the tokens of a candidate read so far


class GnaWarning(UserWarning):
    """A measurement that ran but should be read with care."""


@dataclass(frozen=True)
class Scores:
    """Scores of all candidates.

    ``frame`` has one row per example: ``example, n_candidates, answer, predicted, correct, logprob, margin,
    mass, n_tokens``. ``logprob`` is the answer's, ``margin`` its lead over the best other candidate,
    ``mass`` the probability of all candidates together, ``n_tokens`` the length of the answer. ``logprobs``
    and ``lengths`` hold one array per example with the log-probability and the token count of every
    candidate. ``method`` says how they were found: ``"last logits"``, ``"prefix tree on the cached
    prompt"``, ``"complete rows"``, joined by ``" + "`` where examples differ.

    Where k candidates tie for the best score, ``predicted`` is -1 and ``correct`` is 1/k if the answer is
    among them: what breaking the tie by lot would give on average.
    """

    frame: pd.DataFrame
    logprobs: list[np.ndarray] = field(repr=False)
    lengths: list[np.ndarray] = field(repr=False)
    method: str


def score(
    model,
    examples: Example | Encoded | Iterable[Example | Encoded],
    *,
    max_tokens: int = 4096,
    method: str = "auto",
    remote: bool = False,
    progress: bool | None = None,
) -> Scores:
    """Score the candidates of every example.

    >>> scores = score(model, key_value(100, 10, tokenizer=model.tokenizer))
    >>> print(accuracy(scores))
    0.84 [0.77, 0.91], n = 100, chance 0.10

    The score of a candidate is the sum of the log-probabilities of its tokens after the prompt. Candidates
    of one token are read from the logits at the end of the prompt. Longer ones share a prefix tree: the
    prompt is run once and its cache copied for each branch, one token at a time; models without a cache and
    remote runs get one complete row per branching point instead. Both give the same numbers.

    Parameters
    ----------
    examples: one or several examples, or what :func:`~gna_utils.tasks.encode` made of them (saves time when
        the same examples are scored again and again).
    max_tokens: how many padded tokens run together. It changes memory and speed, not the scores.
    method: ``"auto"`` and ``"full"`` score whole candidates; ``"first_token"`` scores their first tokens.
    progress: show a bar; by default only on a terminal.

    Sums of log-probabilities favour shorter candidates. A :class:`GnaWarning` is given where this cannot be
    right (one candidate begins another), and where the candidates together hold less than 0.1 of the
    probability, because then the model is about to say something else.
    Raises :class:`~gna_utils.errors.GnaError` on an unknown method, on no examples or something else, on a
    model that is not from nnsight, on tokens of another model, when first tokens do not tell candidates
    apart, when the model gives NaN, and whenever :func:`~gna_utils.tasks.encode` does.
    """
    if method not in METHODS:
        raise GnaError(f"unknown method '{method}': choose one of {', '.join(METHODS)}.")
    whole("max_tokens", max_tokens, 1)
    encoded = encoded_of(model, examples)
    if method == "first_token":
        encoded = [_first_tokens(row, i, model.tokenizer) for i, row in enumerate(encoded)]
    _warn_about_beginnings(encoded, model.tokenizer)
    found: list[np.ndarray | None] = [None] * len(encoded)
    used: dict[str, None] = {}
    with tqdm(total=len(encoded), disable=None if progress is None else not progress, mininterval=2) as bar:
        for index, logprobs, how in _run(model, encoded, max_tokens, remote):
            if np.isnan(logprobs).any():
                raise GnaError(
                    f"the model gives NaN for example {index}: its weights are damaged, or its dtype is too "
                    "narrow for it (load it with dtype='float32')."
                )
            found[index], used[how] = logprobs, None
            bar.update()
    frame = pd.DataFrame([outcome(i, row, found[i]) for i, row in enumerate(encoded)])
    if frame["mass"].mean() < LOW_MASS:
        warnings.warn(
            f"the candidates hold only {frame['mass'].mean():.3f} of the probability on average: the model "
            "expects another kind of answer, so check the spaces and the wording of the prompt.",
            GnaWarning,
            stacklevel=2,
        )
    lengths = [np.array([len(ids) for ids in row.candidate_ids]) for row in encoded]
    return Scores(frame, found, lengths, " + ".join(used))


def accuracy(scores: Scores, *, seed: int = 0) -> Estimate:
    """The share of right answers with its 95 % bootstrap interval, beside chance.

    >>> print(accuracy(score(model, examples)))
    0.84 [0.77, 0.91], n = 100, chance 0.10

    Chance is the mean of 1 / (number of candidates).
    """
    frame = scores.frame
    return bootstrap(frame["correct"], chance=float((1 / frame["n_candidates"]).mean()), seed=seed)


def next_tokens(model, example: Example | Encoded, k: int = 8, *, remote: bool = False) -> pd.DataFrame:
    """The ``k`` tokens that the model finds most likely after the prompt, with their probabilities.

    >>> next_tokens(model, example, 2)
        token  probability
    0     fox        0.412
    1       a        0.051

    For a look at what a model wants to say when it is none of the candidates. Raises
    :class:`~gna_utils.errors.GnaError` whenever :func:`~gna_utils.tasks.encode` does.
    """
    [batch] = batches(encoded_of(model, example))
    [logits] = forward(
        model, batch.input_ids, batch.attention_mask, positions=batch.query, rows=batch.rows, remote=remote
    )
    best = torch.topk(logits.softmax(-1), min(k, logits.shape[-1]))
    texts = [model.tokenizer.decode([token]) for token in best.indices.tolist()]
    return pd.DataFrame({"token": texts, "probability": best.values.cpu().numpy()})


# ---------------------------------------------------------------------------------------- what is scored


def encoded_of(model, examples: Example | Encoded | Iterable[Example | Encoded]) -> list[Encoded]:
    """What is scored, in token ids that the model has."""
    require_model(model)
    examples = listed(examples, Example, Encoded)
    if not examples:
        raise GnaError("no examples were given: there is nothing to score.")
    if all(isinstance(example, Encoded) for example in examples):
        for row in examples:
            check_tokens(model, torch.tensor([token for ids in row.candidate_ids for token in ids]))
        return examples
    # a tokenizer may report the window of another model, so it is not asked where the model has none
    return encode(examples, model.tokenizer, window(model) or sys.maxsize)


def _first_tokens(row: Encoded, number: int, tokenizer) -> Encoded:
    firsts: dict[int, tuple[int, ...]] = {}
    for ids in row.candidate_ids:
        if ids[0] in firsts:
            raise GnaError(
                f"the first token does not tell candidates {tokenizer.decode(firsts[ids[0]])!r} and "
                f"{tokenizer.decode(ids)!r} of example {number} apart: score them with method='full'."
            )
        firsts[ids[0]] = ids
    return replace(row, candidate_ids=tuple(ids[:1] for ids in row.candidate_ids))


def _warn_about_beginnings(encoded: Sequence[Encoded], tokenizer) -> None:
    for number, row in enumerate(encoded):
        whole = set(row.candidate_ids)
        for ids in row.candidate_ids:
            beginning = next((ids[:k] for k in range(1, len(ids)) if ids[:k] in whole), None)
            if beginning is not None:
                warnings.warn(
                    f"candidate {tokenizer.decode(beginning)!r} of example {number} begins candidate "
                    f"{tokenizer.decode(ids)!r} and can never score less: give candidates of one length, or "
                    "let each end with a newline.",
                    GnaWarning,
                    stacklevel=3,
                )
                return


def outcome(number: int, row: Encoded, logprobs: np.ndarray) -> dict:
    """The row of an example in ``Scores.frame``."""
    best = np.flatnonzero(logprobs >= logprobs.max() - TIE)
    return {
        "example": number,
        "n_candidates": len(logprobs),
        "answer": row.answer,
        "predicted": int(best[0]) if len(best) == 1 else -1,
        "correct": float(row.answer in best) / len(best),
        "logprob": float(logprobs[row.answer]),
        "margin": float(logprobs[row.answer] - np.delete(logprobs, row.answer).max()),
        "mass": float(np.exp(logprobs).sum()),
        "n_tokens": len(row.candidate_ids[row.answer]),
    }


# ------------------------------------------------------------------------------------------ how it is run


class Tree:
    """The prefix tree of one example's candidates, and the sums gathered while walking it."""

    def __init__(self, candidates: Sequence[tuple[int, ...]]) -> None:
        self.candidates = candidates
        self.logprobs = np.zeros(len(candidates))
        depth = max(map(len, candidates))
        # inner nodes, level by level: prefixes after which some candidate goes on
        self.levels = [list(dict.fromkeys(c[:k] for c in candidates if len(c) > k)) for k in range(depth)]

    def add(self, node: Node, logits: torch.Tensor) -> None:
        """Read the next token of every candidate that passes through ``node``; logits: (vocabulary,)."""
        k = len(node)
        through = [i for i, c in enumerate(self.candidates) if len(c) > k and c[:k] == node]
        tokens = torch.tensor([self.candidates[i][k] for i in through], device=logits.device)
        # logsumexp, because a float32 log_softmax over a large vocabulary is off by up to 1e-4
        self.logprobs[through] += (logits[tokens] - logits.logsumexp(-1)).double().cpu().numpy()


def _run(
    model, encoded: Sequence[Encoded], max_tokens: int, remote: bool
) -> Iterator[tuple[int, np.ndarray, str]]:
    """Yield (number of the example, log-probabilities, method) in the order in which they are done."""
    trees = [Tree(row.candidate_ids) for row in encoded]
    flat = [i for i, tree in enumerate(trees) if len(tree.levels) == 1]
    deep = [i for i, tree in enumerate(trees) if len(tree.levels) > 1]
    for index in _rows(model, [(i, ()) for i in flat], encoded, trees, max_tokens, remote):
        yield index, trees[index].logprobs, "last logits"
    if deep and not remote and _keeps_cache(model):
        # a recurrent state cannot skip padded tokens, so these prompts run together only at equal length
        for group in _equal_lengths(deep, encoded, max_tokens):
            _run_on_cache(model, group, encoded, trees, max_tokens)
            for index in group:
                yield index, trees[index].logprobs, "prefix tree on the cached prompt"
        return
    nodes = [(i, node) for i in deep for level in trees[i].levels for node in level]
    left = Counter(i for i, _ in nodes)
    for index in _rows(model, nodes, encoded, trees, max_tokens, remote):
        left[index] -= 1
        if not left[index]:
            yield index, trees[index].logprobs, "complete rows"


def _rows(model, nodes, encoded, trees, max_tokens, remote) -> Iterator[int]:
    """Run the prompt of each (example, node) with the node's tokens behind it, as a row of its own."""
    rows = [replace(encoded[i], input_ids=encoded[i].input_ids + node) for i, node in nodes]
    for batch in batches(rows, max_tokens=max_tokens):
        ends = batch.lengths - 1
        logits = forward(
            model, batch.input_ids, batch.attention_mask, positions=ends, rows=batch.rows, remote=remote
        )
        for line, k in zip(logits, batch.index):
            trees[nodes[k][0]].add(nodes[k][1], line)
            yield nodes[k][0]


def _equal_lengths(numbers: list[int], encoded: Sequence[Encoded], max_tokens: int) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i in numbers:
        groups.setdefault(len(encoded[i].input_ids), []).append(i)
    parts = []
    for length, group in groups.items():
        size = max(1, max_tokens // length)
        parts += [group[k : k + size] for k in range(0, len(group), size)]
    return parts


def _run_on_cache(model, group: list[int], encoded, trees, max_tokens: int) -> None:
    """Score a group of prompts of equal length."""
    rows = [encoded[i] for i in group]
    input_ids = torch.tensor([row.input_ids for row in rows])
    logits, cache = forward(model, input_ids, torch.ones_like(input_ids), rows=rows, keep_past=True)
    for i, line in zip(group, logits):
        trees[i].add((), line)
    _descend(model, cache, [(i, ()) for i in group], trees, input_ids.shape[1] + 1, max_tokens)


def _descend(model, cache, parents: list[tuple[int, Node]], trees, length: int, max_tokens: int) -> None:
    """Run the children of ``parents`` (the rows of ``cache``); ``length`` counts the new token in."""
    depth = len(parents[0][1]) + 1
    row_of = {parent: k for k, parent in enumerate(parents)}
    children = [
        (i, node)
        for i in dict.fromkeys(i for i, _ in parents)
        if len(trees[i].levels) > depth
        for node in trees[i].levels[depth]
        if (i, node[:-1]) in row_of
    ]
    size = max(1, max_tokens // length)
    for part in (children[k : k + size] for k in range(0, len(children), size)):
        state = select(cache, [row_of[i, node[:-1]] for i, node in part])
        tokens = torch.tensor([[node[-1]] for _, node in part])
        mask = torch.ones(len(part), length, dtype=torch.long)
        logits = forward(model, tokens, mask, past=state)
        for (i, node), line in zip(part, logits):
            trees[i].add(node, line)
        _descend(model, state, part, trees, length + 1, max_tokens)


# ---------------------------------------------------------------------------------------------- the cache


def _keeps_cache(model) -> bool:
    return bool({"cache", "past_key_values"} & set(inspect.signature(model._module.forward).parameters))


def select(cache: Cache, rows: list[int], layers: Iterable[int] | None = None) -> Cache:
    """A copy of ``cache`` with the given rows, as often as they are named; the original stays as it was.

    Only the entries of ``layers`` get the new rows, by default all of them.
    """
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in chosen.layers:
        # recurrent layers keep their states in dicts, which a shallow copy would share
        vars(layer).update({k: dict(v) for k, v in vars(layer).items() if isinstance(v, dict)})
    for layer in chosen.layers if layers is None else [chosen.layers[i] for i in layers]:
        layer.reorder_cache(torch.tensor(rows))  # made for beam search, which also repeats rows
    return chosen
