"""What a task is made of: a prompt with marked segments, candidate answers, and the right one among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import GnaError


class Segment(NamedTuple):
    """One logical part of a prompt, such as a key-value line: characters ``start`` to ``end`` (exclusive).

    The last character of a segment belongs to its summary token; for a line this is the newline.
    """

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Example:
    """A question with candidate answers.

    >>> Example("colour", "The sky is", (" blue", " red"), answer=0)

    ``candidates`` are continuations of ``prompt``, each with its leading space; ``answer`` is the index of
    the right one. ``target`` is the index of the segment that holds the answer, where there is one.
    ``spans`` names further character ranges of the prompt, such as ``"value"``; ``meta`` records how the
    example was made.
    """

    task: str
    prompt: str
    candidates: tuple[str, ...]
    answer: int
    segments: tuple[Segment, ...] = ()
    target: int | None = None
    meta: Mapping[str, object] = field(default_factory=dict)
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def generator(seed: int, i: int) -> np.random.Generator:
    """The random numbers of example ``i``: the same for any number of examples, and apart from all others."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise GnaError(f"seed {seed!r} is not possible: give a whole number from 0 on.")
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=(i,)))
