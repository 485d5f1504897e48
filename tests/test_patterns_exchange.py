"""The interchange test, on a model of which it is known what each head carries."""

from __future__ import annotations

from dataclasses import replace

import circuit
import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from gna_utils import GnaError, interchange, key_value, layers, patch
from gna_utils.forward import forward, tokens
from gna_utils.patterns.exchange import _other_answer, _rewritten
from gna_utils.tasks import Example, Segment, encode

WORDS = [f"w{i}" for i in range(1, 60)]


def dictionaries(n, pairs, seed=0):
    return key_value(n, pairs, tokenizer=tiny.tokenizer(), seed=seed, keys=WORDS[:29], values=WORDS[29:])


@pytest.fixture(scope="module")
def by_hand():
    return circuit.build()


def row(frame, ablation, metric):
    [found] = frame[(frame["ablation"] == ablation) & (frame["metric"] == metric)].itertuples()
    return found


@pytest.mark.parametrize(
    ("heads", "positions", "follows"),
    [
        ("L1H2", "query", 1),  # copies the value to the output
        ("L1H2", "value", 0),  # and does nothing elsewhere
        ("L0H1", "value", 0),  # carries the key, which donors share
        ("L0H3, L0H1", "query", 0),
        ("L0H1, L1H2", "query", 1),
        ("L1H4", "query", 0),
    ],
)
def test_answer_follows_the_donor_through_the_head_that_carries_it(by_hand, heads, positions, follows):
    frame = interchange(by_hand, dictionaries(6, 4), heads, positions)
    moved, odds = row(frame, "interchange", "follows"), row(frame, "interchange", "log_odds")
    assert (moved.baseline, moved.value, moved.ceiling, moved.chance) == (0, follows, 1, 0.25)
    assert (moved.drop, moved.drop_low, moved.drop_high) == (-follows, -follows, -follows)
    # the two answers change places
    assert odds.baseline == pytest.approx(-odds.ceiling, rel=1e-3)
    assert odds.value == pytest.approx(-odds.baseline if follows else odds.baseline, rel=1e-3)
    for metric in ("follows", "log_odds"):
        own = row(frame, "own", metric)
        assert (own.drop, own.drop_low, own.drop_high) == (0, 0, 0)
    assert set(frame["unit"]) == {"+".join(sorted(heads.split(", ")))} and set(frame["n"]) == {6}
    assert (frame["head"].notna() == (frame["n_heads"] == 1)).all()


@pytest.mark.parametrize("family", ["llama", "mamba", "mamba2", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("positions", ["value", "summary", "query"])
def test_own_activations_change_exactly_nothing(tiny_model, family, positions):
    model, _, _ = tiny_model(family)
    examples = [*dictionaries(2, 3), *dictionaries(2, 5, seed=1)]  # several lengths in one batch
    mixer = layers(model)[0]
    frame = interchange(model, examples, "L0H0, L0H3", positions, mixer=mixer.kind)
    own = frame[frame["ablation"] == "own"]
    assert (own[["drop", "drop_low", "drop_high"]] == 0).all().all() and len(own) == 2
    assert (own["value"] == own["baseline"]).all()
    assert row(frame, "interchange", "log_odds").drop != 0


def test_against_patch_by_hand(tiny_model):
    """Baseline, patched and donor runs one prompt at a time, with donors of our own."""
    model, _, tokenizer = tiny_model("llama")
    examples = [*dictionaries(2, 3), *dictionaries(1, 5, seed=1)]
    donors = [_rewritten(example, (example.answer + 1) % len(example.candidates)) for example in examples]
    frame = interchange(model, examples, "L0H1, L1H3", "query", donors=donors)
    odds, follows = [], []
    for own, other in zip(encode(examples, tokenizer), encode(donors, tokenizer)):
        answers = [own.candidate_ids[own.answer][0], own.candidate_ids[other.answer][0]]
        runs = [
            forward(model, *tokens(model, [own]), rows=[own]),
            patch(model, "L0H1, L1H3", [own], [other], "query"),
            forward(model, *tokens(model, [other]), rows=[other]),
        ]
        odds.append([float(run[0, answers[0]] - run[0, answers[1]]) for run in runs])
        firsts = [ids[0] for ids in own.candidate_ids]
        follows.append([firsts[int(run[0, firsts].argmax())] == answers[1] for run in runs])
    for metric, expected in (("log_odds", np.mean(odds, 0)), ("follows", np.mean(follows, 0))):
        found = row(frame, "interchange", metric)
        assert (found.baseline, found.value, found.ceiling) == pytest.approx(tuple(expected), abs=1e-5)
        assert found.drop == pytest.approx(expected[0] - expected[1], abs=1e-5)
        assert found.drop_low <= found.drop <= found.drop_high


def test_batching_and_the_order_of_heads_change_nothing(tiny_model):
    model, _, _ = tiny_model("llama")
    examples = [*dictionaries(2, 3), *dictionaries(2, 5, seed=1)]
    together = interchange(model, examples, "L0H1, L1H3", "summary")
    apart = interchange(model, examples, "L1H3, L0H1", "summary", max_tokens=1)
    pd.testing.assert_frame_equal(together, apart, atol=1e-5)


def test_donor_differs_in_the_value_alone(tiny_model):
    model, _, tokenizer = tiny_model("llama")
    [example] = dictionaries(1, 4)
    [own] = encode([example], tokenizer)
    other = _other_answer(model, example, own, 0, 0)
    changed = [i for i, (a, b) in enumerate(zip(own.input_ids, other.input_ids)) if a != b]
    assert changed == list(range(*own.spans["value"])) and other.answer != own.answer
    assert other.input_ids[changed[0]] == own.candidate_ids[other.answer][0]
    assert (other.segments, other.spans, other.candidate_ids) == (own.segments, own.spans, own.candidate_ids)
    drawn = {_other_answer(model, example, own, 0, seed).answer for seed in range(20)}
    assert drawn == set(range(4)) - {own.answer}


def test_marks_after_a_longer_value_move_with_the_text():
    example = Example(
        "test",
        "a: x\nb: y\na:",
        (" x", " long"),
        0,
        segments=(Segment(0, 5, "a"), Segment(5, 10, "b")),
        spans={"key": (0, 1), "value": (3, 4), "asked": (10, 11)},
    )
    other = _rewritten(example, 1)
    assert other.prompt == "a: long\nb: y\na:" and other.answer == 1
    assert [other.prompt[s.start : s.end] for s in other.segments] == ["a: long\n", "b: y\n"]
    assert {name: other.prompt[a:b] for name, (a, b) in other.spans.items()} == {
        "key": "a",
        "value": "long",
        "asked": "a",
    }


def test_refuses_what_cannot_be_exchanged(tiny_model):
    model, _, _ = tiny_model("llama")
    examples = dictionaries(2, 3)
    first = examples[0]
    with pytest.raises(GnaError, match="positions='all'"):
        interchange(model, examples, "L0H1", "all")
    with pytest.raises(GnaError, match="example 0 has no span 'value'"):
        interchange(model, [replace(first, spans={})], "L0H1")
    with pytest.raises(GnaError, match="which is not its answer"):
        interchange(model, [replace(first, answer=(first.answer + 1) % 3)], "L0H1")
    with pytest.raises(GnaError, match="2 examples and 1 donors"):
        interchange(model, examples, "L0H1", donors=examples[:1])
    with pytest.raises(GnaError, match="the donor of example 0 must have the same candidates"):
        interchange(model, examples, "L0H1", donors=examples)
    long = tuple(f"{text} w5" if i != first.answer else text for i, text in enumerate(first.candidates))
    with pytest.raises(GnaError, match="no other candidate of example 0 has as many tokens"):
        interchange(model, [replace(first, candidates=long)], "L0H1")
    alike = (*first.candidates, f"{first.candidates[0]} w5")
    with pytest.raises(GnaError, match="first token does not tell all candidates"):
        interchange(model, [replace(first, candidates=alike)], "L0H1")
    with pytest.raises(GnaError, match="layers 0 to 1"):
        interchange(model, examples, "L7H0")


def test_random_state_is_left_alone(by_hand):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    interchange(by_hand, dictionaries(3, 3), "L1H2")
    assert torch.equal(before, torch.get_rng_state())
