"""The site is built from executed chapters, replaced only when it is good, rebuilt only after a change."""

from __future__ import annotations

import io
import json
from importlib import metadata
from pathlib import Path

import pytest
from books import code, notebook, text, write

from gna_utils.errors import GnaError
from gna_utils.runs import build, execute, fingerprint, records
from gna_utils.runs.project import Project, read_notebook
from gna_utils.runs.site_checks import check_site

CHART = (
    "import altair as alt\nfrom gna_utils import charts\ncharts.setup()\n"
    "alt.Chart(alt.Data(values=[{'a': 1, 'b': 2}]), title='A chart', description='one point')"
    ".mark_point().encode(x='a:Q', y='b:Q')"
)
CHAPTER = notebook(code(CHART), code("print(6 * 7)"), text("Mathematics, $x^2$, beside a chart."))
STATUS = notebook(
    code("from gna_utils.runs import records\nprint(list(records.table()['chapter']))"),
    parameters=None,
    title="Status",
)


@pytest.fixture(scope="module", autouse=True)
def frozen_package(tmp_path_factory):
    package = tmp_path_factory.mktemp("package")
    (package / "scoring.py").write_text("x = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "PACKAGE", package)
        yield package


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A site of one chapter and a status page: (project, report)."""
    project = Project(write(tmp_path_factory.mktemp("book"), {"status": STATUS, "01_toy": CHAPTER}))
    return project, make(project)


def make(project: Project, *only: str, **options) -> build.SiteReport:
    return build.build_site(only, project=project, progress=io.StringIO(), **options)


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def edit(project: Project, name: str, content: dict) -> None:
    (project.root / "book" / f"{name}.ipynb").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.slow
def test_site_has_every_page_chart_and_output(built):
    """A chart of the wrong kind vanishes from the page without a warning (altair issue 1339)."""
    project, report = built
    page = (project.html_dir / "book" / "01_toy.html").read_text()
    assert page.count('class="gna-chart"') == 1 and "42" in page
    assert "cdn.jsdelivr" not in page and "require.js" not in page and "Traceback" not in page
    status = (project.html_dir / "book" / "status.html").read_text()
    assert (
        "01_toy" in status.partition("cell_output")[2]
    )  # executed last, though it comes first in the contents
    assert list(report.records) == ["01_toy", "status"] and set(report.how.values()) == {"executed"}
    summary = str(report)
    assert "GiB  executed" in summary and str(project.html_dir / "index.html") in summary
    assert not list(project.build_dir.glob(".site-*")) and not list(project.build_dir.glob(".tmp-*"))


@pytest.mark.slow
def test_second_build_does_nothing(built, monkeypatch):
    project, _ = built
    before = files(project.html_dir)
    monkeypatch.setattr(execute, "_run_worker", None)
    monkeypatch.setattr(build, "_sphinx", None)
    report = make(project)
    assert set(report.how.values()) == {"reused"} and report.pages_seconds is None
    assert "pages unchanged" in str(report) and files(project.html_dir) == before


@pytest.mark.slow
def test_edited_prose_makes_the_page_anew_without_executing(built, monkeypatch):
    project, _ = built
    monkeypatch.setattr(execute, "_run_worker", None)
    prose = json.loads(json.dumps(CHAPTER))
    prose["cells"][-1]["source"] = "Quite another sentence."
    edit(project, "01_toy", prose)
    report = make(project)
    page = (project.html_dir / "book" / "01_toy.html").read_text()
    assert "Quite another sentence." in page and "42" in page
    assert report.how == {"01_toy": "reused", "status": "reused"} and report.pages_seconds > 0


@pytest.mark.slow
def test_failing_cell_fails_the_build_and_leaves_the_site(built):
    """A failed cell is only a warning for the book engine, which publishes it (jupyter-book issue 613)."""
    project, _ = built
    before = files(project.html_dir)
    edit(project, "01_toy", notebook(code("1 / 0")))
    with pytest.raises(GnaError, match=r"chapter 01_toy, code cell 2 of 2 \(`1 / 0`\): ZeroDivisionError"):
        make(project)
    assert files(project.html_dir) == before
    edit(project, "01_toy", CHAPTER)


@pytest.mark.slow
def test_warning_of_the_engine_fails_the_build_and_leaves_the_site(built):
    project, _ = built
    before = files(project.html_dir)
    index = project.root / "book" / "index.md"
    good = index.read_text()
    index.write_text(good + "\n[a link](nowhere.md)\n")
    with pytest.raises(GnaError, match=r"without warnings:\n  .*index.md.*nowhere"):
        make(project)
    index.write_text(good + '\n<img src="nowhere.png" alt="a picture">\n')
    with pytest.raises(GnaError, match=r"have faults:\n  book/index.html refers to nowhere.png"):
        make(project)
    assert files(project.html_dir) == before
    index.write_text(good)


@pytest.mark.slow
def test_only_takes_older_runs_of_the_other_chapters(built, monkeypatch):
    project, _ = built
    write(project.root, {"status": STATUS, "01_toy": CHAPTER, "02_new": notebook(code("print('new')"))})
    with pytest.raises(GnaError, match="no run of 02_new is there to reuse"):
        make(project, "01")
    changed = notebook(code("print('changed')"))
    edit(project, "01_toy", changed)
    report = make(project, "02")
    assert report.how["01_toy"] == "reused, older than its source" and report.how["02_new"] == "executed"
    page = (project.html_dir / "book" / "01_toy.html").read_text()
    assert "42" in page and "changed" not in page.partition("cell_input")[0]


@pytest.mark.parametrize("version, works", [("1.0.4.post1", True), ("2.1.7", False), ("10.0", False)])
def test_engine_2_is_refused(version, works, monkeypatch):
    """Version 2 ignores ``_config.yml`` and writes no such pages, with exit status 0."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if works:
        build._check_engine()
        return
    with pytest.raises(GnaError, match=f"jupyter-book {version} is another engine .*<2"):
        build._check_engine()


def test_all_failures_are_named_in_one_build(tmp_path, monkeypatch):
    project = Project(write(tmp_path, {"01_toy": CHAPTER, "02_more": CHAPTER, "status": STATUS}))

    def fail(prepared, **options):
        raise GnaError(f"chapter {prepared.chapter.name} failed.")

    monkeypatch.setattr(execute, "execute", fail)
    with pytest.raises(GnaError, match=r"^chapter 01_toy failed.\nchapter 02_more failed.$"):
        make(project)


def test_a_build_folder_that_cannot_be_written_is_named_once(tmp_path, monkeypatch):
    """It is the same for every chapter, and a build has no --out."""
    project = Project(write(tmp_path, {"01_toy": CHAPTER, "02_more": CHAPTER}))
    project.build_dir.write_text("")
    monkeypatch.setattr(execute, "execute", None)
    with pytest.raises(
        GnaError, match=r"^the folder .*_build/runs cannot be written \(.*make it writable"
    ) as error:
        make(project)
    assert "\n" not in str(error.value) and "--out" not in str(error.value)


def test_a_file_in_place_of_the_staging_folder_is_refused(tmp_path):
    project = Project(write(tmp_path, {}))
    project.build_dir.mkdir()
    (project.build_dir / "stage").write_text("")
    with pytest.raises(GnaError, match=r"stage cannot be made .*: remove what stands there"):
        build._stage(project, build.SiteReport(project.html_dir), project.build_dir / "stage")


def test_pages_at_the_root_of_the_project_are_staged(tmp_path):
    project = Project(write(tmp_path, {"01_toy": CHAPTER}))
    for name in ("02_root.ipynb", "stray.ipynb"):
        (tmp_path / name).write_text(json.dumps(CHAPTER))
    with (tmp_path / "_toc.yml").open("a") as toc:
        toc.write("- file: 02_root\n")
    staged = {str(target) for _, target in build._stage_files(project)}
    assert staged == {"_toc.yml", "_config.yml", "02_root.ipynb", "book/index.md", "book/01_toy.ipynb"}


@pytest.mark.slow
def test_an_error_of_the_engine_is_reported_with_its_cause(tmp_path):
    """A mistyped key in the contents: the engine puts its sentence below a ruler under ``RuntimeError:``."""
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: index\nchapters:\n- fil: x\n")
    (tmp_path / "_config.yml").write_text("title: T\n")
    (tmp_path / "index.md").write_text("# T\n")
    (tmp_path / "_build").mkdir()
    with pytest.raises(
        GnaError, match=r"RuntimeError: The Table of Contents file is malformed: .* @ '/chapters/0'"
    ):
        build._sphinx(Project(tmp_path), tmp_path, tmp_path / "out")


def test_numbered_chapter_without_parameters_fails_the_build(tmp_path):
    project = Project(write(tmp_path, {"01_toy": notebook(code("1"), parameters=None)}))
    with pytest.raises(GnaError, match=r"01_toy\.ipynb has no cell tagged 'parameters'"):
        make(project)


def test_execution_is_off_in_the_staged_settings(tmp_path):
    config = tmp_path / "_config.yml"
    config.write_text("title: T\nexecute:\n  execute_notebooks: force\n  timeout: 1\n")
    assert "execute_notebooks: 'off'\n  timeout: 1" in build._config(config)


def test_old_runs_of_the_site_go_and_those_of_people_stay(tmp_path, monkeypatch):
    project = Project(write(tmp_path, {"01_toy": CHAPTER}))
    made = [record(project, day, for_site=True) for day in range(1, 7)]
    mine = record(project, 9, for_site=False)
    report = build.SiteReport(project.html_dir, records={"01_toy": made[0]})
    build._prune(project, report)
    left = {r.fingerprint for r in records.read_records(project.runs_dir)}
    assert left == {r.fingerprint for r in (made[0], *made[3:], mine)}


def record(project: Project, day: int, for_site: bool) -> records.RunRecord:
    made = records.RunRecord(
        chapter="01_toy",
        notebook="book/01_toy.ipynb",
        fingerprint=f"run{day}{for_site}",
        parameters={},
        given={},
        seed=None,
        started=f"2026-01-0{day}T00:00:00+00:00",
        duration_s=1.0,
        peak_memory_bytes=None,
        n_cells=1,
        package_version="0",
        libraries={},
        python="3",
        platform="",
        device="cpu",
        for_site=for_site,
        folder=str(project.runs_dir / "01_toy" / f"run{day}{for_site}"),
    )
    Path(made.folder).mkdir(parents=True)
    made.write(Path(made.folder))
    return made


# The checks of finished pages, each on a page that has one fault.
GOOD = (
    '<html><head><link rel="stylesheet" href="../_static/a.css"><link rel="canonical" href="https://x.org/p">'
    '<script src="../_static/a.js?digest=1"></script></head><body><a href="https://x.org">out</a>'
    '<a href="#here">here</a><a href="../index.html">top</a><img src="data:image/png;base64,AA==">'
    '<script type="application/json">{"$schema": "https://cdn.x.org/s"}</script>%s</body></html>'
)


def faults(tmp_path: Path, body: str = "", css: str = "", cells: list[dict] | None = None) -> list[str]:
    html = tmp_path / "html"
    for name, content in {
        "index.html": "<html></html>",
        "book/page.html": GOOD % body,
        "_static/a.css": "a {background: url(data:image/png;base64,AA==)}" + css,
        "_static/a.js": "",
        "_static/theme.html": "<img src='{{ template }}'>",
        "genindex.html": "",
    }.items():
        (html / name).parent.mkdir(parents=True, exist_ok=True)
        (html / name).write_text(content)
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps({"cells": cells or []}))
    return check_site(html, ["index", "book/page"], {"book/page": path})


def ran(*outputs: dict, tags: tuple[str, ...] = ()) -> dict:
    return code("1", *tags) | {"outputs": list(outputs)}


def shown(**data: str) -> dict:
    return {
        "output_type": "display_data",
        "metadata": {},
        "data": {k.replace("_", "/"): v for k, v in data.items()},
    }


ERROR = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
CDN = "<script>load('https://cdn.jsdelivr.net/npm/vega@6')</script>"


def test_good_pages_have_no_fault(tmp_path):
    assert faults(tmp_path) == []
    assert (
        faults(tmp_path, '<div class="gna-chart">', cells=[ran(shown(text_html='<div class="gna-chart">'))])
        == []
    )
    assert faults(tmp_path, "<script>const THEBE_JS_URL = 'https://unpkg.com/thebe'</script>") == []
    assert (
        faults(tmp_path, "Traceback (most recent call last)", cells=[ran(ERROR, tags=("raises-exception",))])
        == []
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"body": '<script src="https://x.org/a.js"></script>'}, "fetches https://x.org/a.js from outside"),
        ({"body": '<img src="//x.org/a.png">'}, "fetches //x.org/a.png from outside"),
        ({"body": '<link rel="stylesheet" href="https://x.org/a.css">'}, "fetches https://x.org/a.css"),
        ({"body": '<iframe src="https://x.org">'}, "fetches https://x.org from outside"),
        ({"body": '<p style="background: url(https://x.org/a.png)">'}, "fetches https://x.org/a.png"),
        ({"body": CDN}, "a script in book/page.html fetches https://cdn.jsdelivr.net/npm/vega@6"),
        ({"css": "@import 'https://x.org/b.css';"}, "_static/a.css fetches https://x.org/b.css"),
        (
            {"css": "@font-face {src: url('https://x.org/f.woff')}"},
            "_static/a.css fetches https://x.org/f.woff",
        ),
        (
            {"css": "a {background: url(gone.png)}"},
            "_static/a.css refers to gone.png, which is not in the site",
        ),
        ({"body": '<script src="../_static/gone.js"></script>'}, "refers to ../_static/gone.js"),
        ({"body": '<a href="gone.html#x">'}, "refers to gone.html#x"),
        ({"body": '<img srcset="../_static/a.js 1x, gone.png 2x">'}, "refers to gone.png"),
        ({"body": "Traceback (most recent call last)"}, "the page book/page shows a traceback"),
        ({"cells": [ran(ERROR)]}, "code cell 1 of book/page ends in an error"),
        ({"cells": [ran(shown(text_html='<div class="gna-chart">'))]}, "holds 0 charts, its notebook 1"),
        ({"cells": [ran(shown(text_html="vegaEmbed('#vis', spec)"))]}, "call charts.setup"),
        ({"cells": [ran(shown(text_plain="alt.Chart(...)"))]}, "call charts.setup"),
        ({"cells": [ran(shown(**{"application_vnd.vegalite.v6.json": "{}"}))]}, "call charts.setup"),
    ],
)
def test_each_fault_of_a_page_is_found(tmp_path, options, message):
    found = faults(tmp_path, **options)
    assert len(found) == 1 and message in found[0]


def test_missing_and_stray_pages_are_found(tmp_path):
    """A build that made nothing may still exit with 0 (brainhack_jupyter_book issue 201)."""
    faults(tmp_path)
    html = tmp_path / "html"
    (html / "stray.html").write_text("")
    (html / "book" / "page.html").unlink()
    (html / "index.html").unlink()
    found = check_site(html, ["index", "book/page"], {})
    assert found[0] == "there is no index.html"
    assert "the page book/page of _toc.yml was not built" in found
    assert "the page stray was built, but _toc.yml does not name it" in found


def test_outputs_are_put_into_the_edited_notebook(tmp_path, monkeypatch):
    project = Project(write(tmp_path, {"01_toy": CHAPTER}))
    made = record(project, 1, for_site=True)
    executed = json.loads(json.dumps(CHAPTER))
    for number, cell in enumerate(c for c in executed["cells"] if c["cell_type"] == "code"):
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": str(number)}]
    made.executed.write_text(json.dumps(executed))
    source = read_notebook(project.root / "book" / "01_toy.ipynb")
    source["cells"].insert(1, text("New prose."))
    source["cells"][3]["metadata"]["tags"] = ["hide-input"]
    merged = build._with_outputs(source, made)
    assert [c["outputs"][0]["text"] for c in merged["cells"] if c["cell_type"] == "code"] == ["0", "1", "2"]
    assert merged["cells"][1]["source"] == "New prose." and merged["cells"][3]["metadata"]["tags"] == [
        "hide-input"
    ]
    source["cells"].append(code("one more"))
    assert build._with_outputs(source, made) == executed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"root: 5\n", "names 5 as a page"),
        (b"root: book/intro\nchapters:\n- file:\n", "names None as a page"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_damaged_table_of_contents_is_one_sentence(tmp_path, content, message):
    """A page without a name, or another encoding, must not end in a traceback."""
    (tmp_path / "_toc.yml").write_bytes(content)
    with pytest.raises(GnaError, match=f"table of contents .*{message}"):
        Project(tmp_path).pages()


@pytest.mark.parametrize(("content", "message"), [("a: [", "cannot be read"), ("- a", "are a list")])
def test_damaged_settings_are_one_sentence(tmp_path, content, message):
    """Settings that are no YAML, or no names with values, must not end in a traceback."""
    (tmp_path / "_config.yml").write_text(content)
    with pytest.raises(GnaError, match=f"the settings .*{message}"):
        build._config(tmp_path / "_config.yml")
