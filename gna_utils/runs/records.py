"""What a run leaves behind: its record, and the frames that a chapter saves with their provenance."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import GnaError
from .project import STATUS, Project, atomic_write, find_project, write_json

if TYPE_CHECKING:
    import pandas as pd

RECORD, REQUEST, KERNEL = "record.json", "request.json", "kernel.json"
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class RunRecord:
    """Everything needed to say where a number came from; written as ``record.json`` beside the executed
    notebook.

    ``parameters`` are all values in force, ``given`` those that differ from a plain run of the chapter.
    ``peak_memory_bytes`` is the largest resident size of the kernel (None where the platform cannot tell).
    ``models`` lists every model that the chapter loaded: name, source, device, dtype, sha256.
    """

    chapter: str
    notebook: str
    fingerprint: str
    parameters: dict[str, Any]
    given: dict[str, Any]
    seed: int | None
    started: str
    duration_s: float
    peak_memory_bytes: int | None
    n_cells: int
    package_version: str
    libraries: dict[str, str]
    python: str
    platform: str
    device: str
    models: list[dict[str, Any]] = field(default_factory=list)
    git_commit: str | None = None
    for_site: bool = False
    folder: str = ""

    @property
    def executed(self) -> Path:
        """The executed notebook."""
        return Path(self.folder) / f"{self.chapter}.ipynb"

    def write(self, folder: Path) -> None:
        content = asdict(self)
        del content["folder"]  # the folder is where the record lies: it may be moved
        write_json(folder / RECORD, content)


def read_record(folder: Path) -> RunRecord | None:
    """The record of a finished run, None when the folder holds none (or one of another layout)."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        known = {f.name for f in fields(RunRecord)}
        return RunRecord(**{k: v for k, v in content.items() if k in known} | {"folder": str(folder)})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_records(runs_dir: Path) -> list[RunRecord]:
    """All finished runs below a folder, oldest first."""
    found = [read_record(path.parent) for path in runs_dir.glob(f"*/*/{RECORD}") if _finished(path.parent)]
    return sorted((record for record in found if record), key=lambda record: record.started)


def latest(runs_dir: Path, chapter: str, *, for_site: bool = True) -> RunRecord | None:
    """The newest finished run of a chapter with its default parameters, as the site uses it."""
    found = [
        r for r in read_records(runs_dir) if r.chapter == chapter and r.for_site == for_site and not r.given
    ]
    return found[-1] if found else None


def table(project: Project | None = None, *, for_site: bool = True) -> pd.DataFrame:
    """The newest run of each chapter, for the status page.

    One row per chapter in reading order with columns ``chapter, duration_s, peak_memory_gib, date, model,
    device, dtype, python, torch, transformers, nnsight, package, commit``; a chapter that was never run has
    no row. Durations are seconds, memory is GiB. ``for_site=False`` shows the newest runs of ``gna run``
    instead.
    """
    import pandas as pd

    project = project or find_project()
    names = [chapter.name for chapter in project.chapters() if chapter.name != STATUS]
    rows = [_row(latest(project.runs_dir, name, for_site=for_site)) for name in names]
    return pd.DataFrame([row for row in rows if row], columns=list(_ROW))


_ROW = (
    "chapter",
    "duration_s",
    "peak_memory_gib",
    "date",
    "model",
    "device",
    "dtype",
    "python",
    "torch",
    "transformers",
    "nnsight",
    "package",
    "commit",
)


def _row(record: RunRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    peak = record.peak_memory_bytes
    models = record.models

    def joined(key: str) -> str:
        return ", ".join(dict.fromkeys(str(m[key]) for m in models if m.get(key)))

    return {
        "chapter": record.chapter,
        "duration_s": round(record.duration_s, 1),
        "peak_memory_gib": None if peak is None else round(peak / 2**30, 2),
        "date": record.started[:10],
        "model": joined("name"),
        "device": joined("device") or record.device,
        "dtype": joined("dtype"),
        "python": record.python,
        **{name: record.libraries.get(name, "") for name in ("torch", "transformers", "nnsight")},
        "package": record.package_version,
        "commit": (record.git_commit or "")[:10],
    }


def run_dir() -> Path:
    """Where a notebook keeps its results: the folder of its run, else ``_build/runs/interactive``."""
    given = os.environ.get("GNA_RUN_DIR")
    if given:
        return Path(given)
    return find_project().runs_dir / "interactive"


def save(
    frame: pd.DataFrame,
    name: str,
    *,
    format: str = "parquet",
    parameters: Mapping[str, Any] | None = None,
) -> None:
    """Keep a frame of results, with the record of where it came from beside it.

    >>> save(frame, "accuracy")                           # doctest: +SKIP
    >>> load_frame("accuracy")                            # doctest: +SKIP

    Writes ``<name>.parquet`` (or ``.json`` with ``format="json"``) and ``<name>.record.json``, each whole or
    not at all. In a chapter run by ``gna`` the parameters are known; in JupyterLab give them by
    ``parameters``. Raises :class:`GnaError` on a name with other characters than letters, digits, ``_``,
    ``-`` and ``.``, and on an unknown format.
    """
    if format not in _WRITERS:
        raise GnaError(f"unknown format '{format}' for a frame: choose one of {', '.join(_WRITERS)}.")
    folder = run_dir()
    path = folder / f"{_checked(name)}.{format}"
    other = folder / f"{name}.{'json' if format == 'parquet' else 'parquet'}"
    with atomic_write(path) as temporary:
        _WRITERS[format](frame, temporary)
    other.unlink(missing_ok=True)  # one frame per name: a leftover of the other format would be read instead
    write_json(folder / f"{name}.record.json", _provenance(frame, name, parameters))


def load_frame(name: str, folder: Path | str | None = None) -> pd.DataFrame:
    """Read a frame that :func:`save` wrote, from ``folder`` (default: the folder of this run).

    Raises :class:`GnaError` when there is none, naming those that exist.
    """
    import pandas as pd

    folder = Path(folder) if folder is not None else run_dir()
    name = _checked(name)
    if (folder / f"{name}.parquet").is_file():
        return pd.read_parquet(folder / f"{name}.parquet")
    if (folder / f"{name}.json").is_file():
        return pd.read_json(folder / f"{name}.json", orient="table")
    names = sorted(p.name.removesuffix(".record.json") for p in folder.glob("*.record.json"))
    raise GnaError(f"there is no frame '{name}' in {folder}: it holds {', '.join(names) or 'none'}.")


def facts_of_this_process() -> dict[str, Any]:
    """Versions, device and loaded models as seen from inside the process that computes."""
    from .. import __version__
    from .fingerprint import library_versions

    return {
        "package_version": __version__,
        "libraries": library_versions(),
        "models": _loaded_models(),
        "device": _device(),
    }


def write_kernel_facts() -> None:
    """Called by the runner in the kernel after the last cell."""
    write_json(run_dir() / KERNEL, facts_of_this_process())


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise GnaError(f"'{name}' cannot name a result: use letters, digits, '_', '-' and '.'.")
    return name


def _provenance(frame: pd.DataFrame, name: str, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    request: dict[str, Any] = {}
    if os.environ.get("GNA_RUN_DIR"):
        try:
            request = json.loads((run_dir() / REQUEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            request = {}
    known = dict(request.get("parameters", {})) | dict(parameters or {})
    return {
        "frame": name,
        "rows": len(frame),
        "columns": [str(c) for c in frame.columns],
        "chapter": request.get("chapter"),
        "fingerprint": request.get("fingerprint"),
        "parameters": known,
        "seed": known.get("seed"),
        "written": now(),
        **facts_of_this_process(),
    }


def _loaded_models() -> list[dict[str, Any]]:
    """The models that this process loaded through :mod:`gna_utils.models`, without importing it."""
    module = sys.modules.get("gna_utils.models")
    found = [] if module is None else [asdict(info) for info in module.loaded()]
    # Records are shared: the name of the home folder is nobody's business.
    return [info | {"source": info["source"].replace(str(Path.home()), "~", 1)} for info in found]


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(0)


def _write_json_frame(frame: pd.DataFrame, path: Path) -> None:
    frame.to_json(path, orient="table", index=False)


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path, index=False)


_WRITERS = {"parquet": _write_parquet, "json": _write_json_frame}


def _finished(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name != "failed"
