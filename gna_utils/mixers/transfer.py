"""Transfer matrices of chosen heads: attention maps of softmax heads, hidden attention of scan heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import nnsight
import torch
from torch import Tensor

from ..errors import GnaError
from ..forward import encode_prompts, marks, require_eval
from ..heads import Head, parse_heads
from ..interventions import running
from ..remote import backend
from .adapters import ADAPTERS, call_site
from .table import MixerInfo, layers


def transfer_matrix(
    model,
    prompts,
    heads=None,
    *,
    layer: int | None = None,
    mixer: str | None = None,
    skip: bool = True,
    remote=False,
) -> Tensor:
    """How much position ``j`` contributes to position ``i`` in each chosen head: ``T`` in ``y = T v``.

    >>> transfer_matrix(model, "a b c", "L17H24").shape        # a softmax head: its attention map
    torch.Size([1, 1, 3, 3])
    >>> transfer_matrix(mamba2, prompts, layer=5, skip=False)  # all heads of layer 5, without D

    Returns ``(batch, head, L, L)`` in float32 on the CPU, heads in the order asked for, ``L`` the longest
    prompt in tokens. Row ``i`` is the receiving position; entries with ``j > i``, and rows and columns of
    padding, are 0. ``prompts`` is a text, a list of texts, of examples or of encoded examples, or a batch.
    ``heads`` are names (``"L17H24, L16H22"``), or numbers of heads of ``layer``, or left out for all of its
    heads; ``mixer`` names the kind of mixer where a layer holds two. ``skip=False`` leaves the skip weight
    ``D`` of scan heads off the diagonal.

    Softmax rows sum to 1; rows of a scan head do not, and may be negative. Output gates and norms come after
    ``T``. Only the chosen heads are materialised. Active contexts such as ``ablate`` apply: what they change
    in a head itself comes after its ``T``, but later layers see it. With ``remote`` the trace runs on an NDIF
    server, which sends back what the heads read; the matrix is computed here.

    Raises :class:`GnaError` for a head that does not exist, a layer of another kind, an ambiguous layer, a
    prompt that the model cannot read, a model in training mode, and a mixer that cannot be read.
    Formulas and sources: the adapters' modules.
    """
    return mixing(model, prompts, heads, layer=layer, mixer=mixer, remote=remote).matrix(skip=skip)


def values(
    model, prompts, heads=None, *, layer: int | None = None, mixer: str | None = None, remote=False
) -> Tensor:
    """The vectors ``v_j`` that each chosen head mixes, ``(batch, head, L, head_dim)`` in float32.

    >>> mixed = transfer_matrix(model, prompts, "L3H0") @ values(model, prompts, "L3H0")

    Arguments and errors as in :func:`transfer_matrix`; :func:`mixing` gives both from one run of the model.
    """
    return mixing(model, prompts, heads, layer=layer, mixer=mixer, remote=remote).values


def mixing(
    model, prompts, heads=None, *, layer: int | None = None, mixer: str | None = None, remote=False
) -> Mixing:
    """Run the model once and keep what the chosen heads read: for matrix, values and output together.

    >>> read = mixing(model, prompts, "L17H24, L17H3")
    >>> read.matrix(skip=False), read.values, read.output

    Arguments and errors as in :func:`transfer_matrix`.
    """
    plan, order = _plan(model, heads, layer, mixer)
    input_ids, attention_mask, rows = encode_prompts(model, prompts)
    with running(model, marks(rows, input_ids.shape[1])):
        kept = _read(model, plan, input_ids, attention_mask, remote)
    return Mixing(order, tuple(plan), kept, attention_mask.bool())


@dataclass(frozen=True)
class Part:
    """The chosen heads of one mixer, the call to read, and where each head stands in the order asked for."""

    mixer: MixerInfo
    site: str
    heads: list[int]
    places: list[int]


@dataclass(frozen=True)
class Mixing:
    """What chosen heads did in one run of the model: the result of :func:`mixing`.

    ``heads`` is their order along dimension 1 of every tensor, ``mask`` the ``(batch, L)`` map of real
    tokens.
    """

    heads: list[Head]
    parts: tuple[Part, ...]
    kept: list[tuple[dict, Tensor]]
    mask: Tensor

    def matrix(self, skip: bool = True) -> Tensor:
        """The transfer matrices ``(batch, head, L, L)``, with or without the skip weight of scan heads."""
        mixed = self._gather(self._adapter(part).matrix(kept, skip) for part, (kept, _) in self._pairs)
        if self.mask.all():
            return mixed
        return mixed.masked_fill_(~(self.mask[:, None, :, None] & self.mask[:, None, None, :]), 0.0)

    @cached_property
    def values(self) -> Tensor:
        """The vectors ``v_j`` that the matrices mix: ``(batch, head, L, head_dim)``."""
        return self._real(self._adapter(part).values(kept) for part, (kept, _) in self._pairs)

    @cached_property
    def output(self) -> Tensor:
        """What the mixer's own function returned for these heads: ``(batch, head, L, head_dim)``."""
        return self._real(output.float() for _, output in self.kept)

    @cached_property
    def rebuilt(self) -> Tensor:
        """``T @ v``, times the gate where the function applies one itself: equals :attr:`output`."""
        gates = self._real(self._gate(part, kept) for part, (kept, _) in self._pairs)
        return self.matrix() @ self.values * gates

    @property
    def _pairs(self):
        return zip(self.parts, self.kept)

    @staticmethod
    def _adapter(part: Part):
        return ADAPTERS[part.mixer.kind]

    def _gate(self, part: Part, kept: dict) -> Tensor:
        gate = getattr(self._adapter(part), "gate", lambda kept: None)(kept)
        return torch.ones(len(self.mask), len(part.heads), self.mask.shape[1], 1) if gate is None else gate

    def _real(self, parts: Iterable[Tensor]) -> Tensor:
        """One tensor of all heads, 0 at padding."""
        return self._gather(parts) * self.mask[:, None, :, None]

    def _gather(self, parts: Iterable[Tensor]) -> Tensor:
        """Put the heads of several mixers into the order asked for."""
        if len(self.parts) == 1:
            return next(iter(parts)).cpu()
        result = None
        for part, found in zip(self.parts, parts):
            if result is None:
                result = torch.empty(found.shape[0], len(self.heads), *found.shape[2:])
            if result.shape[2:] != found.shape[2:]:
                raise GnaError(
                    f"the chosen heads have values of different widths ({result.shape[-1]} and "
                    f"{found.shape[-1]}): ask for one kind of mixer at a time."
                )
            result[:, part.places] = found.cpu()
        return result


@torch.no_grad()
def _read(
    model, plan: Sequence[Part], input_ids: Tensor, attention_mask: Tensor, remote
) -> list[tuple[dict, Tensor]]:
    """One trace that stops after the last mixer asked for and brings back what the chosen heads read."""
    jobs = []
    for part in plan:
        adapter = ADAPTERS[part.mixer.kind]
        jobs.append((part.mixer.path, part.site, part.heads, adapter.operands, adapter.output))
    with model.trace(
        input_ids, attention_mask=attention_mask, use_cache=False, backend=backend(model, remote)
    ) as tracer:
        kept = nnsight.save([])
        for path, name, heads, operands, output in jobs:
            site = getattr(model.get(path).source, name)
            args, kwargs = site.inputs
            picked = operands(args, kwargs, heads)
            kept.append((picked, output(site.output, heads)))
        tracer.stop()
    return kept


def _plan(model, heads, layer: int | None, kind: str | None) -> tuple[list[Part], list[Head]]:
    """Group the chosen heads by mixer, in the order in which the model runs them."""
    require_eval(model)
    table = layers(model)
    order = _named(table, heads, layer, kind)
    parts: dict[str, Part] = {}
    for place, head in enumerate(order):
        mixer = table.find(head, kind)
        if mixer.path not in parts:
            parts[mixer.path] = Part(mixer, site_of(model, mixer), [], [])
        parts[mixer.path].heads.append(head.head)
        parts[mixer.path].places.append(place)
    return sorted(parts.values(), key=lambda part: part.mixer.layer), order


def site_of(model, mixer: MixerInfo) -> str:
    """The call to read, found before anything runs: a model that cannot be served is refused here."""
    envoy = model.get(mixer.path)
    site = call_site(envoy.source.names, mixer.kind)
    family = type(envoy._module).__name__
    if site is None:
        raise GnaError(
            f"{family}, the {mixer.kind} mixer of layer {mixer.layer}, calls none of the functions that "
            f"transfer_matrix can read ({', '.join(ADAPTERS[mixer.kind].CALLS)})."
        )
    if mixer.kind == "selective_scan" and getattr(envoy._module, "n_mamba_heads", 1) > 1:
        raise GnaError(
            f"{family} scans several blocks of channels one after the other, which cannot be read."
        )
    return site


def _named(table, heads, layer: int | None, kind: str | None) -> list[Head]:
    """The heads as a list, for every way of naming them."""
    if layer is None:
        if heads is None:
            raise GnaError("no head was given: name heads such as 'L17H24', or a layer for all of its heads.")
        return parse_heads(heads)
    if heads is None:
        return [Head(layer, number) for number in range(table.find(Head(layer, 0), kind).n_heads)]
    if isinstance(heads, int):
        heads = [heads]
    if not isinstance(heads, str):
        heads = [Head(layer, entry) if isinstance(entry, int) else entry for entry in heads]
    order = parse_heads(heads)
    if any(head.layer != layer for head in order):
        raise GnaError(
            f"layer={layer} was asked together with {order}: name heads of that layer, or leave it out."
        )
    return order
