"""Pools of words and numbers that a given tokenizer splits in a known way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache

from ..errors import GnaError
from ..weights import data_dir

# What stands before a key and before a value in the prompts of key_value, in every wording. A word must be
# split alike in all of them, so that the same seed gives the same dictionary in every wording.
KEY_CONTEXTS = (("\n", ""), ("the key '", ""), ("value of", " "))
VALUE_CONTEXTS = (("a:", " "), ("a:", ""), ("a' is", " "))
NUMBERS = tuple(str(number) for number in range(100))


@cache
def nouns() -> tuple[str, ...]:
    """Common English nouns in alphabetical order, lower case, one word each."""
    return tuple(json.loads((data_dir() / "words.json").read_text(encoding="utf-8"))["nouns"])


def pool(kind: str | Sequence[str], role: str, tokenizer, *, multi_token: bool = False) -> tuple[str, ...]:
    """The words or numbers that can stand as ``role`` (``"key"`` or ``"value"``) in a dictionary.

    >>> pool("words", "key", tokenizer)[:3]
    ('acorn', 'actor', 'album')

    Words are single tokens in every place where the prompt uses them, or with ``multi_token`` at least two
    tokens in each. Numbers are 0 to 99 however the tokenizer splits them, but all of the same number of
    tokens (the most frequent one), because a sum of log-probabilities favours the shorter number. A
    sequence of strings is taken as it is.
    """
    if kind not in ("words", "numbers"):
        if isinstance(kind, str):
            raise GnaError(f"unknown {role}s '{kind}': choose 'words', 'numbers', or give a list of strings.")
        return tuple(dict.fromkeys(kind))
    contexts = KEY_CONTEXTS if role == "key" else VALUE_CONTEXTS
    if kind == "words":
        lengths = token_counts(nouns(), contexts, tokenizer)
        fits = (lambda count: count > 1) if multi_token else (lambda count: count == 1)
        return tuple(word for word, counts in lengths.items() if all(map(fits, counts)))
    lengths = token_counts(NUMBERS, contexts, tokenizer)
    usual = Counter(counts for counts in lengths.values() if all(counts)).most_common(1)
    return tuple(number for number, counts in lengths.items() if usual and counts == usual[0][0])


@lru_cache(maxsize=16)  # thousands of short texts: noticeable when a chapter makes many sets of examples
def token_counts(
    words: tuple[str, ...], contexts: tuple[tuple[str, str], ...], tokenizer
) -> dict[str, tuple[int, ...]]:
    """How many tokens each word adds in each context; 0 where it fuses with what stands before it.

    A context is a pair: the text before, and what joins it to the word (a space or nothing).
    """
    counts: dict[str, list[int]] = {word: [] for word in words}
    for before, joint in contexts:
        texts = [before, *(before + joint + word for word in words)]
        start, *rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for word, row in zip(words, rows):
            known = tokenizer.unk_token_id is None or tokenizer.unk_token_id not in row[len(start) :]
            counts[word].append(len(row) - len(start) if row[: len(start)] == start and known else 0)
    return {word: tuple(found) for word, found in counts.items()}
