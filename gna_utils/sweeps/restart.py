"""Run the rest of a model from one layer on, with heads replaced there: what makes sweeps fast.

A head of layer l changes nothing before that layer, so the clean run of a batch is made once, and each
ablation starts from what the clean run left at layer l: the input of the layer, and what its heads put out.
Heads of one layer are stacked in the batch. Layers are skipped by standing in for their ``forward``, so the
model itself makes masks, position codes, the final norm and the logits, whatever its family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from ..errors import GnaError
from ..forward import forward
from ..interventions import replacement
from ..mixers.table import LayerTable
from ..scoring import select
from .units import Unit


@dataclass(frozen=True)
class Layer:
    """One decoder layer, counted from 0, and what is known of its shape.

    ``projections`` maps the path of each output projection to its module. ``returns`` is the length of the
    tuple that the layer gives, None for a tensor. ``mixer`` is set where the layer has one mixer, which gives
    what its projection gives (``mixer_returns`` as above): all the rest of such a layer works on each
    position alone.
    """

    number: int
    module: nn.Module
    projections: dict[str, nn.Module]
    returns: int | None
    mixer: nn.Module | None
    mixer_returns: int | None

    @property
    def kind(self) -> tuple:
        """Layers of one kind run the same code."""
        return type(self.module), type(self.mixer), len(self.projections)

    @property
    def path(self) -> str:
        """The path of the only projection."""
        return next(iter(self.projections))


def restarts_exactly(front: Front, starts: Sequence[int]) -> bool:
    """Whether runs from layers on, with nothing replaced, give the plain logits: one layer of each kind."""
    plain = front.plain()
    # rounding grows over the layers, but a layer that is not as assumed changes logits by much more
    limit = torch.finfo(front.dtype).eps ** 0.5 * (1 + plain.abs().max())
    nothing, unchanged = Unit("nothing", ()), Replaced({"positions": "all"}, {}, front.ids, front.mask)
    one_each = sorted({front.stack[at].kind: at for at in starts}.values())
    front.read(one_each)
    return all((front.logits(at, [nothing], unchanged)[0] - plain).abs().max() <= limit for at in one_each)


def survey(model, table: LayerTable, ids: Tensor, mask: Tensor) -> list[Layer]:
    """Look at every layer during one run of the model."""
    root, found, handles = model._module, {}, []

    def note(module, args, output) -> None:
        found[module] = output

    mixers = [[info for info in table.in_layer(i) if info.n_heads] for i in range(table.n_layers)]
    layers = [root.get_submodule(table.layer_path(i)) for i in range(table.n_layers)]
    modules = [[root.get_submodule(info.path) for info in infos] for infos in mixers]
    projections = [
        {f"{info.path}.{info.out_proj}": getattr(module, info.out_proj) for info, module in zip(*pair)}
        for pair in zip(mixers, modules)
    ]
    for module in [*layers, *chain(*modules), *chain(*(each.values() for each in projections))]:
        handles.append(module.register_forward_hook(note))
    try:
        forward(model, ids, mask)
    finally:
        for handle in handles:
            handle.remove()
    return [_layer(i, *parts, found) for i, parts in enumerate(zip(layers, modules, projections))]


def _layer(number: int, module: nn.Module, mixers: list[nn.Module], projections: dict, found: dict) -> Layer:
    mixer = None
    if len(mixers) == 1:
        [given] = (found.get(part) for part in projections.values())
        first = _first(found.get(mixers[0]))
        same = given is not None and first is not None and given.shape == first.shape
        mixer = mixers[0] if same and torch.equal(given, first) else None
    returns = _width(found[module])
    return Layer(number, module, projections, returns, mixer, None if mixer is None else _width(found[mixer]))


def _first(output) -> Tensor | None:
    return output[0] if isinstance(output, tuple) else output


def _width(output) -> int | None:
    return len(output) if isinstance(output, tuple) else None


def _shaped(tensor: Tensor, width: int | None) -> Tensor | tuple:
    """``tensor`` as what a module gives: alone, or first in a tuple."""
    return tensor if width is None else (tensor, *[None] * (width - 1))


class _Reached(Exception):
    """The heads of a layer are known, so what follows in it need not run."""


class Replaced:
    """What stands in for heads in the prompts of a batch."""

    def __init__(self, what: dict, values: dict[str, dict], prompts: Tensor, mask: Tensor) -> None:
        """``what``: kind and positions; ``values``: by path, what ``trace.replacements`` gave."""
        self.what, self.values = what, values
        before = torch.zeros(len(prompts), dtype=torch.long)
        self.scene = {"prompt": {"ids": prompts, "real": mask}, "real": mask, "before": before}
        at_query = what["positions"] == "query"  # then the one token that runs is the query
        self.where = torch.ones(len(prompts), 1, dtype=torch.bool) if at_query else None

    def apply(self, units: Sequence[Unit], path: str, heads: Tensor) -> Tensor:
        """``heads`` (unit x prompt, length, columns) with the heads of each unit replaced in its rows."""
        if not any(site.path == path for unit in units for site in unit.sites):
            return heads
        new = heads.clone()
        for rows, unit in zip(new.chunk(len(units)), units):
            for site in (site for site in unit.sites if site.path == path):
                given = self.values.get(path, {})
                step = {**self.what, **given}
                if given:
                    step["value"] = given["value"][..., site.columns]
                rows[..., site.columns.to(rows.device)] = replacement(step, self.scene, self.where).to(rows)
        return new


class Front:
    """The clean run of one batch as far as it was needed, and runs that leave it with heads replaced.

    ``ids`` and ``mask`` are (batch, length), right padded; with ``past``, the cache of what came before,
    ``ids`` holds the tokens after it and ``mask`` covers both. Logits are those after the last token.
    """

    def __init__(self, model, stack: list[Layer], ids: Tensor, mask: Tensor, past=None) -> None:
        self.model, self.stack, self.ids, self.mask, self.past = model, stack, ids, mask, past
        self.last = mask[:, -ids.shape[1] :].sum(1) - 1
        self.next = 0  # the first layer that was not run yet
        self.left: Tensor | None = None  # what enters it
        self.hidden: dict[int, Tensor] = {}  # what entered the layers that were read
        self.heads: dict[str, Tensor] = {}  # what their heads put out, by the path of the projection

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model._module.parameters()).dtype

    def plain(self) -> Tensor:
        """Logits (batch, vocabulary) of the whole model."""
        return self._run(0, None, {}, (), 1)

    def read(self, layers: Sequence[int]) -> None:
        """Go on with the clean run, and keep what ``layers`` read; earlier layers are forgotten."""

        def keep(layer: Layer, original: Callable, hidden: Tensor, *args, **kwargs):
            with _watched(layer, len(hidden), self._keep):
                output = original(hidden, *args, **kwargs)
            self.hidden[layer.number], self.left = hidden, _first(output)
            return output

        first, state = self.next, self.left
        self.hidden, self.heads, self.next = {}, {}, layers[-1] + 1
        self._run(first, state, dict.fromkeys(layers, keep), range(self.next, len(self.stack)), 1)

    def logits(self, at: int, units: Sequence[Unit], replaced: Replaced) -> Tensor:
        """Logits (unit, batch, vocabulary) with each unit replaced, from layer ``at`` on, where all start."""
        copies = len(units)

        def start(layer: Layer, original: Callable, hidden: Tensor, *args, **kwargs):
            if layer.mixer is None:
                return edited(layer, original, hidden, *args, **kwargs)
            heads = self.heads[layer.path].repeat(copies, 1, 1)
            heads = replaced.apply(units, layer.path, heads)
            return self._finish(layer, original, hidden, heads, args, kwargs)

        def edited(layer: Layer, original: Callable, hidden: Tensor, *args, **kwargs):
            with _watched(layer, len(hidden), lambda path, heads: replaced.apply(units, path, heads)):
                return original(hidden, *args, **kwargs)

        def last(layer: Layer, original: Callable, hidden: Tensor, *args, **kwargs):
            heads = _heads_of(layer, original, hidden, args, kwargs)
            heads = replaced.apply(units, layer.path, heads)
            return self._finish(layer, original, hidden, heads, args, kwargs)

        end = len(self.stack) - 1
        touched = {site.mixer.layer for unit in units for site in unit.sites}
        stands: dict[int, Callable] = dict.fromkeys(touched, edited)
        if self.stack[end].mixer is not None and self.ids.shape[1] > 1:
            stands[end] = last
        stands[at] = start
        logits = self._run(at, self.hidden[at], stands, (), copies)
        return logits.reshape(copies, len(self.ids), -1)

    def _run(
        self,
        first: int,
        state: Tensor | None,
        stands: dict[int, Callable],
        skipped: Sequence[int],
        copies: int,
    ) -> Tensor:
        """Run the layers from ``first`` on, which ``state`` enters; ``stands`` stand in for some of them."""
        forwards: dict[nn.Module, Callable] = {}
        for i in [*range(first), *skipped]:
            forwards[self.stack[i].module] = self._skip(i, state if i == first - 1 else None, copies)
        for i, stand in stands.items():
            layer = self.stack[i]
            forwards[layer.module] = _bound(stand, layer, layer.module.forward)
        past = None
        if self.past is not None:
            rows = list(range(len(self.ids))) * copies
            one_each = len(self.past.layers) == len(self.stack)
            past = select(self.past, rows, range(first, len(self.stack)) if one_each else None)
        with _swapped(forwards):
            return forward(self.model, self.ids.repeat(copies, 1), self.mask.repeat(copies, 1), past=past)

    def _skip(self, i: int, state: Tensor | None, copies: int) -> Callable:
        def skip(hidden: Tensor, *args, **kwargs):
            new = hidden if state is None else state.repeat(copies, 1, 1)
            return _shaped(new, self.stack[i].returns)

        return skip

    def _keep(self, path: str, heads: Tensor) -> Tensor:
        self.heads[path] = heads
        return heads

    def _finish(self, layer: Layer, original: Callable, hidden: Tensor, heads: Tensor, args, kwargs):
        """What follows the heads in a layer; in the last layer only where logits are read."""
        if layer is not self.stack[-1] or hidden.shape[1] == 1:
            return _rest_of(layer, original, hidden, heads, args, kwargs)
        read = self.last.to(hidden.device).repeat(len(hidden) // len(self.last))[:, None, None]
        short = _rest_of(
            layer, original, hidden.take_along_dim(read, 1), heads.take_along_dim(read, 1), args, kwargs
        )
        new = _first(short)
        full = new.new_zeros(*hidden.shape[:2], new.shape[-1])
        return _shaped(full.scatter_(1, read.expand_as(new), new), layer.returns)


def _rest_of(layer: Layer, original: Callable, hidden: Tensor, heads: Tensor, args, kwargs):
    """A layer whose mixer is not run: its heads are known to put out ``heads``."""
    project = layer.projections[layer.path]

    def mix(*args, **kwargs):
        return _shaped(project(heads), layer.mixer_returns)

    with _swapped({layer.mixer: mix}):
        return original(hidden, *args, **kwargs)


def _heads_of(layer: Layer, original: Callable, hidden: Tensor, args, kwargs) -> Tensor:
    """What the heads of a layer put out; what follows them is not run."""
    found = []

    def stop(path: str, heads: Tensor) -> Tensor:
        found.append(heads)
        raise _Reached

    with suppress(_Reached), _watched(layer, len(hidden), stop):
        original(hidden, *args, **kwargs)
    return found[0]


@contextmanager
def _watched(layer: Layer, rows: int, use: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Send the input of each output projection of a layer through ``use``, as (row, length, columns)."""
    called = set()

    def hook(path: str) -> Callable:
        def change(module, args):
            called.add(path)
            whole = args[0]
            new = use(path, whole.reshape(rows, -1, whole.shape[-1]))
            return (new.reshape(whole.shape), *args[1:])

        return change

    handles = [part.register_forward_pre_hook(hook(path)) for path, part in layer.projections.items()]
    try:
        yield
        for path in layer.projections.keys() - called:
            raise GnaError(
                f"'{path}' was not called in this forward pass, so nothing could be changed there: the model "
                "runs another path (a fused kernel)."
            )
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _swapped(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Let other functions stand in for the ``forward`` of modules."""
    # nnsight keeps a function of its own there, which has to come back
    own = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    try:
        for module, stand in forwards.items():
            module.forward = stand
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
            if module in own:
                module.forward = own[module]


def _bound(stand: Callable, layer: Layer, original: Callable) -> Callable:
    return lambda hidden, *args, **kwargs: stand(layer, original, hidden, *args, **kwargs)
