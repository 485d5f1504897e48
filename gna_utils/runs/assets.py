"""Write the parts of the site that every page shares: chart library, MathJax, script, style, logo.

Nothing third-party is kept in the repository: the chart library comes out of ``vl-convert-python`` and
MathJax out of ``sphinx-mathjax-offline``, both installed packages, when the site is built.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib import metadata, resources
from pathlib import Path

import altair as alt
import vl_convert

from ..charts.style import colours
from ..errors import GnaError
from ..weights import cache_dir

# The combined component for TeX input, and what it loads on demand: fonts, rarer TeX packages, the tools for
# screen readers. The package's other 20 MB (other inputs and outputs, speech in other languages) stay out.
MATHJAX_PARTS = (
    "tex-chtml.js",
    "output/chtml/fonts/woff-v2",
    "input/tex/extensions",
    "a11y",
    "sre/mathmaps/base.json",
    "sre/mathmaps/en.json",
    "sre/mathmaps/nemeth.json",
)


def write_assets(stage: str | Path) -> None:
    """Write everything that the pages share into the staging folder of the site.

    >>> write_assets("_build/stage")  # doctest: +SKIP

    ``_static/`` gets what Jupyter Book links in the head of every page (script, style, logo); ``_extra/``
    gets what must not be linked there: ``vega/vega.js`` (0.9 MB, loaded by the script on pages with charts
    only) and ``mathjax/``. The settings ``html_extra_path`` and ``mathjax_path`` of ``_config.yml`` name
    them.
    """
    stage = Path(stage)
    _write_static(stage / "_static")
    _write(stage / "_extra" / "vega" / "vega.js", vega_bundle())
    _copy_mathjax(stage / "_extra" / "mathjax")


def vega_bundle() -> str:
    """Return the chart library as one script that sets only ``vega``, ``vegaLite`` and ``vegaEmbed``.

    It matches the Vega-Lite version that Altair writes. Made once (some seconds), then kept in the user
    cache.
    """
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    if version not in vl_convert.get_vegalite_versions():
        raise GnaError(
            f"Altair {alt.__version__} writes Vega-Lite {version}, which vl-convert-python "
            f"{vl_convert.__version__} does not bundle: install the versions of requirements.lock"
        )
    kept = cache_dir() / "site" / f"vega-lite-{version}-vl-convert-{vl_convert.__version__}.js"
    if not kept.exists():
        # The bundle's top-level names are single letters: unwrapped they would become globals of the page.
        script = vl_convert.javascript_bundle(vl_version=version)
        _write(kept, f"(function () {{\n{script}\n}})();\n")
    return kept.read_text(encoding="utf-8")


def _write_static(static: Path) -> None:
    source = resources.files(__package__.rpartition(".")[0]) / "site_assets"
    for name in ("gna.css", "logo.svg", "favicon.svg"):
        _write(static / name, (source / name).read_text(encoding="utf-8"))
    dark = json.dumps(colours(dark=True), separators=(",", ":"))
    script = (source / "gna.js").read_text(encoding="utf-8")
    _write(static / "gna.js", script.replace("/* DARK_CONFIG */ {}", dark))


def _copy_mathjax(target: Path) -> None:
    distribution = metadata.distribution("sphinx-mathjax-offline")
    source = Path(str(distribution.locate_file("sphinx-mathjax-offline/static/mathjax")))
    for part in MATHJAX_PARTS:
        if not (source / part).exists():
            raise GnaError(
                f"the package sphinx-mathjax-offline {distribution.version} has no {part}: reinstall it"
            )
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / part, target / part)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
