"""The built site in headless Chromium with the network blocked: what a reader sees must be there.

The first part builds a small book of its own with everything that can go wrong on a page. The second opens
every page of the real site, which `make test` builds before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import small_book
import yaml
from browser import NARROW, browser, faults, served, visit

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
SITE = Path(os.environ.get("GNA_SITE_DIR", ROOT / "_build" / "html"))
CHARTS = "/book/charts.html"


@pytest.fixture(scope="module")
def small_site(tmp_path_factory):
    return small_book.build(tmp_path_factory.mktemp("book"))


@pytest.fixture(scope="module")
def chromium():
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def small_home(small_site):
    with served(small_site) as home:
        yield home


@pytest.fixture(scope="module")
def site_home():
    assert (SITE / "index.html").is_file(), f"there is no site in {SITE}: run `make book` first"
    with served(SITE) as home:
        yield home


def pages_of_the_toc() -> list[str]:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    found = [toc["root"]]

    def collect(entry):
        for value in entry.values() if isinstance(entry, dict) else entry:
            if isinstance(value, (dict, list)):
                collect(value)
        if isinstance(entry, dict) and "file" in entry:
            found.append(entry["file"])

    collect(toc)
    return list(dict.fromkeys(found))


# --- the small book ---


def test_all_kinds_of_charts_draw_beside_maths(chromium, small_home):
    """Script loaders and MathJax used to stop charts on pages with maths (jupyter-book issue 1528)."""
    with visit(chromium, small_home, CHARTS) as seen:
        report = seen.report()
        assert len(report["charts"]) == len(small_book.sample_charts())
        assert faults(report) == [] and seen.problems == []
        # 32 causal cells a side and two strips; 270 heads and one outline
        assert [chart["marks"] for chart in report["charts"]][2:] == [32 * 33 // 2 + 64, 271]
        assert not seen.page.evaluate("'require' in window || (window.define || {}).amd !== undefined")
        assert report["charts"][0]["label"] == "Accuracy falls from 0.9 at 2 pairs to 0.3 at 40."


def test_dark_mode_redraws_in_dark_colours_and_back(chromium, small_home):
    with visit(chromium, small_home, CHARTS) as seen:
        line = ".gna-chart >> nth=0 >> .mark-line path >> nth=0"
        light = seen.page.get_attribute(line, "stroke")
        seen.switch_to("dark")
        seen.settle("dark")
        dark = seen.page.get_attribute(line, "stroke")
        assert (light, dark) == ("#0072B2", "#56B4E9")
        panel = "getComputedStyle(document.querySelector('.output:has(.gna-chart)')).backgroundColor"
        assert seen.page.evaluate(panel) == "rgba(0, 0, 0, 0)"
        seen.switch_to("light")
        seen.settle("light")
        assert seen.page.get_attribute(line, "stroke") == light
        assert faults(seen.report()) == [] and seen.problems == []


def test_readers_who_prefer_dark_get_dark_charts_at_once(chromium, small_home):
    with visit(chromium, small_home, CHARTS) as seen:
        seen.page.emulate_media(color_scheme="dark")
        seen.settle("dark")


@pytest.mark.parametrize("path", ["/book/intro.html", CHARTS, "/book/plain.html"])
def test_narrow_pages_do_not_scroll_sideways(chromium, small_home, path):
    with visit(chromium, small_home, path, width=NARROW) as seen:
        assert faults(seen.report()) == [] and seen.problems == []


def test_charts_follow_the_width_of_the_page(chromium, small_home):
    pictures = "[...document.querySelectorAll('.gna-chart svg.marks')]"
    widths = f"{pictures}.map(s => s.clientWidth - s.closest('.gna-chart').clientWidth)"
    with visit(chromium, small_home, CHARTS) as seen:
        for size in (1200, NARROW, 1200):
            seen.page.set_viewport_size({"width": size, "height": 900})
            seen.page.wait_for_function(f"{widths}.slice(0, 2).every(d => d <= 0 && d > -12)")
            seen.settle()
            assert faults(seen.report()) == []


def test_library_is_loaded_on_pages_with_charts_only(chromium, small_home):
    for path, expected in ((CHARTS, 1), ("/book/plain.html", 0)):
        with visit(chromium, small_home, path) as seen:
            assert sum("vega.js" in url for url in seen.requests) == expected


def test_page_opened_as_a_file(chromium, small_site):
    """The site works from an unpacked archive, without a server."""
    with visit(chromium, small_site.as_uri(), CHARTS) as seen:
        assert faults(seen.report()) == [] and seen.problems == []


def test_charts_in_closed_boxes_draw_when_opened(chromium, small_home):
    with visit(chromium, small_home, CHARTS) as seen:
        seen.page.evaluate(
            """() => {
              const first = document.querySelector('.gna-chart');
              const box = document.createElement('details');
              first.before(box); box.append(first);
              location.hash = '';
            }"""
        )
        closed = seen.page.locator("details .gna-chart")
        assert closed.evaluate("c => c.clientWidth") == 0
        seen.page.set_viewport_size({"width": 900, "height": 900})
        seen.page.evaluate("document.querySelector('details:has(.gna-chart)').open = true")
        seen.settle()
        assert closed.evaluate("c => c.querySelector('svg.marks').clientWidth <= c.clientWidth")


def test_description_stays_when_the_library_is_missing(chromium, small_site, tmp_path):
    """A chart that cannot be drawn leaves its description, and the check of the site notices."""
    broken = tmp_path / "site"
    shutil.copytree(small_site, broken)
    (broken / "vega" / "vega.js").unlink()
    with served(broken) as home, visit(chromium, home, CHARTS) as seen:
        assert seen.page.locator(".gna-chart-text").first.is_visible()
        assert any("chart 1 was not drawn" in fault for fault in faults(seen.report()))
        assert any("vega.js" in problem for problem in seen.problems)


def test_check_notices_bad_pages(chromium, small_site, tmp_path):
    """The checks below must be able to fail: each fault is planted here once."""
    bad = tmp_path / "site"
    shutil.copytree(small_site, bad)
    page = bad / "book" / "charts.html"
    text = page.read_text(encoding="utf-8")
    text = text.replace('"description":"Accuracy falls', '"unheard":"Accuracy falls', 1)
    planted = (
        '<img src="none.png"><script src="https://example.org/a.js"></script><script>undefinedFunction()</script>'
        '<div style="width:3000px">wide</div></body>'
    )
    page.write_text(text.replace("</body>", planted), encoding="utf-8")
    with served(bad) as home, visit(chromium, home, CHARTS) as seen:
        found = " ".join(faults(seen.report()) + seen.problems)
    for expected in (
        "chart 1 has no description",
        "image without alt text",
        "broken image",
        "wider than the screen",
        "request outside the site: https://example.org/a.js",
        "script error: undefinedFunction is not defined",
    ):
        assert expected in found


def test_launch_buttons_and_settings_survive(small_site):
    """Theme options given to Sphinx used to replace the buttons of the book (QuantEcon issue 182)."""
    page = (small_site / "book" / "charts.html").read_text(encoding="utf-8")
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    url = config["repository"]["url"].removeprefix("https://github.com")
    assert f"colab.research.google.com/github{url}/blob/main/book/charts.ipynb" in page
    assert f"mybinder.org/v2/gh{url}/main?urlpath=lab/tree/book/charts.ipynb" in page
    assert f"{url}/edit/main/book/charts.ipynb" in page and f"{url}/issues/new" in page
    assert 'data-default-mode="auto"' in page


def test_pages_name_no_cdn(small_site):
    for page in (small_site / "book").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"""(?:src|href)=["']https?://[^"']*\.(?:js|css)""", text) == []
        assert not re.search("jsdelivr|unpkg|cdnjs", text), page.name
    size = sum(path.stat().st_size for path in small_site.rglob("*") if path.is_file())
    assert size < 16e6


# --- the real site ---


@pytest.mark.parametrize("name", pages_of_the_toc())
def test_page_of_the_site(chromium, site_home, name):
    found = []
    with visit(chromium, site_home, f"/{name}.html") as seen:
        found += [f"light: {fault}" for fault in faults(seen.report())]
        seen.switch_to("dark")
        seen.settle("dark")
        found += [f"dark: {fault}" for fault in faults(seen.report())]
        found += seen.problems
    with visit(chromium, site_home, f"/{name}.html", width=NARROW) as seen:
        found += [f"{NARROW} pixels: {fault}" for fault in faults(seen.report())] + seen.problems
    assert found == []


def test_every_chart_of_the_chapters_is_on_its_page(chromium, site_home):
    """Charts used to vanish on the way from the notebook to the page (altair issue 1339)."""
    for name in pages_of_the_toc():
        notebook = SITE / "_sources" / f"{name}.ipynb"
        if not notebook.is_file():
            continue
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        wanted = sum("gna-chart" in "".join(o.get("data", {}).get("text/html", "")) for o in outputs)
        with visit(chromium, site_home, f"/{name}.html") as seen:
            assert seen.page.locator(".gna-chart").count() == wanted, name
