"""Run one chapter in its own process: strict parameters, a record, and nothing half-written."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from ..errors import GnaError
from . import fingerprint, parameters
from .project import Chapter, Project, find_project, write_json
from .records import KERNEL, REQUEST, RunRecord, now, read_record

LOG = "run.log"
TIMEOUT = 3600
_SCRATCH = ".jupyter"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The same in every run, so that two runs of one fingerprint agree; the number of threads is left to torch.
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses ipywidgets, for bars that are off anyway
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@dataclass(frozen=True)
class Plan:
    """A checked run: what would be executed, and the record of an equal run that is already there."""

    project: Project
    chapter: Chapter
    values: dict[str, Any]
    given: dict[str, Any]
    fingerprint: str
    folder: Path
    for_site: bool
    record: RunRecord | None


def plan(
    chapter: str | Path,
    given: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    *,
    for_site: bool = False,
    project: Project | None = None,
    context: str = "",
) -> Plan:
    """Check chapter and parameters without running anything; raises what :func:`run` raises."""
    if out == "":
        raise GnaError("--out '' names no folder: give the name of one, or leave it out for _build/runs.")
    project = project or find_project()
    chapter = project.chapter(chapter)
    notebook = chapter.source()
    # Pages such as the status page take no parameters; a numbered chapter has to.
    known = {}
    if chapter.numbered or given or not for_site or parameters.has_cell(notebook):
        known = parameters.read(notebook, chapter.path.name)
    changed = parameters.check(known, given or {}, chapter.path.name)
    changed = {
        k: v for k, v in changed.items() if v != known[k].default or type(v) is not type(known[k].default)
    }
    code = fingerprint.of_run(
        project, notebook, changed, for_site=for_site, extra=context, kernel=_ENVIRONMENT
    )
    folder = (Path(out).expanduser().resolve() if out else project.runs_dir) / chapter.name / code
    values = {name: p.default for name, p in known.items()} | changed
    return Plan(project, chapter, values, changed, code, folder, for_site, read_record(folder))


def run(
    chapter: str | Path,
    given: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    *,
    force: bool = False,
    timeout: int | None = None,
    project: Project | None = None,
    progress: TextIO | None = None,
) -> RunRecord:
    """Execute a chapter and keep the notebook, its frames and its record.

    >>> run("01", {"n_examples": 50}).duration_s        # doctest: +SKIP
    38.2

    ``chapter`` is a number, a topic, a name or the path of a notebook; ``given`` holds the parameters that
    differ from the notebook's own. Results go to ``out`` (default ``_build/runs``) in
    ``<chapter>/<fingerprint>/``; a finished run with the same fingerprint is returned as it is unless
    ``force``. ``timeout`` is in seconds per cell (default 3600).

    Raises :class:`GnaError` on an unknown chapter or parameter, a value of the wrong type, a notebook without
    exactly one ``parameters`` cell, a folder that cannot be written, and a cell that fails, runs too long or
    loses its kernel.
    """
    prepared = plan(chapter, given, out, project=project)
    if prepared.record and not force:
        return prepared.record
    return execute(prepared, timeout=timeout, progress=progress)


def execute(prepared: Plan, *, timeout: int | None = None, progress: TextIO | None = None) -> RunRecord:
    """Carry out a plan in a temporary folder that takes its final name only when the last cell has run."""
    parent = prepared.folder.parent
    temporary = parent / f".tmp-{prepared.fingerprint}-{os.getpid()}"
    _make_folder(temporary)
    _sweep(parent)
    meter = _Meter(prepared.chapter.name, _count_cells(prepared.chapter.source()), progress or sys.stderr)
    started, clock = now(), time.perf_counter()
    try:
        _write_request(temporary, prepared, timeout or TIMEOUT)
        outcome = _run_worker(temporary, prepared, meter)
        _clean_log(temporary / LOG)
        if outcome.get("event") != "done":
            kept = _keep_failed(temporary, parent / "failed")
            raise GnaError(_explain(prepared, outcome, meter, timeout or TIMEOUT, kept / LOG))
        record = _record(prepared, temporary, outcome, started, time.perf_counter() - clock, meter.total)
        _finish(temporary, prepared.folder, record)
    finally:
        meter.close()
        shutil.rmtree(temporary, ignore_errors=True)
    meter.done(record)
    return read_record(prepared.folder)


def _write_request(temporary: Path, prepared: Plan, timeout: int) -> None:
    _install_kernel(temporary / _SCRATCH)
    write_json(
        temporary / REQUEST,
        {
            "chapter": prepared.chapter.name,
            "fingerprint": prepared.fingerprint,
            "notebook": str(prepared.chapter.path),
            "output": str(temporary / f"{prepared.chapter.name}.ipynb"),
            "cwd": str(prepared.chapter.path.parent),
            "parameters": prepared.values,
            "given": prepared.given,
            "timeout": timeout,
        },
    )


def _install_kernel(folder: Path) -> None:
    """A ``python3`` kernel that is this interpreter; JUPYTER_PATH puts it before any other of that name."""
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    write_json(folder / "kernels" / "python3" / "kernel.json", spec)


def _run_worker(temporary: Path, prepared: Plan, meter: _Meter) -> dict[str, Any]:
    """Start the worker, follow its events, and return the last one; nothing it started is left running."""
    scratch = str(temporary / _SCRATCH)
    environment = (
        os.environ
        | _ENVIRONMENT
        | {
            "GNA_RUN_DIR": str(temporary),
            "GNA_SITE": "1" if prepared.for_site else "",
            "JUPYTER_PATH": scratch,
            "JUPYTER_RUNTIME_DIR": f"{scratch}/runtime",
            "IPYTHONDIR": f"{scratch}/ipython",
        }
    )
    outcome: dict[str, Any] = {}
    family: set[psutil.Process] = set()
    with (temporary / LOG).open("w") as log:
        # Its own session: Ctrl-C reaches this process only, which then ends worker and kernel in order.
        worker = subprocess.Popen(
            [sys.executable, "-m", "gna_utils.runs.worker", str(temporary / REQUEST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        try:
            for line in worker.stdout:
                outcome = json.loads(line)
                family |= _descendants(worker.pid)
                if outcome["event"] == "cell":
                    meter.cell(outcome)
            worker.wait()
        finally:
            _end(worker, family | _descendants(worker.pid))
    if outcome.get("event") not in ("done", "failed"):
        outcome = {"event": "failed", "cause": "worker", "code": worker.returncode}
    return outcome


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _end(worker: subprocess.Popen, family: set[psutil.Process]) -> None:
    for process in family:
        # psutil compares start times, so a number that the system gave to another process is not hit.
        if process.is_running():
            process.kill()
    if worker.poll() is None:
        worker.kill()
    worker.wait()
    for stream in (worker.stdin, worker.stdout):
        stream.close()


def _explain(prepared: Plan, outcome: dict[str, Any], meter: _Meter, timeout: int, log: Path) -> str:
    """One sentence that names chapter, cell and cause, and where the log is."""
    where = f"chapter {prepared.chapter.name}, {meter.where()}"
    cause = outcome.get("cause")
    if cause == "error":
        what = f"{outcome['ename']}: {_ANSI.sub('', outcome['evalue']) or '(no message)'}"
    elif cause == "timeout":
        what = f"the cell did not finish within {timeout} s; give it more with --timeout"
    elif cause == "died":
        what = _death(outcome.get("code"), outcome.get("peak_memory_bytes"))
    elif cause == "worker":
        what = f"the process that runs the notebook ended early (exit status {outcome['code']})"
    else:
        what = f"the notebook could not be executed: {outcome.get('ename')}: {outcome.get('evalue')}"
    return f"{where}: {what.rstrip('.')}. The log is {log}."


def _death(code: int | None, peak: int | None) -> str:
    """How the kernel ended: killed (mostly for memory), crashed, or by itself."""
    if code is None or code >= 0:
        return f"the kernel ended itself (exit status {code})"
    name = signal.Signals(-code).name
    if -code != signal.SIGKILL:
        return f"the kernel crashed ({name}); the end of the log may say where"
    size = f" at {peak / 2**30:.1f} GiB" if peak else ""
    return f"the kernel was killed by the system{size}, most often for lack of memory; try smaller parameters"


def _record(
    prepared: Plan, folder: Path, outcome: dict[str, Any], started: str, duration: float, n_cells: int
) -> RunRecord:
    facts = json.loads((folder / KERNEL).read_text(encoding="utf-8"))
    root, notebook = prepared.project.root, prepared.chapter.path
    return RunRecord(
        chapter=prepared.chapter.name,
        notebook=notebook.relative_to(root).as_posix() if notebook.is_relative_to(root) else notebook.name,
        fingerprint=prepared.fingerprint,
        parameters=prepared.values,
        given=prepared.given,
        seed=prepared.values.get("seed"),
        started=started,
        duration_s=round(duration, 2),
        peak_memory_bytes=outcome["peak_memory_bytes"],
        n_cells=n_cells,
        python=platform.python_version(),
        platform=platform.platform(),
        git_commit=git_commit(root),
        for_site=prepared.for_site,
        **facts,
    )


def git_commit(root: Path) -> str | None:
    """The commit of the checkout, with ``+`` when tracked files differ from it; None outside git."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
        (folder / REQUEST).touch()
    except OSError as error:
        raise GnaError(
            f"the folder {folder.parent.parent} cannot be written ({error.strerror}): give another to --out."
        ) from None


def _sweep(parent: Path) -> None:
    """Remove temporary folders whose process is gone (killed, or the power failed)."""
    for leftover in parent.glob(".tmp-*-*"):
        if not psutil.pid_exists(int(leftover.name.rpartition("-")[2])):
            shutil.rmtree(leftover, ignore_errors=True)


def _keep_failed(temporary: Path, failed: Path) -> Path:
    shutil.rmtree(failed, ignore_errors=True)
    shutil.rmtree(temporary / _SCRATCH, ignore_errors=True)
    temporary.rename(failed)
    return failed


def _finish(temporary: Path, final: Path, record: RunRecord) -> None:
    shutil.rmtree(temporary / _SCRATCH, ignore_errors=True)
    for name in (REQUEST, KERNEL):
        (temporary / name).unlink(missing_ok=True)
    record.write(temporary)
    replace_folder(temporary, final)


def replace_folder(new: Path, final: Path) -> None:
    """Give a finished folder its final name; what stood there before goes away only after that."""
    old = final.with_name(f".tmp-old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    try:
        new.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _clean_log(log: Path) -> None:
    log.write_text(_ANSI.sub("", log.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")


def _count_cells(notebook: dict) -> int:
    return sum(cell.get("cell_type") == "code" for cell in notebook["cells"])


class _Meter:
    """Progress: one line that is rewritten on a terminal, three lines at most in a log."""

    def __init__(self, name: str, total: int, stream: TextIO):
        self.name, self.total, self.stream = name, total, stream
        self.number, self.first_line = 0, ""
        self.live = stream.isatty()
        self.started = time.perf_counter()
        if not self.live:
            self._print(f"{name}: running {total} cells")

    def cell(self, event: dict[str, Any]) -> None:
        if {"injected-parameters", "gna-facts"}.intersection(event["tags"]):
            return
        self.number += 1
        lines = [line for line in event["source"].splitlines() if line.strip()]
        self.first_line = lines[0].strip()[:60] if lines else "(empty)"
        if self.live:
            self.stream.write(f"\r\x1b[K{self.name}: cell {self.number}/{self.total}  {self.first_line}")
            self.stream.flush()
        elif self.total >= 10 and self.number == self.total // 2:
            self._print(f"{self.name}: cell {self.number} of {self.total}, {self._elapsed():.0f} s")

    def where(self) -> str:
        """The cell that was running, counted among the code cells of the chapter's own notebook."""
        if not self.number:
            return "before the first cell"
        return f"code cell {self.number} of {self.total} (`{self.first_line}`)"

    def close(self) -> None:
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def done(self, record: RunRecord) -> None:
        peak = record.peak_memory_bytes
        memory = f", peak memory {peak / 2**30:.2f} GiB" if peak else ""
        self._print(f"{self.name}: {self.total} cells in {record.duration_s:.1f} s{memory}")

    def _elapsed(self) -> float:
        return time.perf_counter() - self.started

    def _print(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()
