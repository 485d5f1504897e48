"""Bootstrap intervals against closed forms, and their behaviour at the edges."""

from __future__ import annotations

import numpy as np
import pytest

from gna_utils import GnaError
from gna_utils.stats import Estimate, _at_least, bootstrap, bootstrap_each, paired_bootstrap


@pytest.mark.parametrize(("n", "hits"), [(100, 62), (400, 40), (30, 15)])
def test_interval_of_a_proportion_is_binomial(n, hits):
    """Resampled means of 0/1 values are Binomial(n, p) / n: compare with its quantiles, summed by hand."""
    p, k = hits / n, np.arange(n + 1)
    log_factorial = np.concatenate([[0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_pmf = log_factorial[n] - log_factorial - log_factorial[::-1] + k * np.log(p) + (n - k) * np.log(1 - p)
    cdf = np.cumsum(np.exp(log_pmf))
    found = bootstrap([1] * hits + [0] * (n - hits), n_resamples=20_000)
    assert found.value == pytest.approx(p) and found.n == n
    assert abs(found.low - np.searchsorted(cdf, 0.025) / n) <= 1.01 / n
    assert abs(found.high - np.searchsorted(cdf, 0.975) / n) <= 1.01 / n


def test_interval_of_a_mean_approaches_the_normal_one():
    data = np.random.default_rng(0).normal(3, 2, size=2000)
    found, half = bootstrap(data), 1.96 * data.std() / np.sqrt(2000)
    assert found.low == pytest.approx(data.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(data.mean() + half, abs=0.1 * half)
    narrow = bootstrap(data, level=0.5)
    assert (narrow.high - narrow.low) / (2 * half) == pytest.approx(0.6745 / 1.96, abs=0.03)


def test_intervals_cover_the_truth():
    rng = np.random.default_rng(1)
    inside = [
        b.low <= 0.3 <= b.high for b in (bootstrap(rng.random(80) < 0.3, n_resamples=500) for _ in range(300))
    ]
    assert 0.9 <= np.mean(inside) <= 0.985


def test_same_seed_same_interval_and_no_global_state():
    data = np.random.default_rng(3).random(50)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    assert bootstrap(data, seed=1) == bootstrap(data, seed=1) != bootstrap(data, seed=2)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_large_samples_are_resampled_in_blocks():
    data = np.arange(3_000_000.0)
    found = bootstrap(data, n_resamples=8)
    assert found.low < data.mean() < found.high


def test_pairing_removes_what_both_have_in_common():
    """Hard and easy examples spread both scores widely, the drop of 0.5 on every one not at all."""
    hard = np.random.default_rng(0).normal(0, 10, 60)
    drop = paired_bootstrap(hard, hard - 0.5)
    assert drop.value == pytest.approx(0.5) and drop.high - drop.low < 1e-9
    assert bootstrap(hard).high - bootstrap(hard).low > 3
    shuffled = paired_bootstrap(hard, (hard - 0.5)[::-1])
    assert shuffled.value == pytest.approx(0.5) and shuffled.high - shuffled.low > 3


def test_drop_has_the_sign_of_a_loss():
    assert paired_bootstrap([1, 1, 1, 0], [0, 1, 0, 0]).value == 0.5


def test_edges():
    one = bootstrap([1.0], chance=0.5)
    assert one.value == 1 and np.isnan(one.low) and str(one) == "1.00 no interval, n = 1, chance 0.50"
    equal = bootstrap([0.1] * 7)
    assert (equal.value, equal.low, equal.high, equal.n) == (0.1, 0.1, 0.1, 7)
    assert str(Estimate(0.62, 0.57, 0.67, 300, 0.1)) == "0.62 [0.57, 0.67], n = 300, chance 0.10"
    assert str(Estimate(0.62, 0.57, 0.67, 300)) == "0.62 [0.57, 0.67], n = 300"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap([]), "at least one example"),
        (lambda: bootstrap([1, float("nan")]), "1 of 2 values are not finite"),
        (lambda: bootstrap([1, 0], level=95), "not at 95"),
        (lambda: paired_bootstrap([1, 0], [1]), "2 values cannot be paired with 1"),
        (lambda: paired_bootstrap([], []), "at least one example"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(GnaError, match=message):
        call()


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (Estimate(0.20, 0.11, 0.30, 50, 0.1), "clearly above chance"),
        (Estimate(0.20, 0.10, 0.30, 50, 0.1), "not distinguishable from chance"),
        (Estimate(0.01, 0.00, 0.03, 100, 0.1), "clearly below chance"),
        (Estimate(1.00, 1.00, 1.00, 2, 1 / 3), "not distinguishable from chance"),  # 1 run in 9 by luck
        (Estimate(0.00, 0.00, 0.00, 10, 0.1), "not distinguishable from chance"),  # 1 run in 3 by luck
        (Estimate(1.0, float("nan"), float("nan"), 1, 0.5), "not to be told from chance by a single example"),
    ],
)
def test_words_about_chance_follow_interval_and_luck(estimate, words):
    assert estimate.against_chance() == words
    with pytest.raises(GnaError, match="no chance level"):
        Estimate(0.2, 0.1, 0.3, 50).against_chance()


@pytest.mark.parametrize("n", [6, 20, 100])
def test_guessing_is_rarely_called_clear(n):
    """A bootstrap interval alone calls one guessing run in four clear at n = 6."""
    rng = np.random.default_rng(0)
    runs = rng.random((400, n)) < 0.25
    verdicts = [bootstrap(run, chance=0.25, n_resamples=400).against_chance() for run in runs]
    assert sum("clearly" in verdict for verdict in verdicts) / len(verdicts) < 0.06


def test_luck_is_the_exact_binomial():
    assert _at_least(3, 3, 0.5) == pytest.approx(0.125)
    assert _at_least(0, 40, 0.3) == pytest.approx(1)
    drawn = np.random.default_rng(1).binomial(30, 0.2, 200_000)
    assert _at_least(10, 30, 0.2) == pytest.approx((drawn >= 10).mean(), abs=0.003)


def test_row_holds_every_number():
    assert Estimate(0.6, 0.5, 0.7, 20, 0.1).row() == {
        "value": 0.6,
        "low": 0.5,
        "high": 0.7,
        "n": 20,
        "chance": 0.1,
    }


@pytest.mark.parametrize("n", [1, 2, 40])
def test_many_rows_get_what_each_gets_alone(n, monkeypatch):
    data = np.random.default_rng(1).normal(size=(7, n))
    data[3] = 0.1  # equal values give an interval without width, without rounding
    monkeypatch.setattr("gna_utils.stats._BLOCK", 3 * 500)  # three rows at a time
    found = np.transpose(bootstrap_each(data, n_resamples=500, seed=4))
    for row, values in zip(data, found):
        alone = bootstrap(row, n_resamples=500, seed=4)
        np.testing.assert_allclose(values, [alone.value, alone.low, alone.high], rtol=1e-12)
    assert found[3, 0] == 0.1
