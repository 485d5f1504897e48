"""Keeping only some heads, masking rows of attention maps, dropping layers."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch

from gna_utils import ablate, drop_layers, keep_layers, keep_only, layers, mask_rows
from gna_utils.forward import forward

IDS = tiny.ids(3, 11)
LENGTHS = torch.tensor([4, 9, 11])
MASK = (torch.arange(11) < LENGTHS[:, None]).long()
IDS = IDS * MASK


def run(model, **options):
    return forward(model, IDS, MASK, **options)


def test_keep_only_leaves_the_named_heads(tiny_model):
    model, _, _ = tiny_model("falcon_h1")
    with ablate(model, "L0H0, L0H2, L0H3, L1H0, L1H1, L1H2, L1H3", mixer="attention"):
        expected = run(model)
    with keep_only(model, "L0H1", mixer="attention"):
        assert torch.equal(run(model), expected)
        assert torch.equal(run(model, remote="local"), expected)
    with ablate(model, "L1H0, L1H2", mixer="attention"):
        expected = run(model)
    with keep_only(model, "L1H1, L1H3", [1], mixer="attention"):
        assert torch.equal(run(model), expected)
    with keep_only(model, [], [1]):
        nothing = run(model)
        with model.trace(input_ids=IDS, attention_mask=MASK):
            ssd = model.model.layers[1].mamba.out_proj.input.save()
            attention = model.model.layers[1].self_attn.o_proj.input.save()
    assert not ssd.any() and not attention.any() and torch.isfinite(nothing).all()


def test_mask_rows_of_all_attention_heads(tiny_model):
    """The delegation experiment: no attention head of a hybrid reads anything at the chosen positions."""
    model, hf_model, _ = tiny_model("zamba2")
    where = torch.zeros(3, 11, dtype=torch.bool)
    where[:, 2] = True
    with mask_rows(model, positions=where):
        masked, remote = run(model), run(model, remote="local")

    def zero(module, args):
        args[0][:, 2] = 0

    handles = [
        hf_model.model.layers[i].shared_transformer.self_attn.o_proj.register_forward_pre_hook(zero)
        for i in (1, 3)
    ]
    expected = run(model)
    for handle in handles:
        handle.remove()
    assert torch.equal(masked, expected) and torch.equal(masked, remote)
    assert (masked - run(model)).abs().max() > 1e-3
    with mask_rows(model, "L3H0", where), ablate(model, "L3H0", mixer="attention", positions=where):
        once = run(model)
    with mask_rows(model, "L3H0", where):
        assert torch.equal(run(model), once)


@pytest.mark.parametrize("family", ["llama", "gpt2", "zamba2", "falcon_h1"])
def test_masked_rows_of_a_head_are_exactly_zero_and_others_are_not(tiny_model, family):
    """Scores of 0 before the softmax would give the mean over all positions instead (Retrieval_Head 9)."""
    model, _, _ = tiny_model(family)
    mixer = next(mixer for mixer in layers(model) if mixer.kind == "attention")
    with (
        mask_rows(model, [(mixer.layer, 2)], positions="query"),
        model.trace(input_ids=IDS, attention_mask=MASK),
    ):
        site = model.get(f"{mixer.path}.{mixer.out_proj}").input.save()
    zero = (site.unflatten(-1, (mixer.n_heads, mixer.head_dim)) == 0).all(-1) & MASK.bool()[..., None]
    assert zero.nonzero().tolist() == [[i, n - 1, 2] for i, n in enumerate(LENGTHS.tolist())]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_dropped_layer_passes_the_residual_on(tiny_model, family):
    model, hf_model, _ = tiny_model(family)
    table = layers(model)
    stack = hf_model.get_submodule(table.list_path)
    plain = run(model)

    def through(module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if torch.is_tensor(output) else (hidden, *output[1:])

    handle = stack[1].register_forward_hook(through, with_kwargs=True)
    expected = run(model)
    handle.remove()
    with drop_layers(model, 1):
        assert torch.equal(run(model), expected)
        assert torch.equal(run(model, remote="local"), expected)
    with drop_layers(model, range(1, table.n_layers)):
        expected = run(model)
    with keep_layers(model, 1):
        assert torch.equal(run(model), expected)
    with keep_layers(model, table.n_layers):
        assert torch.equal(run(model), plain)
    assert (plain - expected).abs().max() > 1e-3


def test_dropped_layers_equal_a_shorter_model():
    model, hf_model, _ = tiny.build("llama", num_hidden_layers=4)
    shorter = copy.deepcopy(hf_model)
    shorter.model.layers = torch.nn.ModuleList([shorter.model.layers[i] for i in (0, 2)])
    with drop_layers(model, [3, 1]):
        dropped = run(model)
        with model.generate(IDS[2:], max_new_tokens=6, do_sample=False) as tracer:
            ids = tracer.result.save()
    expected = shorter(IDS, attention_mask=MASK, use_cache=False).logits[torch.arange(3), LENGTHS - 1]
    assert (dropped - expected).abs().max() <= 2e-6
    for i, layer in enumerate(shorter.model.layers):
        layer.self_attn.layer_idx = i
    shorter.config.num_hidden_layers = 2
    assert torch.equal(ids, shorter.generate(IDS[2:], max_new_tokens=6, do_sample=False))


def test_ablating_a_head_of_a_dropped_layer_changes_nothing(tiny_model):
    model, _, _ = tiny_model("jamba")
    with drop_layers(model, 1):
        dropped = run(model)
        with ablate(model, "L1H0"):
            assert torch.equal(run(model), dropped)
    with ablate(model, "L1H0"), drop_layers(model, 1):
        assert torch.equal(run(model), dropped)
