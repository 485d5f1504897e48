"""Multi-query associative recall: the synthetic twin of key-value retrieval, in token ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import GnaError
from .example import generator

IGNORE = -100  # the label that cross_entropy leaves out


@dataclass(frozen=True)
class Recall:
    """Sequences of multi-query associative recall.

    ``inputs`` and ``labels`` are int64 arrays (sequence, token). A label is the value to predict *at* that
    position, and -100 where nothing is asked. ``queries`` (sequence, pair) holds the position at which the
    key of each pair is asked for again.
    """

    inputs: np.ndarray
    labels: np.ndarray
    queries: np.ndarray
    n_pairs: int
    vocab_size: int

    def text(self, i: int) -> str:
        """Sequence ``i`` as people would write it: pairs, then the questions with their answers.

        >>> mqar(1, 2, length=12).text(0)
        'k21:v17 k2:v40 | . . . k21→v17 . k2→v40 . .'

        Keys are ``k1, k2, ...``, values ``v0, v1, ...``, and a dot is a token that asks for nothing.
        """
        half, row, labels = self.vocab_size // 2, self.inputs[i], self.labels[i]
        context = row[: 2 * self.n_pairs].reshape(-1, 2)
        pairs = [f"k{key}:v{value - half}" for key, value in context]
        rest = range(2 * self.n_pairs, len(row))
        asked = [f"k{row[t]}→v{labels[t] - half}" if labels[t] != IGNORE else "." for t in rest]
        return " ".join([*pairs, "|", *asked])


def mqar(
    n_examples: int,
    n_pairs: int,
    *,
    length: int | None = None,
    vocab_size: int = 8192,
    alpha: float = 0.01,
    random_filler: bool = True,
    seed: int = 0,
) -> Recall:
    """Make multi-query associative recall: ``n_pairs`` pairs, then each key once more, in random places.

    >>> data = mqar(1000, 8, length=64)
    >>> data.inputs.shape, data.labels.shape
    ((1000, 64), (1000, 64))

    The first half of the vocabulary holds keys (0 is the empty token), the second half values. The pairs
    come first, as ``key value key value ...``. The gap between the end of the pairs and a query follows a
    power law with exponent ``alpha - 1``: most queries come soon, a few late. All other positions hold
    random tokens (``random_filler``), but never a key of the same sequence, so that each key is asked for
    exactly once, or else the empty token.

    ``length`` is even and at least ``4 * n_pairs``; by default the smallest power of 2 from ``8 * n_pairs``
    on. Sequence ``i`` depends on ``seed`` and ``i`` alone. Raises :class:`~gna_utils.errors.GnaError` when
    length or vocabulary are too small. Source: Arora et al. 2023, Zoology (arXiv:2312.04927).
    """
    length = 1 << (8 * n_pairs - 1).bit_length() if length is None else length
    if n_examples < 1 or n_pairs < 1 or length % 2 or length < 4 * n_pairs:
        raise GnaError(
            f"{n_examples} sequences of {length} tokens with {n_pairs} pairs were asked for: it takes at "
            "least one sequence, one pair, and an even length of at least 4 tokens per pair."
        )
    if vocab_size // 2 - 1 < n_pairs or vocab_size < 4:
        raise GnaError(
            f"a vocabulary of {vocab_size} tokens holds {max(vocab_size // 2 - 1, 0)} keys, "
            f"too few for {n_pairs} pairs."
        )
    inputs = np.zeros((n_examples, length), dtype=np.int64)
    labels = np.full((n_examples, length), IGNORE, dtype=np.int64)
    queries = np.zeros((n_examples, n_pairs), dtype=np.int64)
    space = (length - 2 * n_pairs) // 2
    weights = np.arange(1, space + 1, dtype=float) ** (alpha - 1)
    weights /= weights.sum()
    half = vocab_size // 2
    for i in range(n_examples):
        rng = generator(seed, i)
        keys = 1 + rng.choice(half - 1, n_pairs, replace=False)
        values = half + rng.choice(vocab_size - half, n_pairs, replace=False)
        places = 2 * n_pairs + 2 * rng.choice(space, n_pairs, replace=False, p=weights)
        row = _filler(rng, length, vocab_size, keys) if random_filler else np.zeros(length, dtype=np.int64)
        row[0 : 2 * n_pairs : 2], row[1 : 2 * n_pairs : 2] = keys, values
        row[places] = keys
        inputs[i], queries[i] = row, places
        labels[i, places] = values
    return Recall(inputs, labels, queries, n_pairs, vocab_size)


def _filler(rng: np.random.Generator, length: int, vocab_size: int, keys: np.ndarray) -> np.ndarray:
    """Random tokens other than ``keys``: draw from the shorter range, then step over each key."""
    row = rng.integers(vocab_size - len(keys), size=length)
    for key in np.sort(keys):
        row += row >= key
    return row
