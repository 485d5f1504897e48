"""How well pattern scores agree with causal drops: rank correlation and precision at k."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ..errors import GnaError
from ..stats import N_RESAMPLES, TAIL
from ..tasks.encoding import whole

_BLOCK = 2_000_000  # numbers of one array of resampled heads
_SWEEP = ("model", "task", "ablation", "positions", "metric")


def agreement(
    scores: pd.DataFrame, sweep: pd.DataFrame, k: int = 10, *, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """Whether the heads with the highest pattern scores are those whose ablation costs most.

    >>> agreement(pattern_scores(model, examples), sweep_frame, k=10)

    ``scores`` is a frame of :func:`~gna_utils.patterns.pattern_scores` (columns ``layer, head, score,
    value``), ``sweep`` one with a row per head and metric (``layer, head, metric, drop``). Heads are compared
    where both frames have them. Every score meets every metric, apart for each ``model, task, ablation,
    positions`` of the sweep. Two statistics:

    - ``spearman``: rank correlation of score and drop over all heads, ties at their mean rank; chance 0. NaN
      where all scores or all drops are equal, because nothing is ranked then.
    - ``precision_at_k``: the share of the k highest scores among the k largest drops; chance k / n. Heads
      that tie for the last places fill them in equal parts.

    Returns ``score, model, task, ablation, positions, metric, statistic, k, value, low, high, n, chance``,
    with 95 % bootstrap intervals over the ``n`` heads: they say how far the agreement hangs on single heads,
    not how it varies between prompts. Raises :class:`GnaError` when columns are missing, a head comes twice,
    or the frames share no more than k heads.
    """
    whole("k", k, 1)
    _require(scores, "scores", ("layer", "head", "score", "value"))
    _require(sweep, "sweep", ("layer", "head", "metric", "drop"))
    sweep = sweep[sweep["head"].notna()]
    rows = []
    for name, mine in scores.groupby("score", sort=False):
        for labels, drops in _groups(sweep, [column for column in _SWEEP if column in sweep]):
            x, y = _paired(mine, drops, f"{name} and {labels['metric']}")
            if len(x) <= k:
                raise GnaError(
                    f"precision at {k} needs more than {k} heads, but the two frames share {len(x)}."
                )
            for found in _statistics(x, y, k, n_resamples, seed):
                rows.append({"score": name, **labels, **found})
    if not rows:
        raise GnaError("there is nothing to compare: one of the two frames has no rows for single heads.")
    return pd.DataFrame(rows)


def _require(frame: pd.DataFrame, name: str, columns: tuple[str, ...]) -> None:
    missing = [column for column in columns if column not in frame]
    if missing:
        raise GnaError(f"the {name} frame has no column {', '.join(missing)}: it takes {', '.join(columns)}.")


def _groups(frame: pd.DataFrame, columns: list[str]) -> Iterator[tuple[dict, pd.DataFrame]]:
    for values, part in frame.groupby(columns, sort=False, dropna=False):
        yield dict(zip(columns, values)), part


def _paired(scores: pd.DataFrame, drops: pd.DataFrame, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores and drops of the heads that both frames have."""
    keys = ["layer", "head"] + [c for c in ("model", "mixer") if c in scores and c in drops]
    for frame in (scores, drops):
        twice = frame[frame.duplicated(keys)]
        if len(twice):
            layer, head = twice.iloc[0][["layer", "head"]]
            raise GnaError(
                f"L{layer}H{head} comes twice for {what}: give frames with one task, seed and setting, or "
                "choose rows first."
            )
    both = scores[[*keys, "value"]].merge(drops[[*keys, "drop"]], on=keys)
    return both["value"].to_numpy(float), both["drop"].to_numpy(float)


def _statistics(x: np.ndarray, y: np.ndarray, k: int, n_resamples: int, seed: int) -> Iterator[dict]:
    """Both statistics with their intervals: heads are drawn again and again, as often as there are heads."""
    n = len(x)
    once = np.ones((1, n))
    rng = np.random.default_rng(seed)
    step = max(1, _BLOCK // n)
    sizes = [min(step, n_resamples - done) for done in range(0, n_resamples, step)]
    resampled: list[tuple[np.ndarray, np.ndarray]] = []
    for size in sizes:
        drawn = rng.multinomial(n, np.full(n, 1 / n), size=size)
        resampled.append((spearman(x, y, drawn), precision(x, y, drawn, k)))
    values = {"spearman": (spearman(x, y, once), 0.0), "precision_at_k": (precision(x, y, once, k), k / n)}
    for (name, (value, chance)), drawn in zip(values.items(), zip(*resampled)):
        drawn = np.concatenate(drawn)
        drawn = drawn[~np.isnan(drawn)]  # a resample of equal heads ranks nothing
        low, high = np.quantile(drawn, [TAIL, 1 - TAIL]) if len(drawn) else (np.nan, np.nan)
        yield {
            "statistic": name,
            "k": k,
            "value": float(value[0]),
            "low": float(low),
            "high": float(high),
            "n": n,
            "chance": chance,
        }


def spearman(x: np.ndarray, y: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Rank correlation in each resample; ``drawn`` (resample, head) says how often a head is in it."""
    total = drawn.sum(1, keepdims=True)
    left, right = (_ranks(values, drawn) - (total + 1) / 2 for values in (x, y))
    covariance = (drawn * left * right).sum(1)
    spread = np.sqrt((drawn * left**2).sum(1) * (drawn * right**2).sum(1))
    return np.divide(covariance, spread, out=np.full(len(drawn), np.nan), where=spread > 0)


def precision(x: np.ndarray, y: np.ndarray, drawn: np.ndarray, k: int) -> np.ndarray:
    """The share of the k highest ``x`` among the k highest ``y`` in each resample."""
    return (drawn * _places(x, drawn, k) * _places(y, drawn, k)).sum(1) / k


def _ranks(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    below, equal = _counts(values, drawn)
    return below + (equal + 1) / 2


def _places(values: np.ndarray, drawn: np.ndarray, k: int) -> np.ndarray:
    """How much of a place among the k highest each head has: 1, 0, or a part where heads tie for the last."""
    above, equal = _counts(-values, drawn)
    return np.clip(k - above, 0, equal) / np.maximum(equal, 1)


def _counts(values: np.ndarray, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many heads of each resample have a smaller value than each head, and how many the same."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    edges = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    equal = np.add.reduceat(drawn[:, order], edges, axis=1)
    below = equal.cumsum(1) - equal
    return below[:, group], equal[:, group]
