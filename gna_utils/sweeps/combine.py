"""Heads removed together: one after another, all but the best, and in pairs."""

from __future__ import annotations

import pandas as pd

from ..errors import GnaError
from ..forward import require_eval
from ..heads import Head, parse_heads
from ..mixers.table import layers
from ..stats import bootstrap
from .effects import Sweep, sweep


def cumulative(model, examples, heads, **options) -> Sweep:
    """Remove heads one after another, in the order given, and measure after each.

    >>> cumulative(model, examples, found.top(8)).frame[["n_heads", "metric", "value"]]

    Units are named ``first 1``, ``first 2``, ...; column ``n_heads`` counts the removed heads. ``options``
    and errors as in :func:`sweep` (not ``units``).
    """
    heads = parse_heads(heads)
    groups = {f"first {k}": heads[:k] for k in range(1, len(heads) + 1)}
    return sweep(model, examples, units=groups, **options)


def keep_top(model, examples, heads, counts=None, *, mixer: str | None = None, **options) -> Sweep:
    """Keep only the first k of ``heads``, remove every other head of the model, and measure, for each k.

    >>> keep_top(model, examples, found.top(64), counts=[4, 16, 64]).frame[["unit", "metric", "value"]]

    Units are named ``top 4``, ``top 16``, ...; column ``n_heads`` counts the removed heads. ``counts`` is by
    default 1, 2, 4, ... and the length of the list. ``mixer`` limits what is removed to one kind of mixer.
    ``options`` and errors as in :func:`sweep`; raises :class:`GnaError` also for counts that are not between
    1 and the number of heads given, and where a layer holds two mixers and none was named.
    """
    require_eval(model)
    heads = parse_heads(heads)
    if counts is None:
        counts = sorted({2**i for i in range(len(heads).bit_length())} | {len(heads)})
    wrong = [k for k in counts if not 1 <= k <= len(heads)]
    if wrong or not counts:
        raise GnaError(
            f"the top {wrong} of {len(heads)} heads cannot be kept: give counts from 1 to {len(heads)}."
        )
    table = layers(model)
    every = [Head(info.layer, n) for info in table if mixer in (None, info.kind) for n in range(info.n_heads)]
    groups = {f"top {k}": [head for head in every if head not in set(heads[:k])] for k in counts}
    return sweep(model, examples, units=groups, mixer=mixer, **options)


def pairs(model, examples, gather, aggregate, *, seed: int = 0, **options) -> pd.DataFrame:
    """Synergy of each Gather head with each Aggregate head: the pair's drop minus the sum of their own drops.

    >>> pairs(model, examples, "L16H2", "L17H3, L17H24").sort_values("synergy")

    One row per pair and metric: ``model, task, gather, aggregate, ablation, positions, n, metric, drop,
    drop_gather, drop_aggregate, synergy, synergy_low, synergy_high, seed``; the interval is a 95 % bootstrap
    over examples. Heads in one chain do each other's work useless: removing either already breaks it, so the
    synergy is negative. Heads that stand in for each other have a positive one. ``options`` and errors as in
    :func:`sweep` (not ``units``, and no screen).
    """
    both = [(g, a) for g in parse_heads(gather) for a in parse_heads(aggregate) if g != a]
    if not both or options.get("mode") == "screen":
        raise GnaError("pairs take two different heads at least, and every pair is measured: no screen.")
    names = {pair: "+".join(map(str, pair)) for pair in both}
    groups = {str(head): [head] for pair in both for head in pair} | {names[pair]: pair for pair in both}
    found = sweep(model, examples, units={k: list(v) for k, v in groups.items()}, seed=seed, **options)
    by_example = found.examples.assign(drop=lambda frame: frame["baseline"] - frame["value"])
    drops = by_example.pivot(index="example", columns=["metric", "unit"], values="drop")
    facts = found.frame[found.frame["unit"].isin(names.values())].set_index(["unit", "metric"])
    rows = []
    for (g, a), name in names.items():
        for metric in drops.columns.unique("metric"):
            one, other, together = (drops[metric][unit] for unit in (str(g), str(a), name))
            synergy = bootstrap(together - one - other, seed=seed)
            fact = facts.loc[name, metric]
            rows.append(
                {
                    **fact[["model", "task"]],
                    "gather": str(g),
                    "aggregate": str(a),
                    **fact[["ablation", "positions", "n"]],
                    "metric": metric,
                    "drop": fact["drop"],
                    "drop_gather": one.mean(),
                    "drop_aggregate": other.mean(),
                    "synergy": synergy.value,
                    "synergy_low": synergy.low,
                    "synergy_high": synergy.high,
                    "seed": seed,
                }
            )
    return pd.DataFrame(rows)
