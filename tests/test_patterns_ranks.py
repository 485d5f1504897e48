"""Agreement of scores and drops: against ranks by pandas, overlaps by sets, and a plain bootstrap."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from gna_utils import GnaError, agreement
from gna_utils.patterns.ranks import precision, spearman

N = 40


def frames(x, y, **more):
    places = {
        "model": "m",
        "layer": np.arange(len(x)) // 8,
        "head": np.arange(len(x)) % 8,
        "mixer": "attention",
    }
    scores = pd.DataFrame({**places, "task": "key_value", "score": "aggregate", "value": x})
    sweep = {**places, "task": "kv", "ablation": "zero", "positions": "all", "metric": "logprob", "drop": y}
    return scores, pd.DataFrame(sweep | more)


def drawn(seed=0, ties=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=N)
    y = 0.6 * x + rng.normal(size=N)
    return (x.round(), y.round()) if ties else (x, y)


def by_pandas(x, y):
    return np.corrcoef(pd.Series(x).rank(), pd.Series(y).rank())[0, 1]


def statistic(frame, name):
    [row] = frame[frame["statistic"] == name].itertuples()
    return row


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation(ties):
    x, y = drawn(ties=ties)
    found = statistic(agreement(*frames(x, y)), "spearman")
    assert found.value == pytest.approx(by_pandas(x, y), abs=1e-12)
    assert (found.chance, found.n) == (0, N)
    if not ties:  # the textbook formula
        d = pd.Series(x).rank() - pd.Series(y).rank()
        assert found.value == pytest.approx(1 - 6 * (d**2).sum() / (N * (N**2 - 1)))


def test_precision_is_the_overlap_of_the_two_lists():
    x, y = drawn()
    for k in (1, 5, 10):
        found = statistic(agreement(*frames(x, y), k=k), "precision_at_k")
        assert found.value == pytest.approx(len(set(np.argsort(-x)[:k]) & set(np.argsort(-y)[:k])) / k)
        assert (found.chance, found.k) == (k / N, k)


def test_heads_that_tie_share_the_last_places():
    """Against the mean over many ways of breaking ties by lot."""
    x, y = np.array([3.0, 1, 1, 1, 0, 0]), np.array([2.0, 5, 0, 0, 0, 9])
    rng, overlaps = np.random.default_rng(0), []
    for _ in range(20_000):
        left, right = (np.lexsort((rng.random(6), -values))[:3] for values in (x, y))
        overlaps.append(len(set(left) & set(right)) / 3)
    assert precision(x, y, np.ones((1, 6)), 3)[0] == pytest.approx(np.mean(overlaps), abs=0.01)


@pytest.mark.parametrize("ties", [False, True])
def test_resamples_count_a_head_as_often_as_it_is_drawn(ties):
    x, y = drawn(ties=ties)
    rng = np.random.default_rng(1)
    picks = rng.integers(N, size=(50, N))
    counts = np.stack([np.bincount(row, minlength=N) for row in picks])
    expected = [by_pandas(x[row], y[row]) for row in picks]
    np.testing.assert_allclose(spearman(x, y, counts), expected, atol=1e-12)
    if not ties:  # copies of a head stand together, and only the last of them can be cut
        for row, value in zip(picks, precision(x, y, counts, 10)):
            left, right = np.argsort(-x[row], kind="stable")[:10], np.argsort(-y[row], kind="stable")[:10]
            assert abs(value - len(set(left) & set(right)) / 10) <= 0.2


def test_intervals():
    x, y = drawn()
    frame = agreement(*frames(x, y), seed=1)
    rng = np.random.default_rng(5)
    again = [by_pandas(x[p], y[p]) for p in rng.integers(N, size=(4000, N))]
    found = statistic(frame, "spearman")
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(again, [0.025, 0.975])), abs=0.03)
    assert ((frame["low"] <= frame["value"]) & (frame["value"] <= frame["high"])).all()
    pd.testing.assert_frame_equal(frame, agreement(*frames(x, y), seed=1))


def test_perfect_and_opposite_agreement():
    x = np.arange(N, dtype=float)
    same, opposite = agreement(*frames(x, x**3)), agreement(*frames(x, -x))
    assert list(same["value"]) == [1, 1] and list(opposite["value"]) == [-1, 0]
    assert statistic(same, "spearman").low == pytest.approx(1)


def test_unrelated_scores_agree_as_chance_says():
    rng = np.random.default_rng(3)
    found = [agreement(*frames(rng.normal(size=N), rng.normal(size=N)), n_resamples=2) for _ in range(150)]
    means = pd.concat(found).groupby("statistic")[["value", "chance"]].mean()
    np.testing.assert_allclose(means["value"], means["chance"], atol=0.04)


def test_order_of_rows_does_not_matter_and_other_heads_are_left_out():
    x, y = drawn()
    scores, sweep = frames(x, y)
    shuffled = sweep.sample(frac=1, random_state=0)
    extra = pd.DataFrame([{**sweep.iloc[0], "layer": 3, "head": None, "drop": 9.0}])  # a whole layer
    frame = agreement(scores, pd.concat([shuffled, extra]))
    expected = agreement(scores, sweep)
    assert list(frame["value"]) == pytest.approx(list(expected["value"]))
    part = agreement(scores[scores["layer"] < 3], sweep)
    assert set(part["n"]) == {24}
    assert statistic(part, "spearman").value == pytest.approx(by_pandas(x[:24], y[:24]))


def test_every_score_meets_every_metric():
    x, y = drawn()
    scores, sweep = frames(x, y)
    scores = pd.concat([scores, scores.assign(score="gather", value=-x)])
    sweep = pd.concat([sweep, sweep.assign(metric="accuracy", drop=y**3), sweep.assign(ablation="mean")])
    frame = agreement(scores, sweep)
    assert len(frame) == 2 * 3 * 2
    keys = ["score", "ablation", "metric", "statistic"]
    value = frame.set_index(keys)["value"]
    assert value["gather", "zero", "accuracy", "spearman"] == pytest.approx(
        -value["aggregate", "mean", "logprob", "spearman"]
    )


def test_layers_with_two_mixers_are_told_apart():
    x, y = drawn()
    scores, sweep = frames(x, y)
    twins = pd.concat([scores, scores.assign(mixer="ssd", value=-x)])
    drops = pd.concat([sweep, sweep.assign(mixer="ssd", drop=-y)])
    found = statistic(agreement(twins, drops), "spearman")
    assert found.n == 2 * N
    assert found.value == pytest.approx(by_pandas(np.r_[x, -x], np.r_[y, -y]))


def test_constant_scores_have_no_ranks():
    frame = agreement(*frames(np.zeros(N), drawn()[1]))
    found = statistic(frame, "spearman")
    assert np.isnan([found.value, found.low, found.high]).all()
    assert statistic(frame, "precision_at_k").value == pytest.approx(10 / N)


def test_refuses_what_cannot_be_compared():
    scores, sweep = frames(*drawn())
    with pytest.raises(GnaError, match="sweep frame has no column drop"):
        agreement(scores, sweep.drop(columns="drop"))
    with pytest.raises(GnaError, match="needs more than 40 heads, but the two frames share 40"):
        agreement(scores, sweep, k=40)
    with pytest.raises(GnaError, match="share 0"):
        agreement(scores, sweep.assign(model="another"))
    with pytest.raises(GnaError, match="L0H0 comes twice"):
        agreement(scores, pd.concat([sweep, sweep]))
    with pytest.raises(GnaError, match="nothing to compare"):
        agreement(scores, sweep.assign(head=None))
    with pytest.raises(GnaError, match="k=0"):
        agreement(scores, sweep, k=0)
