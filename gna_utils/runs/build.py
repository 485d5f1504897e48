"""Build the site: run the chapters that changed, make the pages, check them, then replace the old ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TextIO

import yaml

from ..errors import GnaError
from . import execute, fingerprint
from .project import STATUS, Chapter, Project, find_project, read_notebook, write_json
from .records import RunRecord, latest, now, read_records
from .site_checks import check_site

_WARNING = re.compile(r"\b(WARNING|ERROR|CRITICAL|SEVERE)\b|^\w*(Exception|Error)\b")
_KEPT_RUNS = 3


@dataclass
class SiteReport:
    """What a build did; ``str()`` is the summary for the terminal."""

    html: Path
    # chapter name -> how its outputs were come by: "executed", "reused" or "reused, older than its source"
    how: dict[str, str] = field(default_factory=dict)
    records: dict[str, RunRecord] = field(default_factory=dict)
    pages_seconds: float | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        width = max(map(len, self.records), default=0)
        lines = []
        for name, record in self.records.items():
            peak = f"{record.peak_memory_bytes / 2**30:6.2f} GiB" if record.peak_memory_bytes else "    ?"
            lines.append(f"  {name:<{width}}  {record.duration_s:7.1f} s  {peak}  {self.how[name]}")
        pages = "unchanged" if self.pages_seconds is None else f"made in {self.pages_seconds:.1f} s"
        lines.append(f"pages {pages}; {self.seconds:.1f} s in all")
        lines.append(f"the site is {self.html / 'index.html'} (show it with `gna serve`)")
        return "\n".join(lines)


def build_site(
    only: Iterable[str] = (),
    *,
    force: bool = False,
    timeout: int | None = None,
    project: Project | None = None,
    progress: TextIO | None = None,
) -> SiteReport:
    """Run the chapters of the table of contents that changed, then make, check and publish ``_build/html``.

    >>> print(build_site())                   # doctest: +SKIP
    >>> build_site(only=["01"], force=True)   # doctest: +SKIP

    A chapter is executed again when its code, its parameters, the package, the data, the lock file, Python or
    a library changed; prose is renewed without executing. ``only`` limits executing to some chapters and
    takes the last good run of the others; ``force`` executes in any case.

    Raises :class:`GnaError` naming chapter, cell and cause for each failure, or the warnings and faults of
    the pages; the site that stood there before is left untouched then.
    """
    clock = time.perf_counter()
    project = project or find_project()
    _check_engine()
    report = SiteReport(project.html_dir)
    _run_chapters(project, list(only), force, timeout, report, progress)
    _make_pages(project, report, force)
    _prune(project, report)
    report.seconds = time.perf_counter() - clock
    return report


def _check_engine() -> None:
    try:
        version = metadata.version("jupyter-book")
    except metadata.PackageNotFoundError:
        raise GnaError("jupyter-book is not installed: pip install 'jupyter-book>=1.0.4.post1,<2'.") from None
    if int(version.split(".")[0]) >= 2:
        raise GnaError(
            f"jupyter-book {version} is another engine that does not read _config.yml: "
            "pip install 'jupyter-book>=1.0.4.post1,<2'."
        )


def _run_chapters(
    project: Project,
    only: list[str],
    force: bool,
    timeout: int | None,
    report: SiteReport,
    progress: TextIO | None,
) -> None:
    """Fill the report with one record per chapter; one failure does not stop the others, so all are named."""
    chosen = {project.chapter(name).name for name in only}
    _check_writable(project.runs_dir)
    # The status page shows the other runs; sorting is stable, so the others keep their order.
    chapters = sorted(project.chapters(), key=lambda chapter: chapter.name == STATUS)
    failures = []
    for chapter in chapters:
        if chapter.name == STATUS and failures:
            continue
        wanted = not only or chapter.name in chosen or chapter.name == STATUS
        try:
            plan = execute.plan(
                chapter.path, for_site=True, project=project, context=_context(chapter, report)
            )
            report.how[chapter.name], report.records[chapter.name] = _outputs(
                plan, wanted, force, timeout, progress
            )
        except GnaError as error:
            failures.append(str(error))
    if failures:
        raise GnaError("\n".join(failures))


def _check_writable(folder: Path) -> None:
    """Asked once before all chapters, each of which would fail for the same reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise GnaError(
            f"the folder {folder} cannot be written ({error.strerror}), and the site is built from the runs "
            "in it: make it writable, or remove what stands in its way."
        ) from None


def _outputs(
    plan: execute.Plan, wanted: bool, force: bool, timeout: int | None, progress: TextIO | None
) -> tuple[str, RunRecord]:
    """How the outputs of a chapter were come by, and the record of their run."""
    if plan.record and not (force and wanted):
        return "reused", plan.record
    if wanted:
        return "executed", execute.execute(plan, timeout=timeout, progress=progress)
    older = latest(plan.project.runs_dir, plan.chapter.name)
    if older is None:
        raise GnaError(
            f"no run of {plan.chapter.name} is there to reuse: build once without --only, or name it too."
        )
    return "reused, older than its source", older


def _context(chapter: Chapter, report: SiteReport) -> str:
    """What a page depends on beside its code: the style of charts, and for the status page all other runs."""
    context = os.environ.get("GNA_CHARTS", "")
    if chapter.name == STATUS:
        context += json.dumps([[r.chapter, r.fingerprint, r.started] for r in report.records.values()])
    return context


def _make_pages(project: Project, report: SiteReport, force: bool) -> None:
    executed = {name: fingerprint.file_sha256(record.executed) for name, record in report.records.items()}
    code = fingerprint.of_site(project, executed, [source for source, _ in _stage_files(project)])
    note = project.build_dir / "site.json"
    if not force and _unchanged(note, code, report.html):
        return
    clock = time.perf_counter()
    stage = project.build_dir / "stage"
    notebooks = _stage(project, report, stage)
    temporary = project.build_dir / f".site-{os.getpid()}"
    try:
        html = _sphinx(project, stage, temporary)
        faults = check_site(html, project.pages(), notebooks)
        if faults:
            raise GnaError(_listing("the built pages have faults", faults))
        execute.replace_folder(html, report.html)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report.pages_seconds = time.perf_counter() - clock
    write_json(note, {"fingerprint": code, "built": now(), "pages": len(project.pages())})


def _unchanged(note: Path, code: str, html: Path) -> bool:
    try:
        return (
            json.loads(note.read_text(encoding="utf-8"))["fingerprint"] == code
            and (html / "index.html").is_file()
        )
    except (OSError, ValueError, KeyError):
        return False


def _stage_files(project: Project) -> list[tuple[Path, Path]]:
    """Files that the pages are made of: (where it is, where it goes in the staging folder)."""
    sources = [project.root / "_toc.yml", project.root / "_config.yml", *project.root.glob("*.md")]
    pages = {project.page_file(page) for page in project.pages()}
    sources += pages
    for folder in {page.parent for page in pages} - {project.root}:
        sources += [p for p in folder.rglob("*") if p.is_file() and not _hidden(p.relative_to(project.root))]
    kept = {p for p in sources if p.is_file() and (p.suffix != ".ipynb" or p in pages)}
    return [(path, path.relative_to(project.root)) for path in sorted(kept)]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _stage(project: Project, report: SiteReport, stage: Path) -> dict[str, Path]:
    """Fill the staging folder; the executed notebooks in it, by page."""
    from .assets import write_assets

    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
    except OSError as error:
        raise GnaError(
            f"the folder {stage} cannot be made ({error.strerror}): remove what stands there."
        ) from None
    notebooks = {}
    for source, target in _stage_files(project):
        path = stage / target
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            write_json(path, _with_outputs(read_notebook(source), report.records[source.stem]))
            notebooks[target.with_suffix("").as_posix()] = path
        elif target == Path("_config.yml"):
            path.write_text(_config(source), encoding="utf-8")
        else:
            shutil.copy2(source, path)
    write_assets(stage)
    return notebooks


def _with_outputs(source: dict, record: RunRecord) -> dict:
    """The notebook of the repository with the outputs of its run, so that edited prose needs no new run."""
    executed = read_notebook(record.executed)
    if fingerprint.code_of(source) != fingerprint.code_of(executed):
        return executed  # an older run, under --only: its outputs belong to its own code
    done = iter([cell for cell in executed["cells"] if cell["cell_type"] == "code"])
    for cell in source["cells"]:
        if cell["cell_type"] == "code":
            ran = next(done)
            cell["outputs"], cell["execution_count"] = ran["outputs"], ran["execution_count"]
    source["metadata"] = executed["metadata"] | source["metadata"]
    return source


def _config(source: Path) -> str:
    """The settings of the site, with execution off whatever they say: the chapters have been executed."""
    try:
        config = yaml.safe_load(source.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise GnaError(f"the settings {source} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise GnaError(f"the settings {source} are a {type(config).__name__}: write 'name: value' lines.")
    config["execute"] = (config.get("execute") or {}) | {"execute_notebooks": "off"}
    return yaml.safe_dump(config, allow_unicode=True, sort_keys=False)


def _sphinx(project: Project, stage: Path, temporary: Path) -> Path:
    """Make the pages with warnings as errors; the folder of the pages."""
    log = project.build_dir / "sphinx.log"
    # Not the `jupyter-book` script: it may belong to another Python than this one.
    engine = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    done = subprocess.run(
        [*engine, "build", str(stage), "--path-output", str(temporary), "-W", "--keep-going"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"NO_COLOR": "1", "PYTHONWARNINGS": "ignore"},
    )
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(f"{stage}{os.sep}", "")
    log.write_text(text, encoding="utf-8")
    if done.returncode != 0:
        lines = _causes(text) or text.strip().splitlines()[-3:]
        raise GnaError(_listing("the pages could not be made without warnings", lines, f"The log is {log}."))
    return temporary / "_build" / "html"


def _causes(text: str) -> list[str]:
    """The lines that report a fault; an error that says nothing itself goes on in the next line."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" =")]
    pairs = zip(lines, [*lines[1:], ""])
    return [
        f"{line} {following}" if line.endswith("Error:") else line
        for line, following in pairs
        if _WARNING.search(line)
    ]


def _listing(headline: str, lines: list[str], end: str = "") -> str:
    shown = lines[:12] + ([f"... and {len(lines) - 12} more"] if len(lines) > 12 else [])
    return "\n  ".join([f"{headline}:", *shown]) + (f"\n{end}" if end else "")


def _prune(project: Project, report: SiteReport) -> None:
    """Keep the last few runs for the site of each chapter; runs that a person asked for are never removed."""
    for name in report.records:
        runs = [r for r in read_records(project.runs_dir) if r.chapter == name and r.for_site]
        for record in runs[:-_KEPT_RUNS]:
            if record.fingerprint != report.records[name].fingerprint:
                shutil.rmtree(record.folder, ignore_errors=True)
