"""A chapter runs in its own process, leaves a full record or nothing, and its failures name the cause."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pyarrow
import pytest
from books import code, notebook, text, write

from gna_utils.errors import GnaError
from gna_utils.runs import execute, fingerprint, load_frame, records, run, save
from gna_utils.runs.project import Project, find_project

CHAPTER = notebook(
    code("import os, signal, sys, time\nprint(sys.executable, os.environ['PYTHONHASHSEED'])"),
    code("import pandas as pd\nfrom gna_utils.runs import save"),
    code("save(pd.DataFrame({'n': range(n_examples)}), 'rows')"),
    code("if quick:\n    raise RuntimeError('a planted fault')"),
    code("if model == 'die':\n    os.kill(os.getpid(), signal.SIGKILL)"),
    code("open(os.environ.get('PID_FILE', os.devnull), 'w').write(str(os.getpid()))"),
    code("if model == 'sleep':\n    time.sleep(120)"),
    *(code(f"step = {number}") for number in range(8)),
)


@pytest.fixture(scope="module", autouse=True)
def frozen_package(tmp_path_factory):
    """A package that nobody edits while the tests run, so that equal runs have equal fingerprints."""
    package = tmp_path_factory.mktemp("package")
    (package / "scoring.py").write_text("x = 1\n")
    (package / "cli.py").write_text("x = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "PACKAGE", package)
        yield package


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return Project(write(tmp_path_factory.mktemp("book"), {"01_toy_task": CHAPTER}))


@pytest.fixture(scope="module")
def done(book, tmp_path_factory):
    """One good run, where another program is registered as the kernel python3: (record, progress)."""
    foreign = tmp_path_factory.mktemp("jupyter")
    (foreign / "kernels" / "python3").mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "Foreign", "language": "python"}
    (foreign / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    progress = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(foreign))
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
        patch.setenv("NDIF_API_KEY", "planted-secret")
        record = run("01", {"n_examples": "5", "n_pairs": "2,8"}, project=book, progress=progress)
    return record, progress.getvalue()


def test_record_says_what_ran(done, book):
    """What papermill records is only what was asked; defaults count too (papermill pull request 869)."""
    record, _ = done
    assert record.parameters == {
        "model": "toy",
        "n_examples": 5,
        "limit": None,
        "ratio": 0.5,
        "quick": False,
        "n_pairs": [2, 8],
        "seed": 0,
    }
    assert record.given == {"n_examples": 5, "n_pairs": [2, 8]}
    assert (record.seed, record.n_cells, record.notebook) == (0, 16, "book/01_toy_task.ipynb")
    assert record.libraries["papermill"] and record.package_version and record.device == "cpu"
    assert 0 < record.duration_s < 600
    assert 20 * 2**20 < record.peak_memory_bytes < 2 * 2**30
    folder = book.runs_dir / "01_toy_task" / record.fingerprint
    assert records.read_record(folder) == record
    assert sorted(p.name for p in folder.iterdir()) == [
        "01_toy_task.ipynb",
        "record.json",
        "rows.parquet",
        "rows.record.json",
        "run.log",
    ]


def test_executed_notebook_is_valid_and_ran_in_this_interpreter(done, book):
    """A kernel python3 of another installation must not be taken (papermill issues 251 and 638)."""
    record, _ = done
    executed = nbformat.read(record.executed, as_version=4)
    nbformat.validate(executed)
    assert executed.cells[3].outputs[0].text == f"{sys.executable} 0\n"
    tags = [tag for cell in executed.cells for tag in cell.metadata.get("tags", [])]
    assert tags == ["parameters", "injected-parameters"]


def test_no_secret_and_no_folder_of_this_machine_is_kept(done, book):
    record, _ = done
    for path in Path(record.folder).iterdir():
        content = path.read_bytes()
        assert b"planted-secret" not in content, path
        if path.suffix in (".json", ".ipynb"):
            assert str(book.root).encode() not in content, path


def test_progress_in_a_log_is_a_few_lines(done):
    """A line per update fills the logs of a server (papermill issue 765)."""
    lines = done[1].splitlines()
    assert 2 <= len(lines) < 5
    assert lines[0] == "01_toy_task: running 16 cells" and "peak memory" in lines[-1]


def test_frame_has_its_provenance_beside_it(done):
    record, _ = done
    assert list(load_frame("rows", record.folder)["n"]) == [0, 1, 2, 3, 4]
    provenance = json.loads((Path(record.folder) / "rows.record.json").read_text())
    assert provenance["parameters"] == record.parameters
    assert provenance["fingerprint"] == record.fingerprint and provenance["rows"] == 5


def test_equal_run_is_not_repeated(done, book, monkeypatch):
    monkeypatch.setattr(execute, "_run_worker", None)
    again = run("toy_task", {"n_pairs": [2, 8], "n_examples": 5, "seed": 0}, project=book)
    assert again == done[0]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"quick": True}, r"code cell 5 of 16 \(`if quick:`\): RuntimeError: a planted fault\. The log is"),
        (
            {"model": "die"},
            r"code cell 6 of 16 .*: the kernel was killed by the system at 0\.\d GiB, most often",
        ),
    ],
)
@pytest.mark.slow
def test_failure_names_chapter_cell_and_cause(done, book, given, message):
    """A failing or killed kernel ends the run, says why, and leaves the good run alone (papermill 125)."""
    before = {p: p.read_bytes() for p in Path(done[0].folder).iterdir()}
    with pytest.raises(GnaError, match="^chapter 01_toy_task, " + message):
        run("01", given, project=book, progress=io.StringIO())
    folder = book.runs_dir / "01_toy_task"
    assert sorted(p.name for p in folder.iterdir()) == sorted([done[0].fingerprint, "failed"])
    log = (folder / "failed" / "run.log").read_text()
    assert ("a planted fault" in log or "Kernel died" in log) and "\x1b" not in log
    assert {p: p.read_bytes() for p in Path(done[0].folder).iterdir()} == before


@pytest.mark.slow
def test_cell_that_takes_too_long_is_ended(book):
    with pytest.raises(
        GnaError, match=r"code cell 8 of 16 .*did not finish within 2 s; give it more with --timeout"
    ):
        run("01", {"model": "sleep"}, project=book, timeout=2, progress=io.StringIO())


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_interrupt_leaves_no_kernel(tmp_path, number, status):
    """Ctrl-C, kill and even kill -9 must end the kernel, and leave nothing that looks like a finished run."""
    book = Project(write(tmp_path, {"01_toy": CHAPTER}))
    pid_file = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-m", "gna_utils.cli", "run", "01", "-p", "model=sleep"],
        cwd=tmp_path,
        env=os.environ | {"PID_FILE": str(pid_file)},
        stderr=subprocess.PIPE,
        text=True,
        # shells start background jobs with Ctrl-C ignored, and the tests may run in one
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    kernel = _kernel_of(pid_file)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert psutil.wait_procs([kernel], timeout=30)[1] == []
    assert not list(book.runs_dir.glob("*/*/record.json"))
    if number != signal.SIGKILL:
        word = "stopped" if number == signal.SIGINT else "terminated"
        assert said.splitlines()[-1] == f"gna: {word}; nothing was left half-written."
        assert not list(book.runs_dir.glob("*/*"))


def _kernel_of(pid_file: Path) -> psutil.Process:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if pid_file.exists() and pid_file.read_text():
            return psutil.Process(int(pid_file.read_text()))
        time.sleep(0.1)
    raise AssertionError("the kernel did not start")


def test_leftovers_of_a_killed_run_are_swept(book):
    parent = book.runs_dir / "swept"
    gone, alive = parent / ".tmp-abc-999999999", parent / f".tmp-abc-{os.getpid()}"
    gone.mkdir(parents=True)
    alive.mkdir()
    execute._sweep(parent)
    assert not gone.exists() and alive.exists()


@pytest.mark.parametrize(
    "chapter, given, message",
    [
        ("01", {"n_exmaples": 10}, r"has no parameter 'n_exmaples': did you mean 'n_examples'\?"),
        ("01", {"n_examples": "abc"}, "must be int, not 'abc'"),
        ("02", {}, "unknown chapter '02': choose one of 01_toy_task"),
        ("toy_tusk", {}, r"did you mean 'toy_task'\?"),
        ("nowhere/x.ipynb", {}, "there is no notebook nowhere/x.ipynb"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(book, chapter, given, message, monkeypatch):
    monkeypatch.setattr(execute, "_run_worker", None)
    with pytest.raises(GnaError, match=message):
        run(chapter, given, project=book)


@pytest.mark.parametrize(
    "cells",
    [
        "[1, 2]",
        "5",
        '{"a": 1}',
        "[{}]",
        '[{"cell_type": "code", "source": 5}]',
        '[{"cell_type": "code", "source": [1]}]',
        '[{"cell_type": "code", "metadata": null}]',
        '[{"cell_type": "code", "metadata": {"tags": 5}}]',
    ],
)
def test_malformed_cells_are_refused(tmp_path, book, cells):
    path = tmp_path / "x.ipynb"
    path.write_text(f'{{"cells": {cells}}}')
    with pytest.raises(GnaError, match=r"x\.ipynb is not a readable notebook: its cells are malformed"):
        run(path, project=book)


def test_notebook_without_parameters_cell_is_refused(tmp_path):
    """Without the tag papermill runs the defaults and says nothing (papermill issue 806)."""
    project = Project(write(tmp_path, {"01_toy": notebook(code("1"), parameters=None)}))
    for given in ({}, {"seed": 1}):
        with pytest.raises(GnaError, match=r"01_toy\.ipynb has no cell tagged 'parameters'"):
            run("01", given, project=project)


def test_folder_that_cannot_be_written_is_refused_before_executing(book, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "_run_worker", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(GnaError, match=r"the folder .*file/runs cannot be written .*: give another to --out"):
        run("01", out=tmp_path / "file" / "runs", project=book, progress=io.StringIO())


def test_fingerprint_follows_everything_that_can_change_a_result(tmp_path, frozen_package):
    """The book engine's own cache misses edits of the package, the data and the lock."""
    project = Project(write(tmp_path, {"01_toy": CHAPTER}))
    (project.root / "data").mkdir()
    words, lock = project.root / "data" / "words.json", project.root / "requirements.lock"
    words.write_text("[]")
    lock.write_text("torch==2\n")

    def now(cells=CHAPTER, **context) -> str:
        return fingerprint.of_run(project, cells, {}, **context)

    first = now()
    assert now() == first
    prose = CHAPTER | {"cells": [text("# Other prose"), *CHAPTER["cells"]]}
    tagged = json.loads(json.dumps(CHAPTER))
    tagged["cells"][3]["metadata"]["tags"] = ["hide-input"]
    (frozen_package / "cli.py").write_text("x = 2\n")
    (project.root / "data" / "README.md").write_text("about the data")
    assert now(prose) == now(tagged) == now() == first

    tagged["cells"][3]["metadata"]["tags"] = ["raises-exception"]
    seen = {first, now(tagged), now(for_site=True), fingerprint.of_run(project, CHAPTER, {"seed": 1})}
    seen.add(now(CHAPTER | {"cells": [*CHAPTER["cells"], code("1")]}))
    words.write_text('["fox"]')
    seen.add(now())
    lock.write_text("torch==3\n")
    seen.add(now())
    (frozen_package / "scoring.py").write_text("x = 2\n")
    seen.add(now())
    assert len(seen) == 8


def test_parameter_at_its_default_is_the_same_run(book):
    plain = execute.plan("01", {}, project=book)
    assert execute.plan("01", {"seed": "0", "n_pairs": "2,4"}, project=book).folder == plain.folder
    assert execute.plan("01", {"seed": "1"}, project=book).folder != plain.folder


def test_save_is_ours_although_nnsight_gives_every_object_a_save():
    """A name that a module looks up on first use is found on ``object`` before, once nnsight is imported."""
    import gna_utils.runs

    assert vars(gna_utils.runs)["save"] is records.save is save


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_save_and_load_in_a_notebook_that_nobody_started(tmp_path, monkeypatch, format):
    write(tmp_path, {"01_toy": CHAPTER})
    monkeypatch.chdir(tmp_path / "book")
    monkeypatch.delenv("GNA_RUN_DIR", raising=False)
    frame = pd.DataFrame({"model": ["a", "b"], "value": [0.1, float("nan")], "n": [1, 2]})
    # Nothing is returned: as the last line of a cell, a path of this machine would stand in the page.
    assert save(frame, "drop", format=format, parameters={"seed": 3}) is None
    path = tmp_path / "_build" / "runs" / "interactive" / f"drop.{format}"
    assert path.is_file()
    pd.testing.assert_frame_equal(load_frame("drop"), frame, check_dtype=format == "parquet")
    record = json.loads((path.parent / "drop.record.json").read_text())
    assert record["seed"] == 3 and record["columns"] == ["model", "value", "n"]
    save(frame.head(1), "drop")
    assert len(load_frame("drop")) == 1


def test_a_frame_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setenv("GNA_RUN_DIR", str(tmp_path))
    save(pd.DataFrame({"a": [1]}), "rows")
    with pytest.raises(pyarrow.ArrowInvalid):
        save(pd.DataFrame({"a": [object()]}), "rows")
    assert list(load_frame("rows")["a"]) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.parquet", "rows.record.json"]


def test_bad_names_and_formats_of_frames_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GNA_RUN_DIR", str(tmp_path))
    frame = pd.DataFrame({"a": [1]})
    save(frame, "rows")
    with pytest.raises(GnaError, match=r"'\.\./rows' cannot name a result"):
        save(frame, "../rows")
    with pytest.raises(GnaError, match="unknown format 'csv'"):
        save(frame, "rows", format="csv")
    with pytest.raises(GnaError, match=r"no frame 'row' in .*: it holds rows"):
        load_frame("row")


def test_table_shows_the_newest_run_of_each_chapter(book, done, tmp_path):
    project = Project(write(tmp_path, {"01_toy": CHAPTER, "02_more": CHAPTER, "status": CHAPTER}))
    model = {"name": "smol", "device": "cpu", "dtype": "float32", "sha256": "ab"}
    for chapter, started, given in (
        ("02_more", "2026-01-02T00:00:00+00:00", {}),
        ("01_toy", "2026-01-01T00:00:00+00:00", {}),
        ("01_toy", "2026-01-03T00:00:00+00:00", {}),
        ("01_toy", "2026-01-04T00:00:00+00:00", {"seed": 1}),
        ("status", "2026-01-05T00:00:00+00:00", {}),
    ):
        made = replace(done[0], chapter=chapter, started=started, given=given, for_site=True, models=[model])
        folder = project.runs_dir / chapter / started[:10]
        folder.mkdir(parents=True)
        made.write(folder)
    table = records.table(project)
    assert list(table["chapter"]) == ["01_toy", "02_more"]
    assert list(table["date"]) == ["2026-01-03", "2026-01-02"]
    assert list(table["model"]) == ["smol", "smol"] and (table["peak_memory_gib"] > 0).all()


def test_project_is_found_from_any_folder(tmp_path, monkeypatch):
    write(tmp_path / "clone", {"01_toy": CHAPTER})
    (tmp_path / "clone" / "_build" / "stage").mkdir(parents=True)
    (tmp_path / "clone" / "_build" / "stage" / "_toc.yml").write_text("root: x\n")
    for folder in ("clone", "clone/book", "clone/_build/stage"):
        assert find_project(tmp_path / folder).root == tmp_path / "clone"
    assert (find_project(tmp_path).root / "gna_utils" / "runs").is_dir()  # else the checkout of the package
    monkeypatch.setattr("gna_utils.runs.project.__file__", str(tmp_path / "a" / "b" / "c.py"))
    with pytest.raises(GnaError, match="is not inside the book"):
        find_project(tmp_path)


@pytest.mark.parametrize(
    "toc, message",
    [
        ("root: [", "cannot be read"),
        ("{}", "names no page"),
        ("root: a\nchapters:\n- file: a\n", "more than once"),
        ("root: a\nchapters:\n- glob: b*\n", "uses 'glob'"),
        ("root: a\n", r"holds no a.ipynb and no a.md"),
    ],
)
def test_faults_of_the_contents_are_named(tmp_path, toc, message):
    (tmp_path / "_toc.yml").write_text(toc)
    with pytest.raises(GnaError, match=message):
        Project(tmp_path).chapters()
