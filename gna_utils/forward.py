"""Run a model on a batch: the one place where a plain forward pass is traced.

Batches are right padded, which is exact for every kind of causal model, and the attention mask always goes
along: without it scan layers would read the padding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence

import nnsight
import torch
from torch import Tensor

from .errors import GnaError
from .interventions import running
from .mixers.table import check_transformers, layers
from .remote import backend
from .tasks import encode, encode_texts

# names of the cache in the signatures and outputs of transformers, newest first
_CACHES = ("cache", "past_key_values", "cache_params")


@torch.no_grad()
def forward(
    model,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    positions: Tensor | None = None,
    rows: Sequence | None = None,
    past=None,
    keep_past: bool = False,
    remote: bool | str = False,
):
    """Logits of the next token at one position of each prompt, or at several.

    >>> forward(model, batch.input_ids, batch.attention_mask).shape                 # after each last token
    torch.Size([batch, vocabulary])
    >>> forward(model, ids, mask, positions=torch.tensor([[3, 7], [2, 5]])).shape   # two positions per prompt
    torch.Size([2, 2, vocabulary])

    ``input_ids`` and ``attention_mask`` are (batch, length) integers, padded at the right. ``positions`` is a
    LongTensor (batch,) or (batch, k), by default the last token of each prompt; the output projection runs on
    these rows only. Returns float32. Active contexts such as ``ablate`` apply; ``rows``, the encoded examples
    of the batch, tells them where summary tokens and queries are.

    ``keep_past=True`` returns ``(logits, past)``; give ``past`` back, with a mask over old and new tokens, to
    go on after prompts of one length. The model updates the cache in place: copy it to use it twice.
    ``remote`` as in nnsight.

    Raises :class:`GnaError` for wrong shapes, left padding, empty rows, tokens that the model does not have,
    more tokens than its window, a model in training mode or not from nnsight, a cache with padding or on a
    server, and when a context is active on another model.
    """
    require_eval(model)
    check_transformers(model._module)
    _check(model, input_ids, attention_mask, past, keep_past, remote)
    length = input_ids.shape[1]
    positions = _positions(positions, attention_mask[:, -length:], length)
    picked = positions if positions.ndim == 2 else positions[:, None]
    if past is None:
        logits, cache = _run(model, input_ids, attention_mask, picked, marks(rows, length), keep_past, remote)
    else:
        logits, cache = _go_on(model, input_ids, attention_mask, picked, past)
    logits = logits if positions.ndim == 2 else logits[:, 0]
    return (logits, cache) if keep_past else logits


def _run(
    model,
    input_ids: Tensor,
    attention_mask: Tensor,
    picked: Tensor,
    marked: dict,
    keep_past: bool,
    remote,
    **options,
):
    """One trace; returns logits (batch, k, vocabulary) and the cache."""
    head = _output_head(model)
    with (
        running(model, marked),
        model.trace(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=keep_past,
            backend=backend(model, remote),
            **options,
        ),
    ):
        if head is not None:
            _keep_rows(model.get(head), picked)
        output = model.output
        logits = nnsight.save(_logits(output, None if head is not None else picked))
        cache = nnsight.save(_cache(output) if keep_past else None)
    return logits, cache


def tokens(model, prompts) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, (batch, length) right padded, for every way of giving prompts.

    >>> ids, mask = tokens(model, ["a short one", "and a longer one"])

    ``prompts`` is a text, a list of texts, of examples or of encoded examples, a batch, or a LongTensor of
    ids. Raises :class:`GnaError` for an empty list, an empty prompt, tokens that the model does not have,
    more of them than its window, left padding, and anything else.
    """
    return encode_prompts(model, prompts)[:2]


def encode_prompts(model, prompts) -> tuple[Tensor, Tensor, list | None]:
    """:func:`tokens`, and the encoded examples where the prompts have marked positions (else None)."""
    require_model(model)
    ids, mask, rows = _encode_prompts(model, prompts)
    _check_batch(model, ids, mask)
    return ids, mask, rows


def _encode_prompts(model, prompts) -> tuple[Tensor, Tensor, list | None]:
    if hasattr(prompts, "attention_mask"):
        return prompts.input_ids, prompts.attention_mask, list(getattr(prompts, "rows", None) or []) or None
    if isinstance(prompts, Tensor):
        prompts = prompts[None] if prompts.ndim == 1 else prompts
        return prompts, torch.ones_like(prompts), None
    several = isinstance(prompts, Iterable) and not isinstance(prompts, str)
    items = list(prompts) if several else [prompts]
    if not items:
        raise GnaError("no prompt was given: name at least one.")
    if all(isinstance(item, str) for item in items):
        return *_pad(encode_texts(items, model.tokenizer)), None
    if all(hasattr(item, "candidates") for item in items):
        items = encode(items, model.tokenizer, window(model) or sys.maxsize)
    if not all(hasattr(item, "input_ids") for item in items):
        raise GnaError(
            f"{type(items[0]).__name__} is not a prompt: give texts, examples, encoded examples or a batch."
        )
    return *_pad([item.input_ids for item in items]), items


def marks(rows: Sequence | None, length: int) -> dict[str, Tensor]:
    """Where the marked positions of encoded examples are: maps (batch, length) by name."""
    found: dict[str, Tensor] = {}
    for i, row in enumerate(rows or ()):
        places = {name: range(*span) for name, span in row.spans.items()}
        places |= {"query": [row.query], "summary": row.summary}
        for name, tokens_ in places.items():
            found.setdefault(name, torch.zeros(len(rows), length, dtype=torch.bool))[i, list(tokens_)] = True
    return found


def window(model) -> int | None:
    """The longest text that the model's positions reach, None where nothing limits it."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def require_model(model) -> None:
    """Refuse what is not an nnsight model, for example the module inside it, which cannot be traced."""
    if not isinstance(model, nnsight.Envoy):
        raise GnaError(
            f"give the model that gna_utils.load returns (an nnsight model), not {type(model).__name__}."
        )


def require_eval(model) -> None:
    """Refuse training mode, in which dropout and fused kernels change what a model computes."""
    require_model(model)
    if model._module.training:
        raise GnaError("the model is in training mode: call model.eval() first.")


def _pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    if not all(len(row) for row in rows):
        raise GnaError("a prompt has no tokens.")
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return ids, mask


def _check_batch(model, input_ids: Tensor, attention_mask: Tensor, past=None) -> None:
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not isinstance(value, Tensor):
            raise GnaError(f"{name} is of type {type(value).__name__}: give a LongTensor (batch, length).")
    shape, covered = tuple(input_ids.shape), tuple(attention_mask.shape)
    if input_ids.ndim != 2 or attention_mask.ndim != 2 or shape[0] != covered[0]:
        raise GnaError(
            f"input_ids has shape {shape} and attention_mask {covered}: both must be (batch, length)."
        )
    if 0 in shape:
        raise GnaError(f"input_ids has shape {shape} and holds no token: give at least one.")
    if past is None and covered[1] != shape[1]:
        raise GnaError(f"the mask covers {covered[1]} tokens, but the prompts have {shape[1]}.")
    check_tokens(model, input_ids)
    limit = window(model)
    if limit is not None and covered[1] > limit:
        raise GnaError(
            f"{covered[1]} tokens were given, but the window of the model is {limit}: give shorter prompts, "
            "or use a model with a longer window."
        )


def check_tokens(model, ids: Tensor) -> None:
    """Refuse tokens that the model has no embedding for."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise GnaError(f"token ids of type {ids.dtype} were given: give whole numbers, a LongTensor.")
    size = model.config.get_text_config().vocab_size
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise GnaError(
            f"token {wrong[0].item()} is not in the model's vocabulary of {size}: the prompt was encoded for "
            "another model."
        )


def _check(model, input_ids: Tensor, attention_mask: Tensor, past, keep_past: bool, remote) -> None:
    _check_batch(model, input_ids, attention_mask, past)
    if (attention_mask.diff(dim=1) > 0).any() or not attention_mask[:, 0].all():
        raise GnaError("a prompt is empty or padded at the left: pad at the right, and give the same mask.")
    if past is None and not keep_past:
        return
    if remote:
        raise GnaError("a cache stays on the server: run whole prompts with remote=.")
    covered = attention_mask if past is None else attention_mask[:, : -input_ids.shape[1]]
    if not covered.all():
        raise GnaError("a cache is exact only after prompts of one length: group the prompts by length.")


def _positions(positions: Tensor | None, mask: Tensor, length: int) -> Tensor:
    if positions is None:
        return mask.long().sum(1) - 1
    if positions.ndim not in (1, 2) or positions.shape[0] != len(mask):
        raise GnaError(
            f"positions has shape {tuple(positions.shape)}: give ({len(mask)},) or ({len(mask)}, k) for this "
            "batch."
        )
    if positions.min() < 0 or positions.max() >= length:
        raise GnaError(
            f"positions must lie between 0 and {length - 1}, the last token of the longest prompt."
        )
    return positions.long()


def _output_head(model) -> str | None:
    """Path of the projection to the vocabulary, None where the model does not say."""
    module = model._module
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return (
        next((path for path, part in module.named_modules() if part is head), None)
        if head is not None
        else None
    )


def _go_on(model, input_ids: Tensor, attention_mask: Tensor, picked: Tensor, past):
    """Read more tokens after a cache, as many at a time as the mixers of transformers allow."""
    kinds = {mixer.kind for mixer in layers(model)}
    names = inspect.signature(model._module.forward).parameters
    cache_name = next((name for name in _CACHES if name in names), "cache")
    length, start = input_ids.shape[1], attention_mask.shape[1] - input_ids.shape[1]
    # Mamba-1 scans forget the cached state unless tokens come one at a time
    step = 1 if "selective_scan" in kinds else length
    found = []
    for first in range(0, length, step):
        stop = first + step
        options = {cache_name: past}
        if "position_ids" in names:  # Bamba would count them from 0 again
            options["position_ids"] = torch.arange(start + first, start + stop)[None]
        # a pure scan model wants the mask of the new tokens alone
        mask = attention_mask[:, (0 if "attention" in kinds else start + first) : start + stop]
        rows = picked if step == length else torch.zeros(len(input_ids), 1, dtype=torch.long)
        logits, past = _run(
            model, input_ids[:, first:stop], mask, rows, {"past": start + first}, True, False, **options
        )
        found.append(logits)
    logits = torch.cat(found, dim=1)
    return (logits if step == length else logits.take_along_dim(picked.to(logits.device)[..., None], 1)), past


def _keep_rows(head, picked: Tensor) -> None:
    hidden = head.input
    head.input = hidden.take_along_dim(picked.to(hidden.device)[..., None], dim=1)


def _logits(output, picked: Tensor | None) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    if picked is not None:
        logits = logits.take_along_dim(picked.to(logits.device)[..., None], dim=1)
    return logits.float()


def _cache(output):
    for name in _CACHES:
        if (found := output.get(name)) is not None:
            return found
    raise GnaError("this model keeps no cache.")
