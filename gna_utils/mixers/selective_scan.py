"""Transfer matrix of selective-scan channels (Mamba, Falcon-Mamba, Jamba, Zamba): one head is one channel.

``T_ij = sum_n C_in exp(A_n sum_{j<m<=i} dt_m) dt_j B_jn`` for ``j <= i``, plus ``D`` on the diagonal: Ali,
Zimerman and Wolf, "The Hidden Attention of Mamba Models" (arXiv 2403.01590).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from .ssd import decay, times, with_skip

CALLS = ("mamba_selective_scan",)
_POSITIONAL = ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")


def operands(args: tuple, kwargs: dict, heads: list[int]) -> dict:
    """Pick what the chosen channels need out of the arguments of the scan."""
    call = dict(zip(_POSITIONAL, args)) | kwargs
    gate, bias, skip = call.get("z"), call.get("delta_bias"), call.get("D")
    return {
        "states": call["hidden_states"][:, heads],
        "dt": call["dt"][:, heads],
        "dt_bias": None if bias is None else bias[heads],
        "dt_softplus": bool(call.get("delta_softplus", False)),
        "A": call["A"][heads],
        "B": call["B"],
        "C": call["C"],
        "D": None if skip is None else skip[heads],
        "gate": None if gate is None else gate[:, heads],
    }


def output(result: Tensor | tuple, heads: list[int]) -> Tensor:
    """Pick the chosen channels out of what the scan returned: ``(batch, head, L, 1)``."""
    scanned = result[0] if isinstance(result, tuple) else result
    return scanned[:, heads, :, None]


def matrix(ops: dict, skip: bool = True) -> Tensor:
    """The transfer matrix ``(batch, head, L, L)`` in float32, with or without the skip weight ``D``."""
    dt = ops["dt"].float()
    if ops["dt_bias"] is not None:
        dt = dt + ops["dt_bias"].float()[:, None]
    if ops["dt_softplus"]:
        dt = softplus(dt)
    A, B, C = ops["A"].float(), ops["B"].float(), ops["C"].float()
    mixed = torch.zeros(*dt.shape, dt.shape[-1], device=dt.device)
    # One state dimension at a time: all of them together would need d_state times the memory of the result.
    for n in range(A.shape[-1]):
        part = times(decay(dt * A[:, n, None]), C[:, n, None, :, None])
        mixed += times(part, (B[:, n, None, :] * dt)[..., None, :])
        del part  # or it would still be there while the next one is made
    return with_skip(mixed, ops["D"] if skip else None)


def values(ops: dict) -> Tensor:
    """The vectors that the matrix mixes: ``(batch, head, L, 1)``."""
    return ops["states"].float()[..., None]


def gate(ops: dict) -> Tensor | None:
    """What the scan multiplies each row of ``T @ v`` with before it returns: ``silu(z)``."""
    return None if ops["gate"] is None else silu(ops["gate"].float())[..., None]
