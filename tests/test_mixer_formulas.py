"""The formulas of the mixer kinds, each against another way of computing it, one position at a time."""

from __future__ import annotations

import math
import sys

import memory
import pytest
import torch
from torch.nn.functional import silu, softplus

from gna_utils.errors import GnaError
from gna_utils.mixers import attention, delta_rule, selective_scan, ssd
from gna_utils.mixers.adapters import ADAPTERS

HEADS = [5, 0, 3]  # neither sorted nor all


def test_softmax_by_hand():
    """Grouped queries, scale, soft cap, sliding window and sinks, one entry at a time."""
    draw = _generator()
    query, key, value = draw(2, 4, 6, 5), draw(2, 2, 6, 5), draw(2, 2, 6, 5)
    sinks, window, cap, scale = draw(4), 3, 2.0, 0.7
    arguments = {"scaling": scale, "softcap": cap, "sliding_window": window, "s_aux": sinks, "dropout": 0.0}
    ops = attention.operands((None, query, key, value, None), arguments, [3, 0])
    expected = torch.zeros(2, 2, 6, 6)
    for b in range(2):
        for place, head in enumerate([3, 0]):
            for i in range(6):
                seen = range(max(0, i - window + 1), i + 1)
                scores = [float(query[b, head, i] @ key[b, head // 2, j]) * scale for j in seen]
                scores = [cap * math.tanh(score / cap) for score in scores]
                total = sum(map(math.exp, scores)) + math.exp(sinks[head])
                for j, score in zip(seen, scores):
                    expected[b, place, i, j] = math.exp(score) / total
    torch.testing.assert_close(attention.matrix(ops), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(attention.values(ops), value[:, [1, 0]])


@pytest.mark.parametrize("form", ["none", "two-dimensional", "boolean", "additive"])
def test_every_form_of_attention_mask_gives_the_same_map(form):
    draw = _generator()
    query, key = draw(2, 2, 5, 4), draw(2, 2, 5, 4)
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    causal = torch.ones(5, 5).tril().bool()
    visible = causal & real[:, None, None, :]
    mask = {
        "none": None,
        "two-dimensional": real.long(),
        "boolean": visible,
        "additive": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min),
    }[form]
    found = attention.matrix(attention.operands((None, query, key, key, mask), {}, [0, 1]))
    visible = causal.expand(2, 1, 5, 5) if form == "none" else visible
    scores = (query @ key.mT / 2).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(found, scores.softmax(-1).nan_to_num(0.0))


def test_an_attention_argument_of_unknown_meaning_is_refused():
    query = _generator()(1, 2, 3, 4)
    ops = attention.operands((None, query, query, query, None), {"position_bias": torch.ones(3, 3)}, [0])
    with pytest.raises(GnaError, match="position_bias"):
        attention.matrix(ops)


@pytest.mark.parametrize("dt_limit", [(0.0, math.inf), (0.3, 0.6)])
def test_ssd_against_a_plain_recurrence(dt_limit):
    """Eight heads, two groups: neighbouring heads share a group; the mixer's own limit clamps dt."""
    draw = _generator()
    x, dt, B, C = draw(2, 9, 8, 3), draw(2, 9, 8), draw(2, 9, 2, 4), draw(2, 9, 2, 4)
    A, D, bias = -draw(8).exp(), draw(8), draw(8)
    state, expected = torch.zeros(2, 8, 3, 4), []
    for i in range(9):
        step = softplus(dt[:, i] + bias).clamp(*dt_limit)
        into = torch.stack([B[:, i, 0]] * 4 + [B[:, i, 1]] * 4, 1)
        out = torch.stack([C[:, i, 0]] * 4 + [C[:, i, 1]] * 4, 1)
        written = (step[..., None] * x[:, i])[..., None] * into[:, :, None]
        state = state * (step * A).exp()[..., None, None] + written
        expected.append((state * out[:, :, None]).sum(-1) + D[:, None] * x[:, i])
    arguments = {"chunk_size": 4, "D": D, "dt_bias": bias, "dt_softplus": True, "dt_limit": dt_limit}
    ops = ssd.operands((x, dt, A, B, C), arguments, HEADS)
    expected = torch.stack(expected, 2)[:, HEADS]
    torch.testing.assert_close(ssd.matrix(ops) @ ssd.values(ops), expected, atol=1e-5, rtol=1e-5)
    without = expected - D[HEADS, None, None] * ssd.values(ops)
    torch.testing.assert_close(ssd.matrix(ops, skip=False) @ ssd.values(ops), without, atol=1e-5, rtol=1e-5)


def test_selective_scan_against_a_plain_recurrence():
    draw = _generator()
    x, dt, z, B, C = draw(2, 6, 9), draw(2, 6, 9), draw(2, 6, 9), draw(2, 4, 9), draw(2, 4, 9)
    A, D, bias = -draw(6, 4).exp(), draw(6), draw(6)
    state, expected = torch.zeros(2, 6, 4), []
    for i in range(9):
        step = softplus(dt[..., i] + bias)[..., None]
        state = state * (step * A).exp() + step * B[:, None, :, i] * x[..., i, None]
        expected.append(((state * C[:, None, :, i]).sum(-1) + D * x[..., i]) * silu(z[..., i]))
    arguments = {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True, "return_last_state": False}
    ops = selective_scan.operands((x, dt, A, B, C), arguments, HEADS)
    rebuilt = selective_scan.matrix(ops) @ selective_scan.values(ops) * selective_scan.gate(ops)
    torch.testing.assert_close(rebuilt[..., 0], torch.stack(expected, -1)[:, HEADS], atol=1e-5, rtol=1e-5)
    difference = selective_scan.matrix(ops) - selective_scan.matrix(ops, skip=False)
    on_diagonal = torch.diag_embed(D[HEADS, None].expand(2, 3, 9))
    torch.testing.assert_close(difference, on_diagonal, atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalise", [True, False])
def test_delta_rule_against_a_plain_recurrence(normalise):
    draw = _generator()
    query, key, value = draw(2, 9, 3, 4), draw(2, 9, 3, 4) / 2, draw(2, 9, 6, 5)
    g, beta = -draw(2, 9, 6).exp(), draw(2, 9, 6).sigmoid()
    arguments = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": normalise}
    ops = delta_rule.operands((query, key, value), arguments, HEADS)
    if normalise:
        query, key = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (query, key))
    state, expected = torch.zeros(2, 6, 4, 5), []
    for i in range(9):
        q, k = (torch.stack([t[:, i, h // 2] for h in range(6)], 1) for t in (query / 2, key))
        state = state * g[:, i].exp()[..., None, None]
        error = value[:, i] - (state * k[..., None]).sum(-2)
        state = state + k[..., None] * (beta[:, i, :, None] * error)[..., None, :]
        expected.append((state * q[..., None]).sum(-2))
    rebuilt = delta_rule.matrix(ops) @ delta_rule.values(ops)
    torch.testing.assert_close(rebuilt, torch.stack(expected, 2)[:, HEADS], atol=1e-5, rtol=1e-5)


def test_decay_keeps_its_digits_after_a_long_sum():
    """Near the diagonal the difference of two sums of 4096 steps must be as exact as the step itself."""
    steps = -torch.linspace(0.5, 1.5, 4096)
    found = ssd.decay(steps).diagonal(-1)
    torch.testing.assert_close(found, steps[1:].double().exp().float(), atol=0, rtol=1e-6)


def test_gradients_through_the_matrices_are_finite():
    """Masking after the exponential would overflow above the diagonal and turn every gradient into NaN."""
    draw = _generator()
    x, dt, B = draw(1, 60, 4, 3), 20 * draw(1, 60, 4), draw(1, 60, 2, 4)
    A = -torch.full((4,), 50.0)
    channels, into = A[:, None].expand(4, 5), draw(1, 5, 60)
    calls = [
        (ssd, (x, dt.abs(), A, B, B), {}),
        (selective_scan, (x[..., 0].mT, dt.abs().mT, channels, into, into), {}),
        (delta_rule, (x[:, :, :2], x[:, :, 2:], x), {"g": -dt.abs(), "beta": dt.sigmoid()}),
        (attention, (None, x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), None), {}),
    ]
    for adapter, args, kwargs in calls:
        ops = adapter.operands(args, kwargs, [0, 2])
        leaves = {name: t.clone().requires_grad_() for name, t in ops.items() if torch.is_tensor(t)}
        plain = adapter.matrix(ops)
        mixed = adapter.matrix({**ops, **leaves})
        torch.testing.assert_close(mixed, plain)
        mixed.square().sum().backward()
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        assert len(gradients) >= 2, adapter.__name__
        assert all(gradient.isfinite().all() for gradient in gradients), adapter.__name__


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory of the process from /proc")
@pytest.mark.parametrize("kind", list(ADAPTERS))
def test_memory_stays_near_the_size_of_the_result(kind):
    # Buffers above 32 MB go back to the system at once; holes left by smaller ones would be counted.
    ops = _large_operands(kind, heads=9, length=1024)
    result = 9 * 1024 * 1024 * 4
    with torch.no_grad():
        ADAPTERS[kind].matrix(_large_operands(kind, heads=1, length=16))
        peak = memory.peak(lambda: ADAPTERS[kind].matrix(ops))
    assert peak < 2.5 * result, f"{peak / result:.2f} times the result"


def _generator():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def _large_operands(kind: str, heads: int, length: int) -> dict:
    draw, every = _generator(), list(range(heads))
    x = draw(1, length, heads, 16)
    flat = draw(1, heads, length)
    args, kwargs = {
        "attention": ((None, *[x.transpose(1, 2)] * 3, None), {}),
        "ssd": ((x, flat.mT, -draw(heads).exp(), x, x), {"D": draw(heads), "dt_softplus": True}),
        "selective_scan": (
            (flat, flat, -draw(heads, 2).exp(), draw(1, 2, length), draw(1, 2, length)),
            {"D": draw(heads), "delta_softplus": True},
        ),
        "delta_rule": (
            (x, x, x),
            {"g": -flat.mT.exp(), "beta": flat.mT.sigmoid(), "use_qk_l2norm_in_kernel": True},
        ),
        "discrete_ssd": ((x, -flat.mT.exp(), x, x, draw(heads)), {}),
    }[kind]
    return ADAPTERS[kind].operands(args, kwargs, every)
