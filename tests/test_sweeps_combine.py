"""Heads removed together: cumulative removal, keeping only the best, synergy of pairs."""

from __future__ import annotations

import circuit
import pytest
from sweep_checks import EXAMPLES, dictionaries, expected, same

from gna_utils import GnaError, cumulative, keep_only, keep_top, pairs, score
from gna_utils.stats import bootstrap

pytestmark = pytest.mark.filterwarnings("ignore::gna_utils.scoring.GnaWarning")


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_cumulative_removes_in_the_order_given(tiny_model, family):
    model = tiny_model(family)[0]
    heads = ["L1H2", "L0H3", "L1H0"]
    found = cumulative(model, EXAMPLES, heads)
    assert list(found.frame["n_heads"]) == [1, 1, 2, 2, 3, 3]
    for k in (1, 2, 3):
        same(found, f"first {k}", expected(model, EXAMPLES, heads[:k]))


def test_keep_top_removes_all_others(tiny_model):
    model = tiny_model("bamba")[0]
    heads = ["L1H2", "L0H3", "L0H7"]
    found = keep_top(model, EXAMPLES, heads)
    assert list(found.frame["unit"].unique()) == ["top 1", "top 2", "top 3"]
    assert list(found.frame["n_heads"].unique()) == [11, 10, 9]
    for k in (1, 2, 3):
        with keep_only(model, heads[:k]):
            frame = score(model, EXAMPLES).frame
        same(found, f"top {k}", {"logprob": frame["logprob"].to_numpy()})


def test_keep_top_of_one_kind_of_mixer(tiny_model):
    model = tiny_model("falcon_h1")[0]
    found = keep_top(model, EXAMPLES, "L0H1, L1H3", counts=[2], mixer="attention")
    with keep_only(model, "L0H1, L1H3", mixer="attention"):
        frame = score(model, EXAMPLES).frame
    same(found, "top 2", {"logprob": frame["logprob"].to_numpy()})


@pytest.mark.parametrize("counts", [[0], [3], []])
def test_keep_top_refuses_other_counts(tiny_model, counts):
    with pytest.raises(GnaError, match="from 1 to 2"):
        keep_top(tiny_model("llama")[0], EXAMPLES, "L0H1, L1H2", counts=counts)


def test_synergy_is_what_the_pair_loses_beyond_the_sum(tiny_model):
    model = tiny_model("llama")[0]
    frame = pairs(model, EXAMPLES, "L0H1, L0H2", "L1H0, L1H3", seed=2)
    assert len(frame) == 2 * 2 * 2 and not frame.isna().any(axis=None)
    plain = score(model, EXAMPLES).frame["logprob"].to_numpy()
    drops = {
        group: plain - expected(model, EXAMPLES, group)["logprob"] for group in ("L0H2", "L1H3", "L0H2, L1H3")
    }
    [row] = frame[
        (frame["gather"] == "L0H2") & (frame["aggregate"] == "L1H3") & (frame["metric"] == "logprob")
    ].to_dict("records")
    assert row["drop"] == pytest.approx(drops["L0H2, L1H3"].mean(), abs=1e-4)
    assert row["drop_gather"] == pytest.approx(drops["L0H2"].mean(), abs=1e-4)
    estimate = bootstrap(drops["L0H2, L1H3"] - drops["L0H2"] - drops["L1H3"], seed=2)
    assert row["synergy"] == pytest.approx(estimate.value, abs=1e-4)
    assert row["synergy_low"] == pytest.approx(estimate.low, abs=1e-4)
    assert row["synergy_high"] == pytest.approx(estimate.high, abs=1e-4)


def test_heads_in_one_chain_have_negative_synergy():
    """Removing either head of the circuit breaks it, so removing both loses no more than one of them."""
    model = circuit.build()
    frame = pairs(model, dictionaries(model), "L0H1, L0H0", "L1H2").set_index(["gather", "metric"])
    chain, idle = frame.loc[("L0H1", "logprob")], frame.loc[("L0H0", "logprob")]
    assert chain["synergy_high"] < -0.5 and idle["synergy"] == pytest.approx(0, abs=1e-5)


def test_pairs_refuse_a_head_with_itself_and_screens(tiny_model):
    model = tiny_model("llama")[0]
    for gather, aggregate, mode in (("L0H1", "L0H1", "exact"), ("L0H1", "L1H1", "screen")):
        with pytest.raises(GnaError, match="two different heads"):
            pairs(model, EXAMPLES, gather, aggregate, mode=mode)


def test_combinations_take_every_option_of_a_sweep(tiny_model, tmp_path):
    model = tiny_model("llama")[0]
    options = {"kind": "mean", "reference": ["w1 w2 w3", "w5"], "mode": "query", "resume": tmp_path / "a.npz"}
    found = cumulative(model, EXAMPLES, "L1H2, L0H3", **options)
    truth = expected(
        model, EXAMPLES, "L1H2, L0H3", kind="mean", reference=["w1 w2 w3", "w5"], positions="query"
    )
    same(found, "first 2", truth)
