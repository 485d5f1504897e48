"""Estimates with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .errors import GnaError

N_RESAMPLES = 5000
TAIL = 0.025
_BLOCK = 4_000_000  # numbers drawn at a time, which keeps memory near 64 MB for any n


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` examples with its interval, and the value that guessing would give.

    >>> print(Estimate(0.62, 0.57, 0.67, 300, chance=0.1))
    0.62 [0.57, 0.67], n = 300, chance 0.10

    ``low`` and ``high`` are NaN where one example alone was measured: nothing is known about the spread.
    """

    value: float
    low: float
    high: float
    n: int
    chance: float | None = None

    def __str__(self) -> str:
        interval = "no interval" if np.isnan(self.low) else f"[{self.low:.2f}, {self.high:.2f}]"
        chance = "" if self.chance is None else f", chance {self.chance:.2f}"
        return f"{self.value:.2f} {interval}, n = {self.n}{chance}"

    def row(self) -> dict[str, float | int | None]:
        """The numbers as one row of a frame: ``value, low, high, n, chance``."""
        return asdict(self)

    def against_chance(self) -> str:
        """What the data say about guessing, as words that fit into a sentence.

        >>> Estimate(0.62, 0.57, 0.67, 300, chance=0.1).against_chance()
        'clearly above chance'
        >>> Estimate(1.0, 1.0, 1.0, 2, chance=0.33).against_chance()
        'not distinguishable from chance'

        *Clearly* takes two things: the interval leaves out chance, and guessing would go as far in at most
        2.5 % of such runs (exact binomial). The second guards small samples, whose bootstrap intervals are
        too narrow. Raises :class:`~gna_utils.errors.GnaError` when no chance level is known.
        """
        if self.chance is None:
            raise GnaError("this estimate has no chance level to compare with: make it with chance=...")
        if np.isnan(self.low):
            return "not to be told from chance by a single example"
        right = self.value * self.n
        if self.low > self.chance and _at_least(right, self.n, self.chance) <= TAIL:
            return "clearly above chance"
        if self.high < self.chance and _at_least(self.n - right, self.n, 1 - self.chance) <= TAIL:
            return "clearly below chance"
        return "not distinguishable from chance"


def bootstrap(
    values: Sequence[float] | np.ndarray,
    *,
    chance: float | None = None,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The mean of ``values`` with a percentile bootstrap interval over examples.

    >>> print(bootstrap([1, 1, 0, 1], chance=0.5))
    0.75 [0.25, 1.00], n = 4, chance 0.50

    The same seed gives the same interval. Equal values give an interval without width: the sample shows
    no spread, which in a small sample does not mean that there is none. Raises
    :class:`~gna_utils.errors.GnaError` on no values, on values that are not finite, and on a level
    outside (0, 1).
    """
    data = np.asarray(values, dtype=float).ravel()
    if data.size == 0:
        raise GnaError("no values were given: an estimate needs at least one example.")
    if not np.isfinite(data).all():
        raise GnaError(f"{int((~np.isfinite(data)).sum())} of {data.size} values are not finite numbers.")
    if not 0 < level < 1:
        raise GnaError(f"the level of an interval lies between 0 and 1, not at {level}.")
    mean = float(data.mean())
    if data.size == 1:
        return Estimate(mean, float("nan"), float("nan"), 1, chance)
    if np.ptp(data) == 0:  # exact, where rounding in the resampled means would not be
        return Estimate(float(data[0]), float(data[0]), float(data[0]), data.size, chance)
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(_resampled_means(data, n_resamples, seed), [tail, 100 - tail])
    return Estimate(mean, float(low), float(high), data.size, chance)


def bootstrap_each(
    values: np.ndarray, *, level: float = 0.95, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and interval of many measurements on the same examples: :func:`bootstrap` of each row, quickly.

    >>> mean, low, high = bootstrap_each(np.array([[1, 1, 0, 1], [0, 0, 0, 1]]))

    ``values`` is (measurement, example) and finite. All rows share the resamples that :func:`bootstrap` draws
    from the same seed, so the intervals are the same.
    """
    data = np.asarray(values, dtype=float)
    n = data.shape[1]
    mean = data.mean(1)
    if n == 1:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    picks = np.random.default_rng(seed).integers(n, size=(n_resamples, n))
    drawn = np.zeros((n_resamples, n))  # how often each example is in each resample
    np.add.at(drawn, (np.arange(n_resamples)[:, None], picks), 1)
    tail = 100 * (1 - level) / 2
    step = max(1, _BLOCK // n_resamples)
    blocks = [data[k : k + step] @ drawn.T / n for k in range(0, len(data), step)]
    low, high = np.concatenate([np.percentile(block, [tail, 100 - tail], axis=1) for block in blocks], axis=1)
    equal = np.ptp(data, axis=1) == 0  # exact, where rounding in the resampled means would not be
    mean = np.where(equal, data[:, 0], mean)
    return mean, np.where(equal, mean, low), np.where(equal, mean, high)


def paired_bootstrap(
    baseline: Sequence[float] | np.ndarray,
    value: Sequence[float] | np.ndarray,
    *,
    level: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The drop from ``baseline`` to ``value``, paired per example, with its interval.

    >>> print(paired_bootstrap([1, 1, 1, 0], [0, 1, 0, 0]))
    0.50 [0.00, 1.00], n = 4

    Both come from the same examples in the same order, so examples are resampled as pairs. Raises
    :class:`~gna_utils.errors.GnaError` when their numbers differ.
    """
    before, after = np.asarray(baseline, dtype=float).ravel(), np.asarray(value, dtype=float).ravel()
    if before.size != after.size:
        raise GnaError(
            f"{before.size} values cannot be paired with {after.size}: give the same examples twice."
        )
    return bootstrap(before - after, level=level, n_resamples=n_resamples, seed=seed)


def _resampled_means(data: np.ndarray, n_resamples: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    step = max(1, _BLOCK // data.size)
    blocks = [min(step, n_resamples - done) for done in range(0, n_resamples, step)]
    return np.concatenate([data[rng.integers(data.size, size=(rows, data.size))].mean(1) for rows in blocks])


def _at_least(count: float, n: int, share: float) -> float:
    """The probability that ``n`` guesses, each right with probability ``share``, give ``count`` or more."""
    if not 0 < share < 1:
        return float(share >= 1 or count <= 0)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])  # of the factorials
    k = np.arange(int(np.ceil(count - 1e-9)), n + 1)
    terms = logs[n] - logs[k] - logs[n - k] + k * np.log(share) + (n - k) * np.log1p(-share)
    return float(np.exp(terms).sum())
