"""What a sweep has measured so far, in memory and in a file that lets it go on after an interruption."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from pathlib import Path

import numpy as np

from ..errors import GnaError
from .measure import Cells

METRICS = {"correct": "accuracy", "logprob": "logprob"}
_PAUSE = 10.0  # seconds between two savings
_CLOSE = 1e-3  # the same weights give the same baseline, up to rounding on another machine


class Ledger:
    """Arrays (unit, example) by key of :data:`METRICS`, NaN where nothing was measured yet.

    ``baseline`` holds arrays (example,) under the same keys. ``settings`` says what was measured; a file of
    other settings or with another baseline is refused.
    """

    def __init__(
        self, n_units: int, baseline: dict[str, np.ndarray], settings: dict, path: Path | None
    ) -> None:
        self.baseline, self.settings, self.path = baseline, settings, path
        shape = (n_units, len(baseline["correct"]))
        self.values = {key: np.full(shape, np.nan) for key in METRICS}
        self.saved = time.monotonic()
        if path is not None and path.exists():
            self._load()

    @property
    def missing(self) -> np.ndarray:
        """The map (unit, example) of what was not measured."""
        return np.isnan(self.values["logprob"])

    def record(self, cells: Cells) -> None:
        for key in METRICS:
            self.values[key][np.ix_(cells.units, cells.examples)] = getattr(cells, key)
        if time.monotonic() > self.saved + _PAUSE:
            self.save()

    def save(self) -> None:
        """Write the file, if there is one: a temporary file first, so that a good one is never damaged."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        baseline = {f"baseline_{key}": values for key, values in self.baseline.items()}
        with temporary.open("wb") as file:
            np.savez(file, settings=json.dumps(self.settings), **self.values, **baseline)
        temporary.replace(self.path)
        self.saved = time.monotonic()

    def _load(self) -> None:
        try:
            with np.load(self.path) as stored:
                content = {name: stored[name] for name in stored.files}
            settings = json.loads(str(content["settings"]))
            values = {key: content[key] for key in METRICS}
            baseline = {key: content[f"baseline_{key}"] for key in METRICS}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise GnaError(f"{self.path} does not hold a sweep: name another file, or remove it.") from None
        other = [key for key, value in self.settings.items() if settings.get(key) != value]
        if not other and any(np.abs(baseline[key] - self.baseline[key]).max() > _CLOSE for key in METRICS):
            other = ["weights"]
        if other:
            raise GnaError(
                f"{self.path} holds a sweep with other {' and '.join(other)}: go on with the same ones, or "
                "name another file."
            )
        self.values = values


def digest(content: object) -> str:
    """A short name for anything with a faithful ``repr``."""
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
