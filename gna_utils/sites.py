"""Where heads can be read and replaced: slices of the input of one module per mixer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import nnsight
import torch
from torch import Tensor

from .errors import GnaError
from .forward import encode_prompts, marks
from .heads import Head
from .interventions import can_stop, fingerprints, marked, read_scene
from .mixers.table import SCANS, LayerTable, MixerInfo
from .remote import backend

MAX_TOKENS = 4096  # padded tokens per run, as in tasks.batches


@dataclass(frozen=True)
class Site:
    """Some heads of one mixer: the module whose input holds them, and their columns there."""

    mixer: MixerInfo
    heads: tuple[int, ...]
    path: str

    @property
    def columns(self) -> Tensor:
        width = self.mixer.head_dim
        return (torch.tensor(self.heads)[:, None] * width + torch.arange(width)).flatten()


def sites_of(
    table: LayerTable, heads: Sequence[Head], mixer: str | None, where: str = "out_proj"
) -> list[Site]:
    """The sites of ``heads``, in the order of the layers; the order of the list does not matter."""
    numbers: dict[MixerInfo, set[int]] = {}
    for head in heads:
        kind = mixer
        if where == "scan" and kind is None:  # says which is meant where attention stands beside the scan
            kind = next((info.kind for info in table.in_layer(head.layer) if info.kind in SCANS), None)
        numbers.setdefault(table.find(head, kind), set()).add(head.head)
    return [
        Site(info, tuple(sorted(numbers[info])), _path(info, where))
        for info in sorted(numbers, key=lambda info: (info.layer, info.path))
    ]


def _path(info: MixerInfo, where: str) -> str:
    if where == "out_proj":
        return f"{info.path}.{info.out_proj}"
    if info.norm is None:
        raise GnaError(
            f"{info} has no norm between heads and {info.out_proj}, so where='scan' is no other place than "
            "where='out_proj': use that."
        )
    return f"{info.path}.{info.norm}"


def grouped(items: Sequence[Site]) -> list[list[Site]]:
    """Split sites into groups with one mixer per layer: inside a layer, modules may run in any order."""
    groups: list[list[Site]] = []
    for site in items:
        free = next((g for g in groups if all(s.mixer.layer != site.mixer.layer for s in g)), None)
        if free is None:
            groups.append([site])
        else:
            free.append(site)
    return groups


@dataclass(frozen=True)
class Reading:
    """Values of heads at the marked positions of prompts.

    ``values`` holds one tensor (marked positions of all prompts, columns) per site, ``counts`` the number of
    marked positions of each prompt, ``names`` its fingerprint.
    """

    values: list[Tensor]
    counts: Tensor
    names: Tensor

    def per_prompt(self, site: int) -> Tensor:
        """(prompt, marked position, columns), padded with zeros."""
        parts = self.values[site].split(self.counts.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


@torch.no_grad()
def read(model, sites: Sequence[Site], prompts, positions, remote) -> Reading:
    """Run ``prompts`` and keep what stands at the sites, at ``positions``; only that leaves the run."""
    jobs = [
        [(sites.index(site), site.path, site.columns) for site in group] for group in grouped(list(sites))
    ]
    values: list[list[Tensor]] = [[] for _ in sites]
    counts, names = [], []
    for ids, mask, rows in chunks(*encode_prompts(model, prompts)):
        where = positions_map(positions, ids, mask, rows)
        for group in jobs:
            with model.trace(
                input_ids=ids, attention_mask=mask, use_cache=False, backend=backend(model, remote)
            ) as tracer:
                kept = nnsight.save(collect(model, group, where))
                if can_stop(model):
                    tracer.stop()
            for (number, _, _), found in zip(group, kept):
                values[number].append(found.cpu())
        counts.append(where.sum(1))
        names.append(fingerprints(ids, mask))
    return Reading([torch.cat(part) for part in values], torch.cat(counts), torch.cat(names))


def collect(model, group: list[tuple], where: Tensor) -> list[Tensor]:
    """Runs inside the trace: the chosen columns at the marked positions."""
    found = []
    for _, path, columns in group:
        x = model.get(path).input
        x = x.reshape(*where.shape, -1)
        found.append(x[where.to(x.device)][:, columns.to(x.device)])
    return found


def positions_map(positions: str | Tensor, ids: Tensor, mask: Tensor, rows: Sequence | None) -> Tensor:
    """The BoolTensor (batch, length) of positions to read or replace, without padding."""
    scene = read_scene((), {"input_ids": ids, "attention_mask": mask})
    where = marked(positions, scene, marks(rows, ids.shape[1]))
    return scene["real"] if where is None else where & scene["real"]


def chunks(
    ids: Tensor, mask: Tensor, rows: Sequence | None
) -> Iterator[tuple[Tensor, Tensor, Sequence | None]]:
    """Parts of a batch that are small enough for one run, cut to their longest prompt."""
    size = max(1, MAX_TOKENS // ids.shape[1])
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        longest = int(mask[part].sum(1).max())
        yield ids[part, :longest], mask[part, :longest], None if rows is None else rows[part]
