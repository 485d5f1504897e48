"""Parameters of a chapter are refused when they are unknown, of another type, or given twice."""

from __future__ import annotations

import ast

import pytest
from books import PARAMETERS, code, notebook

from gna_utils.errors import GnaError
from gna_utils.runs import parameters

KNOWN = parameters.read(notebook(), "toy.ipynb")


def value(name: str, given: object) -> object:
    return parameters.check(KNOWN, {name: given}, "toy.ipynb")[name]


def test_reads_every_line_with_type_default_and_help():
    """papermill's own reader loses parameters annotated ``int | None`` (papermill issue 806)."""
    assert list(KNOWN) == ["model", "n_examples", "limit", "ratio", "quick", "n_pairs", "seed"]
    assert KNOWN["limit"] == parameters.Parameter("limit", "int | None", None, "stop after so many")
    assert KNOWN["n_pairs"].default == [2, 4]
    # The defaults are those that Python itself gives the lines.
    scope: dict = {}
    exec(compile(ast.parse(PARAMETERS), "cell", "exec"), scope)
    assert {name: scope[name] for name in KNOWN} == {name: p.default for name, p in KNOWN.items()}


def test_agrees_with_papermill_where_papermill_can_read():
    from papermill.translators import PythonTranslator

    theirs = {p.name: p for p in PythonTranslator.inspect({"source": PARAMETERS})}
    assert set(KNOWN) - set(theirs) == {"limit"}
    for name, parameter in theirs.items():
        assert (KNOWN[name].type, KNOWN[name].help) == (parameter.inferred_type_name, parameter.help)


@pytest.mark.parametrize(
    "name, given, want",
    [
        ("n_examples", "50", 50),
        ("n_examples", 50, 50),
        ("limit", "none", None),
        ("limit", None, None),
        ("limit", "7", 7),
        ("ratio", "1e-3", 0.001),
        ("ratio", 2, 2.0),
        ("quick", "true", True),
        ("quick", "No", False),
        ("n_pairs", "2,5,10", [2, 5, 10]),
        ("n_pairs", "[2, 5, 10]", [2, 5, 10]),
        ("n_pairs", "3", [3]),
        ("n_pairs", (1, 2), [1, 2]),
        ("model", "none", "none"),
        ("model", "org/name=v2", "org/name=v2"),
    ],
)
def test_converts(name, given, want):
    got = value(name, given)
    assert got == want and type(got) is type(want)


@pytest.mark.parametrize(
    "name, given",
    [
        ("n_examples", "abc"),
        ("n_examples", "1.5"),
        ("n_examples", 1.5),
        ("n_examples", True),
        ("n_examples", "none"),
        ("limit", "many"),
        ("ratio", "half"),
        ("quick", "maybe"),
        ("quick", 1),
        ("n_pairs", "2,x"),
        ("n_pairs", "[2, 5"),
        ("n_pairs", 3),
        ("model", 3),
    ],
)
def test_refuses_another_type(name, given):
    """papermill passes any value on, whatever the annotation says (papermill pull request 701)."""
    with pytest.raises(GnaError, match=rf"'{name}' of toy.ipynb must be .*not {given!r}".replace("[", r"\[")):
        value(name, given)


def test_unknown_name_is_refused_with_the_nearest():
    """papermill only warns about a misspelt parameter and runs the defaults (papermill issue 245)."""
    with pytest.raises(
        GnaError, match=r"no parameter 'n_exmaples': did you mean 'n_examples'\? it knows model"
    ):
        value("n_exmaples", "10")


def test_union_of_number_and_text_prefers_the_number():
    known = parameters.read(
        notebook(parameters="layer: int | str = 'all'\nkind: Literal['a', 'b'] = 'a'"), "x"
    )
    assert parameters.check(known, {"layer": "3"}, "x") == {"layer": 3}
    assert parameters.check(known, {"layer": "last"}, "x") == {"layer": "last"}
    assert parameters.check(known, {"kind": "b"}, "x") == {"kind": "b"}
    with pytest.raises(GnaError, match="kind"):
        parameters.check(known, {"kind": "c"}, "x")


@pytest.mark.parametrize(
    "book, message",
    [
        (notebook(parameters=None), "no cell tagged 'parameters'"),
        (notebook(code("n = 1", "parameters")), "2 cells tagged 'parameters'"),
        (notebook(parameters="n: int = 1\nprint(n)"), "line 2"),
        (notebook(parameters="n: int = len('abc')"), "no plain default"),
        (notebook(parameters="n: int ="), "not valid Python"),
    ],
)
def test_a_cell_that_cannot_be_checked_is_refused(book, message):
    with pytest.raises(GnaError, match=message):
        parameters.read(book, "toy.ipynb")


def test_pairs_of_the_command_line():
    assert parameters.parse_pairs(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    with pytest.raises(GnaError, match="given twice"):
        parameters.parse_pairs(["a=1", "a=2"])
    with pytest.raises(GnaError, match="write name=value"):
        parameters.parse_pairs(["a"])


def test_unknown_annotation_says_what_is_possible():
    known = parameters.read(notebook(parameters="x: tensor = 1"), "toy")
    with pytest.raises(GnaError, match="'tensor' is not a type for parameters"):
        parameters.check(known, {"x": "1"}, "toy")
