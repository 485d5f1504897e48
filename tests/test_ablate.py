"""Ablation: what is removed, exactly that, only inside the context, however the model is run."""

from __future__ import annotations

import copy
import types

import numpy as np
import pytest
import tiny
import tiny_llamba
import torch
from nnsight.intervention import serialization
from nnsight.intervention.backends.local import LocalSimulationBackend
from nnsight.modeling.transformers import TransformersModel

from gna_utils import (
    GnaError,
    Head,
    ablate,
    drop_layers,
    keep_layers,
    keep_only,
    layers,
    mask_rows,
)
from gna_utils.forward import forward

IDS = tiny.ids(3, 11)
LENGTHS = torch.tensor([4, 9, 11])
MASK = (torch.arange(11) < LENGTHS[:, None]).long()
IDS = IDS * MASK
PLACES = [(family, i) for family in tiny.FAMILIES for i in range(sum(len(k) for k in tiny.KINDS[family]))]


def run(model, **options):
    return forward(model, IDS, MASK, **options)


def with_zeroed_columns(hf_model, mixer, heads):
    """The same model with the heads' columns of the projection set to 0: an independent ablation."""
    other = copy.deepcopy(hf_model)
    projection = other.get_submodule(f"{mixer.path}.{mixer.out_proj}")
    # Zamba2 shares attention weights between layers: give this layer its own before changing them
    projection.weight = torch.nn.Parameter(projection.weight.clone(), requires_grad=False)
    weight = projection.weight if type(projection).__name__ != "Conv1D" else projection.weight.T
    for head in heads:
        weight[:, head * mixer.head_dim : (head + 1) * mixer.head_dim] = 0
    return wrapped(other)


def wrapped(hf_model):
    return TransformersModel(hf_model, tokenizer=tiny.tokenizer(), task="text-generation")


@pytest.mark.parametrize(("family", "place"), PLACES)
def test_equals_zeroed_columns_and_not_a_sliced_output(tiny_model, family, place):
    """The block's *output* is a sum over heads: a slice of it is no head (nnsight's pattern of one head)."""
    model, hf_model, _ = tiny_model(family)
    mixer = layers(model)[place]
    if not mixer.n_heads:
        return
    with ablate(model, [(mixer.layer, 1), (mixer.layer, 3)], mixer=mixer.kind):
        ablated, remote = run(model), run(model, remote="local")
    assert (ablated - run(with_zeroed_columns(hf_model, mixer, [1, 3]))).abs().max() <= 1e-6
    assert torch.equal(ablated, remote)
    assert (ablated - run(model)).abs().max() > 1e-3

    def slice_output(module, args, output):
        for head in (1, 3):
            width = mixer.head_dim if mixer.head_dim > 1 else 1
            (output if torch.is_tensor(output) else output[0])[..., head * width : (head + 1) * width] = 0
        return output

    handle = hf_model.get_submodule(mixer.path).register_forward_hook(slice_output)
    sliced = run(model)
    handle.remove()
    assert (ablated - sliced).abs().max() > 1e-3


def test_llamba_head(tiny_model):
    hf_model = tiny_llamba.build()
    model = wrapped(hf_model)
    with ablate(model, "L1H2"):
        ablated = run(model)
    assert (ablated - run(with_zeroed_columns(hf_model, layers(model)[1], [2]))).abs().max() <= 1e-6


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba2", "falcon_h1", "qwen3_next"])
def test_stays_causal_and_the_slice_is_zero(tiny_model, family):
    """Setting scores to 0 before the softmax lets a head average over everything, the future included."""
    model, _, _ = tiny_model(family)
    mixer = layers(model)[0]
    later = IDS.clone()
    later[2, 6] = 5 if IDS[2, 6] != 5 else 6
    positions = torch.arange(11).expand(3, 11)
    with ablate(model, [(0, 2)], mixer=mixer.kind):
        before = forward(model, IDS, MASK, positions=positions)[2]
        after = forward(model, later, MASK, positions=positions)[2]
        with model.trace(input_ids=IDS, attention_mask=MASK):
            site = model.get(f"{mixer.path}.{mixer.out_proj}").input.save()
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6:], after[6:])
    width = mixer.head_dim
    assert (site[..., 2 * width : 3 * width] == 0).all()
    assert (site[..., : 2 * width] != 0).any() and (site[..., 3 * width :] != 0).any()


def test_grouped_queries(tiny_model):
    """A head is not hidden size / heads wide, and kv heads serve their own queries (TransformerLens 980)."""
    model, hf_model, _ = tiny_model("llama")
    attention = hf_model.model.layers[0].self_attn
    with model.trace(input_ids=IDS, attention_mask=MASK):
        heads = model.model.layers[0].self_attn.o_proj.input.save()
        output = model.model.layers[0].self_attn.o_proj.output.save()
    assert heads.shape[-1] == 4 * 16
    weight = attention.o_proj.weight
    parts = [heads[..., 16 * h : 16 * (h + 1)] @ weight[:, 16 * h : 16 * (h + 1)].T for h in range(4)]
    assert torch.allclose(sum(parts), output, atol=1e-5)
    other = copy.deepcopy(hf_model)
    other.model.layers[0].self_attn.v_proj.weight[:16] = 0
    reference = other(IDS, attention_mask=MASK).logits[torch.arange(3), LENGTHS - 1]
    with ablate(model, "L0H0, L0H1"):
        assert (run(model) - reference).abs().max() <= 2e-6
    with ablate(model, "L0H1, L0H2"):
        assert (run(model) - reference).abs().max() > 1e-3


def test_shared_weights_do_not_carry_an_ablation_to_other_layers(tiny_model):
    """Zamba2 shares attention weights: zeroed in layer 1 they change layer 3 too; an edit must not."""
    model, hf_model, _ = tiny_model("zamba2")
    first, second = (hf_model.model.layers[i].shared_transformer.self_attn.o_proj for i in (1, 3))
    assert first.weight.data_ptr() == second.weight.data_ptr()
    leaking = copy.deepcopy(hf_model)
    leaking.model.layers[1].shared_transformer.self_attn.o_proj.weight[:, :16] = 0
    leaked = leaking(IDS, attention_mask=MASK).logits[torch.arange(3), LENGTHS - 1]
    with ablate(model, "L1H0", mixer="attention"):
        ablated = run(model)
        with model.trace(input_ids=IDS, attention_mask=MASK):
            other_layer = model.model.layers[3].shared_transformer.self_attn.o_proj.input.save()
    assert (other_layer[..., :16] != 0).any()
    assert (ablated - leaked).abs().max() > 1e-3


@pytest.mark.parametrize(
    "family", ["mamba2", "bamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"]
)
def test_before_the_gated_norm_is_another_place(tiny_model, family):
    """The norm between scan and projection rescales the other heads (transformers pull request 35943)."""
    model, hf_model, _ = tiny_model(family)
    mixer = next(m for m in layers(model) if m.kind == "ssd")
    with ablate(model, [(mixer.layer, 3)], mixer="ssd"):
        after_norm = run(model)
    with ablate(model, [(mixer.layer, 3)], where="scan"):
        before_norm, remote = run(model), run(model, remote="local")

    def zero(module, args):
        args[0].view(3, 11, 8, 8)[:, :, 3] = 0

    handle = hf_model.get_submodule(f"{mixer.path}.norm").register_forward_pre_hook(zero)
    expected = run(model)
    handle.remove()
    assert (before_norm - expected).abs().max() <= 1e-6 and torch.equal(before_norm, remote)
    assert (before_norm - after_norm).abs().max() > 1e-3


def test_scan_of_a_delta_rule_is_split_by_heads(tiny_model):
    model, _, _ = tiny_model("qwen3_next")
    with ablate(model, "L0H1"):
        expected = run(model)
    with ablate(model, "L0H1", where="scan"):  # the norm works head by head here: zero stays zero
        assert torch.allclose(run(model), expected, atol=1e-6)


def test_order_of_heads_does_not_matter_and_contexts_nest(tiny_model):
    model, _, _ = tiny_model("zamba2")
    heads = [Head(3, 1), Head(0, 2), Head(2, 5)]
    results = []
    for order in (heads, heads[::-1]):
        with ablate(model, order, mixer="ssd"):
            results.append(run(model))
    with ablate(model, [heads[0]], mixer="ssd"), ablate(model, heads[1:], mixer="ssd"):
        results.append(run(model))
        with ablate(model, "L1H0", mixer="attention"):
            deeper = run(model)
        assert torch.equal(run(model), results[-1]) and not torch.equal(deeper, results[-1])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_readers_own_traces_and_generation_see_it(tiny_model):
    model, hf_model, _ = tiny_model("llama")
    plain = run(model)
    with ablate(model, "L0H1"):
        with model.trace(input_ids=IDS, attention_mask=MASK):
            logits = model.output.logits.save()
        with model.generate(IDS[2:], max_new_tokens=8, do_sample=False) as tracer:
            ids = tracer.result.save()
        ablated = run(model)
    assert torch.allclose(logits[torch.arange(3), LENGTHS - 1], ablated, atol=1e-5)
    zeroed = with_zeroed_columns(hf_model, layers(model)[0], [1])
    expected = zeroed._module.generate(IDS[2:], max_new_tokens=8, do_sample=False)
    assert torch.equal(ids, expected)
    assert not torch.equal(ids, hf_model.generate(IDS[2:], max_new_tokens=8, do_sample=False))
    assert torch.equal(run(model), plain)


def test_several_prompts_of_a_reader_are_left_alone_by_the_batching(tiny_model):
    """Prompts of a trace are padded by nnsight, possibly at the left: the query is found from the mask."""
    model = tiny.build("llama")[0]
    for side in ("left", "right"):
        model.tokenizer.padding_side = side
        with ablate(model, "L1H2", positions="query"), model.trace(["w1 w2 w3 w4 w5", "w6 w7"]):
            real = model.inputs[1]["attention_mask"].bool().save()
            site = model.model.layers[1].self_attn.o_proj.input[..., 32:48].save()
        zero = (site == 0).all(-1) & real  # attention itself gives 0 where a padded row sees nothing
        last = [5, 2] if side == "right" else [5, 5]
        assert zero.nonzero().tolist() == [[0, last[0]], [1, last[1]]]


def test_a_run_around_nnsight_is_refused(tiny_model):
    """An intervention that is silently idle is worse than an error."""
    model, hf_model, _ = tiny_model("llama")
    with ablate(model, "L0H1"):
        with pytest.raises(GnaError, match=r"ablate\(L0H1\) is active, but this run goes around it"):
            hf_model(IDS, attention_mask=MASK)
        with pytest.raises(GnaError, match="goes around it"), model.model.trace(input_ids=IDS):
            model.model.norm.output.save()
    hf_model(IDS, attention_mask=MASK)


def test_a_module_that_is_not_called_is_an_error(tiny_model):
    """Fused paths skip modules, and a hook there stays silent (state-spaces/mamba issue 59)."""
    model, hf_model, _ = tiny.build("mamba2")
    mixer = hf_model.backbone.layers[1].mixer
    plain = mixer.forward

    mixer.forward = types.MethodType(lambda self, hidden_states, **kwargs: hidden_states, mixer)
    with ablate(model, "L1H0"), pytest.raises(GnaError, match=r"layers\.1\.mixer\.out_proj' was not called"):
        run(model)
    mixer.forward = plain


def test_stopping_a_trace_early_is_no_error(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L0H1, L1H1"), model.trace(input_ids=IDS) as tracer:
        hidden = model.model.layers[0].output.save()
        tracer.stop()
    assert hidden.shape == (3, 11, 32)


def read_logits(model, ids):
    """A trace of the reader's own, without the checks of the package."""
    with model.trace(input_ids=ids, attention_mask=torch.ones_like(ids)):
        logits = model.output.logits.save()
    return logits


def test_an_exception_leaves_nothing_behind(tiny_model):
    """Hooks left behind after errors, or foreign hooks removed (TransformerLens 156, SAELens 278)."""
    model, hf_model, _ = tiny.build("zamba2")
    calls = []
    foreign = hf_model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with model.edit(inplace=True):
        model.lm_head.output = model.lm_head.output * 1
    edits, weights, plain = list(model._edits), copy.deepcopy(hf_model.state_dict()), run(model)

    def hooks():
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in hf_model.modules())

    counted = hooks()
    contexts = [
        lambda: ablate(model, "L1H0", mixer="ssd", kind="mean", reference=["w1 w2", "w3"]),
        lambda: keep_only(model, "L0H0"),
        lambda: mask_rows(model),
        lambda: drop_layers(model, 1),
        lambda: keep_layers(model, 2),
    ]
    for context in contexts:
        with pytest.raises(ZeroDivisionError), context():
            run(model)
            1 / 0
        with pytest.raises(IndexError), context():
            read_logits(model, IDS.expand(3, 11) + 1000)  # the model itself fails: tokens out of range
    calls.clear()
    assert hooks() == counted and model._edits == edits
    assert torch.equal(run(model), plain) and calls == [1]
    for name, value in hf_model.state_dict().items():
        assert torch.equal(value, weights[name])
    foreign.remove()


def test_edits_of_the_reader_inside_the_context_stay(tiny_model):
    model, _, _ = tiny.build("llama")
    plain = run(model)
    with ablate(model, "L0H1"), model.edit(inplace=True):
        model.lm_head.output = model.lm_head.output * 2
    assert torch.allclose(run(model), plain * 2)
    model.clear_edits()


def test_edit_that_travelled_by_value(tiny_model):
    """A server has no copy of this package: what the edit needs must be packed with it."""
    model, _, _ = tiny.build("zamba2")
    with ablate(
        model, "L1H0, L3H1", mixer="attention", kind="mean", reference=["w1 w2", "w3"], positions="query"
    ):
        expected = run(model)
        packed = serialization.dumps(model._edits[-1])
    backend = LocalSimulationBackend(model)
    hidden = backend._hide_local_modules()
    try:
        edit = serialization.loads(packed, model._remoteable_persistent_objects())
    finally:
        backend._restore(hidden)

    model._edits = [edit]
    assert torch.equal(run(model), expected)
    model.clear_edits()
    assert not torch.equal(run(model), expected)


# ---- errors ----


def test_no_deprecation_warning(tiny_model, deprecations_are_errors):
    model, _, _ = tiny_model("zamba2")
    with ablate(model, "L1H0", mixer="attention"), mask_rows(model), drop_layers(model, 2):
        run(model)


def test_numbers_are_numpy_ready(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L0H0"):
        assert isinstance(run(model).numpy(), np.ndarray)
