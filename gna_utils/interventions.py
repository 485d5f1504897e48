"""Changes to a running model that stay in place for a while: what they do, and who is under them.

An intervention is stored as an edit of the nnsight model. Every later ``model.trace`` and ``model.generate``
replays it, here or on a server, until the context that made it ends; no weight is touched. The functions of
the first half run inside the trace, so they use torch only, and plain dictionaries describe what to do: a
server may have another version of Python, where classes of ours could not be rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from nnsight.intervention.interleaver import OutOfOrderError
from nnsight.intervention.iterator import Iterations
from torch import Tensor

from .errors import GnaError
from .remote import ship_package


def run_steps(model, steps: list[dict], marks: dict) -> None:
    """The body of every edit: carry out ``steps`` in each forward pass of a run."""
    at, finished, seen, prompt, end = None, 0, marks.get("past", 0), None, f"{model.path}.output"
    try:
        # what `tracer.iter[:]` gives; the tracer itself could not travel to a server
        for _ in Iterations()[:]:
            at, finished = None, model.interleaver.counts.get(end, 0)
            args, kwargs = model.inputs
            scene = read_scene(args, kwargs, seen)
            seen = scene["past"] + scene["length"]
            prompt = scene["prompt"] = prompt or scene
            for step in steps:
                at = step["path"]
                (bypass if step["action"] == "bypass" else replace)(model, step, scene, marks)
    except OutOfOrderError:
        # Thrown in at the end of the run. Waiting for one more pass is how this loop ends, and a pass may
        # have been stopped; but a pass that went to its end without calling a module was not changed there.
        if at is not None and model.interleaver.counts.get(end, 0) > finished:
            raise GnaError(
                f"'{at}' was not called in this forward pass, so nothing could be changed there: the model "
                "runs another path (a fused kernel, or a part of the model alone)."
            ) from None


def read_scene(args: tuple, kwargs: dict, seen: int = 0) -> dict:
    """The pass that starts: its size, tokens, the map of real ones, and how many came before.

    ``seen`` tokens of the same texts were read in earlier passes; a mask wider than the input says so too.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    first = kwargs.get("inputs_embeds") if ids is None else ids
    batch, length = first.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones(batch, length, dtype=torch.bool, device=first.device)
    known = isinstance(mask, Tensor) and mask.ndim == 2
    wider = max(mask.shape[1] - length, 0) if known else 0
    before = mask[:, :wider].sum(1) if wider else torch.full((batch,), seen, device=first.device)
    return {
        "batch": batch,
        "length": length,
        "ids": ids,
        "real": mask[:, -length:].bool() if known else None,
        "past": wider or seen,
        "before": before,
    }


def marked(positions, scene: dict, marks: dict) -> Tensor | None:
    """The (batch, length) map of positions to change, None for all of them."""
    shape = (scene["batch"], scene["length"])
    if isinstance(positions, Tensor):
        if tuple(positions.shape) in (shape, shape[1:]):
            return positions.expand(shape)
        if scene["past"]:  # tokens after the prompt that the map was made for
            return torch.zeros(shape, dtype=torch.bool)
        raise GnaError(
            f"positions is a map of shape {tuple(positions.shape)}, but this batch has {shape[0]} prompts of "
            f"{shape[1]} tokens: give {shape} or {shape[1:]}."
        )
    if positions == "all":
        return None
    if scene["past"]:  # named positions lie in the prompt; what comes after it is none of them
        return torch.zeros(shape, dtype=torch.bool)
    if positions in marks:
        return marks[positions]
    if scene["real"] is None:
        raise GnaError(f"positions='{positions}' needs an attention mask of shape {shape}.")
    if positions == "query":
        last = scene["length"] - 1 - scene["real"].flip(1).long().argmax(1)
        return torch.arange(scene["length"], device=last.device)[None] == last[:, None]
    raise GnaError(
        f"positions='{positions}' is only known for examples with marked segments, run through gna_utils "
        "(score, forward with rows=...): give a map of positions instead."
    )


def replace(model, step: dict, scene: dict, marks: dict) -> None:
    """Replace columns of a module's input: by zeros, one vector, a donor prompt, or given values."""
    site = model.get(step["path"])
    whole = site.input
    x = whole.reshape(scene["batch"], scene["length"], -1)
    columns = step["columns"].to(x.device)
    where = marked(step["positions"], scene, marks)
    if step["kind"] == "zero" and where is None:
        x = x.index_fill(-1, columns, 0)
    else:
        new = replacement(step, scene, where).to(x)
        if where is not None:
            new = torch.where(where.to(x.device)[..., None], new, x[..., columns])
        x = x.index_copy(-1, columns, new.expand(*x.shape[:2], -1))
    site.input = x.reshape(whole.shape)


def replacement(step: dict, scene: dict, where: Tensor | None) -> Tensor:
    """What stands in for a head: broadcasts to (batch, length, columns)."""
    if step["kind"] == "zero":
        return torch.zeros(1, 1, 1)
    if step["kind"] in ("mean", "given"):
        return step["value"]
    donor = donors(step, scene)
    if isinstance(step["positions"], str) and where is not None:
        rank = where.long().cumsum(1) - 1  # the k-th marked position takes the donor's k-th marked position
    else:
        rank = scene["real"].long().cumsum(1) - 1 + scene["before"][:, None]
    rank = torch.minimum(rank.cpu(), step["counts"][donor][:, None] - 1).clamp(min=0)
    return step["value"][donor[:, None], rank]


def donors(step: dict, scene: dict) -> Tensor:
    """Which reference prompt each row takes: drawn from the seed and the row's prompt, whatever the batch."""
    names = fingerprints(scene["prompt"]["ids"], scene["prompt"]["real"])
    chosen = (names * 31 + step["seed"] * 7919 + 17) % 2_147_483_629 % len(step["counts"])
    own = step["names"][chosen] == names  # the prompt itself is no other prompt
    return (chosen + own.long()) % len(step["counts"])


def fingerprints(ids: Tensor, real: Tensor) -> Tensor:
    """One number per prompt, the same wherever padding stands."""
    ids, real = ids.cpu().long(), real.cpu().long()
    place = real.cumsum(1)
    return (ids * real * (place * 1_000_003 % 998_244_353)).sum(1) % 2_147_483_629


def bypass(model, step: dict, scene: dict, marks: dict) -> None:
    """Hand a layer's input on as its output. The layer still runs: its cache must grow with the others."""
    layer = model.get(step["path"])
    hidden = layer.input
    output = layer.output
    layer.output = hidden if isinstance(output, Tensor) else (hidden, *output[1:])


# ---- outside the trace: contexts ----


@dataclass
class Active:
    """One running context: the model, its stored edits, and what they must know of the batch."""

    model: object
    label: str
    edits: list = field(default_factory=list)
    marks: dict = field(default_factory=dict)  # shared with the edits, which read it when they run
    paused: bool = False


_ACTIVE: list[Active] = []


@contextmanager
def applied(model, groups: list[list[dict]], label: str) -> Iterator[object]:
    """Keep ``groups`` of steps in place; the model must reach the steps of a group in the listed order."""
    ship_package()  # the reader's own remote traces carry the edits too
    active = Active(model, label)
    active.edits = [_store(model, steps, active.marks) for steps in groups if steps]
    guard = _guard(active, groups)
    _ACTIVE.append(active)
    try:
        yield model
    finally:
        _ACTIVE.remove(active)
        _forget(active)
        guard.remove()


def _store(model, steps: list[dict], marks: dict):
    with model.edit(inplace=True):
        run_steps(model, steps, marks)
    return model._edits[-1]


def _forget(active: Active) -> None:
    # nnsight's clear_edits would also drop the edits of the reader, some of them made inside the context
    active.model._edits = [
        edit for edit in active.model._edits if all(edit is not own for own in active.edits)
    ]


def can_stop(model) -> bool:
    """Whether a trace may end early: nnsight fails an edit of the reader that waits for a later module."""
    ours = [edit for active in _ACTIVE for edit in active.edits]
    return all(any(edit is own for own in ours) for edit in model._edits)


def _guard(active: Active, groups: list[list[dict]]):
    """Refuse runs that would silently go around the edits: plain calls of the module, traces of a part."""
    first = next((steps[0]["path"] for steps in groups if steps), None)
    watched = active.model.get(first)._module if first else torch.nn.Identity()

    def check(*_) -> None:
        running = active.model.interleaver.mediators
        if not active.paused and not all(any(one is edit for one in running) for edit in active.edits):
            raise GnaError(
                f"{active.label} is active, but this run goes around it: use model.trace(...) or "
                "model.generate(...) of the same nnsight model, or leave the context."
            )

    return watched.register_forward_pre_hook(check)


@contextmanager
def paused(model) -> Iterator[None]:
    """Run the plain model inside contexts, for reference activations."""
    mine = [active for active in _ACTIVE if active.model is model]
    edits = list(model._edits)
    for active in mine:
        _forget(active)
        active.paused = True
    try:
        yield
    finally:
        model._edits = edits
        for active in mine:
            active.paused = False


@contextmanager
def running(model, marks: dict) -> Iterator[None]:
    """Check that the active contexts are for this model, and tell them about the batch that runs now.

    ``marks`` holds maps of positions by name, and under ``"past"`` how many tokens the cache already holds.
    """
    mine = [active for active in _ACTIVE if active.model is model]
    foreign = [active for active in _ACTIVE if active.model is not model]
    if foreign and not mine:
        raise GnaError(
            f"{foreign[-1].label} is active on another model ({type(foreign[-1].model._module).__name__}): "
            "pass that model, or leave the context."
        )
    for active in mine:
        active.marks.clear()
        active.marks.update(marks)
    try:
        yield
    finally:
        for active in mine:
            active.marks.clear()
