"""Pattern scores of all heads of a model, from one trace per batch."""

from __future__ import annotations

from dataclasses import replace

import circuit
import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from gna_utils import GnaError, ablate, key_value, layers, pattern_scores, transfer_matrix
from gna_utils.patterns import map_scores, repeated_tokens, row_shares, scores
from gna_utils.stats import bootstrap
from gna_utils.tasks import Example, encode

WORDS = [f"w{i}" for i in range(1, 60)]
HEADS = ["layer", "head", "mixer", "score"]


def dictionaries(n, pairs, seed=0):
    return key_value(n, pairs, tokenizer=tiny.tokenizer(), seed=seed, keys=WORDS[:29], values=WORDS[29:])


@pytest.fixture(scope="module")
def examples():
    """Prompts of several lengths."""
    return [*dictionaries(2, 3), *dictionaries(1, 5, seed=1), *dictionaries(1, 2, seed=2)]


@pytest.fixture(scope="module")
def by_hand():
    return circuit.build()


def one(frame, layer, head, score):
    [row] = frame[
        (frame["layer"] == layer) & (frame["head"] == head) & (frame["score"] == score)
    ].itertuples()
    return row


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equals_the_scores_of_each_map_alone(tiny_model, examples, family):
    """Every kind of mixer, all heads: against transfer_matrix of one prompt and one mixer at a time."""
    model, _, tokenizer = tiny_model(family)
    frame = pattern_scores(model, examples).set_index(HEADS)
    assert len(frame) == 6 * sum(mixer.n_heads for mixer in layers(model))
    rows = encode(examples, tokenizer)
    for mixer in layers(model):
        if not mixer.n_heads:
            continue
        found = []
        for row in rows:
            T = transfer_matrix(model, [row], layer=mixer.layer, mixer=mixer.kind, skip=False)
            T = T if mixer.kind == "attention" else row_shares(T)
            found.append(map_scores(T, [row], ("gather", "aggregate", "retrieval")))
        for name in found[0]:
            here = frame.xs((mixer.layer, mixer.kind, name), level=["layer", "mixer", "score"])
            for column, part in (("value", 0), ("chance", 1)):
                expected = torch.stack([one[name][part][0] for one in found]).mean(0)
                np.testing.assert_allclose(here[column], expected, atol=2e-6)


@pytest.mark.parametrize("family", ["llama", "mamba", "falcon_h1"])
def test_batches_and_blocks_of_heads_change_nothing(tiny_model, examples, family, monkeypatch):
    model, _, _ = tiny_model(family)
    together = pattern_scores(model, examples)
    monkeypatch.setattr(scores, "_BLOCK", 1)
    apart = pattern_scores(model, examples, max_tokens=1)
    pd.testing.assert_frame_equal(together, apart, atol=1e-6)


def test_each_mixer_is_read_from_one_run(tiny_model, examples):
    model, hf_model, _ = tiny_model("bamba")
    calls = []
    handle = hf_model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    pattern_scores(model, examples, max_tokens=10_000)
    handle.remove()
    assert len(calls) == 1


def test_heads_in_any_order_give_the_same_rows(tiny_model, examples):
    model, _, _ = tiny_model("llama")
    frame = pattern_scores(model, examples, "L1H3, L0H2, L1H0")
    pd.testing.assert_frame_equal(frame, pattern_scores(model, examples, ["L0H2", (1, 0), "L1H3"]))
    every = pattern_scores(model, examples).set_index(HEADS)
    pd.testing.assert_frame_equal(frame.set_index(HEADS), every.loc[frame.set_index(HEADS).index])
    pd.testing.assert_frame_equal(
        frame,
        pattern_scores(model, encode(examples, tiny.tokenizer()), "L0H2 L1H0 L1H3").assign(task="key_value"),
    )


def test_intervals_are_those_of_the_bootstrap(tiny_model, examples):
    model, _, tokenizer = tiny_model("llama")
    row = one(pattern_scores(model, examples, "L1H2", "retrieval", seed=3), 1, 2, "retrieval")
    values = [
        map_scores(transfer_matrix(model, [e], "L1H2"), [e], "retrieval")["retrieval"][0].item()
        for e in encode(examples, tokenizer)
    ]
    expected = bootstrap(values, seed=3)
    assert (row.value, row.low, row.high) == pytest.approx(
        (expected.value, expected.low, expected.high), abs=1e-6
    )
    assert row.low < row.value < row.high and row.n == 4


def test_heads_written_by_hand_are_found(by_hand):
    frame = pattern_scores(by_hand, dictionaries(4, 5))
    best = frame.loc[frame.groupby("score")["value"].idxmax()].set_index("score")
    for name in ("aggregate", "aggregate_argmax", "aggregate_argmax_all", "retrieval"):
        assert (best["layer"][name], best["head"][name]) == (1, 2), name
        assert best["value"][name] == pytest.approx(1, abs=circuit.SHARP)
    assert one(frame, 0, 1, "gather_mass").value == pytest.approx(1, abs=circuit.SHARP)
    assert one(frame, 0, 1, "gather").value == pytest.approx(
        0, abs=circuit.SHARP
    )  # offset 2, whatever stands
    spread = one(frame, 0, 0, "aggregate")
    assert spread.value == pytest.approx(1 / 20) and spread.chance == pytest.approx(1 / 20)


def test_induction_head_written_by_hand_is_found(by_hand):
    frame = pattern_scores(by_hand, repeated_tokens(by_hand, 3, 12), scores="induction")
    assert set(frame["task"]) == {"repeated tokens"}
    best = frame.loc[frame["value"].idxmax()]
    assert (best["layer"], best["head"]) == (1, 4)
    assert best["value"] == pytest.approx(1, abs=circuit.SHARP)
    assert one(frame, 0, 1, "induction").value == pytest.approx(0, abs=circuit.SHARP)


def test_scan_heads_that_take_in_nothing(examples):
    model, hf_model, _ = tiny.build("mamba2")
    mixer = hf_model.backbone.layers[1].mixer
    mixer.conv1d.weight.data.zero_()
    mixer.conv1d.bias.data.zero_()  # so that B and C are 0
    frame = pattern_scores(model, examples)
    assert np.isfinite(frame.drop(columns=["model", "task", "mixer", "score"])).all().all()
    here = frame[frame["layer"] == 1].set_index("score")["value"]
    assert (here.drop(["aggregate_argmax", "aggregate_argmax_all"]) == 0).all()
    assert np.allclose(here["aggregate_argmax"], np.mean([1 / 3, 1 / 3, 1 / 5, 1 / 2]))


def test_active_contexts_apply(by_hand):
    """Without the head that carries keys, the Aggregate head has nothing to look for."""
    with ablate(by_hand, "L0H1"):
        frame = pattern_scores(by_hand, dictionaries(4, 5), "L1H2", "aggregate")
    assert one(frame, 1, 2, "aggregate").value < 0.1


def test_mixer_chooses_where_layers_hold_two(tiny_model, examples):
    model, _, _ = tiny_model("falcon_h1")
    frame = pattern_scores(model, examples)
    assert set(frame["mixer"]) == {"attention", "ssd"}
    only = pattern_scores(model, examples, mixer="ssd")
    pd.testing.assert_frame_equal(only, frame[frame["mixer"] == "ssd"].reset_index(drop=True))
    pattern_scores(model, examples, "L0H1", mixer="attention")
    with pytest.raises(GnaError, match="two mixers"):
        pattern_scores(model, examples, "L0H1")


def test_repeated_tokens(tiny_model):
    model, _, tokenizer = tiny_model("llama")
    rows = repeated_tokens(model, 3, 10, seed=5)
    assert rows[:2] == repeated_tokens(model, 2, 10, seed=5) and rows != repeated_tokens(model, 3, 10)
    for row in rows:
        lead, first, second = row.input_ids[:1], row.input_ids[1:11], row.input_ids[11:]
        assert lead == (tokenizer.bos_token_id,) and first == second and len(set(first)) == 10
        assert not set(first) & set(tokenizer.all_special_ids)
        assert row.spans == {"first": (1, 11), "second": (11, 21)} and row.query == 20
    with pytest.raises(GnaError, match="at most 31 twice"):
        repeated_tokens(circuit.build(), 1, 32)
    with pytest.raises(GnaError, match="length=1"):
        repeated_tokens(model, 1, 1)


def test_refuses_what_cannot_be_scored(tiny_model, examples):
    model, _, _ = tiny_model("llama")
    with pytest.raises(GnaError, match="example 0 has no segments, which the gather score needs"):
        pattern_scores(model, Example("plain", "w1 w2 w3", (" w4", " w5"), 0))
    with pytest.raises(GnaError, match="example 1 has no target"):
        pattern_scores(model, [examples[0], replace(examples[1], target=None)])
    with pytest.raises(GnaError, match="example 0 has no span 'first' and 'second'"):
        pattern_scores(model, examples, scores="induction")
    with pytest.raises(GnaError, match="str is not an Example"):
        pattern_scores(model, "w1 w2 w3")
    with pytest.raises(GnaError, match="has no ssd heads"):
        pattern_scores(model, examples, mixer="ssd")
    with pytest.raises(GnaError, match="layers 0 to 1"):
        pattern_scores(model, examples, "L9H0")
    with pytest.raises(GnaError, match="no prompt was given"):
        pattern_scores(model, [])
    with ablate(circuit.build(), "L0H1"), pytest.raises(GnaError, match="active on another model"):
        pattern_scores(model, examples)
    training, _, _ = tiny.build("llama")
    training._module.train()
    with pytest.raises(GnaError, match="training mode"):
        pattern_scores(training, examples)


def test_model_that_gives_nan_is_refused(examples):
    model, hf_model, _ = tiny.build("llama")
    hf_model.model.layers[1].self_attn.q_proj.weight.data.fill_(torch.nan)
    with pytest.raises(GnaError, match="attention layer 1 gives NaN"):
        pattern_scores(model, examples)


def test_runs_as_on_a_server(tiny_model, examples):
    """``remote="local"`` serialises the trace as for a server: it must not need classes of ours."""
    model, _, _ = tiny_model("bamba")
    pd.testing.assert_frame_equal(
        pattern_scores(model, examples, remote="local"), pattern_scores(model, examples), atol=1e-6
    )
