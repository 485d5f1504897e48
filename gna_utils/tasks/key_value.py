"""Key-value retrieval: find the value of one key in a dictionary that stands in the prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import GnaError
from .example import Example, Segment, generator
from .words import pool

# (wording, query): what stands before the pairs, one pair, and what stands after them.
# "paper" with the query last is the probe of Bick et al. 2025 (arXiv:2504.18574).
_TEMPLATES = {
    ("plain", "last"): ("Dictionary:\n", "{key}: {value}\n", "\n{key}:"),
    ("plain", "first"): (
        "Look for the value of {key}.\n\nDictionary:\n",
        "{key}: {value}\n",
        "\nThe value is:",
    ),
    ("paper", "last"): (
        "Memorize the following dictionary:\n",
        "{key}:{value}\n",
        "The value of the key '{key}' is",
    ),
    ("paper", "first"): (
        "Memorize the value of the key '{key}' in the following dictionary:\n",
        "{key}:{value}\n",
        "The value is",
    ),
}
WORDINGS, QUERIES = ("plain", "paper"), ("last", "first")


def key_value(
    n_examples: int,
    n_pairs: int,
    *,
    tokenizer,
    seed: int = 0,
    wording: str = "plain",
    query: str = "last",
    keys: str | Sequence[str] = "words",
    values: str | Sequence[str] = "words",
    position: int | float | str | None = None,
    multi_token: bool = False,
) -> list[Example]:
    """Make examples of key-value retrieval: a dictionary of ``n_pairs`` lines and a question about one key.

    >>> print(key_value(1, 2, tokenizer=model.tokenizer)[0].prompt)
    Dictionary:
    river: lamp
    fox: violin
    <BLANKLINE>
    fox:
    >>> key_value(100, 20, tokenizer=model.tokenizer, wording="paper", values="numbers", position="first")

    The candidates are the ``n_pairs`` values in the order of the dictionary, so chance is ``1 / n_pairs``
    and ``answer`` is also the position of the queried pair. Each line is a segment that ends with its
    newline; ``spans`` marks ``"key"``, ``"value"`` (of the queried pair) and ``"asked"`` (the key in the
    question). Keys are distinct, values are distinct, and no word is both a key and a value of one example.

    Parameters
    ----------
    wording: ``"plain"`` (``key: value`` lines, then ``key:``) or ``"paper"`` (``key:value`` lines, then
        ``The value of the key 'key' is``).
    query: ``"last"``, or ``"first"``: the question stands before the dictionary, and after it only a cue
        that does not name the key, so the model can look for the key while it reads.
    keys, values: ``"words"``, ``"numbers"`` (0 to 99, all of one token length), or a list of strings.
    position: which pair is asked for: an index, ``"first"``, ``"last"``, a fraction from 0.0 to 1.0, or
        ``None`` for a random one. It does not change the dictionary; nor does the kind of values change which
        keys are drawn and which is asked for.
    multi_token: words of two or more tokens instead of single tokens.

    Example ``i`` depends on ``seed`` and ``i`` alone: more examples only add to the list, and the global
    random state is neither read nor changed. Raises :class:`~gna_utils.errors.GnaError` on unknown options
    and when the pools cannot fill ``n_pairs`` lines. Source: arXiv:2504.18574, section 3.
    """
    if (wording, query) not in _TEMPLATES:
        raise GnaError(
            f"there is no wording '{wording}' with the query '{query}': choose the wording among "
            f"{', '.join(WORDINGS)} and the query among {', '.join(QUERIES)}."
        )
    if not _whole(n_examples, 1) or not _whole(n_pairs, 2):
        raise GnaError(
            f"{n_examples} examples with {n_pairs} pairs were asked for: "
            "it takes at least 1 example and 2 pairs."
        )
    if position is not None:
        _place(position, n_pairs)  # a bad position is refused before any work
    key_pool = pool(keys, "key", tokenizer, multi_token=multi_token)
    value_pool = pool(values, "value", tokenizer, multi_token=multi_token)
    _check_pools(n_pairs, key_pool, value_pool)
    examples = []
    for i in range(n_examples):
        rng = generator(seed, i)
        drawn = int(rng.integers(n_pairs))  # first, so that other values leave the question as it is
        pairs = _draw_pairs(n_pairs, key_pool, value_pool, rng)
        place = drawn if position is None else _place(position, n_pairs)
        options = {"seed": seed, "index": i, "n_pairs": n_pairs, "wording": wording, "query": query}
        examples.append(_write(pairs, place, _TEMPLATES[wording, query], options))
    return examples


def _whole(number, least: int) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool) and number >= least


def _draw_pairs(n_pairs: int, key_pool, value_pool, rng: np.random.Generator) -> list[tuple[str, str]]:
    chosen = [key_pool[k] for k in rng.choice(len(key_pool), n_pairs, replace=False)]
    free = [value for value in value_pool if value not in set(chosen)]
    return list(zip(chosen, [free[k] for k in rng.choice(len(free), n_pairs, replace=False)]))


def _write(pairs: list[tuple[str, str]], place: int, templates, options: dict) -> Example:
    before, line, after = templates
    key, value = pairs[place]
    spans = {}
    if "{key}" in before:
        spans["asked"] = _span(before, "{key}", key, 0)
    text = before.format(key=key)
    segments = []
    for k, v in pairs:
        start = len(text)
        if k == key:
            spans["key"] = (start, start + len(key))
            spans["value"] = _span(line.replace("{key}", key), "{value}", value, start)
        text += line.format(key=k, value=v)
        segments.append(Segment(start, len(text), f"{k}: {v}"))
    if "{key}" in after:
        spans["asked"] = _span(after, "{key}", key, len(text))
    text += after.format(key=key)
    return Example(
        task="key_value",
        prompt=text,
        candidates=tuple(f" {v}" for _, v in pairs),
        answer=place,
        segments=tuple(segments),
        target=place,
        meta={**options, "position": place, "key": key, "value": value},
        spans=spans,
    )


def _span(template: str, field: str, word: str, offset: int) -> tuple[int, int]:
    start = offset + template.index(field)
    return start, start + len(word)


def _place(position: int | float | str, n_pairs: int) -> int:
    named = {"first": 0, "last": n_pairs - 1}
    if isinstance(position, str) and position in named:
        return named[position]
    if isinstance(position, float) and 0 <= position <= 1:
        return round(position * (n_pairs - 1))
    if _whole(position, 0) and position < n_pairs:
        return int(position)
    raise GnaError(
        f"position {position!r} is not a place among {n_pairs} pairs: give an index from 0 to {n_pairs - 1}, "
        "'first', 'last', or a fraction from 0.0 to 1.0."
    )


def _check_pools(n_pairs: int, key_pool: tuple[str, ...], value_pool: tuple[str, ...]) -> None:
    # in the worst case every drawn key is taken out of the values
    shared = len(set(key_pool) & set(value_pool))
    possible = [n for n in range(1, len(key_pool) + 1) if n + min(n, shared) <= len(value_pool)]
    if not possible:
        raise GnaError(
            "this tokenizer splits none of the book's words as keys and values need it: give your own by "
            "keys=[...] and values=[...], or try multi_token=True."
        )
    if n_pairs not in possible:
        raise GnaError(
            f"{n_pairs} pairs were asked for, but with this tokenizer the pools hold {len(key_pool)} keys "
            f"and {len(value_pool)} values: at most {max(possible)} pairs are possible."
        )
