"""``gna doctor``: what this machine has, for the reader who wonders and for the issue that they may write."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .. import __version__
from ..errors import GnaError
from .fingerprint import LIBRARIES, library_versions
from .project import find_project

if TYPE_CHECKING:
    from ..catalogue import ModelCard

_MORE = ("jupyter-book", "jupyterlab", "pyarrow", "sphinx")
# Optional kernels of the `gpu` extra: used when importable, never needed.
_KERNELS = ("mamba-ssm", "causal-conv1d", "flash-attn")


def report() -> dict[str, Any]:
    """Everything that ``gna doctor`` prints, as plain data; needs no network."""
    import torch

    return {
        "gna_utils": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "libraries": library_versions((*LIBRARIES, *_MORE)),
        "optional": {name: _version(name) or "not installed" for name in _KERNELS},
        "cpu": {"cores": os.cpu_count(), "usable": _usable_cores(), "torch_threads": torch.get_num_threads()},
        "memory_gib": {
            "total": _gib(psutil.virtual_memory().total),
            "available": _gib(psutil.virtual_memory().available),
        },
        "devices": _devices(),
        "dtype": _dtype(),
        "weights": _weights(),
        "disk_free_gib": _disks(),
        "project": _project(),
    }


def text(content: dict[str, Any]) -> str:
    """The report as lines for a terminal."""
    lines: list[str] = []
    for key, value in content.items():
        title = key.replace("_", " ")
        if isinstance(value, list):
            lines += [f"{title}:", *(f"  {_sentence(entry)}" for entry in value)]
        elif isinstance(value, dict):
            lines += [f"{title}:", *(f"  {name:<22} {entry}" for name, entry in value.items())]
        else:
            lines.append(f"{title}: {value}")
    return "\n".join(lines)


def as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False)


def _sentence(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    return ", ".join(f"{value}" if name == "name" else f"{name} {value}" for name, value in entry.items())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    """Cores that this process may use: fewer than the machine has in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _devices() -> list[dict[str, Any]]:
    import torch

    devices = [{"name": "cpu", "type": platform.processor() or platform.machine()}]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        devices.append({"name": f"cuda:{index}", "type": card.name, "memory_gib": _gib(card.total_memory)})
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "type": "Apple GPU"})
    return devices


def _dtype() -> dict[str, str]:
    """What ``load(..., dtype="auto")`` would choose on each device, measured now."""
    import torch

    from ..models import faster_dtype

    kinds = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    return {kind: str(faster_dtype(torch.device(kind))).removeprefix("torch.") for kind in kinds}


def _weights() -> list[dict[str, Any]]:
    """Registered models that need no network, with the hash of the file that lies here, read now."""
    from ..catalogue import registry

    return [{"name": card.name, **_state(card)} for card in registry().values() if card.cached is not None]


def _state(card: ModelCard) -> dict[str, Any]:
    from .. import weights

    wheel = weights.manifest().get(card.name, {}).get("wheel")
    if wheel is None:
        files = sorted(Path(card.source).glob("*.safetensors"))
        return {"sha256": " ".join(weights.file_sha256(file) for file in files)}
    file = weights.cache_dir() / card.name / Path(wheel["member"]).name
    if file.is_file():
        seen = weights.file_sha256(file)
        good = "as published" if seen == wheel["sha256"] else f"damaged: {wheel['sha256']} was expected"
        return {"sha256": seen, "file": good}
    return {"file": "unpacked" if card.cached else "not fetched yet", "sha256": wheel["sha256"]}


def _disks() -> dict[str, float]:
    from ..weights import cache_dir

    places = {"cache": cache_dir(), "here": Path.cwd()}
    return {
        f"{name} ({path})": _gib(shutil.disk_usage(_existing(path)).free) for name, path in places.items()
    }


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _project() -> str:
    try:
        return str(find_project().root)
    except GnaError as error:
        return str(error)


def _gib(size: int) -> float:
    return round(size / 2**30, 1)
