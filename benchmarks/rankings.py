"""Cheap rankings of heads by the harm of their removal, which bench_sweeps compares with the exact one.

Each function takes a model, examples and the number of heads to be found, and returns a score per head (a
Series by name, higher is more harmful). They know nothing of the exact drops.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch

from gna_utils import layers, pattern_scores, sweep
from gna_utils.forward import tokens
from gna_utils.scoring import encoded_of
from gna_utils.sweeps.units import units_of

FEW = 8  # examples for rankings that need gradients


def drops(found) -> pd.Series:
    """Mean drop of the answer's log-probability, on whatever examples were measured."""
    rows = found.examples[found.examples["metric"] == "logprob"]
    return (rows["baseline"] - rows["value"]).groupby(rows["unit"]).mean()


def rounds(model, examples, k: int) -> pd.Series:
    """What ``mode="screen"`` does: fewer heads and more examples, round by round."""
    found = sweep(model, examples, mode="screen", verify=k, progress=False)
    scores = drops(found)
    verified = found.frame["unit"].unique()
    return scores.where(scores.index.isin(verified), -np.inf)


def few_examples(model, examples, k: int) -> pd.Series:
    """Exact drops, on the first examples only."""
    return drops(sweep(model, examples[:FEW], progress=False))


def query(model, examples, k: int) -> pd.Series:
    """Drops by removal at the query position only."""
    return drops(sweep(model, examples, mode="query", progress=False))


def query_and_gather(model, examples, k: int) -> pd.Series:
    """Half the places for heads that act at the query, half for Gather heads in the layers below them."""
    by_query = query(model, examples, k).sort_values(ascending=False)
    frame = pattern_scores(model, examples[:FEW])
    gather = frame[frame["score"] == "gather"].assign(unit=lambda f: _names(f["layer"], f["head"]))
    top = by_query.index[: k // 2]
    below = gather["layer"] < max(int(name[1:].split("H")[0]) for name in top)
    candidates = gather[below & ~gather["unit"].isin(top)].sort_values("value", ascending=False)["unit"]
    order = [*top, *candidates[: k - k // 2]]
    return pd.Series(np.arange(len(order), 0, -1.0), order).reindex(by_query.index, fill_value=0.0)


def layer_then_head(model, examples, k: int) -> pd.Series:
    """Drops of whole layers on few examples, then of the heads of the most harmful third of the layers."""
    by_layer = drops(sweep(model, examples[:FEW], units="layers", progress=False))
    best = {int(name[1:]) for name in by_layer.nlargest(max(1, len(by_layer) // 3)).index}
    heads = units_of(layers(model), "heads", None)
    chosen = [unit.name for unit in heads if unit.start in best]
    found = drops(sweep(model, examples[:FEW], units=chosen, progress=False))
    return found.reindex([unit.name for unit in heads], fill_value=-np.inf)


def group_testing(model, examples, k: int) -> pd.Series:
    """Drops of random groups of heads on few examples, taken apart by ridge regression."""
    names = [unit.name for unit in units_of(layers(model), "heads", None)]
    rng = np.random.default_rng(0)
    member = rng.random((max(32, len(names) // 3), len(names))) < 4 / len(names)
    member = member[member.any(1)]
    groups = {f"group {i}": [names[n] for n in np.flatnonzero(row)] for i, row in enumerate(member)}
    found = drops(sweep(model, examples[:FEW], units=groups, progress=False))[list(groups)].to_numpy()
    design = member.astype(float)
    return pd.Series(np.linalg.solve(design.T @ design + 0.1 * np.eye(len(names)), design.T @ found), names)


def attribution(model, examples, k: int) -> pd.Series:
    """Attribution patching: the first-order estimate of each drop, at the unchanged model."""
    return _gradients(model, examples[:FEW], [(None, 1.0)])


def path_of_all(model, examples, k: int) -> pd.Series:
    """Integrated gradients while all heads fade together."""
    return _gradients(model, examples[:FEW], [(None, (i + 0.5) / 5) for i in range(5)])


def path_of_layers(model, examples, k: int) -> pd.Series:
    """Integrated gradients while the heads of one layer fade together, layer by layer."""
    numbers = sorted({info.layer for info in layers(model) if info.n_heads})
    return _gradients(model, examples[:FEW], [(n, at) for n in numbers for at in (0.25, 0.75)])


RANKINGS: dict[str, Callable] = {
    "rounds": rounds,
    "few examples": few_examples,
    "query": query,
    "query and gather": query_and_gather,
    "layer then head": layer_then_head,
    "group testing": group_testing,
    "attribution patching": attribution,
    "path of all heads": path_of_all,
    "path of each layer": path_of_layers,
}


def _gradients(model, examples, points: list[tuple[int | None, float]]) -> pd.Series:
    """Mean derivative of the answer's log-probability by a gate on each head.

    A point fades the gates of one layer (None: all) to a value. The derivative of a gate at 1 is the
    first-order drop of its head; its mean along a path from 1 to 0 is the drop along that path.
    """
    rows = encoded_of(model, examples)
    ids, mask = tokens(model, rows)
    answers = torch.tensor([row.candidate_ids[row.answer][0] for row in rows])
    mixers = [info for info in layers(model) if info.n_heads]
    total = {info.path: torch.zeros(info.n_heads) for info in mixers}
    count = {info.path: 0 for info in mixers}
    for layer, value in points:
        gates, handles = {}, []
        for info in mixers:
            faded = layer in (None, info.layer)
            gate = torch.full((info.n_heads,), value if faded else 1.0, requires_grad=faded)
            part = getattr(model._module.get_submodule(info.path), info.out_proj)
            gates[info.path] = gate
            handles.append(part.register_forward_pre_hook(_gated(gate, info.head_dim)))
        try:
            logits = model._module(ids, attention_mask=mask, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        last = logits[torch.arange(len(ids)), mask.sum(1) - 1].log_softmax(-1)
        last.gather(1, answers[:, None]).mean().backward()
        for path, gate in gates.items():
            if gate.grad is not None:
                total[path] += gate.grad
                count[path] += 1
    names = [unit.name for unit in units_of(layers(model), "heads", None)]
    return pd.Series(torch.cat([total[info.path] / count[info.path] for info in mixers]).numpy(), names)


def _gated(gate: torch.Tensor, width: int) -> Callable:
    return lambda module, args: (args[0] * gate.repeat_interleave(width), *args[1:])


def _names(numbers: pd.Series, heads: pd.Series) -> list[str]:
    return [f"L{layer}H{head}" for layer, head in zip(numbers, heads)]
