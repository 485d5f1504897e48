"""What a sweep removes at a time: one head, the heads of one layer, or a group of heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import GnaError
from ..heads import Head, parse_heads
from ..mixers.table import LayerTable, MixerInfo
from ..sites import Site, sites_of


@dataclass(frozen=True)
class Unit:
    """Heads that are removed together, under one name; ``sites`` is empty where nothing is removed."""

    name: str
    sites: tuple[Site, ...]

    @property
    def start(self) -> int:
        """The first layer that changes."""
        return self.sites[0].mixer.layer

    @property
    def n_heads(self) -> int:
        return sum(len(site.heads) for site in self.sites)

    def columns(self) -> dict[str, object]:
        """How a frame names the unit; ``layer`` and ``head`` are None where there is more than one."""
        layers = {site.mixer.layer for site in self.sites}
        return {
            "unit": self.name,
            "layer": layers.pop() if len(layers) == 1 else None,
            "head": self.sites[0].heads[0] if self.n_heads == 1 else None,
            "n_heads": self.n_heads,
            "mixer": " and ".join(sorted({site.mixer.kind for site in self.sites})),
        }


def units_of(table: LayerTable, units, mixer: str | None) -> list[Unit]:
    """Every way of naming what to remove, as a list without repetitions, in the order given.

    ``units`` is ``"heads"``, ``"layers"``, a list of heads and groups of heads, or a mapping from names to
    groups. ``mixer`` limits it to one kind of mixer.
    """
    if isinstance(units, str) and units in ("heads", "layers"):
        mixers = [info for info in table if info.n_heads and mixer in (None, info.kind)]
        if not mixers:
            raise GnaError(f"{table.name} has no {mixer} mixer: its kinds are {_kinds(table)}.")
        return _heads(table, mixers) if units == "heads" else _layers(mixers)
    if isinstance(units, Mapping):
        groups = {str(name): _group(group) for name, group in units.items()}
    else:
        groups = {"+".join(map(str, group)): group for group in map(_group, _listed(units))}
    if not groups:
        raise GnaError("no units were given: name 'heads', 'layers', or a list of heads or groups of heads.")
    return [Unit(name, tuple(sites_of(table, group, mixer))) for name, group in groups.items()]


def _heads(table: LayerTable, mixers: list[MixerInfo]) -> list[Unit]:
    found = []
    for info in mixers:
        twins = sum(other.n_heads > 0 for other in table.in_layer(info.layer)) > 1
        for n in range(info.n_heads):
            name = f"{Head(info.layer, n)}" + (f" {info.kind}" if twins else "")
            found.append(Unit(name, (_site(info, (n,)),)))
    return found


def _layers(mixers: list[MixerInfo]) -> list[Unit]:
    numbers = dict.fromkeys(info.layer for info in mixers)
    return [
        Unit(f"L{n}", tuple(_site(info, range(info.n_heads)) for info in mixers if info.layer == n))
        for n in numbers
    ]


def _site(info: MixerInfo, heads: Iterable[int]) -> Site:
    return Site(info, tuple(heads), f"{info.path}.{info.out_proj}")


def whole_mixers(units: Iterable[Unit]) -> list[Site]:
    """All heads of every mixer that some unit touches, in the order of the layers."""
    mixers = {site.mixer for unit in units for site in unit.sites}
    ordered = sorted(mixers, key=lambda info: (info.layer, info.path))
    return [_site(info, range(info.n_heads)) for info in ordered]


def _listed(units) -> list:
    if isinstance(units, str):
        return parse_heads(units)
    if isinstance(units, Head) or not isinstance(units, Iterable):
        return [units]
    return list(units)


def _group(entry) -> list[Head]:
    pair = isinstance(entry, tuple) and all(isinstance(number, int) for number in entry)
    return parse_heads([entry] if pair else entry)


def _kinds(table: LayerTable) -> str:
    return ", ".join(sorted({info.kind for info in table}))
