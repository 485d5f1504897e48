"""Faults that may hit any function that runs a model, each tried on all of them at once."""

from __future__ import annotations

import builtins
import functools
import inspect
import types
from contextlib import nullcontext

import numpy as np
import pytest
import tiny
import torch
from IPython.core.interactiveshell import InteractiveShell
from nnsight.modeling.transformers import TransformersModel

import gna_utils as gna
from gna_utils import GnaError, forward, interventions, sites
from gna_utils.mixers import transfer
from gna_utils.mixers.adapters import ADAPTERS
from gna_utils.scoring import next_tokens, score
from gna_utils.tasks import Example

pytestmark = pytest.mark.filterwarnings("ignore::gna_utils.scoring.GnaWarning")

PROMPTS = ["w1 w2 w3 w4 w5 w6", "w7", "w8 w9 w10"]
DONORS = ["w20", "w21 w22 w23 w24", "w25 w26"]
REFERENCE = ["w30 w31 w32 w33", "w34 w35", "w36 w37 w38"]
HEADS = "L0H1, L1H0"
FAMILIES = ["llama", "gpt2", "mamba", "mamba2", "jamba", "qwen3_next"]


def examples(prompts):
    return [Example("test", prompt, (" w40", " w41 w42", " w41 w43"), 0) for prompt in prompts]


def logits(model, prompts, remote, context=None):
    with context or nullcontext():
        return list(forward.forward(model, *forward.tokens(model, prompts), remote=remote))


def scores(model, prompts, remote):
    return [torch.tensor(found) for found in score(model, examples(prompts), remote=remote).logprobs]


def tops(model, prompts, remote):
    """The most likely tokens, one prompt at a time: the function takes one only."""
    found = [next_tokens(model, one, 3, remote=remote) for one in examples(prompts)]
    return [torch.tensor(frame["probability"].to_numpy()) for frame in found]


def matrices(model, prompts, remote):
    found = gna.transfer_matrix(model, prompts, "L0H0, L0H1", remote=remote)
    return [one[:, :n, :n] for one, n in zip(found, lengths(model, prompts))]


def mixed_values(model, prompts, remote):
    found = transfer.values(model, prompts, "L0H0, L0H1", remote=remote)
    return [one[:, :n] for one, n in zip(found, lengths(model, prompts))]


def lengths(model, prompts):
    return forward.tokens(model, prompts)[1].sum(1).tolist()


def patched(model, prompts, remote):
    donors = [DONORS[PROMPTS.index(prompt)] for prompt in prompts]
    return list(gna.patch(model, HEADS, prompts, donors, positions="query", remote=remote))


def swept(model, prompts, remote, mode="exact"):
    """Log-probabilities with each head removed; a sweep takes two examples at least."""
    found = gna.sweep(model, 2 * examples(prompts), units=HEADS, mode=mode, remote=remote).examples
    rows = found[found["metric"] == "logprob"].pivot(index="example", columns="unit", values="value")
    return list(torch.tensor(rows.to_numpy()))[: len(prompts)]


# what opens each context, by name
CONTEXTS = {
    "ablate": lambda model: gna.ablate(model, HEADS),
    "ablate, mean": lambda model: gna.ablate(model, HEADS, kind="mean", reference=REFERENCE),
    "ablate, resample": lambda model: gna.ablate(model, HEADS, kind="resample", reference=REFERENCE),
    "ablate, query": lambda model: gna.ablate(model, HEADS, positions="query"),
    "ablate, scan": lambda model: gna.ablate(model, "L0H1", where="scan"),
    "keep_only": lambda model: gna.keep_only(model, HEADS),
    "mask_rows": lambda model: gna.mask_rows(model, positions="query"),
    "drop_layers": lambda model: gna.drop_layers(model, 1),
    "keep_layers": lambda model: gna.keep_layers(model, 1),
}
READS = {
    "forward": logits,
    "score": scores,
    "next_tokens": tops,
    "transfer_matrix": matrices,
    "values": mixed_values,
    "patch": patched,
    "sweep": swept,
    "sweep, query": functools.partial(swept, mode="query"),
}
# every function: (model, prompts, remote) -> one tensor per prompt
CALLS = READS | {
    name: lambda model, prompts, remote, open_=open_: logits(model, prompts, remote, open_(model))
    for name, open_ in CONTEXTS.items()
}


def possible(family: str, name: str) -> bool:
    kinds = {kind for layer in tiny.KINDS[family] for kind in layer}
    if name == "mask_rows":
        return "attention" in kinds
    return name != "ablate, scan" or bool({"ssd", "delta_rule"} & set(tiny.KINDS[family][0]))


EVERY = [(family, name) for family in FAMILIES for name in CALLS if possible(family, name)]


def same(found, expected, tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_prompts_in_a_batch_get_what_each_gets_alone(family, name):
    """Padding, on whichever side, must not change the answer of a short prompt (nnsight 672, 234)."""
    model = tiny.build(family)[0]
    call = CALLS[name]
    alone = [call(model, [prompt], False)[0] for prompt in PROMPTS]
    for side in ("left", "right"):
        model.tokenizer.padding_side = side
        same(call(model, PROMPTS, False), alone, 1e-5)


@pytest.mark.parametrize("name", list(CALLS))
def test_packed_as_for_a_server_gives_the_same_numbers(tiny_model, name):
    """Helpers of a remote trace must not need files of this machine (nnsight 637, 619)."""
    model = tiny_model("qwen3_next")[0]
    same(CALLS[name](model, PROMPTS, "local"), CALLS[name](model, PROMPTS, False), 1e-5)


@pytest.mark.parametrize("name", list(CALLS))
def test_works_from_a_timed_cell(tiny_model, name):
    """nnsight cannot find the body of a trace in a cell that starts with %%time (issues 551 and 606)."""
    model = tiny_model("qwen3_next")[0]
    shell = InteractiveShell.instance()
    shell.push({"call": CALLS[name], "model": model, "PROMPTS": PROMPTS})
    shell.run_cell("%%time\nfound = call(model, PROMPTS, False)").raise_error()
    same(shell.user_ns["found"], CALLS[name](model, PROMPTS, False), 0)


@pytest.mark.parametrize("family", ["jamba", "mamba2", "qwen3_next"])
@pytest.mark.parametrize("name", list(CALLS))
def test_the_mask_goes_along_in_every_run(tiny_model, family, name):
    """Without the mask, padding changes scan layers (transformers 31540)."""
    if not possible(family, name):
        return
    model, hf_model, _ = tiny_model(family)
    seen = []

    def watch(module, args, kwargs):
        seen.append((kwargs.get("input_ids", args[0] if args else None), kwargs.get("attention_mask")))

    handle = hf_model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        CALLS[name](model, PROMPTS, False)
    finally:
        handle.remove()
    assert seen
    for ids, mask in seen:
        assert mask is not None and torch.equal(mask[:, -ids.shape[1] :].bool(), ids != 0)


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_training_mode_is_refused(family):
    """Training mode switches dropout and fused kernels on, past what could be read or changed."""
    model, hf_model, _ = tiny.build(family)
    hf_model.train()
    for name, call in CALLS.items():
        if possible(family, name):
            with pytest.raises(GnaError, match=r"call model.eval\(\) first"):
                call(model, PROMPTS, False)


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("family", ["jamba", "mamba2", "qwen3_next"])
def test_no_deprecation_warning(tiny_model, family, name, deprecations_are_errors):
    """The names of caches and layer kinds change from version to version (transformers PR 44950)."""
    if possible(family, name):
        CALLS[name](tiny_model(family)[0], PROMPTS, False)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_a_cache_is_found_under_its_old_and_new_names(name):
    assert forward._cache({name: "the cache", "logits": 1}) == "the cache"


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_bfloat16_models_give_numbers_that_numpy_takes(family):
    """Checkpoints are often bfloat16, which numpy does not know (transformers PR 42805)."""
    _, hf_model, words = tiny.build(family)
    model = TransformersModel(hf_model.bfloat16(), tokenizer=words, task="text-generation")
    for name, call in CALLS.items():
        if possible(family, name):
            for row in call(model, PROMPTS, False):
                assert np.isfinite(row.numpy()).all(), name


@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f, n in EVERY if n in CONTEXTS and n != "ablate, resample"]
)
def test_no_position_sees_a_later_one(tiny_model, family, name):
    """Scores of 0 before the softmax make a "blocked" head average over the future, too."""
    model = tiny_model(family)[0]
    ids = tiny.ids(1, 9)
    later = ids.clone()
    later[0, 6] = 5 if ids[0, 6] != 5 else 6
    everywhere = torch.arange(9)[None]
    with CONTEXTS[name](model):
        before, after = (
            forward.forward(model, one, torch.ones_like(one), positions=everywhere)[0] for one in (ids, later)
        )
    torch.testing.assert_close(before[:6], after[:6], atol=1e-5, rtol=0)
    assert (before[6:] - after[6:]).abs().max() > 1e-3


@pytest.mark.parametrize("name", list(CALLS))
def test_a_failing_run_leaves_the_model_as_it_was(name):
    """Hooks left behind after errors, or foreign hooks removed (TransformerLens 156, SAELens 278)."""
    model, hf_model, _ = tiny.build("qwen3_next")
    foreign = hf_model.lm_head.register_forward_hook(lambda *_: None)
    weights = {key: value.clone() for key, value in hf_model.state_dict().items()}
    plain = logits(model, PROMPTS, False)

    def hooks():
        return [(part, *part._forward_hooks, *part._forward_pre_hooks) for part in hf_model.modules()]

    counted, edits = hooks(), list(model._edits)
    breaks = hf_model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CALLS[name](model, PROMPTS, False)
    breaks.remove()
    assert hooks() == counted and model._edits == edits and foreign.id in hf_model.lm_head._forward_hooks
    assert hf_model.config._attn_implementation == "sdpa"
    same(logits(model, PROMPTS, False), plain, 0)
    assert all(torch.equal(value, weights[key]) for key, value in hf_model.state_dict().items())


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bamba", "ssd"), ("jamba", "selective_scan"), ("qwen3_next", "delta_rule"), ("mamba2", "ssd")],
)
def test_attention_of_a_scan_layer_is_refused_by_every_function(tiny_model, family, kind):
    """A scan layer must never be handed out under the name of attention (nnterp 18)."""
    model = tiny_model(family)[0]
    calls = [
        lambda: gna.transfer_matrix(model, PROMPTS, "L0H0", mixer="attention"),
        lambda: transfer.values(model, PROMPTS, "L0H0", mixer="attention"),
        lambda: gna.patch(model, "L0H0", PROMPTS, DONORS, mixer="attention", positions="query"),
        lambda: gna.ablate(model, "L0H0", mixer="attention").__enter__(),
        lambda: gna.keep_only(model, "L0H0", mixer="attention").__enter__(),
        lambda: gna.mask_rows(model, "L0H0").__enter__(),
    ]
    for call in calls:
        with pytest.raises(GnaError, match=f"layer 0 .* is {kind} and has no attention heads"):
            call()


def test_left_padded_batches_give_the_matrices_of_the_bare_prompts(tiny_model):
    """Left padding changed scan outputs and shifted positions (transformers 31540)."""
    bare = tiny.ids(2, 8)
    ids = torch.cat([torch.zeros(2, 3, dtype=torch.long), bare], 1)
    batch = types.SimpleNamespace(input_ids=ids, attention_mask=(ids != 0).long())
    for family in tiny.FAMILIES:
        model = tiny_model(family)[0]
        for mixer in gna.layers(model):
            if mixer.n_heads:
                chosen = {"heads": [0, 1], "layer": mixer.layer, "mixer": mixer.kind}
                padded, alone = (transfer.mixing(model, one, **chosen) for one in (batch, bare))
                torch.testing.assert_close(padded.matrix()[:, :, 3:, 3:], alone.matrix(), atol=1e-4, rtol=0)
                torch.testing.assert_close(padded.values[:, :, 3:], alone.values, atol=1e-4, rtol=0)
                assert not padded.matrix()[:, :, :3].any() and not padded.matrix()[..., :3].any()


# ---- what runs inside a trace ----


def inside_traces() -> list[types.FunctionType]:
    adapters = [getattr(adapter, name) for adapter in ADAPTERS.values() for name in ("operands", "output")]
    return [
        interventions.run_steps,
        sites.collect,
        forward._keep_rows,
        forward._logits,
        forward._cache,
        *adapters,
    ]


def test_functions_inside_traces_need_torch_and_nnsight_only():
    """A server refuses modules that it does not know, and our files (nnsight 637, nnterp 48)."""
    waiting, seen = inside_traces(), set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in inspect.getclosurevars(function).globals:
            value = function.__globals__[name]
            home = (
                value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", builtins.__name__)
            )
            root = home.partition(".")[0]
            assert root in ("torch", "nnsight", "builtins", "gna_utils"), (
                f"{function.__qualname__} uses {name} of {home}"
            )
            if inspect.isfunction(value) and root == "gna_utils":
                waiting.append(value)
    assert interventions.replace in seen and interventions.donors in seen
