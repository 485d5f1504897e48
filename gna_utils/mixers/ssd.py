"""Transfer matrix of SSD heads (Mamba-2, Bamba, Zamba2, Falcon-H1, Nemotron-H, Granite-MoE-hybrid).

``T_ij = (C_i . B_j) exp(a sum_{j<m<=i} dt_m) dt_j`` for ``j <= i``, plus ``D`` on the diagonal: section 6 of
Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

CALLS = ("mamba2_chunk_scan",)
_POSITIONAL = ("hidden_states", "dt", "A", "B", "C", "chunk_size")


def operands(args: tuple, kwargs: dict, heads: list[int]) -> dict:
    """Pick what the chosen heads need out of the arguments of the scan."""
    call = dict(zip(_POSITIONAL, args)) | kwargs
    states, dt, B, C = call["hidden_states"], call["dt"], call["B"], call["C"]
    # B and C are shared by neighbouring heads: head h reads group h // share (interleaved, not tiled).
    share = states.shape[2] // B.shape[2]
    groups = [head // share for head in heads]
    bias, skip = call.get("dt_bias"), call.get("D")
    return {
        "states": states[:, :, heads].transpose(1, 2),
        "dt": dt[:, :, heads].transpose(1, 2),
        "dt_bias": None if bias is None else bias[heads],
        "dt_softplus": bool(call.get("dt_softplus", False)),
        "dt_limit": tuple(call.get("dt_limit", (0.0, float("inf")))),
        "A": call["A"][heads],
        "B": B[:, :, groups].transpose(1, 2),
        "C": C[:, :, groups].transpose(1, 2),
        "D": None if skip is None else skip[heads],
    }


def output(result: Tensor | tuple, heads: list[int]) -> Tensor:
    """Pick the chosen heads out of what the scan returned: ``(batch, head, L, head_dim)``."""
    scanned = result[0] if isinstance(result, tuple) else result
    return scanned[:, :, heads].transpose(1, 2)


def matrix(ops: dict, skip: bool = True) -> Tensor:
    """The transfer matrix ``(batch, head, L, L)`` in float32, with or without the skip weight ``D``."""
    dt = ops["dt"].float()
    if ops["dt_bias"] is not None:
        dt = dt + ops["dt_bias"].float()[:, None]
    if ops["dt_softplus"]:
        dt = softplus(dt)
    dt = dt.clamp(*ops["dt_limit"])
    written = ops["B"].float() * dt[..., None]
    scores = ops["C"].float() @ written.transpose(-1, -2)
    mixed = times(scores, decay(dt * ops["A"].float()[:, None]))
    return with_skip(mixed, ops["D"] if skip else None)


def values(ops: dict) -> Tensor:
    """The vectors that the matrix mixes: ``(batch, head, L, head_dim)``."""
    return ops["states"].float()


def decay(log_decay: Tensor) -> Tensor:
    """``exp(sum_{j<m<=i} log_decay_m)`` for ``j <= i`` and exactly 0 above the diagonal.

    ``log_decay`` is ``(..., L)``, the result ``(..., L, L)`` in float32. The running sum is taken in float64
    and kept as a pair of float32 numbers, because the difference of two long sums loses the digits that
    matter near the diagonal. It is taken on the CPU, because not every accelerator has float64.
    """
    total = log_decay.cpu().double().cumsum(-1)
    high = total.float()
    low = (total - high.double()).float().to(log_decay.device)
    high = high.to(log_decay.device)
    between = high[..., :, None] - high[..., None, :]
    between += low[..., :, None]
    between -= low[..., None, :]
    length = log_decay.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu_(1)
    # The mask comes before the exponential: above the diagonal it would overflow and make gradients NaN.
    return between.masked_fill_(future, -torch.inf).exp_()


def times(left: Tensor, right: Tensor) -> Tensor:
    """``left * right``, written into ``left`` unless a gradient will need its old value."""
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return left * right
    return left.mul_(right)


def with_skip(mixed: Tensor, skip: Tensor | None) -> Tensor:
    """Add each head's skip weight to the diagonal of its matrix, in place."""
    if skip is not None:
        mixed.diagonal(dim1=-2, dim2=-1).add_(skip.float()[:, None])
    return mixed
