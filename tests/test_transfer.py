"""Transfer matrices against the models themselves, and against recurrences taken one position at a time."""

from __future__ import annotations

import math
import sys

import identity_table
import memory
import pytest
import tiny
import torch
from torch.nn.functional import silu, softplus

from gna_utils.errors import GnaError
from gna_utils.mixers import attention, delta_rule, layers, selective_scan, ssd
from gna_utils.mixers.adapters import ADAPTERS, call_site
from gna_utils.mixers.transfer import mixing, transfer_matrix, values
from gna_utils.trace import ablate

ATTENTION = [family for family in tiny.FAMILIES if ["attention"] in tiny.KINDS[family]]
HEADS = [5, 0, 3]  # neither sorted nor all


@pytest.fixture(scope="module")
def models():
    cache = {}

    def get(family: str):
        if family not in cache:
            cache[family] = identity_table.build(family)
        return cache[family]

    return get


# ---- the identity, on every family ----


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_matrix_times_values_is_the_mixers_own_output(family):
    rows = identity_table.measure(family)
    assert [row.kind for row in rows] == _kinds(family)
    for row in rows:
        assert row.error < 1e-4, row
        assert row.scale > 0.5, f"{row}: too little of the output comes from T for this to mean anything"


def _kinds(family: str) -> list[str]:
    return sorted({kind for kinds in tiny.KINDS[family] for kind in kinds} - {"mlp"})


def test_the_page_of_the_book_lists_every_family_and_mixer():
    rows = [line.split("|")[1:4] for line in identity_table.BOOK.read_text(encoding="utf-8").splitlines()]
    listed = [(row[0].strip(), row[1].strip()) for row in rows if len(row) == 3][2:]
    assert listed == [(family, kind) for family in tiny.FAMILIES for kind in _kinds(family)]


@pytest.mark.parametrize("family", ["zamba2", "falcon_h1"])
def test_two_mixers_in_one_layer_are_told_apart(models, family):
    model, hf_model, _ = models(family)
    batch = identity_table.batch(7)
    for mixer in layers(model):
        if len(layers(model).in_layer(mixer.layer)) < 2 or mixer.kind != "attention":
            continue
        projected = _input_of(hf_model.get_submodule(mixer.path).o_proj, hf_model, batch)
        read = mixing(model, batch, layer=mixer.layer, mixer="attention")
        torch.testing.assert_close(read.rebuilt.transpose(1, 2).flatten(2), projected, atol=1e-4, rtol=0)


def _input_of(module, hf_model, batch):
    seen = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hf_model(batch.input_ids, attention_mask=batch.attention_mask)
    hook.remove()
    return seen[0]


# ---- against implementations written here ----


@pytest.mark.parametrize("family", ATTENTION)
def test_attention_map_equals_the_weights_of_the_eager_implementation(models, family):
    """SDPA answers `output_attentions` with an empty tuple; the map must be right all the same."""
    model, hf_model, _ = models(family)
    assert hf_model.config._attn_implementation == "sdpa"
    batch = identity_table.batch(11, "right")
    hf_model.set_attn_implementation("eager")
    try:
        expected = hf_model(
            batch.input_ids, attention_mask=batch.attention_mask, output_attentions=True
        ).attentions
        under_eager = [transfer_matrix(model, batch, layer=i, mixer="attention") for i in _layers(model)]
    finally:
        hf_model.set_attn_implementation("sdpa")
    expected = [weights for weights in expected if weights is not None]
    assert len(expected) == len(under_eager) > 0
    real = batch.attention_mask[:, None, :, None]
    for layer, weights, eager in zip(_layers(model), expected, under_eager):
        found = transfer_matrix(model, batch, layer=layer, mixer="attention")
        torch.testing.assert_close(found, weights * real, atol=1e-5, rtol=0)
        torch.testing.assert_close(found, eager, atol=1e-6, rtol=0)
    assert hf_model.config._attn_implementation == "sdpa"


def _layers(model) -> list[int]:
    return [mixer.layer for mixer in layers(model) if mixer.kind == "attention"]


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


# ---- properties ----


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mamba", "mamba2", "qwen3_next"])
def test_a_short_prompt_in_a_batch_keeps_its_matrix(models, family):
    """Several prompts in one batch must not change the answer of a short one (nnsight issue 672)."""
    model, _, _ = models(family)
    for padding_side in ("right", "left"):
        model.tokenizer.padding_side = padding_side
        together = mixing(model, ["w1 w2 w3 w4 w5 w6 w7", "w8 w9"], layer=0)
        alone = mixing(model, "w8 w9", layer=0)
        assert alone.matrix().shape[-1] == 3 and together.matrix().shape[-1] == 8
        torch.testing.assert_close(together.matrix()[1:, :, :3, :3], alone.matrix(), atol=1e-5, rtol=0)
        torch.testing.assert_close(together.values[1:, :, :3], alone.values, atol=1e-5, rtol=0)
        assert not together.matrix()[1, :, 3:].any() and not together.matrix()[1, :, :, 3:].any()
    model.tokenizer.padding_side = "right"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_nothing_is_seen_above_the_diagonal_and_softmax_rows_sum_to_one(models, family):
    model, _, _ = models(family)
    for mixer in layers(model):
        if mixer.n_heads:
            mixed = transfer_matrix(model, identity_table.batch(9), layer=mixer.layer, mixer=mixer.kind)
            assert mixed.dtype == torch.float32 and mixed.shape == (2, mixer.n_heads, 9, 9)
            assert not mixed.triu(1).any() and mixed.any()
            if mixer.kind == "attention":
                torch.testing.assert_close(mixed.sum(-1), torch.ones(2, mixer.n_heads, 9))


def test_heads_come_in_the_order_asked_for(models):
    model, _, _ = models("llama")
    batch = identity_table.batch(5)
    every = [transfer_matrix(model, batch, layer=layer) for layer in (0, 1)]
    found = transfer_matrix(model, batch, "L1H2, L0H3, L1H0")
    expected = torch.stack([every[1][:, 2], every[0][:, 3], every[1][:, 0]], 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(transfer_matrix(model, batch, [2, 0], layer=1), every[1][:, [2, 0]])
    read = mixing(model, batch, "L1H2, L0H3, L1H0")
    torch.testing.assert_close(read.rebuilt, read.output, atol=1e-5, rtol=0)
    torch.testing.assert_close(read.values, values(model, batch, "L1H2, L0H3, L1H0"))


def test_matrices_of_both_kinds_of_a_hybrid_in_one_call(models):
    model, _, _ = models("jamba")
    batch = identity_table.batch(5)
    both = mixing(model, batch, "L1H0, L0H7")
    assert torch.equal(both.matrix(skip=False)[:, 1:], transfer_matrix(model, batch, "L0H7", skip=False))
    with pytest.raises(GnaError, match="different widths"):
        both.values


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_trace_packed_as_for_a_server_gives_the_same_numbers(models, family):
    model, _, _ = models(family)
    kinds = {mixer.kind: mixer for mixer in layers(model) if mixer.n_heads}
    for mixer in kinds.values():
        chosen = {"heads": [0, 1], "layer": mixer.layer, "mixer": mixer.kind}
        here = mixing(model, identity_table.batch(5), **chosen)
        packed = mixing(model, identity_table.batch(5), **chosen, remote="local")
        assert torch.equal(here.matrix(), packed.matrix())
        assert torch.equal(here.output, packed.output)


@pytest.mark.parametrize("remote", [False, "local"])
def test_later_layers_show_an_ablation_and_the_head_itself_does_not(models, remote):
    model, _, _ = models("mamba2")
    batch = identity_table.batch(7)
    before = [transfer_matrix(model, batch, layer=layer) for layer in (0, 1)]
    with ablate(model, "L0H1"):
        inside = [transfer_matrix(model, batch, layer=layer, remote=remote) for layer in (0, 1)]
    assert torch.equal(inside[0], before[0])
    assert (inside[1] - before[1]).abs().max() > 1e-2
    assert torch.equal(transfer_matrix(model, batch, layer=1), before[1])


def test_reading_changes_neither_the_model_nor_the_random_state(models):
    model, hf_model, _ = models("zamba2")
    batch = identity_table.batch(5)
    before, random = hf_model(batch.input_ids).logits, torch.get_rng_state()
    transfer_matrix(model, batch, layer=1, mixer="ssd")
    with pytest.raises(GnaError):
        transfer_matrix(model, batch, "L0H99")
    assert torch.equal(hf_model(batch.input_ids).logits, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert hf_model.config._attn_implementation == "sdpa"


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


# ---- refusals ----


def test_attention_asked_from_a_scan_layer_names_its_kind_and_the_choices(models):
    """A hybrid must never hand out a scan under the name of attention."""
    model, _, _ = models("bamba")
    with pytest.raises(GnaError, match=r"layer 0 .* ssd .* no attention heads.*: 1"):
        transfer_matrix(model, "w1 w2", layer=0, mixer="attention")


@pytest.mark.parametrize(
    ("family", "heads", "options", "message"),
    [
        ("llama", "L0H4", {}, "heads 0 to 3"),
        ("llama", "L2H0", {}, "layers 0 to 1"),
        ("llama", [], {}, "no head"),
        ("llama", None, {}, "no head"),
        ("llama", "L0H0", {"layer": 1}, "layer=1"),
        ("llama", "L0H0", {"mixer": "mamba"}, "unknown kind"),
        ("zamba2", "L1H0", {}, "two mixers"),
        ("nemotron_h", "L2H0", {}, "mlp"),
    ],
)
def test_heads_that_do_not_exist_are_refused(models, family, heads, options, message):
    with pytest.raises(GnaError, match=message):
        transfer_matrix(models(family)[0], "w1 w2", heads, **options)


def test_a_model_in_training_mode_is_refused(models):
    """In training mode fused kernels run the whole mixer in one call, past every place that could be read."""
    model, hf_model, _ = models("mamba2")
    hf_model.train()
    try:
        with pytest.raises(GnaError, match="eval"):
            transfer_matrix(model, "w1 w2", "L0H0")
    finally:
        hf_model.eval()


def test_a_mixer_without_a_known_call_is_refused_before_anything_runs(models, monkeypatch):
    model, hf_model, _ = models("mamba2")
    monkeypatch.setattr(ssd, "CALLS", ("another_scan",))
    ran = []
    hook = hf_model.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with pytest.raises(GnaError, match=r"Mamba2Mixer.*another_scan"):
            transfer_matrix(model, "w1 w2", "L0H0")
    finally:
        hook.remove()
    assert not ran
    assert call_site(("mamba2_chunk_scan_0",), "ssd") is None


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
