"""Patching: a head's own output at marked positions, from a donor prompt."""

from __future__ import annotations

import pytest
import tiny
import torch

from gna_utils import GnaError, ablate, key_value, layers, patch
from gna_utils.forward import forward, tokens
from gna_utils.tasks import encode

WORDS = [f"w{i}" for i in range(1, 60)]


@pytest.fixture(scope="module")
def examples():
    return [
        key_value(5, 3, tokenizer=tiny.tokenizer(), seed=seed, keys=WORDS[:29], values=WORDS[29:])
        for seed in (1, 2)
    ]


def plain(model, prompts):
    ids, mask = tokens(model, prompts)
    return forward(model, ids, mask)


def places(row, name):
    return {"summary": list(row.summary), "query": [row.query]}.get(name) or list(range(*row.spans[name]))


def by_hand(hf_model, row, donor, here, there):
    """Logits of one prompt with L0H1 and L1H3 taken from one donor, by plain hooks on a plain model."""
    chosen = {hf_model.model.layers[0].self_attn.o_proj: slice(16, 32)}
    chosen[hf_model.model.layers[1].self_attn.o_proj] = slice(48, 64)
    kept = {}

    def store(module, args):
        kept[module] = args[0][:, there, chosen[module]].clone()

    def write(module, args):
        args[0][:, here, chosen[module]] = kept[module]

    for action, ids in ((store, donor.input_ids), (write, row.input_ids)):
        handles = [projection.register_forward_pre_hook(action) for projection in chosen]
        logits = hf_model(torch.tensor([ids])).logits[0, -1]
        for handle in handles:
            handle.remove()
    return logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_own_activations_change_nothing_and_others_do(tiny_model, examples, family):
    """A patch that silently does nothing looks like a head without effect (nnsight issue 143)."""
    model, _, _ = tiny_model(family)
    own, other = examples
    for mixer in layers(model):
        if not mixer.n_heads:
            continue
        heads = [(mixer.layer, h) for h in range(mixer.n_heads)]
        kept = patch(model, heads, own, own, positions="summary", mixer=mixer.kind)
        assert torch.equal(kept, plain(model, own))
        swapped = patch(model, heads, own, other, positions="query", mixer=mixer.kind)
        assert ((swapped - kept).abs().amax(1) > 1e-4).all()


@pytest.mark.parametrize("positions", ["value", "key", "summary", "query"])
def test_equals_writing_the_donors_values_in_by_hand(tiny_model, examples, positions):
    model, hf_model, _ = tiny_model("llama")
    own, other = (encode(part, model.tokenizer) for part in examples)
    patched = patch(model, "L0H1, L1H3", own, other, positions=positions)
    assert torch.equal(patched, patch(model, "L1H3, L0H1", own, other, positions=positions))
    assert torch.equal(patched, patch(model, "L0H1, L1H3", own, other, positions=positions, remote="local"))
    for i, (row, donor) in enumerate(zip(own, other)):
        expected = by_hand(hf_model, row, donor, places(row, positions), places(donor, positions))
        assert (patched[i] - expected).abs().max() <= 1e-5


def test_maps_of_positions_for_prompt_and_donor(tiny_model):
    model, _, _ = tiny_model("mamba2")
    prompts, donors = ["w1 w2 w3 w4", "w5 w6 w7"], ["w8 w9 w10", "w11 w12 w13 w14 w15"]
    here, there = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.bool)
    here[0, 4] = here[1, 3] = there[0, 3] = there[1, 5] = True
    by_maps = patch(model, "L0H0, L1H1", prompts, donors, positions=(here, there))
    assert torch.equal(by_maps, patch(model, "L0H0, L1H1", prompts, donors, positions="query"))
    assert (by_maps - plain(model, prompts)).abs().max() > 1e-4


def test_many_prompts_run_in_parts(tiny_model, examples, monkeypatch):
    model, _, _ = tiny_model("llama")
    own, other = examples
    together = patch(model, "L0H1", own, other, positions="value")
    monkeypatch.setattr("gna_utils.sites.MAX_TOKENS", 1)
    assert torch.allclose(patch(model, "L0H1", own, other, positions="value"), together, atol=1e-5)


def test_active_contexts_apply_to_both_sides(tiny_model, examples):
    model, _, _ = tiny_model("llama")
    own, other = examples
    with ablate(model, "L0H1"):
        ablated = plain(model, own)
        assert torch.equal(patch(model, "L0H1", own, other, positions="summary"), ablated)


@pytest.mark.parametrize(
    ("prompts", "donors", "positions", "words"),
    [
        (["w1 w2"], ["w1", "w2"], "query", "1 prompts and 2 donors"),
        (["w1 w2"], ["w1 w2 w3"], "all", "prompt 0 has 3 marked positions and its donor 4"),
        (["w1 w2"], ["w1 w3"], "value", "'value' is only known for examples"),
        (["w1 w2"], ["w1 w3"], torch.zeros(1, 3, dtype=torch.bool), "prompt 0 has 0 marked positions"),
        (
            ["w1 w2"],
            ["w1 w3"],
            torch.zeros(1, 4, dtype=torch.bool),
            r"shape \(1, 4\), but this batch has 1 prompts",
        ),
        (["w1 w2"], ["w1 w3"], ("query",) * 3, "positions holds 3 maps: give one, or a pair"),
        ([], ["w1"], "query", "no prompt was given"),
        (None, ["w1"], "query", "NoneType is not a prompt"),
        ([3], ["w1"], "query", "int is not a prompt"),
    ],
)
def test_errors(tiny_model, prompts, donors, positions, words):
    with pytest.raises(GnaError, match=words):
        patch(tiny_model("llama")[0], "L0H0", prompts, donors, positions=positions)
