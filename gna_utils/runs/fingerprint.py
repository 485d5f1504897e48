"""What the outputs of a chapter depend on, as one hash: equal fingerprints mean that a run can be reused.

The notebook cache of the book engine sees the code cells only, and keeps stale outputs when the package, the
data or a library changes. Here everything that can change a result is part of the hash; prose and
presentation tags are not, since they cannot.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .project import Project, cell_source, cell_tags

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = (
    "altair",
    "ipykernel",
    "nbclient",
    "nnsight",
    "numpy",
    "pandas",
    "papermill",
    "tokenizers",
    "torch",
    "transformers",
    "vl-convert-python",
)
# Tags that change what a run does; all others (hide-input, ...) only change how the page looks.
_RUN_TAGS = {"parameters", "raises-exception", "skip-execution"}
# Modules that start chapters and are never used by one: editing them leaves every result as it was.
_OUTSIDE = ("cli.py", "runs/", "site_assets/")
_INSIDE = ("runs/records.py",)


def library_versions(names: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Installed versions, read without importing anything; a library that is absent is left out."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def of_run(project: Project, notebook: dict, parameters: Mapping[str, Any], **context: Any) -> str:
    """The fingerprint (16 hex digits) of executing ``notebook`` with these given parameters.

    It covers code cells, the tags that steer execution, the parameters, the package's source, ``data/``, the
    lock file, the Python version, the versions of the libraries that compute, and whatever ``context`` adds.
    """
    return _digest(
        {
            "cells": code_of(notebook),
            "parameters": dict(parameters),
            "environment": environment(project),
            "context": context,
        }
    )


def code_of(notebook: dict) -> list[list]:
    """The part of a notebook that decides its outputs: source and execution tags of each code cell."""
    return [
        [cell_source(cell), sorted(_RUN_TAGS.intersection(cell_tags(cell)))]
        for cell in notebook["cells"]
        if cell.get("cell_type") == "code"
    ]


def environment(project: Project) -> dict[str, Any]:
    """The part of a fingerprint that all chapters share."""
    return {
        "package": of_files(PACKAGE, _package_files()),
        "data": of_files(project.root, _data_files(project.root / "data")),
        "lock": of_files(project.root, sorted(project.root.glob("*.lock"))),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "libraries": library_versions(),
    }


def of_files(base: Path, files: Iterable[Path]) -> str:
    """One hash over the names (relative to ``base``) and contents of files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(base).as_posix()}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_site(project: Project, executed: Mapping[str, str], stage_files: Iterable[Path]) -> str:
    """The fingerprint of the built pages: executed notebooks, prose, configuration, the package (for its
    reference pages and its site scripts) and the libraries that draw pages."""
    engine = (
        "jupyter-book",
        "sphinx",
        "myst-nb",
        "sphinx-book-theme",
        "sphinx-mathjax-offline",
        "vl-convert-python",
    )
    package = sorted(p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return _digest(
        {
            "executed": dict(executed),
            "sources": of_files(project.root, sorted(stage_files)),
            "package": of_files(PACKAGE, package),
            "engine": library_versions(engine),
        }
    )


def _package_files() -> list[Path]:
    def decides(path: Path) -> bool:
        name = path.relative_to(PACKAGE).as_posix()
        return name in _INSIDE or not name.startswith(_OUTSIDE)

    return sorted(path for path in PACKAGE.rglob("*.py") if decides(path))


def _data_files(folder: Path) -> list[Path]:
    """Word lists, registries and small weights: everything but texts for people."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in (".md", ".tmp"))


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
