"""What a task is made of: a prompt with marked segments, candidate answers, and the right one among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


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
