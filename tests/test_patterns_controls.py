"""Random heads as controls: as many, from where they should come, and never the heads under test."""

from __future__ import annotations

from collections import Counter

import pytest

from gna_utils import GnaError, Head, layers, parse_heads, random_heads


def test_as_many_heads_of_each_layer_and_none_of_the_given(tiny_model):
    model, _, _ = tiny_model("llama")
    draws = random_heads(model, "L0H1, L1H0, L1H3", 200)
    assert len(draws) == 200
    for draw in draws:
        assert [head.layer for head in draw] == [0, 1, 1] and len(set(draw)) == 3
        assert not set(draw) & {Head(0, 1), Head(1, 0), Head(1, 3)}
    # L0H0, L0H2 and L0H3 are equally likely: 200 draws of 1/3 stay within four standard deviations
    counts = Counter(draw[0] for draw in draws)
    assert set(counts) == {Head(0, 0), Head(0, 2), Head(0, 3)}
    assert all(abs(count - 200 / 3) < 4 * (200 * 2 / 9) ** 0.5 for count in counts.values())
    assert {tuple(draw[1:]) for draw in draws} == {(Head(1, 1), Head(1, 2))}


def test_seed_and_order(tiny_model):
    model, _, _ = tiny_model("mamba")
    draws = random_heads(model, "L0H1, L1H40", 5, seed=2)
    assert draws == random_heads(model, ["L1H40", (0, 1)], 5, seed=2)
    assert draws != random_heads(model, "L0H1, L1H40", 5, seed=3)
    assert draws[:3] == random_heads(model, "L0H1, L1H40", 3, seed=2)


def test_from_any_layer_of_the_same_kind(tiny_model):
    model, _, _ = tiny_model("zamba2")  # attention in layers 1 and 3, a scan in every layer
    like = parse_heads("L1H0, L1H1, L1H2, L1H3")
    draws = random_heads(model, like, 5, same_layers=False, mixer="attention")
    assert draws == [[Head(3, 0), Head(3, 1), Head(3, 2), Head(3, 3)]] * 5
    draws = random_heads(model, "L0H5", 100, same_layers=False)
    assert {head.layer for [head] in draws} == {0, 1, 2, 3}
    assert max(head.head for [head] in draws) < layers(model)[0].n_heads


def test_refuses_more_than_there_are(tiny_model):
    model, _, _ = tiny_model("llama")
    with pytest.raises(
        GnaError, match=r"3 random heads of layer 1 .* there are 1: give fewer heads, or same_layers"
    ):
        random_heads(model, "L0H0, L1H0, L1H1, L1H2", 1)
    assert len(random_heads(model, "L0H0, L1H0, L1H1, L1H2", 1, same_layers=False)[0]) == 4
    with pytest.raises(
        GnaError, match=r"5 random heads of the attention layers .* there are 3: give fewer heads"
    ):
        random_heads(model, "L0H0, L0H1, L1H0, L1H1, L1H2", 1, same_layers=False)
    with pytest.raises(GnaError, match="n_draws=0"):
        random_heads(model, "L0H0", 0)
    with pytest.raises(GnaError, match="seed=-1"):
        random_heads(model, "L0H0", 1, seed=-1)
    with pytest.raises(GnaError, match="heads 0 to 3"):
        random_heads(model, "L0H4", 1)
