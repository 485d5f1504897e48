"""Ablation: what cannot be done is refused, in one sentence that names the choices."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from gna_utils import GnaError, ablate, drop_layers, keep_layers, keep_only, mask_rows
from gna_utils.forward import forward

IDS = tiny.ids(3, 11)
LENGTHS = torch.tensor([4, 9, 11])
MASK = (torch.arange(11) < LENGTHS[:, None]).long()
IDS = IDS * MASK


def run(model, **options):
    return forward(model, IDS, MASK, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: ablate(m, []), "no head was given"),
        (lambda m: ablate(m, "L9H0"), "layer 9 .* layers 0 to 1"),
        (lambda m: ablate(m, "L0H9"), "L0H9: attention layer 0 .* heads 0 to 3"),
        (lambda m: ablate(m, "L0H0", kind="none"), "kind='none' .* 'zero', 'mean', 'resample'"),
        (lambda m: ablate(m, "L0H0", where="norm"), "where='norm' .* 'out_proj', 'scan'"),
        (lambda m: ablate(m, "L0H0", where="scan"), "layer 0: attention, 4 heads of 16 has no norm"),
        (lambda m: ablate(m, "L0H0", positions="last"), "positions='last' .* 'query', 'summary'"),
        (lambda m: ablate(m, "L0H0", positions=torch.ones(3, 11)), "torch.float32: give a BoolTensor"),
        (lambda m: ablate(m, "L0H0", mixer="ssd"), "layer 0 .* is attention and has no ssd heads"),
        (lambda m: ablate(m, "L0H0", kind="mean"), "kind='mean' needs reference"),
        (lambda m: ablate(m, "L0H0", kind="resample", reference=["w1"]), "at least two reference prompts"),
        (lambda m: ablate(m, "L0H0", kind="mean", reference=[]), "no prompt was given"),
        (lambda m: keep_only(m, "L0H0", [5]), "layer 5"),
        (lambda m: keep_only(m, "L0H0", mixer="mamba"), "mixer='mamba'"),
        (lambda m: drop_layers(m, [0, 7]), "layer 7 .* layers 0 to 1"),
        (lambda m: keep_layers(m, 0), "0 layers cannot be kept of 2"),
        (lambda m: keep_layers(m, "x"), "'x' layers cannot be kept of 2"),
        (lambda m: drop_layers(m, []), "no layer was given: .* layers 0 to 1"),
        (lambda m: drop_layers(m, "0"), "layer '0' was asked"),
        (lambda m: ablate(m, "L0H0", positions=np.ones((3, 11))), "torch.float64: give a BoolTensor"),
        (lambda m: ablate(m, "L0H0", kind="resample", reference=["w1", "w2"], seed=-1), "seed=-1 is not"),
        (lambda m: ablate(m, "L0H0", kind="mean", reference=tiny.ids(1, 3) + 64), "vocabulary of 64"),
        (lambda m: ablate(None, "L0H0"), "give the model that gna_utils.load returns .*, not NoneType"),
        (lambda m: keep_layers(m._module, 2), "gna_utils.load returns .*, not LlamaForCausalLM"),
    ],
)
def test_errors(tiny_model, call, words):
    with pytest.raises(GnaError, match=words), call(tiny_model("llama")[0]):
        pass


def test_a_map_may_be_a_numpy_array(tiny_model):
    model, chosen = tiny_model("llama")[0], torch.arange(11) < 2
    with ablate(model, "L0H0", positions=chosen):
        expected = run(model)
    with ablate(model, "L0H0", positions=chosen.numpy()):
        assert torch.equal(run(model), expected)


def test_maps_of_the_wrong_shape(tiny_model):
    model, _, _ = tiny_model("llama")
    wrong = r"shape \(2, 11\), but this batch has 3 prompts of 11 tokens"
    with ablate(model, "L0H0", positions=MASK[:2] > 0), pytest.raises(GnaError, match=wrong):
        run(model)


def test_no_attention_to_mask(tiny_model):
    with pytest.raises(GnaError, match="no attention map to mask: its layers are ssd"):
        mask_rows(tiny_model("mamba2")[0]).__enter__()


def test_a_context_of_another_model(tiny_model):
    """A context around the wrong model would silently do nothing."""
    model, other = tiny_model("llama")[0], tiny_model("gpt2")[0]
    with ablate(model, "L0H0"), pytest.raises(GnaError, match=r"ablate\(L0H0\) is active on another model"):
        run(other)
    with ablate(model, "L0H0"), ablate(other, "L0H0"):
        run(other)


def test_training_mode_is_refused(tiny_model):
    """Training mode switches fused paths and dropout on."""
    model, hf_model, _ = tiny.build("mamba2")
    hf_model.train()
    for context in (ablate(model, "L0H0"), keep_only(model, "L0H0"), drop_layers(model, 0)):
        with pytest.raises(GnaError, match=r"call model.eval\(\) first"), context:
            pass
    hf_model.eval()
