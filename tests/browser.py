"""Open built pages in headless Chromium with the network blocked, and list what is wrong with them."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

NARROW = 400  # pixels
UNNAMED = "Vega visualization"  # what the library says of a chart without description
CHARTS_READY = (
    "mode => [...document.querySelectorAll('.gna-chart')].filter(c => c.clientWidth)"
    ".every(c => c.dataset.drawn === mode || c.dataset.failed)"
)
MATHS_READY = "async () => { if (window.MathJax && MathJax.startup) await MathJax.startup.promise; }"
REPORT = """() => {
  const shown = node => node.clientWidth > 0;
  const charts = [...document.querySelectorAll('.gna-chart')].filter(shown).map(chart => ({
    failed: chart.dataset.failed || '',
    marks: chart.querySelectorAll('svg .role-mark :is(path, line, rect, text)').length,
    label: (chart.querySelector('[role=graphics-document]') || chart).getAttribute('aria-label') || '',
    height: chart.clientHeight,
  }));
  const sources = [...document.querySelectorAll('article .math.notranslate')];
  return {
    charts,
    withoutAlt: [...document.images].filter(image => !image.hasAttribute('alt')).map(image => image.src),
    brokenImages: [...document.images].filter(i => i.complete && !i.naturalWidth).map(image => image.src),
    unrendered: sources.filter(node => !node.querySelector('mjx-container')).map(node => node.textContent),
    mathErrors: [...document.querySelectorAll('mjx-merror, [data-mjx-error]')].map(n => n.textContent),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  };
}"""


def chromium() -> str:
    """Return the path of the browser: ``GNA_CHROMIUM`` or the installed Chromium."""
    path = os.environ.get("GNA_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "the browser tests need Chromium: apt-get install chromium, or name one in GNA_CHROMIUM"
    return path


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on a free loopback port and give its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Visit:
    """One opened page and everything that its browser complained about."""

    page: Page
    home: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.route("**/*", self._allow_only_home)
        self.page.on("console", lambda m: m.type in ("error", "warning") and self._note(f"console: {m.text}"))
        self.page.on("pageerror", lambda error: self._note(f"script error: {error}"))
        self.page.on("requestfailed", lambda request: self._note(f"failed request: {request.url}"))
        self.page.on("response", lambda r: r.status >= 400 and self._note(f"status {r.status}: {r.url}"))
        self.page.goto(self.home + path)

    def settle(self, mode: str = "light") -> None:
        """Wait until every visible chart is drawn in this colour mode and all maths is set."""
        self.page.wait_for_function(CHARTS_READY, arg=mode, timeout=60_000)
        self.page.evaluate(MATHS_READY)

    def report(self) -> dict:
        return self.page.evaluate(REPORT)

    def switch_to(self, mode: str) -> None:
        """Press the page's own colour button until it stands at ``mode``."""
        for _ in range(3):
            if self.page.evaluate("document.documentElement.dataset.mode") == mode:
                return
            self.page.locator(".theme-switch-button").first.click()
        assert self.page.evaluate("document.documentElement.dataset.mode") == mode

    def _note(self, problem: str) -> None:
        self.problems.append(problem)

    def _allow_only_home(self, route) -> None:
        url = route.request.url
        self.requests.append(url)
        if url.startswith((self.home, "data:", "blob:")):
            route.continue_()
        else:
            self._note(f"request outside the site: {url}")
            route.abort()


@contextmanager
def visit(opened: Browser, home: str, path: str, width: int = 1200) -> Iterator[Visit]:
    """Open one page in a fresh profile (light, English) of the given width."""
    context = opened.new_context(viewport={"width": width, "height": 900}, color_scheme="light")
    try:
        seen = Visit(context.new_page(), home)
        seen.open(path)
        seen.settle()
        yield seen
    finally:
        context.close()


def faults(report: dict) -> list[str]:
    """Turn a report into sentences; an empty list is a good page."""
    found = []
    for number, chart in enumerate(report["charts"], 1):
        if chart["failed"]:
            found.append(f"chart {number} was not drawn: {chart['failed']}")
        elif not chart["marks"]:
            found.append(f"chart {number} has no marks")
        if chart["label"].strip() in ("", UNNAMED):
            found.append(f"chart {number} has no description")
    found += [f"image without alt text: {src}" for src in report["withoutAlt"]]
    found += [f"broken image: {src}" for src in report["brokenImages"]]
    found += [f"maths not rendered: {text}" for text in report["unrendered"]]
    found += [f"maths error: {text}" for text in report["mathErrors"]]
    if report["overflow"] > 0:
        found.append(f"the page is {report['overflow']} pixels wider than the screen")
    return found
