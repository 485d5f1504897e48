"""The effect of every head, layer or group on a task: accuracy and log-probability with and without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from ..columns import COLUMNS
from ..errors import GnaError
from ..forward import encode_prompts, require_eval
from ..heads import Head
from ..mixers.table import layers
from ..models import name_of
from ..scoring import encoded_of, score
from ..stats import paired_bootstrap
from ..tasks import Encoded, Example
from ..tasks.encoding import listed, whole
from ..trace import KINDS
from .ledger import METRICS, Ledger, digest
from .measure import Ablation, Meter
from .units import Unit, units_of

MODES = ("exact", "query", "screen")
FRAME = ("unit", *COLUMNS, "n_heads")
FIRST = 4  # examples on which a screen measures every unit


@dataclass(frozen=True)
class Sweep:
    """Effects of units (heads, layers, groups).

    ``frame`` has one row per unit and metric (``accuracy``, and ``logprob`` of the answer in nats): ``unit``,
    then the columns of every table of results (:data:`gna_utils.columns.COLUMNS`), then ``n_heads``; the
    interval is a 95 % paired bootstrap over examples. ``layer`` and ``head`` are
    missing where a unit has several. ``examples`` has one row per unit, example and metric: ``unit, example,
    metric, baseline, value``. After a screen, ``frame`` holds the verified units, and ``examples`` all that
    was measured.
    """

    frame: pd.DataFrame
    examples: pd.DataFrame = field(repr=False)

    def top(self, k: int = 10, metric: str = "logprob") -> list[Head]:
        """The ``k`` heads whose removal costs most, the most harmful first.

        >>> with ablate(model, sweep(model, examples).top(5)):
        ...     without = score(model, examples)

        Raises :class:`GnaError` for another metric, and where a unit is not a single head.
        """
        rows = self.frame[self.frame["metric"] == metric].sort_values("drop", ascending=False, kind="stable")
        if rows.empty or rows["head"].isna().any():
            raise GnaError(
                f"a list of heads by {metric!r} takes a sweep over single heads, and one of the metrics "
                f"{', '.join(METRICS.values())}."
            )
        return [Head(int(row.layer), int(row.head)) for row in rows.head(k).itertuples()]


def sweep(
    model,
    examples,
    *,
    units="heads",
    mode: str = "exact",
    kind: str = "zero",
    reference=None,
    mixer: str | None = None,
    verify: int = 20,
    seed: int = 0,
    resume: str | Path | None = None,
    max_tokens: int = 4096,
    remote: bool | str = False,
    progress: bool | None = None,
) -> Sweep:
    """Remove each head in turn, and measure what is lost.

    >>> found = sweep(model, examples, mode="screen")
    >>> found.top(3)
    [L17H3, L16H2, L14H5]
    >>> sweep(model, examples, units=["L17H3", ["L17H3", "L16H2"]]).frame[["unit", "metric", "drop"]]

    The numbers are those of ``ablate`` and ``score``, only faster: a run starts at the ablated layer from the
    clean input of that layer, and heads of one layer share a batch.

    Parameters
    ----------
    examples: at least two, as :func:`~gna_utils.score` takes them.
    units: ``"heads"``; ``"layers"`` (all heads of a layer; its MLP stays); a list of heads and of groups of
        heads; or a mapping from names to groups.
    mode: ``"exact"`` removes a unit at every position. ``"query"`` removes it at the last token of the prompt
        only, which is many times faster: it finds heads that act there, such as Aggregate heads, and misses
        those that work earlier. ``"screen"`` measures all units on the first four examples, drops the less
        harmful ones, doubles the examples, and so on, until ``verify`` units are measured on all examples as
        in ``"exact"``.
    kind, reference, mixer: as in :func:`~gna_utils.ablate`; ``mixer`` limits ``"heads"`` and ``"layers"``.
    seed: of the bootstrap and of ``kind="resample"``.
    resume: a file (``.npz``) that keeps what was measured; the same call goes on from it after an
        interruption. It is written every few seconds, and never left damaged.
    max_tokens: how many padded tokens run together: bounds memory, changes no result.
    remote: as in nnsight. On a server, and while contexts such as ``ablate`` are active or the model holds
        edits of yours, units are measured one by one by ``ablate`` and ``score``, with those contexts.
    progress: show a bar; by default only on a terminal.

    Raises :class:`GnaError` for unknown heads, modes and kinds, fewer than two examples, a resume file of
    other settings, and whatever :func:`~gna_utils.score` and :func:`~gna_utils.ablate` refuse. Source of the
    screen: successive halving (arXiv:1502.07943).
    """
    _check(mode, kind, verify)
    require_eval(model)
    if kind != "zero" and reference is None:
        raise GnaError(f"kind='{kind}' needs reference=..., the prompts that the replacement comes from.")
    table = layers(model)
    chosen = units_of(table, units, mixer)
    examples = listed(examples, Example, Encoded)
    reference = list(reference) if isinstance(reference, Iterator) else reference
    encoded = encoded_of(model, examples)
    if len(encoded) < 2:
        raise GnaError(f"{len(encoded)} example was given: an interval takes at least two.")
    positions = "query" if mode == "query" else "all"
    scores = score(model, encoded, max_tokens=max_tokens, remote=remote, progress=False)
    baseline = {key: scores.frame[key].to_numpy(float) for key in METRICS}
    settings = {
        "model": name_of(model),
        "examples": digest(encoded),
        "units": digest([(unit.name, [(s.path, s.heads) for s in unit.sites]) for unit in chosen]),
        "kind": kind,
        "positions": positions,
        "seed": seed if kind == "resample" else 0,
        "reference": None if kind == "zero" else digest(encode_prompts(model, reference)[0].tolist()),
    }
    ledger = Ledger(len(chosen), baseline, settings, None if resume is None else Path(resume))
    how = Ablation(kind, positions, reference, seed, remote)
    meter = Meter(model, table, chosen, encoded, how, max_tokens)
    rounds = _rounds(len(chosen), len(encoded), verify) if mode == "screen" else [(len(chosen), len(encoded))]
    _measure(meter, ledger, rounds, progress)
    # encoded examples no longer know their task
    tasks = " and ".join(sorted({getattr(example, "task", "") for example in examples}))
    facts = {"model": settings["model"], "task": tasks, "ablation": kind, "positions": positions}
    return _result(chosen, ledger, **facts, seed=seed)


def _check(mode, kind, verify) -> None:
    for name, value, possible in (("mode", mode, MODES), ("kind", kind, KINDS)):
        if value not in possible:
            raise GnaError(f"{name}={value!r} is not possible: choose {', '.join(map(repr, possible))}.")
    whole("verify", verify, 1)


def _rounds(n_units: int, n_examples: int, verify: int) -> list[tuple[int, int]]:
    """How many units each round of a screen measures, on how many examples.

    Examples double, and units shrink by one factor, so that no round costs much more than another.
    """
    counts = [min(FIRST, n_examples)]
    while counts[-1] < n_examples:
        counts.append(min(2 * counts[-1], n_examples))
    if verify >= n_units or len(counts) == 1:
        return [(n_units, n_examples)]
    factor = (verify / n_units) ** (1 / (len(counts) - 1))
    return [(round(n_units * factor**i), count) for i, count in enumerate(counts)]


def _measure(meter: Meter, ledger: Ledger, rounds: list[tuple[int, int]], progress: bool | None) -> None:
    """Measure round by round: the most harmful units so far, on more examples."""
    kept, asked = np.array(meter.order), np.zeros_like(ledger.missing)
    done, total = 0, 0
    for n_units, n_examples in rounds:
        total, done = total + n_units * (n_examples - done), n_examples
    show = None if progress is None else not progress
    with tqdm(total=total, desc="sweep", unit="run", disable=show, mininterval=2) as bar:
        try:
            for n_units, n_examples in rounds:
                kept = _most_harmful(ledger, kept, n_units, int(asked.any(0).sum()))
                new = np.zeros_like(asked)
                new[np.ix_(kept, range(n_examples))] = True
                new &= ~asked
                asked |= new
                bar.update(int((new & ~ledger.missing).sum()))
                for cells in meter.cells(new & ledger.missing):
                    ledger.record(cells)
                    bar.update(len(cells.units) * len(cells.examples))
        finally:
            ledger.save()


def _most_harmful(ledger: Ledger, units: np.ndarray, n_units: int, n_examples: int) -> np.ndarray:
    """The units whose removal costs the answer most log-probability, on the first examples."""
    if n_units == len(units):
        return units
    losses = ledger.baseline["logprob"][:n_examples] - ledger.values["logprob"][units, :n_examples]
    return units[np.argsort(-losses.mean(1), kind="stable")[:n_units]]


def _result(units: list[Unit], ledger: Ledger, **facts) -> Sweep:
    complete = ~ledger.missing.any(1)
    rows, parts = [], []
    for u, unit in enumerate(units):
        measured = np.flatnonzero(~ledger.missing[u])
        for key, metric in METRICS.items():
            before, after = ledger.baseline[key][measured], ledger.values[key][u, measured]
            parts.append(
                {"unit": unit.name, "example": measured, "metric": metric, "baseline": before, "value": after}
            )
            if complete[u]:
                rows.append(
                    {**unit.columns(), **_effect(before, after, facts["seed"]), "metric": metric, **facts}
                )
    frame = pd.DataFrame(rows, columns=FRAME).astype({"layer": "Int64", "head": "Int64"})
    return Sweep(frame, pd.concat([pd.DataFrame(part) for part in parts], ignore_index=True))


def _effect(before: np.ndarray, after: np.ndarray, seed: int) -> dict[str, float]:
    drop = paired_bootstrap(before, after, seed=seed)
    return {
        "n": len(before),
        "baseline": before.mean(),
        "value": after.mean(),
        "drop": drop.value,
        "drop_low": drop.low,
        "drop_high": drop.high,
    }
