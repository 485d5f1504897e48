"""Scans that train quickly on a CPU: the same numbers as those of transformers, in a fraction of the time.

transformers computes its scans in a way that is right for every length, and that keeps every intermediate
state for the gradient. The sequences of the small world are short, so that other ways are cheaper:

>>> with fast_scans():
...     loss = model(input_ids).logits.sum()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

_MODULES = {
    "mamba": ("mamba_selective_scan", "causal_conv1d_fn"),
    "mamba2": ("mamba2_chunk_scan", "causal_conv1d_fn"),
    "bamba": ("mamba2_chunk_scan", "causal_conv1d_fn"),
}


@contextmanager
def fast_scans() -> Iterator[None]:
    """Within this context Mamba, Mamba-2 and Bamba models run the scans of this module, from empty states.

    Not for generation or cached prompts: a call that hands over or asks for a state runs the scan of
    transformers. Not thread-safe: the functions of transformers' modules are exchanged and put back.
    """
    with ExitStack() as stack:
        for family, names in _MODULES.items():
            module = import_module(f"transformers.models.{family}.modeling_{family}")
            for name in names:
                stack.enter_context(mock.patch.object(module, name, _FAST[name](getattr(module, name))))
        yield


def _ssd(original):
    def scan(
        hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_limit=(0.0, float("inf")), **more
    ):
        stateful = more.get("initial_states") is not None or more.get("return_final_states", False)
        if stateful or not more.get("dt_softplus", False):
            return original(
                hidden_states, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, dt_limit=dt_limit, **more
            )
        dt = F.softplus(dt if dt_bias is None else dt + dt_bias).clamp(*dt_limit).transpose(1, 2)
        share = hidden_states.shape[2] // B.shape[2]
        values = hidden_states.transpose(1, 2)
        scores = (C.transpose(1, 2) @ B.transpose(1, 2).mT).repeat_interleave(share, dim=1)
        # One matrix for the whole sequence: below some hundred tokens this beats chunks and carried states.
        mixed = (scores * _decay(dt * A[:, None])) @ (values * dt[..., None])
        return (mixed if D is None else mixed + D[:, None, None] * values).transpose(1, 2)

    return scan


def _decay(log_decay: Tensor) -> Tensor:
    # Less careful than mixers.ssd.decay, which keeps all digits of long sums, and several times faster.
    total = log_decay.cumsum(-1)
    future = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()


def _selective(original):
    def scan(hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, **more):
        if more.get("return_last_state", False) or not more.get("delta_softplus", False):
            return original(hidden_states, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, **more)
        dt = F.softplus(dt if delta_bias is None else dt + delta_bias[:, None])
        # Time first, so that one step of the recurrence reads and writes one block of memory.
        over_time = [t.permute(2, 0, 1).contiguous() for t in (hidden_states, dt, B, C)]
        out = SelectiveScan.apply(over_time[0], over_time[1], A.contiguous(), *over_time[2:]).permute(1, 2, 0)
        if D is not None:
            out = out + hidden_states * D[:, None]
        return out if z is None else out * F.silu(z)

    return scan


def _conv(original):
    def conv(hidden_states, weight, bias=None, activation=None, **more):
        length, width = hidden_states.shape[-1], weight.shape[-1]
        # Channels last, and a sum of shifted copies: the gradient of a grouped convolution is slow on CPUs.
        padded = F.pad(hidden_states.transpose(1, 2), (0, 0, width - 1, 0))
        out = bias
        for k in range(width):
            part = padded[:, k : k + length]
            out = part * weight[:, k] if out is None else torch.addcmul(out, part, weight[:, k])
        return (out if activation is None else ACT2FN[activation](out)).transpose(1, 2)

    return conv


_FAST = {"mamba_selective_scan": _selective, "mamba2_chunk_scan": _ssd, "causal_conv1d_fn": _conv}


class SelectiveScan(torch.autograd.Function):
    """The recurrence of Mamba, one token at a time, with a gradient that runs back the same way.

    ``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t`` and ``y_t = C_t . h_t``; ``x`` and ``dt`` are
    ``(L, batch, channel)``, ``A`` ``(channel, state)``, ``B`` and ``C`` ``(L, batch, state)``.
    """

    @staticmethod
    def forward(ctx, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        length, batch, channels = x.shape
        states = x.new_empty(length + 1, batch, channels, A.shape[1])
        states[0] = 0
        keep, out, written = torch.empty_like(states[1:]), torch.empty_like(x), dt * x
        for t in range(length):
            torch.mul(dt[t, ..., None], A, out=keep[t]).exp_()
            torch.mul(keep[t], states[t], out=states[t + 1])
            states[t + 1].addcmul_(written[t, ..., None], B[t, :, None])
            torch.bmm(states[t + 1], C[t, ..., None], out=out[t, ..., None])
        ctx.save_for_backward(x, dt, A, B, C, states, keep)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, states, keep = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        grad_written, grad_keep = torch.empty_like(x), torch.empty_like(x)
        grad_B, grad_C = torch.empty_like(B), torch.empty_like(C)
        carried, grad_A, change = (torch.zeros_like(states[0]) for _ in range(3))
        written = dt * x
        for t in reversed(range(len(x))):
            carried.addcmul_(grad_out[t, ..., None], C[t, :, None])  # now the gradient of state t
            torch.bmm(grad_out[t, :, None], states[t + 1], out=grad_C[t, :, None])
            torch.bmm(carried, B[t, ..., None], out=grad_written[t, ..., None])
            torch.bmm(written[t, :, None], carried, out=grad_B[t, :, None])
            carried.mul_(keep[t])  # now the gradient of state t-1
            torch.mul(carried, states[t], out=change)  # the gradient of dt_t A
            grad_A.addcmul_(change, dt[t, ..., None])
            torch.sum(change.mul_(A), -1, out=grad_keep[t])
        return grad_written * dt, grad_written * x + grad_keep, grad_A.sum(0), grad_B, grad_C
