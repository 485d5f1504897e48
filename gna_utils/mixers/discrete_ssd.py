"""Transfer matrix of Llamba's heads: ``T_ij = (C_i . B_j) prod_{j<m<=i} sigmoid(-A_log_m)`` for ``j <= i``.

Plus ``D`` on the diagonal. Unlike in Mamba-2 no step size multiplies the input: :mod:`gna_utils.llamba`.
"""

from __future__ import annotations

from torch import Tensor

from .ssd import decay, times, with_skip

CALLS = ("discrete_ssd_scan",)
_POSITIONAL = ("x", "log_decay", "B", "C", "D")


def operands(args: tuple, kwargs: dict, heads: list[int]) -> dict:
    """Pick what the chosen heads need out of the arguments of the scan."""
    call = dict(zip(_POSITIONAL, args)) | kwargs
    x, B, C = call["x"], call["B"], call["C"]
    # Neighbouring value heads share one query-key head.
    share = x.shape[2] // B.shape[2]
    groups = [head // share for head in heads]
    return {
        "x": x[:, :, heads].transpose(1, 2),
        "log_decay": call["log_decay"][:, :, heads].transpose(1, 2),
        "B": B[:, :, groups].transpose(1, 2),
        "C": C[:, :, groups].transpose(1, 2),
        "D": call["D"][heads],
    }


def output(result: tuple[Tensor, Tensor], heads: list[int]) -> Tensor:
    """Pick the chosen heads out of what the scan returned: ``(batch, head, L, head_dim)``."""
    return result[0][:, :, heads].transpose(1, 2)


def matrix(ops: dict, skip: bool = True) -> Tensor:
    """The transfer matrix ``(batch, head, L, L)`` in float32, with or without the skip weight ``D``."""
    scores = ops["C"].float() @ ops["B"].float().transpose(-1, -2)
    mixed = times(scores, decay(ops["log_decay"].float()))
    return with_skip(mixed, ops["D"] if skip else None)


def values(ops: dict) -> Tensor:
    """The vectors that the matrix mixes: ``(batch, head, L, head_dim)``."""
    return ops["x"].float()
