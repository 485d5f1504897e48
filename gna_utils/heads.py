"""Names of heads: ``L17H24`` is head 24 of layer 17, both counted from 0."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import NamedTuple

from .errors import GnaError

_NAME = re.compile(r"L(\d+)H(\d+)", re.IGNORECASE)


class Head(NamedTuple):
    """One head of one layer, the unit that a mixer's output projection reads.

    >>> Head(17, 24)
    L17H24
    >>> Head.parse("L17H24").layer
    17
    """

    layer: int
    head: int

    @classmethod
    def parse(cls, text: str) -> Head:
        """Read a name such as ``"L17H24"``; raises :class:`GnaError` on any other text."""
        match = _NAME.fullmatch(text.strip())
        if match is None:
            raise GnaError(f"'{text}' is not the name of a head: write layer and head as in 'L17H24'.")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    __repr__ = __str__


def parse_heads(heads: str | Head | Iterable[str | Head | tuple[int, int]]) -> list[Head]:
    """Turn any way of naming heads into a list of :class:`Head`, without repetitions, in the given order.

    >>> parse_heads("L17H24, L16H22")
    [L17H24, L16H22]
    >>> parse_heads([(3, 1), "L3H1", Head(0, 2)])
    [L3H1, L0H2]

    Raises :class:`GnaError` when the list is empty, an entry names no head, or no list was given.
    """
    if isinstance(heads, Head):
        heads = [heads]
    if isinstance(heads, str):
        heads = [part for part in re.split(r"[,\s]+", heads) if part]
    if not isinstance(heads, Iterable):
        raise GnaError(f"{heads!r} names no heads: give 'L17H24, L16H22', or a list of heads.")
    found = [_head(entry) for entry in heads]
    if not found:
        raise GnaError("no head was given: name at least one, for example 'L17H24'.")
    return list(dict.fromkeys(found))


def _head(entry: str | Head | tuple[int, int]) -> Head:
    if isinstance(entry, str):
        return Head.parse(entry)
    try:
        layer, head = entry
        numbers = Head(operator.index(layer), operator.index(head))
    except (TypeError, ValueError):
        raise GnaError(f"{entry!r} is not a head: give 'L17H24', Head(17, 24) or (17, 24).") from None
    if min(numbers) < 0:
        raise GnaError(f"{entry!r} is not a head: layers and heads are counted from 0.")
    return numbers
