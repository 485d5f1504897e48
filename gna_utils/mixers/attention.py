"""Attention map of softmax heads, from the queries, keys and mask that reach ``attention_interface``.

Reading the arguments of the call instead of its second result has three advantages: it is exact whichever
implementation runs (SDPA returns no weights at all), nothing has to be switched and restored, and only the
heads asked for are ever materialised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import GnaError

CALLS = ("attention_interface",)
_POSITIONAL = ("module", "query", "key", "value", "attention_mask")
_UNDERSTOOD = {*_POSITIONAL, "scaling", "softcap", "sliding_window", "s_aux", "position_ids"}


def operands(args: tuple, kwargs: dict, heads: list[int]) -> dict:
    """Pick what the chosen heads need out of the arguments of the attention function."""
    call = dict(zip(_POSITIONAL, args)) | kwargs
    query, key, value, mask = call["query"], call["key"], call["value"], call.get("attention_mask")
    # Grouped queries: head h reads the keys and values of group h // share.
    share = query.shape[1] // key.shape[1]
    groups = [head // share for head in heads]
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
        mask = mask[:, heads]
    scaling, sinks = call.get("scaling"), call.get("s_aux")
    return {
        "query": query[:, heads],
        "key": key[:, groups],
        "value": value[:, groups],
        "mask": mask,
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": call.get("softcap"),
        "window": call.get("sliding_window"),
        "sinks": None if sinks is None else sinks[heads],
        "unknown": [name for name in call if torch.is_tensor(call[name]) and name not in _UNDERSTOOD],
    }


def output(result: Tensor | tuple, heads: list[int]) -> Tensor:
    """Pick the chosen heads out of what the attention function returned: ``(batch, head, L, head_dim)``."""
    mixed = result[0] if isinstance(result, tuple) else result
    return mixed[:, :, heads].transpose(1, 2)


def matrix(ops: dict, skip: bool = True) -> Tensor:
    """The attention map ``(batch, head, L, L)`` in float32; ``skip`` changes nothing.

    Raises :class:`GnaError` when the model passes a tensor of unknown meaning, such as a position bias.
    """
    if ops["unknown"]:
        raise GnaError(
            f"this model's attention takes {', '.join(ops['unknown'])}, which transfer_matrix does not know: "
            f"it understands a mask, a scale, a soft cap, a sliding window and sinks."
        )
    length = ops["key"].shape[-2]
    scores = (ops["query"].float() * ops["scaling"]) @ ops["key"].float().transpose(-1, -2)
    if ops["softcap"]:
        scores = torch.tanh(scores / ops["softcap"]) * ops["softcap"]
    visible, bias = _visible(ops["mask"], length, ops["window"], scores.device)
    if bias is not None:
        scores = scores + bias
    # A row that sees nothing belongs to padding. It becomes 0 at the end: softmax alone would answer NaN.
    empty = ~visible.any(-1, keepdim=True)
    scores.masked_fill_(~(visible | empty), -torch.inf)
    if ops["sinks"] is not None:
        sink = ops["sinks"].float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    mixed = scores.softmax(-1)[..., :length]
    return mixed.masked_fill(empty, 0.0) if empty.any() else mixed


def values(ops: dict) -> Tensor:
    """The vectors that the map mixes: ``(batch, head, L, head_dim)``."""
    return ops["value"].float()


def _visible(mask, length: int, window: int | None, device) -> tuple[Tensor, Tensor | None]:
    """Which keys each query sees, and a finite bias on the scores if the mask carries one.

    The mask comes in the form of the running implementation: none (causal), ``(batch, L)`` (flash attention),
    a boolean map (SDPA) or an additive one (eager).
    """
    if not (mask is None or isinstance(mask, torch.Tensor)):
        raise GnaError(
            f"the attention mask is a {type(mask).__name__}, which cannot be read: load the model with "
            f"attn_implementation='sdpa' or 'eager'."
        )
    if mask is not None and mask.dim() == 4:
        mask = mask[..., :length].to(device)
        if mask.dtype == torch.bool:
            return mask, None
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        return ~hidden, mask.float().masked_fill(hidden, 0.0) if bool((mask[~hidden] != 0).any()) else None
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    visible = (age >= 0) if window is None else (age >= 0) & (age < window)
    return visible if mask is None else visible & mask.bool().to(device)[:, None, None, :], None
