"""Sweeps: the numbers of ``ablate`` and ``score`` for every kind of mixer, whatever way they are found."""

from __future__ import annotations

from contextlib import ExitStack

import circuit
import numpy as np
import pytest
import tiny
import tiny_llamba
import torch
from nnsight.modeling.transformers import TransformersModel
from sweep_checks import EXAMPLES, PROMPTS, WORDS, dictionaries, expected, same, values

from gna_utils import GnaError, Head, ablate, layers, score, sweep
from gna_utils.forward import forward
from gna_utils.heads import parse_heads
from gna_utils.sweeps import restart
from gna_utils.sweeps.effects import FRAME
from gna_utils.sweeps.measure import Meter
from gna_utils.tasks import Example

pytestmark = pytest.mark.filterwarnings("ignore::gna_utils.scoring.GnaWarning")

REFERENCE = ["w30 w31 w32 w33", "w34 w35", "w36 w37 w38"]
PHRASES = (" w40", " w41 w42", " w41 w43")
LONGER = [Example("test", prompt, PHRASES, i % 3) for i, prompt in enumerate(PROMPTS)]
FAMILIES = [
    *("llama", "gpt2", "gemma3", "gpt_neox", "mamba", "mamba2", "jamba", "bamba", "zamba2", "falcon_h1"),
    *("nemotron_h", "granitemoehybrid", "qwen3_next", "llamba"),
]


def built(family):
    if family != "llamba":
        return tiny.build(family)[0]
    return TransformersModel(tiny_llamba.build(), tokenizer=tiny.tokenizer(), task="text-generation")


@pytest.fixture
def only_restarts(monkeypatch):
    """Fail where the fast way is not taken."""

    def refuse(self, todo):
        raise AssertionError("units were measured one by one")

    monkeypatch.setattr(Meter, "_one_by_one", refuse)


def some_units(model, kind):
    """The first and the last heads of one kind of mixer, and a group over all its layers."""
    heads = [Head(m.layer, n) for m in layers(model) if m.kind == kind for n in range(m.n_heads)]
    chosen = [*heads[:2], *heads[-2:]]
    return {**{str(head): [head] for head in chosen}, "group": [heads[0], heads[-1], heads[1]]}


@pytest.mark.parametrize("mode", ["exact", "query"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_ablate_and_score(family, mode, only_restarts):
    model = built(family)
    for kind in sorted({mixer.kind for mixer in layers(model) if mixer.n_heads}):
        units = some_units(model, kind)
        for ablation in ("zero", "mean", "resample"):
            options = {"kind": ablation, "mixer": kind, "seed": 3}
            options |= {} if ablation == "zero" else {"reference": REFERENCE}
            found = sweep(model, EXAMPLES, units=units, mode=mode, **options)
            positions = "query" if mode == "query" else "all"
            for unit, group in units.items():
                same(found, unit, expected(model, EXAMPLES, group, positions=positions, **options))
    changed = found.examples[found.examples["metric"] == "logprob"]
    assert (changed["value"] - changed["baseline"]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "mamba2", "zamba2", "llamba"])
def test_answers_of_several_tokens(family, only_restarts):
    model = built(family)
    kind = layers(model)[0].kind
    units = some_units(model, kind)
    found = sweep(model, LONGER, units=units, mixer=kind)
    for unit, group in units.items():
        same(found, unit, expected(model, LONGER, group, mixer=kind))


@pytest.mark.parametrize("options", [{"mode": "query"}, {"kind": "resample", "reference": REFERENCE}])
def test_answers_of_several_tokens_where_a_restart_is_not_exact(tiny_model, options):
    model, _, _ = tiny_model("llama")
    found = sweep(model, LONGER, units="L0H1, L1H2", **options)
    how = {**options, "positions": "query"} if options.pop("mode", None) else options
    for head in ("L0H1", "L1H2"):
        same(found, head, expected(model, LONGER, head, **{k: v for k, v in how.items() if k != "mode"}))


def test_prompts_of_one_token(tiny_model):
    model, _, _ = tiny_model("mamba2")
    short = [Example("test", "", WORDS, 0), Example("test", "w3", WORDS, 1)]  # <bos> alone, and one word
    found = sweep(model, short, units="L0H1, L1H0", mode="query")
    for head in ("L0H1", "L1H0"):
        same(found, head, expected(model, short, head, positions="query"))


def test_layers_are_all_heads_of_all_their_mixers(tiny_model):
    model, _, _ = tiny_model("falcon_h1")
    found = sweep(model, EXAMPLES, units="layers")
    assert list(found.frame["unit"].unique()) == ["L0", "L1"]
    assert set(found.frame["n_heads"]) == {12} and set(found.frame["mixer"]) == {"attention and ssd"}
    with ExitStack() as both:
        for mixer in layers(model).in_layer(1):
            heads = [Head(1, n) for n in range(mixer.n_heads)]
            both.enter_context(ablate(model, heads, mixer=mixer.kind))
        frame = score(model, EXAMPLES).frame
    same(found, "L1", {"logprob": frame["logprob"].to_numpy()})


def test_heads_of_two_mixers_in_one_layer_are_told_apart(tiny_model):
    model, _, _ = tiny_model("falcon_h1")
    found = sweep(model, EXAMPLES, mixer=None)
    assert len(found.frame["unit"].unique()) == 2 * (4 + 8)
    same(found, "L1H2 ssd", expected(model, EXAMPLES, "L1H2", mixer="ssd"))
    same(found, "L1H2 attention", expected(model, EXAMPLES, "L1H2", mixer="attention"))


def test_a_mixer_that_changes_what_its_projection_gives(monkeypatch, only_restarts):
    """Then a restart cannot stand in for the mixer, and runs it."""
    model, hf_model, _ = tiny.build("llama")
    for layer in hf_model.model.layers:
        inner = layer.self_attn.forward
        doubled = lambda *args, inner=inner, **kwargs: (2 * inner(*args, **kwargs)[0], None)  # noqa: E731
        monkeypatch.setattr(layer.self_attn, "forward", doubled)
    for mode in ("exact", "query"):
        found = sweep(model, EXAMPLES, units=["L0H1", ["L0H2", "L1H2"]], mode=mode)
        positions = "query" if mode == "query" else "all"
        for unit in ("L0H1", "L0H2+L1H2"):
            same(found, unit, expected(model, EXAMPLES, unit.replace("+", ","), positions=positions))


def test_a_layer_that_mixes_outside_its_mixer_is_measured_whole(monkeypatch):
    """A restart takes all but the mixer to work on each position alone; where that fails it is not used."""
    model, hf_model, _ = tiny.build("llama")
    mlp = hf_model.model.layers[1].mlp
    inner = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: inner(x).cumsum(1))
    found = sweep(model, EXAMPLES, units="L0H1, L1H2")
    for head in ("L0H1", "L1H2"):
        same(found, head, expected(model, EXAMPLES, head), 1e-6)


def test_a_kernel_that_goes_around_the_projection_is_refused(monkeypatch):
    """As in ablate: a fused kernel reads the weights of the projection, and nothing would be removed."""
    model, hf_model, _ = tiny.build("mamba2")
    project = hf_model.backbone.layers[1].mixer.out_proj
    monkeypatch.setattr(project, "__class__", type("Fused", (type(project),), {"__call__": project.forward}))
    for mode in ("exact", "query"):
        with pytest.raises(GnaError, match="out_proj' was not called"):
            sweep(model, EXAMPLES, units="L1H2", mode=mode)


# ------------------------------------------------------------------------------ what is found, and reported


@pytest.fixture(scope="module")
def known():
    """A model whose heads are known, and a task that it solves."""
    model = circuit.build()
    return model, dictionaries(model)


@pytest.mark.parametrize(
    ("mode", "heads"),
    [("exact", {"L0H1", "L0H3", "L1H2"}), ("screen", {"L0H1", "L0H3", "L1H2"}), ("query", {"L0H3", "L1H2"})],
)
def test_known_heads_are_found_by_every_mode(known, mode, heads):
    """L0H1 writes at the values, long before the query; the two others work at the query."""
    model, examples = known
    found = sweep(model, examples, mode=mode, verify=4)
    assert set(map(str, found.top(len(heads)))) == heads
    drops = found.frame[found.frame["metric"] == "accuracy"].set_index("unit")["drop"]
    assert (drops[list(heads)] > 0.5).all() and (drops.drop(list(heads)) == 0).all()


def test_frame(known):
    model, examples = known
    found = sweep(model, examples, seed=4)
    frame = found.frame
    assert tuple(frame.columns) == FRAME and len(frame) == 2 * 10
    assert not frame.isna().any(axis=None)
    assert set(frame["n"]) == {12} and set(frame["seed"]) == {4} and set(frame["task"]) == {"key_value"}
    assert np.allclose(frame["baseline"] - frame["value"], frame["drop"])
    assert (frame["drop_low"] <= frame["drop"] + 1e-12).all()
    assert (frame["drop"] <= frame["drop_high"] + 1e-12).all()
    rows = found.examples.groupby(["unit", "metric"]).mean(numeric_only=True)
    means = frame.set_index(["unit", "metric"])
    assert np.allclose(rows.loc[means.index, "value"], means["value"])


def test_screen_verifies_with_the_numbers_of_exact_and_measures_less(tiny_model):
    model, _, _ = tiny_model("llama")
    prompts = [f"w{i} w{i + 1} w{i + 2}" for i in range(1, 41)]
    examples = [Example("test", prompt, WORDS, i % 3) for i, prompt in enumerate(prompts)]
    exact, screen = sweep(model, examples), sweep(model, examples, mode="screen", verify=3)
    assert len(screen.frame["unit"].unique()) == 3 and set(screen.frame["n"]) == {40}
    assert screen.top(1) == exact.top(1)
    assert len(screen.examples["unit"].unique()) == 8
    assert len(screen.examples) < 0.6 * len(exact.examples)
    for unit in screen.frame["unit"].unique():
        same(screen, unit, values(exact, unit), 1e-5)


@pytest.mark.parametrize("mode", ["exact", "screen"])
def test_order_of_units_does_not_matter(known, mode):
    model, examples = known
    heads = parse_heads([(layer, n) for layer in range(2) for n in range(5)])
    mixed = [heads[i] for i in np.random.default_rng(1).permutation(10)]
    one, other = (sweep(model, examples, units=units, mode=mode, verify=5) for units in (heads, mixed))
    by = ["unit", "metric"]
    assert one.frame.sort_values(by, ignore_index=True).equals(other.frame.sort_values(by, ignore_index=True))


@pytest.mark.parametrize("mode", ["exact", "query"])
def test_max_tokens_bounds_what_runs_together(tiny_model, monkeypatch, mode):
    model, _, _ = tiny_model("bamba")
    units = {name: group for name, group in some_units(model, "ssd").items() if name != "group"}
    free = sweep(model, EXAMPLES, units=units, mode=mode)
    sizes = []

    def watched(model, ids, mask, **options):
        sizes.append(mask.numel())
        return forward(model, ids, mask, **options)

    monkeypatch.setattr(restart, "forward", watched)
    sweep(model, EXAMPLES, units=units, mode=mode, max_tokens=14)
    bound = sweep(model, EXAMPLES, units=units, mode=mode, max_tokens=14)
    assert max(sizes) <= 14
    for unit in units:
        same(bound, unit, values(free, unit), 1e-5)


# ----------------------------------------------------------------------------------- beside other contexts


def test_active_contexts_stay_in_place(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L0H2"):
        found = sweep(model, EXAMPLES, units="L0H1, L1H3")
    same(found, "L1H3", expected(model, EXAMPLES, "L0H2, L1H3"), 1e-6)
    assert np.allclose(found.frame["baseline"].iloc[1], expected(model, EXAMPLES, "L0H2")["logprob"].mean())


def test_a_context_on_another_model_is_refused(tiny_model):
    with ablate(tiny_model("llama")[0], "L0H2"), pytest.raises(GnaError, match="another model"):
        sweep(tiny_model("gpt2")[0], EXAMPLES)


def test_remote_gives_the_same_numbers(tiny_model):
    model, _, _ = tiny_model("qwen3_next")
    here, there = (sweep(model, EXAMPLES, units="L0H1, L1H3", remote=where) for where in (False, "local"))
    assert np.allclose(here.examples["value"], there.examples["value"], atol=1e-5)


def test_the_model_is_left_as_it_was(monkeypatch):
    model, hf_model, _ = tiny.build("llama")
    before = {name: vars(part).get("forward") for name, part in hf_model.named_modules()}
    ids = tiny.ids(2, 7)
    plain = forward(model, ids, torch.ones_like(ids))

    def fail(*args):
        raise KeyboardInterrupt

    sweep(model, EXAMPLES)
    monkeypatch.setattr(restart.Replaced, "apply", fail)  # in the middle of a restarted run
    with pytest.raises(KeyboardInterrupt):
        sweep(model, EXAMPLES)
    assert {name: vars(part).get("forward") for name, part in hf_model.named_modules()} == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in hf_model.modules())
    assert torch.equal(forward(model, ids, torch.ones_like(ids)), plain)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "mode='fast'.*'exact', 'query', 'screen'"),
        ({"kind": "noise"}, "kind='noise'.*'zero', 'mean', 'resample'"),
        ({"kind": "mean"}, "kind='mean' needs reference"),
        ({"verify": 0}, "verify=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"units": "L9H0"}, "layers 0 to 1"),
        ({"units": "L0H7"}, "heads 0 to 3"),
        ({"units": []}, "no units"),
        ({"units": 3}, "3 names no heads"),
        ({"mixer": "ssd"}, "no ssd"),
        ({"examples": EXAMPLES[:1]}, "1 example was given"),
        ({"examples": []}, "no examples"),
        ({"examples": ["w1 w2"]}, "str is not an Example"),
    ],
)
def test_refused(tiny_model, options, words):
    model, _, _ = tiny_model("llama")
    with pytest.raises(GnaError, match=words):
        sweep(model, options.pop("examples", EXAMPLES), **options)


def test_top_takes_single_heads_and_a_known_metric(tiny_model):
    found = sweep(tiny_model("llama")[0], EXAMPLES, units="layers")
    with pytest.raises(GnaError, match="single heads"):
        found.top(1)
    with pytest.raises(GnaError, match="accuracy, logprob"):
        sweep(tiny_model("llama")[0], EXAMPLES).top(1, metric="loss")
