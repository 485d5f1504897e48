"""environment.yml, pyproject.toml and requirements.lock tell one story, and the code imports nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NAMED_BY_THE_USER = {"jupyter-book", "jupyterlab", "torch", "nnsight", "transformers", "altair", "papermill"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(one.name): one for one in parsed}


def declared() -> dict[str, Requirement]:
    """What a reader installs: the dependencies and the extra ``dev``; ``gpu`` and ``eval`` stay optional."""
    return requirements(project()["dependencies"] + project()["optional-dependencies"]["dev"])


def conda() -> tuple[dict[str, Requirement], list[str]]:
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in entries if isinstance(entry, dict))
    return requirements([line for line in pip if not line.startswith("-")]), [
        line for line in pip if line.startswith("-")
    ]


def lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): pin for name, pin in pins}


def test_environment_yml_repeats_the_ranges_of_pyproject():
    packages, options = conda()
    assert set(packages) == NAMED_BY_THE_USER
    for name, requirement in packages.items():
        assert requirement.specifier == declared()[name].specifier, name
    assert options == ["--constraint requirements.lock", "--editable .[dev]"]


def test_the_kernels_of_mamba_are_an_extra_and_never_a_dependency():
    gpu = requirements(project()["optional-dependencies"]["gpu"])
    assert set(gpu) == {"mamba-ssm", "causal-conv1d"}
    assert not set(gpu) & (set(declared()) | set(lock()))


@pytest.mark.parametrize("name", sorted(declared()))
def test_the_lock_pins_every_declared_package_inside_its_range(name):
    assert declared()[name].specifier.contains(lock()[name]), f"{name}: {lock()[name]} is outside the range"


def test_the_lock_is_complete_and_pins_torch():
    assert lock()["torch"] == "2.13.0"
    assert len(lock()) > 100
    for name in ("sphinx", "myst-nb", "sphinx-book-theme", "nbclient", "ipykernel"):
        assert name in lock()


def test_jupyter_book_is_capped_below_2_wherever_it_is_named():
    texts = [ROOT / "pyproject.toml", ROOT / "environment.yml", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for path in texts:
        for match in re.finditer(r"jupyter-book[>=][^\"'\n]*", path.read_text()):
            assert "<2" in match[0], f"{path.name}: {match[0]}"
    assert lock()["jupyter-book"].startswith("1.")


@pytest.mark.parametrize("name", sorted(declared()))
def test_what_is_installed_here_is_what_the_lock_says(name):
    assert version(name).split("+")[0] == lock()[name]


def test_package_and_citation_carry_one_version():
    import gna_utils

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == gna_utils.__version__ == version("gna-utils")
    assert f"## {gna_utils.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def imported(folder: str) -> set[str]:
    """Top-level modules that the Python files of a folder import, wherever the import stands."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        if "actor" in path.parts:  # runs in the environment of the NDIF server, not in ours
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    own = {path.stem for area in (folder, "tests") for path in (ROOT / area).rglob("*.py")}
    return found - set(sys.stdlib_module_names) - own - {"gna_utils", "tests"}


@pytest.mark.parametrize("folder", ["gna_utils", "tests", "benchmarks"])
def test_every_imported_package_is_declared(folder):
    distributions = packages_distributions()
    for module in sorted(imported(folder)):
        names = {canonicalize_name(name) for name in distributions.get(module, [module])}
        assert names & set(declared()), (
            f"'{module}' is imported in {folder}/ but not declared in pyproject.toml"
        )
