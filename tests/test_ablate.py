"""Ablation: what is removed, exactly that, only inside the context, however the model is run."""

from __future__ import annotations

import copy
import types

import nnsight
import numpy as np
import pytest
import tiny
import torch

from gna_utils import GnaError, Head, ablate, drop_layers, keep_layers, keep_only, key_value, layers, mask_rows
from gna_utils.forward import forward, tokens
from gna_utils.tasks import batches, encode

IDS = tiny.ids(3, 11)
LENGTHS = torch.tensor([4, 9, 11])
MASK = (torch.arange(11) < LENGTHS[:, None]).long()
IDS = IDS * MASK
PLACES = [(family, i) for family in tiny.FAMILIES for i in range(sum(len(k) for k in tiny.KINDS[family]))]


def run(model, **options):
    return forward(model, IDS, MASK, **options)


def everywhere(model):
    """Logits at every position, (3, 11, 64)."""
    return forward(model, IDS, MASK, positions=torch.arange(11).expand(3, 11))


def with_zeroed_columns(hf_model, mixer, heads):
    """The same model with the heads' columns of the projection set to 0: an independent ablation."""
    other = copy.deepcopy(hf_model)
    projection = other.get_submodule(f"{mixer.path}.{mixer.out_proj}")
    # Zamba2 shares attention weights between layers: give this layer its own before changing them
    projection.weight = torch.nn.Parameter(projection.weight.clone(), requires_grad=False)
    weight = projection.weight if type(projection).__name__ != "Conv1D" else projection.weight.T
    for head in heads:
        weight[:, head * mixer.head_dim : (head + 1) * mixer.head_dim] = 0
    return type(tiny.build("llama")[0])(other, tokenizer=tiny.tokenizer(), task="text-generation")


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
    model, hf_model, _ = tiny.build_llamba()
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
    """Head width is not hidden size / heads, and a kv head serves its own query heads (TransformerLens 980)."""
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
    """Zamba2 shares attention weights: zeroing them in layer 1 also changes layer 3, a stored edit must not."""
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


@pytest.mark.parametrize("family", ["mamba2", "bamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"])
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
    model, hf_model, _ = tiny.build("llama")
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
            forward(model, IDS.expand(3, 11) + 1000, MASK)  # the model itself fails: tokens out of range
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


# ---- positions ----


@pytest.fixture(scope="module")
def examples():
    words = [f"w{i}" for i in range(1, 60)]
    return key_value(4, 3, tokenizer=tiny.tokenizer(), seed=1, keys=words[:29], values=words[29:])


def test_positions_choose_what_is_ablated(tiny_model):
    model, _, _ = tiny_model("llama")
    where = torch.zeros(3, 11, dtype=torch.bool)
    where[torch.arange(3), LENGTHS - 1] = True
    plain = everywhere(model)
    with ablate(model, "L0H1", positions="query"):
        query = everywhere(model)
    with ablate(model, "L0H1", positions=where):
        assert torch.equal(everywhere(model), query)
    with ablate(model, "L0H1", positions=where[2]):
        last = everywhere(model)
    for i, n in enumerate(LENGTHS.tolist()):
        assert torch.equal(query[i, : n - 1], plain[i, : n - 1])
        assert (query[i, n - 1] - plain[i, n - 1]).abs().max() > 1e-3
        assert torch.equal(last[i, :10], plain[i, :10])


@pytest.mark.parametrize("name", ["summary", "value", "key", "query"])
def test_positions_by_name_come_from_the_examples(tiny_model, examples, name):
    model, _, _ = tiny_model("llama")
    rows = encode(examples, model.tokenizer)
    ids, mask = tokens(model, rows)
    where = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        span = row.spans.get(name, (0, 0))
        where[i, list({"summary": row.summary, "query": [row.query]}.get(name, range(*span)))] = True
    with ablate(model, "L0H0", positions=where):
        expected = forward(model, ids, mask)
    with ablate(model, "L0H0", positions=name):
        assert torch.equal(forward(model, ids, mask, rows=rows), expected)
        assert torch.equal(forward(model, ids, mask, rows=rows, remote="local"), expected)
        (batch,) = batches(rows)
        again = forward(model, batch.input_ids, batch.attention_mask, rows=batch.rows)
    assert torch.allclose(again[torch.tensor(batch.index).argsort()], expected, atol=1e-5)
    assert (forward(model, ids, mask) - expected).abs().max() > 1e-4


def test_segment_positions_of_plain_text_are_refused(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L0H0", positions="summary"):
        with pytest.raises(GnaError, match="'summary' is only known for examples with marked segments"):
            run(model)
        with pytest.raises(GnaError, match="'summary' is only known"), model.trace("w1 w2"):
            model.output.logits.save()


def test_named_positions_end_with_the_prompt(tiny_model):
    model, hf_model, _ = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    zero = {}
    for positions in ("query", "all"):
        with ablate(model, "L0H1", positions=positions):
            with model.generate(IDS[2:], max_new_tokens=4, min_new_tokens=4) as tracer:
                sites = nnsight.save([])
                for _ in tracer.iter[:4]:
                    sites.append(attention.o_proj.input[0, -1, 16:32])
        zero[positions] = [bool((site == 0).all()) for site in sites]
    assert zero == {"query": [True, False, False, False], "all": [True] * 4}


# ---- mean and resample ----

REFERENCE = ["w1 w2 w3 w4", "w5 w6", "w7 w8 w9 w10 w11"]


def head_inputs(model, prompts, path="model.layers.0.self_attn.o_proj", columns=slice(16, 32)):
    """The head's values in single runs of each prompt, without padding."""
    found = []
    for prompt in prompts:
        with model.trace(input_ids=tokens(model, prompt)[0]):
            found.append(model.get(path).input[0, :, columns].save())
    return found


def test_mean_is_one_vector_over_all_real_tokens(tiny_model):
    """Padding of the reference must not enter the mean."""
    model, _, _ = tiny_model("llama")
    mean = torch.cat(head_inputs(model, REFERENCE)).mean(0)
    with ablate(model, "L0H1", kind="mean", reference=REFERENCE):
        (site,) = head_inputs(model, ["w20 w21 w22"])
        ablated, remote = run(model), run(model, remote="local")
    assert torch.allclose(site, mean.expand(4, 16), atol=1e-6)
    assert torch.equal(ablated, remote) and (ablated - run(model)).abs().max() > 1e-3


def test_mean_at_the_query_is_the_mean_of_queries(tiny_model):
    model, _, _ = tiny_model("llama")
    mean = torch.stack([values[-1] for values in head_inputs(model, REFERENCE)]).mean(0)
    plain = head_inputs(model, ["w20 w21 w22"])[0]
    with ablate(model, "L0H1", kind="mean", reference=REFERENCE, positions="query"):
        (site,) = head_inputs(model, ["w20 w21 w22"])
    assert torch.equal(site[:-1], plain[:-1]) and torch.allclose(site[-1], mean, atol=1e-6)


def test_reference_runs_on_the_plain_model(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L1H0", kind="mean", reference=REFERENCE), ablate(model, "L0H1"):
        inner = run(model)
    with ablate(model, "L0H1"), ablate(model, "L1H0", kind="mean", reference=REFERENCE):
        assert torch.equal(run(model), inner)


def test_resample_takes_another_prompt_and_repeats_with_the_seed(tiny_model):
    model, _, _ = tiny_model("llama")
    donors = head_inputs(model, REFERENCE)

    def donor_of(values):
        """Which reference prompt these values come from; beyond its end, its last token."""
        matches = []
        for number, donor in enumerate(donors):
            index = torch.arange(len(values)).clamp(max=len(donor) - 1)
            matches += [number] if torch.allclose(values, donor[index], atol=1e-6) else []
        return matches

    prompts = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4}" for i in range(20, 40)]
    chosen = {}
    for seed in (0, 0, 1):
        with ablate(model, "L0H1", kind="resample", reference=REFERENCE, seed=seed):
            found = [donor_of(values) for values in head_inputs(model, prompts)]
            own = [donor_of(values) for values in head_inputs(model, REFERENCE)]
        assert all(len(matches) == 1 for matches in found)
        assert all(number not in matches for number, matches in enumerate(own))
        chosen.setdefault(seed, []).append(found)
    assert chosen[0][0] == chosen[0][1] != chosen[1][0]
    assert len({tuple(matches) for matches in chosen[0][0]}) == 3


def test_resample_does_not_depend_on_the_batch(tiny_model):
    model, _, _ = tiny_model("mamba2")
    with ablate(model, "L0H1, L1H2", kind="resample", reference=REFERENCE, seed=3):
        together, remote = run(model), run(model, remote="local")
        alone = [forward(model, IDS[i : i + 1, :n], MASK[i : i + 1, :n]) for i, n in enumerate(LENGTHS.tolist())]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5) and torch.equal(together, remote)


# ---- keep, mask, drop ----


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
        hf_model.model.layers[i].shared_transformer.self_attn.o_proj.register_forward_pre_hook(zero) for i in (1, 3)
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


# ---- errors ----


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
        (lambda m: keep_layers(m, 3), "3 layers cannot be kept of 2"),
    ],
)
def test_errors(tiny_model, call, words):
    with pytest.raises(GnaError, match=words), call(tiny_model("llama")[0]):
        pass


def test_maps_of_the_wrong_shape(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L0H0", positions=torch.ones(2, 11, dtype=torch.bool)):
        with pytest.raises(GnaError, match=r"shape \(2, 11\), but this batch has 3 prompts of 11 tokens"):
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


def test_no_deprecation_warning(tiny_model, deprecations_are_errors):
    model, _, _ = tiny_model("zamba2")
    with ablate(model, "L1H0", mixer="attention"), mask_rows(model), drop_layers(model, 2):
        run(model)


def test_numbers_are_numpy_ready(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L0H0"):
        assert isinstance(run(model).numpy(), np.ndarray)
