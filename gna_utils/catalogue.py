"""Which models can be loaded by name, and where each name leads."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from pathlib import Path

from . import weights
from .errors import GnaError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_LENGTH = 96  # the hub's own limit


@dataclass(frozen=True)
class ModelCard:
    """One registered model: what it is and what it needs.

    ``source`` is a requirement of the package index, a folder, or a hub id; ``bytes`` is what is downloaded
    (0 when nothing is); ``cached`` says whether it loads without a network. None stands for "the hub knows".
    ``accuracies`` holds what a model of this project does on held-out examples, by task.
    """

    name: str
    what: str
    parameters: int | None
    bytes: int | None
    licence: str
    source: str
    cached: bool | None
    chapters: str
    aliases: tuple[str, ...] = ()
    accuracies: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where a name leads: a folder, or a hub id; ``sha256`` when the weights have a published one."""

    name: str
    place: str
    is_folder: bool
    tokenizer: str | None = None
    sha256: str | None = None


def registry() -> dict[str, ModelCard]:
    """Every registered model by name: those of ``data/manifest.json`` and every folder of ``data/models``.

    >>> registry()["smollm2-135m"].licence
    'Apache-2.0'
    """
    cards = {name: _card(name, entry) for name, entry in weights.manifest().items()}
    return cards | {name: _included(name, folder) for name, folder in _folders().items()}


def find(name: str | os.PathLike[str]) -> Source:
    """Where ``name`` leads, fetching weights if the name is registered with a download.

    Looked up in this order: folders of ``data/models``, registered names and their aliases, local folders,
    hub ids. Raises :class:`GnaError` for anything else, with the nearest registered name.
    """
    if not isinstance(name, str | os.PathLike):
        raise GnaError(f"{name!r} is no name of a model: give a registered name, a hub id or a folder.")
    name = os.fspath(name)
    included = _folders().get(name)
    if included is not None:
        return Source(name, str(included), is_folder=True)
    registered = _registered(name)
    if registered is not None:
        return registered
    folder = _folder(name)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise GnaError(f"the folder '{name}' holds no model: it lacks config.json.")
        return Source(name, str(folder.absolute()), is_folder=True)
    if _HUB_ID.fullmatch(name) and len(name) <= _HUB_LENGTH and not name.startswith("."):
        return Source(name, name, is_folder=False)
    raise GnaError(_unknown(name))


def _folder(name: str) -> Path | None:
    try:
        folder = Path(name).expanduser()
        return folder if name and folder.is_dir() else None
    except (OSError, RuntimeError):  # longer than the system allows, not readable, or of an unknown user
        return None


def _registered(name: str) -> Source | None:
    manifest = weights.manifest()
    by_alias = {alias: known for known, entry in manifest.items() for alias in entry.get("aliases", ())}
    name = by_alias.get(name, name)
    entry = manifest.get(name)
    if entry is None:
        return None
    if "wheel" in entry:
        return Source(name, str(weights.folder(name)), is_folder=True, sha256=entry["wheel"]["sha256"])
    return Source(name, entry["hub"], is_folder=False, tokenizer=entry.get("tokenizer"))


def _unknown(name: str) -> str:
    known = sorted([*weights.manifest(), *_folders()])
    near = get_close_matches(name, known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    said = name if len(name) <= 2 * _HUB_LENGTH else f"{name[:_HUB_LENGTH]}..."
    choices = f"one of {', '.join(known)}"
    if "/" in name or "\\" in name:
        return (
            f"there is no folder '{said}'{hint}: give an existing folder, a hub id 'org/name', or {choices}."
        )
    return f"unknown model '{said}'{hint}: give {choices}, a hub id such as 'org/name', or a local folder."


def _folders() -> dict[str, Path]:
    home = weights.data_dir() / "models"
    return {path.parent.name: path.parent for path in sorted(home.glob("*/config.json"))}


def _card(name: str, entry: dict) -> ModelCard:
    wheel = entry.get("wheel")
    return ModelCard(
        name=name,
        what=entry["what"],
        parameters=entry.get("parameters"),
        bytes=wheel["bytes"] if wheel else None,
        licence=entry["licence"],
        source=wheel["requirement"] if wheel else entry["hub"],
        cached=weights.is_cached(name) if wheel else None,
        chapters=entry.get("chapters", ""),
        aliases=tuple(entry.get("aliases", ())),
    )


def _included(name: str, folder: Path) -> ModelCard:
    """The card of a model that the project brings along; ``card.json`` in its folder may say what it is."""
    said, record = _json(folder / "card.json"), _json(folder / "training.json")
    config = _json(folder / "config.json")
    measured = record.get("accuracies", ())
    return ModelCard(
        name=name,
        what=said.get("what", f"a small model of type {config.get('model_type', 'unknown')}"),
        parameters=sum(_count(file) for file in folder.glob("*.safetensors")) or None,
        bytes=0,
        licence=said.get("licence", "MIT"),
        source=str(folder),
        cached=True,
        chapters=said.get("chapters", ""),
        accuracies={row["task"]: row["value"] for row in measured if row["usual"]},
    )


def _json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _count(file: Path) -> int:
    """Number of values in a safetensors file, read from its header alone."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
