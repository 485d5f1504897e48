"""Every notebook of the book is clean, runnable and takes its parameters in one place."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import nbformat
import pytest
import yaml

from gna_utils.runs import parameters
from gna_utils.runs.project import Chapter, Project, cell_source, cell_tags

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(p for p in (ROOT / "book").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
TRACES = (".trace(", ".generate(", ".session(", ".scan(")


def faults(path: Path) -> list[str]:
    """What is wrong with a notebook, as sentences."""
    chapter = Chapter(path.stem, path)
    content = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    found = [*_format_faults(content), *(fault for cell in code for fault in _cell_faults(cell))]
    if chapter.numbered or parameters.has_cell(content):
        found += _parameter_faults(content, code, path.name)
    return found


def _format_faults(content: dict) -> list[str]:
    found = []
    ids = [cell.get("id") for cell in content["cells"]]
    if None in ids or len(set(ids)) != len(ids):
        found.append("its cells need ids, each another one")
    if content["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("its kernelspec is not python3")
    try:
        nbformat.validate(json.loads(json.dumps(content)))  # a copy: validating repairs what it finds
    except nbformat.ValidationError as error:
        found.append(f"it is not a valid notebook: {error.message}")
    return found


def _cell_faults(cell: dict) -> list[str]:
    found, source = [], cell_source(cell)
    if cell["outputs"] or cell["execution_count"] is not None:
        found.append(f"a cell holds outputs or an execution count: {source[:40]!r}")
    if source.lstrip().startswith("%%") and any(trace in source for trace in TRACES):
        found.append(f"a cell magic stands in a cell that traces a model: {source[:40]!r}")
    return found


def _parameter_faults(content: dict, code: list[dict], name: str) -> list[str]:
    try:
        known = parameters.read(content, name)
        found = []
        for parameter in known.values():
            parameters.check(known, {parameter.name: parameter.default}, name)
            if parameter.type == "Any" or not parameter.help:
                found.append(
                    f"parameter {parameter.name} needs a type and a comment: 'name: type = value  # help'"
                )
    except ValueError as error:
        return [str(error)]
    for cell in code:
        if "parameters" in cell_tags(cell):
            return found
        used = _names(cell_source(cell)).intersection(known)
        if used:
            found.append(f"{', '.join(sorted(used))} is used before the parameters cell")
    return found


def _names(source: str) -> set[str]:
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    return {node.id for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path):
    """No outputs in git, one parameters cell before first use, kernel python3, no magic around a trace."""
    assert not faults(path)


def test_every_chapter_of_the_contents_is_scanned():
    assert {chapter.path for chapter in Project(ROOT).chapters()} <= set(NOTEBOOKS)


@pytest.mark.filterwarnings("ignore:Cell is missing an id")
def test_the_scan_finds_each_fault(tmp_path):
    from books import code, notebook

    def scan(content: dict) -> str:
        path = tmp_path / "01_toy.ipynb"
        path.write_text(json.dumps(content), encoding="utf-8")
        return " | ".join(faults(path))

    good = notebook(code("print(n_examples)"))
    assert scan(good) == ""
    assert "exactly one" in scan(notebook(parameters=None))
    assert "exactly one" in scan(notebook(code("a = 1", "parameters")))
    assert "needs a type and a comment" in scan(notebook(parameters="n: int = 3"))
    assert "needs a type and a comment" in scan(notebook(parameters="n = 3  # how many"))
    assert "must be int" in scan(notebook(parameters="n: int = 'a'  # how many"))
    assert "cell magic" in scan(notebook(code("%%time\nwith model.trace('x'):\n    pass")))
    early = notebook()
    early["cells"].insert(1, code("print(seed)"))
    assert "seed is used before" in scan(early)
    ran = notebook(code("1"))
    ran["cells"][-1]["execution_count"] = 1
    assert "execution count" in scan(ran)
    other = notebook()
    other["metadata"]["kernelspec"]["name"] = "conda-root-py"
    assert "kernelspec" in scan(other)
    twins = notebook(code("1"), code("2"))
    twins["cells"][-1].pop("id")
    assert "ids" in scan(twins)


def test_cells_may_take_longer_than_the_default_of_the_book_engine():
    """Whoever builds with execution on would otherwise stop cells after 30 s (jupyter-book issue 945)."""
    execute = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["execute"]
    assert execute["execute_notebooks"] == "off" and execute["timeout"] >= 600


@pytest.mark.parametrize("kernel", ["mamba_ssm", "causal_conv1d", "flash_attn"])
def test_nothing_imports_a_compiled_kernel(kernel):
    """mamba-ssm cannot be installed without nvcc (state-spaces/mamba issues 602 and 639)."""
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    sources = [cell_source(cell) for cell in cells if cell["cell_type"] == "code"]
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "gna_utils").rglob("*.py")]
    assert not [source for source in sources if f"import {kernel}" in source or f"from {kernel}" in source]
