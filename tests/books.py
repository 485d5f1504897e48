"""Small books for the tests of running and building: a folder with ``_toc.yml`` and a few notebooks."""

from __future__ import annotations

import json
from pathlib import Path

PARAMETERS = """\
model: str = "toy"  # which model
n_examples: int = 3  # how many examples
limit: int | None = None  # stop after so many
ratio: float = 0.5  # a share
quick: bool = False  # skip the long part
n_pairs: list[int] = [2, 4]  # list lengths
seed: int = 0  # of the examples"""

CONFIG = """\
title: Toy
author: Nobody
only_build_toc_files: true
execute:
  execute_notebooks: "off"
sphinx:
  config:
    html_extra_path: [_extra]
    mathjax_path: ../mathjax/tex-chtml.js
"""


def code(source: str, *tags: str) -> dict:
    return {
        "cell_type": "code",
        "id": f"c{abs(hash((source, tags))):x}"[:12],
        "metadata": {"tags": list(tags)} if tags else {},
        "source": source,
        "outputs": [],
        "execution_count": None,
    }


def text(source: str) -> dict:
    return {"cell_type": "markdown", "id": f"m{abs(hash(source)):x}"[:12], "metadata": {}, "source": source}


def notebook(*cells: dict, parameters: str | None = PARAMETERS, title: str = "A chapter") -> dict:
    head = [text(f"# {title}")] + ([code(parameters, "parameters")] if parameters is not None else [])
    return {
        "cells": head + list(cells),
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write(folder: Path, chapters: dict[str, dict], pages: dict[str, str] | None = None) -> Path:
    """A book of these notebooks (and texts) below ``folder``, beginning with a page ``index``."""
    pages = {"index": "# Toy book\n"} | (pages or {})
    (folder / "book").mkdir(parents=True, exist_ok=True)
    for name, content in chapters.items():
        (folder / "book" / f"{name}.ipynb").write_text(json.dumps(content), encoding="utf-8")
    for name, content in pages.items():
        (folder / "book" / f"{name}.md").write_text(content, encoding="utf-8")
    names = [*chapters, *(page for page in pages if page != "index")]
    toc = "format: jb-book\nroot: book/index\nchapters:\n" + "".join(f"- file: book/{n}\n" for n in names)
    (folder / "_toc.yml").write_text(toc, encoding="utf-8")
    (folder / "_config.yml").write_text(CONFIG, encoding="utf-8")
    return folder
