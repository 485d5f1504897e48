"""Where the book lies on disk: the project folder, its chapters and its build folders."""

from __future__ import annotations

import difflib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..errors import GnaError

STATUS = "status"
"""The page that shows the runs of all others; it is executed last and knows nothing of its own run."""

_NUMBERED = re.compile(r"\d\d_")


@dataclass(frozen=True)
class Chapter:
    """One notebook page: its name (the file's stem) and its file."""

    name: str
    path: Path

    @property
    def numbered(self) -> bool:
        """Whether this is a chapter that readers rerun (``NN_topic``), not a page such as ``status``."""
        return _NUMBERED.match(self.name) is not None

    def source(self) -> dict:
        """The notebook as JSON; raises :class:`GnaError` when the file is not a notebook."""
        return read_notebook(self.path)


@dataclass(frozen=True)
class Project:
    """A folder with ``_toc.yml``.

    >>> find_project().chapter("01").name          # doctest: +SKIP
    '01_retrieval_tasks'
    """

    root: Path

    @property
    def build_dir(self) -> Path:
        return self.root / "_build"

    @property
    def runs_dir(self) -> Path:
        return self.build_dir / "runs"

    @property
    def html_dir(self) -> Path:
        return self.build_dir / "html"

    def pages(self) -> list[str]:
        """Every page of the table of contents, without suffix, in reading order."""
        toc = self.root / "_toc.yml"
        try:
            content = yaml.safe_load(toc.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise GnaError(f"the table of contents {toc} cannot be read: {error}") from None
        pages = list(_files(content))
        for page in pages:
            if not isinstance(page, str):
                raise GnaError(f"the table of contents {toc} names {page!r} as a page: give a file's name.")
        if not pages:
            raise GnaError(f"the table of contents {toc} names no page: give it a 'root' and 'chapters'.")
        twice = sorted({page for page in pages if pages.count(page) > 1})
        if twice:
            raise GnaError(f"the table of contents {toc} names {', '.join(twice)} more than once.")
        return [page.removesuffix(".ipynb").removesuffix(".md") for page in pages]

    def page_file(self, page: str) -> Path:
        """The source of a page of the table of contents (a notebook or a text)."""
        for suffix in (".ipynb", ".md", ".rst"):
            path = self.root / f"{page}{suffix}"
            if path.is_file():
                return path
        raise GnaError(
            f"_toc.yml names the page '{page}', but {self.root} holds no {page}.ipynb and no {page}.md."
        )

    def chapters(self) -> list[Chapter]:
        """The notebook pages of the table of contents, in reading order."""
        files = [self.page_file(page) for page in self.pages()]
        return [Chapter(path.stem, path) for path in files if path.suffix == ".ipynb"]

    def chapter(self, name: str | Path) -> Chapter:
        """The chapter called ``name``: its number, its topic, its whole name or the path of a notebook.

        Raises :class:`GnaError` when there is none, naming those that exist.
        """
        path = Path(name)
        if path.suffix == ".ipynb":
            if not path.is_file():
                raise GnaError(f"there is no notebook {path}.")
            return Chapter(path.stem, path.resolve())
        chapters, text = self.chapters(), str(name)
        for chapter in chapters:
            number, _, topic = chapter.name.partition("_")
            if text == chapter.name or (chapter.numbered and text in (number, topic, number.lstrip("0"))):
                return chapter
        names = [chapter.name for chapter in chapters]
        close = difflib.get_close_matches(text, names + [n.partition("_")[2] for n in names], 1)
        hint = f" did you mean '{close[0]}'?" if close else ""
        raise GnaError(
            f"unknown chapter '{text}':{hint} choose one of {', '.join(names) or '(none)'}, "
            "or the path of a notebook."
        )


def find_project(start: Path | None = None) -> Project:
    """The project that holds the current folder, else the checkout that holds this package.

    Raises :class:`GnaError` when there is neither.
    """
    start = (start or Path.cwd()).resolve()
    package = Path(__file__).resolve().parents[2]
    for folder in (start, *start.parents, package):
        # The staging folder of a build also holds a _toc.yml; it is never the project.
        if "_build" not in folder.parts and (folder / "_toc.yml").is_file():
            return Project(folder)
    raise GnaError(
        f"{start} is not inside the book: go to the folder that holds _toc.yml (the clone of the repository)."
    )


def read_notebook(path: Path) -> dict:
    """A notebook file as JSON; raises :class:`GnaError` when it cannot be read."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = notebook["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GnaError(f"{path} is not a readable notebook: {error}") from None
    if not (isinstance(cells, list) and all(map(_is_cell, cells))):
        raise GnaError(
            f"{path} is not a readable notebook: its cells are malformed; save it anew in Jupyter."
        )
    return notebook


def _is_cell(cell: object) -> bool:
    """Whether the parts that are used here have the types that the format of notebooks gives them."""
    if not isinstance(cell, dict) or not isinstance(cell.get("cell_type"), str):
        return False
    source, metadata = cell.get("source", ""), cell.get("metadata", {})
    if not isinstance(source, str | list) or not isinstance(metadata, dict):
        return False
    tags = metadata.get("tags", [])
    return isinstance(tags, list) and all(isinstance(part, str) for part in [*source, *tags])


def cell_source(cell: dict) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def cell_tags(cell: dict) -> list[str]:
    return list(cell.get("metadata", {}).get("tags", []))


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path that replaces ``path`` when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; a result is as readable as any other file of the user.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _files(node: object) -> Iterator[str]:
    if isinstance(node, list):
        for entry in node:
            yield from _files(entry)
    elif isinstance(node, dict):
        if "glob" in node:
            raise GnaError("_toc.yml uses 'glob': name each page, so that the reading order is certain.")
        for key in ("root", "file"):
            if key in node:
                yield node[key]
        for key in ("parts", "chapters", "sections", "subtrees", "entries"):
            yield from _files(node.get(key) or [])
