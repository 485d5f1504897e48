"""Transfer matrix of gated delta-rule heads (Qwen3-Next, Qwen3.5, OLMo-hybrid).

``T = s (Q K^T o G) (I + strict_tril(diag(b) (K K^T o G)))^-1 diag(b)`` with ``G_ij = prod_{j<m<=i} a_m``:
Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), unrolled over the whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ssd import decay, times

CALLS = ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")
_POSITIONAL = ("query", "key", "value", "g", "beta")


def operands(args: tuple, kwargs: dict, heads: list[int]) -> dict:
    """Pick what the chosen heads need out of the arguments of the chunked rule."""
    call = dict(zip(_POSITIONAL, args)) | kwargs
    query, key, value = call["query"], call["key"], call["value"]
    share = value.shape[2] // key.shape[2]
    groups = [head // share for head in heads]
    return {
        "query": query[:, :, groups].transpose(1, 2),
        "key": key[:, :, groups].transpose(1, 2),
        "value": value[:, :, heads].transpose(1, 2),
        "log_decay": call["g"][:, :, heads].transpose(1, 2),
        "beta": call["beta"][:, :, heads].transpose(1, 2),
        "normalise": bool(call.get("use_qk_l2norm_in_kernel", False)),
    }


def output(result: Tensor | tuple, heads: list[int]) -> Tensor:
    """Pick the chosen heads out of what the rule returned: ``(batch, head, L, head_dim)``."""
    mixed = result[0] if isinstance(result, tuple) else result
    return mixed[:, :, heads].transpose(1, 2)


def matrix(ops: dict, skip: bool = True) -> Tensor:
    """The transfer matrix ``(batch, head, L, L)`` in float32; there is no skip weight to leave out."""
    query, key, beta = ops["query"].float(), ops["key"].float(), ops["beta"].float()
    if ops["normalise"]:
        query, key = _unit(query), _unit(key)
    query = query * query.shape[-1] ** -0.5
    mixed = torch.empty(*beta.shape, beta.shape[-1], device=beta.device)
    # One head at a time: the triangular solve works on copies, too many of them for all heads together.
    for head in range(beta.shape[1]):
        b = beta[:, head, :, None]
        forgotten = decay(ops["log_decay"][:, head])
        read = times(query[:, head] @ key[:, head].transpose(-1, -2), forgotten)
        overwritten = times((b * key[:, head]) @ key[:, head].transpose(-1, -2), forgotten)
        # With unitriangular=True the solver takes the diagonal as 1 and does not read the stored one.
        solved = torch.linalg.solve_triangular(overwritten, read, upper=False, left=False, unitriangular=True)
        mixed[:, head] = solved * b.transpose(-1, -2)
    return mixed


def values(ops: dict) -> Tensor:
    """The vectors that the matrix mixes: ``(batch, head, L, head_dim)``."""
    return ops["value"].float()


def _unit(vectors: Tensor) -> Tensor:
    """Scale to length 1 with the same small term under the root as transformers' ``l2norm``."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
