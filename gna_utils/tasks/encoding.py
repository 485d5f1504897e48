"""From text to token ids, exactly: special tokens, the border to the answer, and where each segment lies."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import LongTensor

from ..errors import GnaError
from .example import Example

_NO_WINDOW = 10**9  # tokenizers without a window report a number above this


@dataclass(frozen=True)
class Encoded:
    """An example in token ids; spans are (first token, last token + 1).

    ``input_ids`` is the prompt with its special tokens, ``query`` its last position. ``segments`` and
    ``summary`` (the last token of each segment) are in the order of the example's segments; where one token
    holds the end of a segment and the start of the next, it belongs to both. ``candidate_ids`` are the
    tokens that each candidate adds to the prompt. ``spans`` holds the example's named ranges.
    """

    input_ids: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    summary: tuple[int, ...]
    query: int
    candidate_ids: tuple[tuple[int, ...], ...]
    answer: int
    target: int | None
    spans: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Batch:
    """Prompts side by side, padded on the right: LongTensors (row, token), and (row,) for the rest.

    ``index`` says which entry of the encoded list a row is, ``query`` the position of its last token.
    Right padding is exact for every causal model as long as the position read is not a padded one.
    """

    input_ids: LongTensor
    attention_mask: LongTensor
    lengths: LongTensor
    index: tuple[int, ...]
    query: LongTensor
    rows: list[Encoded]


def encode(examples: Example | Iterable[Example], tokenizer, max_length: int | None = None) -> list[Encoded]:
    """Turn examples into token ids.

    >>> encode(key_value(10, 5, tokenizer=tokenizer), tokenizer)[0].candidate_ids
    ((9786,), (2382,), ...)

    Special tokens are those that the tokenizer itself puts before a text, once, also when the prompt
    already starts with them (as a chat template writes them). Spaces at the end of a prompt move to the
    candidates, because that is how tokenizers split running text.

    ``max_length`` is the window of the model; without it, the window that the tokenizer reports, if any.
    Raises :class:`~gna_utils.errors.GnaError` when a token spans the border between prompt and candidate, a
    candidate has no token of its own, two candidates have the same tokens, fewer than two candidates are
    given, prompt and longest candidate do not fit into the window, or something is not an example.
    """
    examples = listed(examples, Example)
    if not getattr(tokenizer, "is_fast", False):
        raise GnaError(
            f"{type(tokenizer).__name__} cannot tell which characters a token covers: "
            "load a fast tokenizer (one with a tokenizer.json)."
        )
    lead = _lead(tokenizer)
    window = max_length or tokenizer.model_max_length
    return [
        _encode(example, f"example {i}", tokenizer, lead, window if window < _NO_WINDOW else None)
        for i, example in enumerate(examples)
    ]


def listed(given, *kinds: type) -> list:
    """One object of the given kinds, or several, as a list; anything else is refused."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, *kinds))
    items = list(given) if several else [given]
    for item in items:
        if not isinstance(item, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise GnaError(f"{type(item).__name__} is not an {names}: give one, or a list of them.")
    return items


def whole(name: str, value, least: int) -> int:
    """``value`` as an int; fractions, texts and numbers below ``least`` are refused."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise GnaError(f"{name}={value!r} is not possible: give a whole number, at least {least}.")
    return number


def encode_texts(texts: Sequence[str], tokenizer) -> list[list[int]]:
    """Token ids of plain texts: the special tokens before a text once, and nothing behind it.

    >>> encode_texts(["<s>a b"], tokenizer) == encode_texts(["a b"], tokenizer)
    True
    """
    lead = _lead(tokenizer)
    coded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [[*lead, *ids[_doubled(lead, ids) :]] for ids in coded]


def _lead(tokenizer) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    full, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    return next(full[:k] for k in range(len(full)) if full[k : k + len(bare)] == bare)


def _doubled(lead: list[int], ids: list[int]) -> int:
    """How many tokens of a text spell out the lead, which is then there once and not twice."""
    found = 0
    while lead and ids[found : found + len(lead)] == lead:
        found += len(lead)
    return found


def _encode(example: Example, name: str, tokenizer, lead: list[int], window: int | None) -> Encoded:
    if len(example.candidates) < 2 or not 0 <= example.answer < len(example.candidates):
        raise GnaError(
            f"{name} has {len(example.candidates)} candidates and answer {example.answer}: "
            "it takes at least two candidates, and the index of one of them."
        )
    prompt = example.prompt.rstrip(" ")
    spaces = example.prompt[len(prompt) :]
    coded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
    texts = [prompt + spaces + candidate for candidate in example.candidates]
    ids, joint = coded["input_ids"], tokenizer(texts, add_special_tokens=False)["input_ids"]
    doubled = _doubled(lead, ids)
    plain, *joint = ([*lead, *row[doubled:]] for row in (ids, *joint))
    if not plain:
        raise GnaError(f"{name} has an empty prompt, and the tokenizer adds no token before it.")
    chars = [(0, 0)] * len(lead) + _characters(tokenizer, ids, coded["offset_mapping"])[doubled:]
    candidates = tuple(
        _continuation(name, candidate, plain, row, tokenizer)
        for candidate, row in zip(example.candidates, joint)
    )
    _check_distinct(name, example.candidates, candidates)
    _check_window(name, len(plain), max(map(len, candidates)), window)
    segments = tuple(
        _tokens(chars, s.start, s.end, f"segment '{s.label}' of {name}") for s in example.segments
    )
    return Encoded(
        input_ids=tuple(plain),
        segments=segments,
        summary=tuple(stop - 1 for _, stop in segments),
        query=len(plain) - 1,
        candidate_ids=candidates,
        answer=example.answer,
        target=example.target,
        spans={key: _tokens(chars, *span, f"'{key}' of {name}") for key, span in example.spans.items()},
    )


def _characters(tokenizer, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The characters of each token, with the leading whitespace that some tokenizers leave out."""
    found, end = [], 0
    for token, (start, stop) in zip(tokenizer.convert_ids_to_tokens(ids), offsets):
        spaces = len(token) - len(token.lstrip("Ġ \t\r\n"))  # "Ġ" is the space of byte-level tokens
        found.append((min(start, max(end, start - spaces)), stop))
        end = stop
    return found


def _tokens(chars: Sequence[tuple[int, int]], start: int, end: int, name: str) -> tuple[int, int]:
    """The tokens that cover a character range; the last of them holds its last (kept) character."""
    hit = [t for t, (first, stop) in enumerate(chars) if first < end and stop > start]
    if not hit:
        raise GnaError(f"{name} (characters {start} to {end}) holds no token of the prompt.")
    return hit[0], hit[-1] + 1


def _continuation(
    name: str, candidate: str, plain: list[int], joint: list[int], tokenizer
) -> tuple[int, ...]:
    if joint[: len(plain)] != plain:
        k = next((k for k, (a, b) in enumerate(zip(plain, joint)) if a != b), len(joint) - 1)
        raise GnaError(
            f"the token {tokenizer.decode(joint[k : k + 1])!r} spans the end of the prompt and the start of "
            f"candidate {candidate!r} ({name}): let the candidate start with a space or the prompt end "
            "with a newline or punctuation."
        )
    if len(joint) == len(plain):
        raise GnaError(f"candidate {candidate!r} of {name} has no token of its own, so it cannot be scored.")
    return tuple(joint[len(plain) :])


def _check_distinct(name: str, texts: Sequence[str], candidates: Sequence[tuple[int, ...]]) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for text, ids in zip(texts, candidates):
        if ids in seen:
            raise GnaError(f"candidates {seen[ids]!r} and {text!r} of {name} have the same tokens.")
        seen[ids] = text


def _check_window(name: str, prompt: int, candidate: int, window: int | None) -> None:
    # the last token of a candidate is predicted, never read
    if window is not None and prompt + candidate - 1 > window:
        raise GnaError(
            f"{name} needs {prompt + candidate - 1} tokens (prompt {prompt}, longest candidate {candidate}), "
            f"but the window of the model is {window}: make the prompt shorter, for example with fewer "
            "pairs, or use a model with a longer window."
        )


def batches(encoded: Sequence[Encoded], *, max_tokens: int = 4096, pad_id: int = 0) -> list[Batch]:
    """Group prompts of similar length, at most ``max_tokens`` padded tokens together (at least one prompt).

    >>> [batch.input_ids.shape for batch in batches(encoded, max_tokens=1024)]
    [torch.Size([14, 71]), ...]

    Raises :class:`~gna_utils.errors.GnaError` unless ``max_tokens`` is a whole number of at least 1.
    """
    whole("max_tokens", max_tokens, 1)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i].input_ids))
    groups: list[list[int]] = []
    for i in order:
        if not groups or (len(groups[-1]) + 1) * len(encoded[i].input_ids) > max_tokens:
            groups.append([])
        groups[-1].append(i)
    return [_batch([encoded[i] for i in group], tuple(group), pad_id) for group in groups]


def _batch(rows: list[Encoded], index: tuple[int, ...], pad_id: int) -> Batch:
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    input_ids = torch.full((len(rows), int(lengths.max())), pad_id)
    for line, row in zip(input_ids, rows):
        line[: len(row.input_ids)] = torch.tensor(row.input_ids)
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    return Batch(input_ids, mask, lengths, index, torch.tensor([row.query for row in rows]), rows)
