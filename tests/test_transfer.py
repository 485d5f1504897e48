"""Transfer matrices of whole models: the identity, eager attention, batches, servers, refusals."""

from __future__ import annotations

import identity_table
import pytest
import tiny
import torch

from gna_utils.errors import GnaError
from gna_utils.mixers import layers, ssd
from gna_utils.mixers.adapters import call_site
from gna_utils.mixers.transfer import mixing, transfer_matrix, values
from gna_utils.trace import ablate

ATTENTION = [name for name in tiny.FAMILIES if any("attention" in kinds for kinds in tiny.KINDS[name])]


@pytest.fixture(scope="module")
def models():
    cache = {}

    def get(family: str):
        if family not in cache:
            cache[family] = identity_table.build(family)
        return cache[family]

    return get


# ---- the identity, on every family ----


@pytest.mark.parametrize("family", identity_table.FAMILIES)
def test_matrix_times_values_is_the_mixers_own_output(family):
    rows = identity_table.measure(family)
    assert [row.kind for row in rows] == _kinds(family)
    for row in rows:
        assert row.error < 1e-4, row
        assert row.scale > 0.5, f"{row}: too little of the output comes from T for this to mean anything"


def _kinds(family: str) -> list[str]:
    if family == "llamba":
        return ["discrete_ssd"]
    return sorted({kind for kinds in tiny.KINDS[family] for kind in kinds} - {"mlp"})


def test_the_page_of_the_book_lists_every_family_and_mixer():
    rows = [line.split("|")[1:4] for line in identity_table.BOOK.read_text(encoding="utf-8").splitlines()]
    listed = [(row[0].strip(), row[1].strip()) for row in rows if len(row) == 3][2:]
    assert listed == [(family, kind) for family in identity_table.FAMILIES for kind in _kinds(family)]


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


# ---- against transformers' own weights ----


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
        torch.testing.assert_close(found, eager, atol=1e-5, rtol=0)
    assert hf_model.config._attn_implementation == "sdpa"


def _layers(model) -> list[int]:
    return [mixer.layer for mixer in layers(model) if mixer.kind == "attention"]


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


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (" ".join(["w1"] * 64), "65 tokens .* window of the model is 64"),
        (tiny.ids(1, 65), "65 tokens .* window of the model is 64"),
        (torch.tensor([[5, 70]]), "token 70 is not in the model's vocabulary of 64"),
        (torch.tensor([[0.5, 1.0]]), "torch.float32"),
        (tiny.ids(1, 4)[None], r"shape \(1, 1, 4\)"),
    ],
)
def test_prompts_that_the_model_cannot_read_are_refused(tiny_model, prompts, message):
    with pytest.raises(GnaError, match=message):
        transfer_matrix(tiny_model("gpt2")[0], prompts, "L0H0")


def test_only_an_nnsight_model_is_read(models):
    for wrong, name in ((None, "NoneType"), (models("gpt2")[1], "GPT2LMHeadModel")):
        with pytest.raises(GnaError, match=f"gna_utils.load returns .*, not {name}"):
            transfer_matrix(wrong, "w1 w2", "L0H0")


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
