"""What must hold for built pages before they replace the site: complete, no error, no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from .project import cell_tags, read_notebook

CHART = 'class="gna-chart"'
TRACEBACK = "Traceback (most recent call last)"
# Pages that the book engine adds by itself.
_GENERATED = {"index", "genindex", "search", "py-modindex", "prf-prf"}
_CSS_URL = re.compile(r"url\(\s*['\"]?([^'\")]+)['\"]?\s*\)|@import\s+['\"]([^'\"]+)['\"]")
_CDN = re.compile(r"https?://[\w.-]*(?:jsdelivr|unpkg|cdnjs|cloudflare|cdn)[\w.-]*/[\w@./-]*")
# What a browser fetches when it shows a page; a link that waits for a click is not among it.
_FETCHED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
}
_FETCHED_LINKS = {"stylesheet", "preload", "modulepreload", "icon", "prefetch", "preconnect", "manifest"}


def check_site(html: Path, pages: list[str], notebooks: Mapping[str, Path]) -> list[str]:
    """The faults of a built site, as sentences; an empty list means that it may be published.

    ``pages`` is the table of contents, ``notebooks`` maps its notebook pages to the executed files.
    """
    return [
        *_complete(html, pages),
        *_outputs(html, notebooks),
        *(fault for page in _pages(html) for fault in _assets(html, page)),
        *(fault for sheet in sorted(html.rglob("*.css")) for fault in _style(html, sheet)),
    ]


def _pages(html: Path) -> list[Path]:
    """The pages of the site; folders such as ``_static`` hold templates of the theme besides."""
    return [p for p in sorted(html.rglob("*.html")) if not p.relative_to(html).parts[0].startswith("_")]


def _complete(html: Path, pages: list[str]) -> Iterator[str]:
    if not (html / "index.html").is_file():
        yield "there is no index.html"
    for page in pages:
        if not (html / f"{page}.html").is_file():
            yield f"the page {page} of _toc.yml was not built"
    built = {path.relative_to(html).with_suffix("").as_posix() for path in _pages(html)}
    for page in sorted(built - set(pages) - _GENERATED):
        yield f"the page {page} was built, but _toc.yml does not name it"


def _outputs(html: Path, notebooks: Mapping[str, Path]) -> Iterator[str]:
    for page, path in notebooks.items():
        cells = [c for c in read_notebook(path)["cells"] if c.get("cell_type") == "code"]
        on_purpose = any("raises-exception" in cell_tags(cell) for cell in cells)
        shown = html / f"{page}.html"
        text = shown.read_text(encoding="utf-8") if shown.is_file() else ""
        if TRACEBACK in text and not on_purpose:
            yield f"the page {page} shows a traceback"
        charts = 0
        for number, cell in enumerate(cells, 1):
            outputs = cell.get("outputs", [])
            if "raises-exception" not in cell_tags(cell) and any(
                o["output_type"] == "error" for o in outputs
            ):
                yield f"code cell {number} of {page} ends in an error"
            removed = {"remove-cell", "remove-output"}.intersection(cell_tags(cell))
            for output in outputs:
                kind = _chart_kind(output)
                if kind == "lost":
                    yield f"code cell {number} of {page} has a chart that the page loses: call charts.setup()"
                charts += kind == "drawn" and not removed
        # Glued charts may add more; fewer means that one was lost on the way to the page.
        if text.count(CHART) < charts:
            yield f"the page {page} holds {text.count(CHART)} charts, its notebook {charts}"


def _chart_kind(output: dict) -> str | None:
    """``drawn`` for a chart that the site's script draws, ``lost`` for one in a form without use."""
    data = output.get("data", {})
    kinds = set(data)
    if any("vegalite" in kind for kind in kinds):
        return "lost"
    page = "".join(data.get("text/html", ""))
    if CHART in page:
        # A chart for glue stands in the page where it is used, not where it is made.
        return None if "scrapbook" in output.get("metadata", {}) else "drawn"
    if "vegaEmbed" in page:
        return "lost"
    plain = "".join(data.get("text/plain", ""))
    pictured = kinds & {"text/html", "image/svg+xml", "image/png"}
    return "lost" if re.match(r"alt\.\w*Chart\(", plain) and not pictured else None


def _assets(html: Path, page: Path) -> Iterator[str]:
    name = page.relative_to(html).as_posix()
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    for url in reader.fetched:
        if _external(url):
            yield f"{name} fetches {url} from outside the site"
    for url in dict.fromkeys([*reader.fetched, *reader.linked]):
        if not _external(url) and _missing(html, page, url):
            yield f"{name} refers to {url}, which is not in the site"
    for script in reader.scripts:
        found = _CDN.search(script)
        # Thebe is fetched only when a reader asks for a live kernel.
        if found and "THEBE_JS_URL" not in script:
            yield f"a script in {name} fetches {found[0]} from outside the site"


def _style(html: Path, sheet: Path) -> Iterator[str]:
    name = sheet.relative_to(html).as_posix()
    for found in _CSS_URL.finditer(sheet.read_text(encoding="utf-8", errors="replace")):
        url = found[1] or found[2]
        if _external(url):
            yield f"{name} fetches {url} from outside the site"
        elif _missing(html, sheet, url):
            yield f"{name} refers to {url}, which is not in the site"


def _external(url: str) -> bool:
    parts = urlsplit(url.strip())
    return parts.scheme in ("http", "https") or (not parts.scheme and bool(parts.netloc))


def _missing(html: Path, base: Path, url: str) -> bool:
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return True
    if parts.scheme or not parts.path:
        return False
    path = unquote(parts.path)
    target = html / path.lstrip("/") if path.startswith("/") else base.parent / path
    return not target.exists()


class _Reader(HTMLParser):
    """Collects what a page fetches, what it links to, and its inline scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        for name in _FETCHED.get(tag, ()):
            if values.get(name):
                urls = values[name].split(",") if name == "srcset" else [values[name]]
                self.fetched += [url.split()[0] for url in urls if url.strip()]
        if tag == "link" and values.get("href"):
            eager = _FETCHED_LINKS.intersection(values.get("rel", "").lower().split())
            (self.fetched if eager else self.linked).append(values["href"])
        if tag == "a" and values.get("href"):
            self.linked.append(values["href"])
        self.fetched += [m[1] for m in _CSS_URL.finditer(values.get("style", "")) if m[1]]
        # Data for the site's own script (charts) is no code: an address in it is not fetched.
        self._in_script = tag == "script" and values.get("type", "") in ("", "module", "text/javascript")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)
