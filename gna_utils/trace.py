"""Change what a model does while it runs: remove heads, rows of attention maps or layers, or patch heads.

Every context is an nnsight edit of the model: all functions of this package, and the reader's own
``model.trace`` and ``model.generate``, see the changed model inside it, and the plain one after it. With
``remote=True`` the edit travels with the request.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor

from .errors import GnaError
from .forward import encode_prompts, forward, require_eval
from .heads import Head, parse_heads
from .interventions import applied, paused
from .mixers.table import KINDS as MIXERS
from .mixers.table import LayerTable
from .mixers.table import layers as table_of
from .sites import Site, chunks, grouped, positions_map, read, sites_of
from .tasks.encoding import whole

KINDS = ("zero", "mean", "resample")
POSITIONS = ("all", "query", "summary", "key", "value")


@contextmanager
def ablate(
    model,
    heads,
    kind: str = "zero",
    positions: str | Tensor = "all",
    where: str = "out_proj",
    *,
    reference=None,
    seed: int = 0,
    mixer: str | None = None,
    remote: bool | str = False,
) -> Iterator[object]:
    """Replace the contribution of heads as long as the context is open.

    >>> with ablate(model, "L17H24, L16H22"):
    ...     ablated = score(model, examples)
    >>> with ablate(model, "L17H24", kind="mean", reference=other_examples, positions="query"):
    ...     logits = forward(model, ids, mask)

    What is replaced is the head's slice of the *input* of the output projection, so ``zero`` equals zeroing
    the head's columns of that projection (as the paper does; a bias stays). ``where="scan"`` replaces the
    output of the scan instead, before the gated norm, through which the other heads of the layer are
    rescaled.

    - ``zero``: nothing is left of the head.
    - ``mean``: its mean over the marked positions of the ``reference`` prompts (over all their tokens for
      ``"all"`` and for a map), one vector for every position.
    - ``resample``: its values in another prompt of ``reference``; the k-th marked position takes the donor's
      k-th, or its last. Which prompt is drawn from ``seed`` and the tokens of the whole prompt, whatever the
      batch; so another last token may bring another donor, and change logits before it.

    ``positions``: ``"all"``; the ``"query"`` (the last token of a prompt); the ``"summary"`` tokens of its
    segments; the ``"key"`` or ``"value"`` asked for; or a map, a BoolTensor (batch, length) or (length,).
    Named positions lie in the prompt: what is generated after it is left alone, unless ``"all"``. The order
    of heads does not matter, and contexts nest. ``mixer`` names the kind of mixer where a layer holds two.
    The reference runs on the plain model, on the server with ``remote``.

    Raises :class:`GnaError` for a head that does not exist, an ambiguous layer, a map of the wrong shape,
    segment positions of plain texts, a missing reference, and a run that would go around the intervention.
    Source: zeroing as in the notebook of the Gather-and-Aggregate paper; mean and resample as in causal
    scrubbing.
    """
    _choice("kind", kind, KINDS)
    _choice("where", where, ("out_proj", "scan"))
    positions = _checked(positions)
    require_eval(model)
    found = sites_of(table_of(model), parse_heads(heads), mixer, where)
    values = {} if kind == "zero" else replacements(model, found, kind, positions, reference, seed, remote)
    with _applied(model, found, {"kind": kind, "positions": positions}, values, f"ablate({_names(found)})"):
        yield model


@contextmanager
def keep_only(
    model, heads, layers: Iterable[int] | None = None, *, mixer: str | None = None
) -> Iterator[object]:
    """Zero every head except ``heads``: in the layers given, else in the whole model.

    >>> with keep_only(model, "L16H22, L17H24", [16, 17]):
    ...     minimal = score(model, examples)

    ``mixer`` limits it to one kind of mixer, for example the attention heads of a hybrid. An empty list keeps
    none. Ablation as :func:`ablate` with ``kind="zero"``. Raises :class:`GnaError` for heads that do not
    exist.
    """
    require_eval(model)
    table = table_of(model)
    chosen = range(table.n_layers) if layers is None else _layers(table, layers)
    if mixer is not None:
        _choice("mixer", mixer, MIXERS)
    kept = {(site.mixer, n) for site in sites_of(table, _heads(heads), mixer) for n in site.heads}
    rest = [
        Site(info, others, f"{info.path}.{info.out_proj}")
        for info in table
        if info.layer in chosen and info.n_heads and mixer in (None, info.kind)
        if (others := tuple(n for n in range(info.n_heads) if (info, n) not in kept))
    ]
    with _applied(model, rest, {"kind": "zero", "positions": "all"}, {}, "keep_only(...)"):
        yield model


@contextmanager
def mask_rows(model, heads=None, positions: str | Tensor = "query") -> Iterator[object]:
    """Zero rows of attention maps: at the chosen positions, softmax heads read nothing.

    >>> with mask_rows(model, positions="summary"):          # all attention heads of a hybrid
    ...     blocked = score(model, examples)

    ``heads`` are attention heads, by default all of the model. A row of zeros gives a head output of exactly
    0, unlike scores of zero, which would average over everything, the future included. ``positions`` and
    errors as in :func:`ablate`. Source: the paper's experiment on Zamba2 (delegation to attention).
    """
    positions = _checked(positions)
    require_eval(model)
    table = table_of(model)
    if heads is None:
        attention = [info for info in table if info.kind == "attention"]
        if not attention:
            kinds = sorted({info.kind for info in table})
            raise GnaError(f"{table.name} has no attention map to mask: its layers are {', '.join(kinds)}.")
        chosen = [Head(info.layer, n) for info in attention for n in range(info.n_heads)]
    else:
        chosen = parse_heads(heads)
    found = sites_of(table, chosen, "attention")
    with _applied(model, found, {"kind": "zero", "positions": positions}, {}, f"mask_rows({_names(found)})"):
        yield model


@contextmanager
def drop_layers(model, layers: int | Iterable[int]) -> Iterator[object]:
    """Take layers out: the residual stream passes them unchanged.

    >>> with drop_layers(model, [16]):
    ...     without = score(model, examples)

    A dropped layer still runs, so that caches stay in step, and its output is discarded: this costs the time
    of the whole model. Raises :class:`GnaError` for layers that do not exist.
    """
    require_eval(model)
    table = table_of(model)
    chosen = _layers(table, layers)
    steps = [{"action": "bypass", "path": table.layer_path(layer)} for layer in chosen]
    with applied(model, [steps], f"drop_layers({chosen})"):
        yield model


@contextmanager
def keep_layers(model, n: int) -> Iterator[object]:
    """Keep the first ``n`` layers and drop the rest; the final norm and the output projection stay.

    >>> with keep_layers(model, 18):                          # layers 0 to 17
    ...     pruned = score(model, examples)

    Raises :class:`GnaError` unless ``1 <= n <=`` the number of layers.
    """
    require_eval(model)
    total = table_of(model).n_layers
    if not isinstance(n, SupportsIndex) or not 1 <= n <= total:
        raise GnaError(f"{n!r} layers cannot be kept of {total}: give a number from 1 to {total}.")
    with drop_layers(model, range(n, total)) if n < total else nullcontext():
        yield model


@torch.no_grad()
def patch(
    model,
    heads,
    prompts,
    donors,
    positions: str | Tensor | tuple[Tensor, Tensor] = "value",
    *,
    mixer: str | None = None,
    remote: bool | str = False,
) -> Tensor:
    """Logits of prompts while chosen heads put out what they put out in donor prompts.

    >>> swapped = patch(model, "L17H24", examples, other_examples, positions="summary")
    >>> (swapped - forward(model, ids, mask)).abs().max()     # > 0 only if the head carries what differs

    At the marked positions, the k-th of a prompt takes the donor's k-th. ``positions`` as in :func:`ablate`,
    for prompts and donors alike; a pair of maps marks them separately. Returns float32 (batch, vocabulary)
    after the last token of each prompt. Active contexts apply to both.

    Raises :class:`GnaError` when the numbers of prompts or of marked positions differ, naming the prompt.
    """
    require_eval(model)
    pair = positions if isinstance(positions, tuple) else (positions, positions)
    if len(pair) != 2:
        raise GnaError(f"positions holds {len(pair)} maps: give one, or a pair for prompts and donors.")
    here, there = map(_checked, pair)
    found = sites_of(table_of(model), parse_heads(heads), mixer)
    ids, mask, rows = encode_prompts(model, prompts)
    given = read(model, found, donors, there, remote)
    counts = positions_map(here, ids, mask, rows).sum(1)
    _check_donors(counts, given.counts)
    values = [given.per_prompt(i) for i in range(len(found))]
    logits, start = [], 0
    for part, part_mask, part_rows in chunks(ids, mask, rows):
        stop = start + len(part)
        where = positions_map(_part(here, start, stop, part), part, part_mask, part_rows)
        spread = {site: {"value": _spread(v[start:stop], where)} for site, v in zip(found, values)}
        with _applied(model, found, {"kind": "given", "positions": where}, spread, f"patch({_names(found)})"):
            logits.append(forward(model, part, part_mask, rows=part_rows, remote=remote))
        start = stop
    return torch.cat(logits)


def _applied(model, sites: list[Site], what: dict, values: dict[Site, dict], label: str):
    """The context for steps that replace slices; ``values`` holds what differs between sites."""
    groups = [
        [
            {"action": "replace", "path": site.path, "columns": site.columns, **what, **values.get(site, {})}
            for site in group
        ]
        for group in grouped(sites)
    ]
    return applied(model, groups, label)


def replacements(
    model, sites: list[Site], kind: str, positions, prompts, seed: int, remote
) -> dict[Site, dict]:
    """What ``mean`` and ``resample`` put in place of a head, from the reference prompts."""
    if prompts is None:
        raise GnaError(f"kind='{kind}' needs reference=..., the prompts that the replacement comes from.")
    if kind == "resample":
        whole("seed", seed, 0)
    with paused(model):
        found = read(model, sites, prompts, "all" if isinstance(positions, Tensor) else positions, remote)
    if kind == "mean":
        return {site: {"value": values.float().mean(0)} for site, values in zip(sites, found.values)}
    if len(found.counts) < 2:
        raise GnaError("kind='resample' needs at least two reference prompts: one may be the prompt itself.")
    shared = {"counts": found.counts, "names": found.names, "seed": seed}
    return {site: {"value": found.per_prompt(i), **shared} for i, site in enumerate(sites)}


def _spread(values: Tensor, where: Tensor) -> Tensor:
    """Lay the donor's values (prompt, k, columns) out over the marked positions of (batch, length)."""
    laid = torch.zeros(*where.shape, values.shape[-1], dtype=values.dtype)
    kept = torch.arange(values.shape[1]) < where.sum(1, keepdim=True)
    laid[where] = values[kept]
    return laid


def _part(positions, start: int, stop: int, ids: Tensor):
    """The part of a map that belongs to some rows of the batch."""
    if not isinstance(positions, Tensor):
        return positions
    return positions[..., : ids.shape[1]] if positions.ndim == 1 else positions[start:stop, : ids.shape[1]]


def _check_donors(counts: Tensor, donors: Tensor) -> None:
    if len(counts) != len(donors):
        raise GnaError(
            f"{len(counts)} prompts and {len(donors)} donors were given: each prompt needs one donor."
        )
    for i, (own, other) in enumerate(zip(counts.tolist(), donors.tolist())):
        if own != other or not own:
            raise GnaError(
                f"prompt {i} has {own} marked positions and its donor {other}: both need the same number, "
                "at least 1."
            )


def _checked(positions) -> str | Tensor:
    if isinstance(positions, np.ndarray) and positions.dtype.kind in "biuf":
        positions = torch.from_numpy(positions)
    if isinstance(positions, Tensor):
        if positions.dtype != torch.bool or positions.ndim not in (1, 2):
            raise GnaError(
                f"positions is a map of shape {tuple(positions.shape)} and type {positions.dtype}: give a "
                "BoolTensor (batch, length) or (length,)."
            )
        return positions
    _choice("positions", positions, POSITIONS, " or a BoolTensor (batch, length)")
    return positions


def _choice(name: str, value, possible: tuple[str, ...], more: str = "") -> None:
    if not isinstance(value, str) or value not in possible:
        raise GnaError(f"{name}={value!r} is not possible: choose {', '.join(map(repr, possible))}{more}.")


def _layers(table: LayerTable, chosen: int | Iterable[int]) -> list[int]:
    chosen = list(chosen) if isinstance(chosen, Iterable) else [chosen]
    if not chosen:
        raise GnaError(f"no layer was given: {table.name} has layers 0 to {table.n_layers - 1}.")
    for layer in chosen:
        table.layer_path(layer)
    return sorted({operator.index(layer) for layer in chosen})


def _heads(heads) -> list[Head]:
    return [] if isinstance(heads, (list, tuple)) and not len(heads) else parse_heads(heads)


def _names(sites: list[Site]) -> str:
    names = [str(Head(site.mixer.layer, n)) for site in sites for n in site.heads]
    return ", ".join(names[:4]) + (f", ... {len(names)} heads" if len(names) > 4 else "")
