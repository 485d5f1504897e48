"""Scores of attention maps, and of transfer matrices made comparable with them.

:func:`read` runs inside a trace, so it uses torch only; :func:`probe` says beforehand, in tensors, where the
marked tokens of a batch are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import GnaError
from ..tasks import Encoded

# every score, and the measurements that it consists of, in the order in which `read` returns them
SCORES = {
    "gather": ("gather", "gather_mass"),
    "aggregate": ("aggregate", "aggregate_argmax", "aggregate_argmax_all"),
    "retrieval": ("retrieval",),
    "induction": ("induction",),
}
TIE = 1e-6  # shares this close count as equal: it is what batching may move them


def row_shares(T: Tensor) -> Tensor:
    """Each position's share of what a row of ``T`` takes in: ``|T_ij| / sum_j |T_ij|``.

    >>> row_shares(torch.tensor([[0.0, 0.0], [-1.0, 3.0]]))
    tensor([[0.0000, 0.0000],
            [0.2500, 0.7500]])

    The one normalisation with which this package compares the transfer matrices of scan heads, whose rows
    are signed and have any sum, with attention maps, whose rows are shares already. A negative entry counts
    as much as a positive one, and the size of a whole row is lost. A row of zeros stays a row of zeros.
    """
    size = T.abs()
    total = size.sum(-1, keepdim=True)
    return size / total.masked_fill(total == 0, 1.0)


def map_scores(
    maps: Tensor, rows: Sequence[Encoded], scores: str | Iterable[str] = "gather"
) -> dict[str, tuple[Tensor, Tensor]]:
    """Scores of maps that are at hand, each with the value that chance gives: ``{name: (value, chance)}``.

    >>> rows = encode(examples, model.tokenizer)
    >>> value, chance = map_scores(transfer_matrix(model, rows, "L17H3"), rows, "gather")["gather"]

    ``maps`` is ``(batch, head, L, L)``, nonnegative, with rows that sum to at most 1: attention maps, or
    :func:`row_shares` of transfer matrices. All results are ``(batch, head)``. What the scores mean and what
    they raise: :func:`~gna_utils.patterns.pattern_scores`.
    """
    scores = chosen(scores)
    found = read(maps, probe(rows, maps.shape[-1], scores))
    names = [name for score in scores for name in SCORES[score]]
    return {name: (value, chance) for name, (value, chance) in zip(names, found)}


def chosen(scores: str | Iterable[str]) -> tuple[str, ...]:
    """The scores asked for, in the order of :data:`SCORES`."""
    asked = {scores} if isinstance(scores, str) else set(scores)
    unknown = sorted(map(str, asked - set(SCORES)))
    if unknown or not asked:
        raise GnaError(f"scores={', '.join(unknown) or 'none'} is not possible: choose {', '.join(SCORES)}.")
    return tuple(score for score in SCORES if score in asked)


def require_marks(rows: Sequence[Encoded], scores: Iterable[str]) -> None:
    """Refuse examples that do not mark what a score looks at."""
    for score in scores:
        for i, row in enumerate(rows):
            missing = _missing(row, score)
            if missing:
                raise GnaError(f"example {i} has no {missing}, which the {score} score needs.")


def _missing(row: Encoded, score: str) -> str | None:
    if score in ("gather", "aggregate") and not row.segments:
        return "segments"
    if score == "gather" and not _compared(row):
        return "segment of two or more tokens inside the prompt"
    if score == "aggregate" and row.target is None:
        return "target (the segment that holds the answer)"
    wanted = {"retrieval": ("value",), "induction": ("first", "second")}.get(score, ())
    missing = [name for name in wanted if name not in row.spans]
    if not missing:
        return None
    hint = " (use gna_utils.patterns.repeated_tokens)" if score == "induction" else ""
    return f"span {' and '.join(map(repr, missing))}{hint}"


def probe(rows: Sequence[Encoded], length: int, scores: Iterable[str]) -> dict[str, Tensor]:
    """Where the maps of a batch, padded to ``length``, are read: weights of entries, and marked positions."""
    require_marks(rows, scores)
    found = {}
    if "gather" in scores:
        pairs = [_gather_weights(row, length) for row in rows]
        found |= {"own": torch.stack([p[0] for p in pairs]), "near": torch.stack([p[1] for p in pairs])}
    if "aggregate" in scores:
        found["summary"] = _marked([row.summary for row in rows], length)
        found["target"] = torch.tensor([row.summary[row.target] for row in rows])
    if "retrieval" in scores:
        found["value"] = _marked([range(*row.spans["value"]) for row in rows], length)
    if "induction" in scores:
        found["repeated"] = torch.stack([_induction_weights(row, length) for row in rows])
    return found | {"query": torch.tensor([row.query for row in rows])}


def read(maps: Tensor, at: dict[str, Tensor]) -> Tensor:
    """The measurements of maps ``(batch, head, L, L)``: (measurement, value or chance, batch, head)."""
    at = {name: where.to(maps.device) for name, where in at.items()}
    found = []
    if "own" in at:
        own, near = _mass(maps, at["own"]), _mass(maps, at["near"])
        found += [(own - near, torch.zeros_like(own)), (own, near)]
    query = at["query"][:, None, None]
    row = maps.take_along_dim(query[..., None], dim=2)[:, :, 0]
    seen = torch.arange(maps.shape[-1], device=maps.device) <= query
    if "target" in at:
        target, summary = at["target"][:, None, None], at["summary"][:, None]
        number = summary.sum(-1)
        on_right = row.take_along_dim(target, dim=-1)[..., 0]
        found.append((on_right, (row * summary).sum(-1) / number))
        for among in (summary, seen):
            best = row.masked_fill(~among, -1.0)
            best = (best >= best.amax(-1, keepdim=True) - TIE) & among
            hit = best.take_along_dim(target, dim=-1)[..., 0] / best.sum(-1)
            found.append((hit, (1 / number).expand_as(hit)))
    if "value" in at:
        on_value = (row * at["value"][:, None]).sum(-1)
        found.append((on_value, (at["value"][:, None].sum(-1) / seen.sum(-1)).expand_as(on_value)))
    if "repeated" in at:
        after = _mass(maps, at["repeated"])
        share = 1 / torch.arange(1, maps.shape[-1] + 1, device=maps.device)
        found.append((after, (at["repeated"].sum(-1) @ share)[:, None].expand_as(after)))
    return torch.stack([torch.stack(pair) for pair in found])


def _mass(maps: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("bhij,bij->bh", maps, weights)


def _marked(places: Sequence[Iterable[int]], length: int) -> Tensor:
    marked = torch.zeros(len(places), length, dtype=torch.bool)
    for line, found in zip(marked, places):
        line[list(found)] = True
    return marked


def _compared(row: Encoded) -> list[tuple[int, int, list[int]]]:
    """The segments that a Gather score can be read from, each with the positions it is compared with.

    These come in pairs, as far before the summary token as after it, so that what only changes slowly along
    the prompt cancels. They are less than a segment away, end no segment, and look back over as many tokens
    without reaching the first one of the prompt, on which many heads rest.
    """
    summary, found = set(row.summary), []
    for start, stop in row.segments:
        last, size = stop - 1, stop - start
        reach = min(size - 1, start - 1, len(row.input_ids) - 1 - last)
        pairs = [(last - k, last + k) for k in range(1, reach + 1) if not {last - k, last + k} & summary]
        if pairs:
            found.append((start, stop, [i for pair in pairs for i in pair]))
    return found


def _gather_weights(row: Encoded, length: int) -> tuple[Tensor, Tensor]:
    """Weights whose sum with a map is the mass on own segments, and on the same offsets elsewhere."""
    own, near = torch.zeros(length, length), torch.zeros(length, length)
    segments = _compared(row)
    for start, stop, others in segments:
        own[stop - 1, start:stop] += 1 / len(segments)
        for i in others:
            near[i, i + 1 - stop + start : i + 1] += 1 / len(others) / len(segments)
    return own, near


def _induction_weights(row: Encoded, length: int) -> Tensor:
    (first, _), (second, stop) = row.spans["first"], row.spans["second"]
    weights = torch.zeros(length, length)
    for k in range(stop - second):
        weights[second + k, first + k + 1] = 1 / (stop - second)
    return weights
