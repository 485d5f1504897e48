"""Strict parameters of a chapter: known names and right types, checked before anything runs.

A chapter has one cell tagged ``parameters`` with lines ``name: type = value  # help``.
papermill only warns about a parameter that the notebook does not know, checks no type, and does not see
``int | None`` at all; so the cell is read here from its syntax tree.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import GnaError
from .project import cell_source, cell_tags

_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_NONE = {"none", "null"}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell; ``type`` is its annotation as text, ``Any`` where it has none."""

    name: str
    type: str
    default: Any
    help: str


def read(notebook: dict, where: str) -> dict[str, Parameter]:
    """The parameters of a notebook, by name.

    >>> cell = {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "n: int = 3  # how many"}
    >>> read({"cells": [cell]}, "demo")["n"]
    Parameter(name='n', type='int', default=3, help='how many')

    Raises :class:`GnaError` when there is no ``parameters`` cell, more than one, or a line of another form.
    """
    cells = [
        cell
        for cell in notebook["cells"]
        if cell.get("cell_type") == "code" and "parameters" in cell_tags(cell)
    ]
    if len(cells) != 1:
        found = "no cell" if not cells else f"{len(cells)} cells"
        raise GnaError(f"{where} has {found} tagged 'parameters': it needs exactly one to take parameters.")
    return _read_cell(cell_source(cells[0]), where)


def has_cell(notebook: dict) -> bool:
    """Whether any cell of the notebook is tagged ``parameters``."""
    return any("parameters" in cell_tags(cell) for cell in notebook["cells"])


def check(known: Mapping[str, Parameter], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The given values as the types that the notebook asks for.

    >>> known = {"n": Parameter("n", "int | None", 3, "")}
    >>> check(known, {"n": "5"}, "demo"), check(known, {"n": "none"}, "demo")
    ({'n': 5}, {'n': None})

    Values may be Python objects or the text of a command line. Raises :class:`GnaError` on an unknown name
    and on a value of another type.
    """
    values = {}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" did you mean '{close[0]}'?" if close else ""
            raise GnaError(f"{where} has no parameter '{name}':{hint} it knows {', '.join(known) or 'none'}.")
        values[name] = _convert(known[name], value, where)
    return values


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Turn ``["n=3", "model=x"]`` into a dictionary; a repeated name is a :class:`GnaError`."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise GnaError(f"'{pair}' is not a parameter: write name=value, for example -p n_examples=50.")
        if name in found:
            raise GnaError(
                f"parameter '{name}' is given twice ('{found[name]}' and '{value}'): give it once."
            )
        found[name] = value
    return found


def describe(known: Mapping[str, Parameter]) -> str:
    """The parameters as lines of text: name, type, default and help."""
    lines = [f"  {p.name}: {p.type} = {p.default!r}" for p in known.values()]
    width = max(map(len, lines), default=0)
    return "\n".join(f"{line:<{width}}  {p.help}".rstrip() for line, p in zip(lines, known.values()))


def _read_cell(source: str, where: str) -> dict[str, Parameter]:
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise GnaError(f"the parameters cell of {where} is not valid Python: {error.msg}.") from None
    comments = _comments(source)
    found: dict[str, Parameter] = {}
    for statement in statements:
        target, annotation, value = _assignment(statement)
        if target is None:
            raise GnaError(
                f"line {statement.lineno} of the parameters cell of {where} is not 'name: type = value'."
            )
        try:
            default = ast.literal_eval(value)
        except ValueError:
            raise GnaError(
                f"parameter '{target}' of {where} has no plain default: write a number, text, list or None."
            ) from None
        kind = ast.unparse(annotation) if annotation is not None else "Any"
        found[target] = Parameter(target, kind, default, comments.get(statement.end_lineno, ""))
    return found


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None, ast.expr | None]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        return statement.target.id, statement.annotation, statement.value
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id, None, statement.value
    return None, None, None


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").rstrip() for t in tokens if t.type == tokenize.COMMENT}


class _Mismatch(Exception):
    """The value is not of this type; another member of a union may still fit."""


def _convert(parameter: Parameter, value: Any, where: str) -> Any:
    if parameter.type == "Any":
        return _guess(value)
    try:
        return _cast(ast.parse(parameter.type, mode="eval").body, value)
    except _Mismatch:
        raise GnaError(
            f"parameter '{parameter.name}' of {where} must be {parameter.type}, not {value!r} "
            f"(its default is {parameter.default!r})."
        ) from None


def _cast(node: ast.expr, value: Any) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a quoted annotation
        return _cast(ast.parse(node.value, mode="eval").body, value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _first(_members(node), value)
    if isinstance(node, ast.Subscript):
        return _cast_generic(ast.unparse(node.value).rpartition(".")[2], node.slice, value)
    name = "None" if isinstance(node, ast.Constant) else ast.unparse(node).rpartition(".")[2]
    caster = _CASTERS.get(name)
    if caster is None:
        raise GnaError(
            f"'{name}' is not a type for parameters: use {', '.join(_CASTERS)}, or unions of them."
        )
    return caster(value)


def _cast_generic(outer: str, inner: ast.expr, value: Any) -> Any:
    if outer == "Optional":
        return _first([ast.Constant(None), inner], value)
    if outer == "Literal":
        choices = [ast.literal_eval(c) for c in (inner.elts if isinstance(inner, ast.Tuple) else [inner])]
        for choice in choices:
            if value == choice or (isinstance(value, str) and value == str(choice)):
                return choice
        raise _Mismatch
    if outer in ("list", "List", "Sequence"):
        return [_cast(inner, entry) for entry in _list(value)]
    if outer in ("dict", "Dict", "Mapping"):
        return _dict(value)
    raise GnaError(f"'{outer}[...]' is not a type for parameters: use list[...], Literal[...] or X | None.")


def _members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return _members(node.left) + _members(node.right)
    return [node]


def _first(members: list[ast.expr], value: Any) -> Any:
    # None first and text last: every text is a str, so "none" and "5" must meet the narrower types before.
    def rank(member: ast.expr) -> int:
        text = ast.unparse(member)
        return {"None": 0, "str": 2}.get(text, 1)

    for member in sorted(members, key=rank):
        try:
            return _cast(member, value)
        except _Mismatch:
            continue
    raise _Mismatch


def _int(value: Any) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise _Mismatch from None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _Mismatch
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not (isinstance(value, str) or hasattr(value, "__float__")):
        raise _Mismatch
    try:
        return float(value)
    except ValueError:
        raise _Mismatch from None


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise _Mismatch


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise _Mismatch
    return value


def _none(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.lower() in _NONE):
        raise _Mismatch


def _list(value: Any) -> list:
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            value = _json(value)
        else:
            value = [part.strip() for part in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise _Mismatch
    return list(value)


def _dict(value: Any) -> dict:
    value = _json(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise _Mismatch
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise _Mismatch from None


def _guess(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


_CASTERS = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": _str,
    "None": _none,
    "list": lambda value: [_guess(entry) for entry in _list(value)],
    "dict": _dict,
    "Any": _guess,
}
