"""How charts look and how they reach the page: palette, Altair theme, renderers."""

from __future__ import annotations

import html
import json
import os

import altair as alt

from ..errors import GnaError

# Okabe and Ito's colour-blind safe colours. Their yellow, orange and sky blue are too faint on white
# (contrast below 3:1), their blue and black on a dark page; each mode keeps the hues in the same order.
LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#4D4D4D")
DARK = ("#56B4E9", "#F27830", "#00B887", "#E29AC6", "#DDDDDD")
PAGE = {"light": "#ffffff", "dark": "#14181e"}
RENDERERS = ("html", "svg", "png", "site")


def setup() -> None:
    """Give all charts of this kernel the book's theme and a renderer that fits where they are shown.

    >>> setup()
    >>> alt.theme.active
    'gna'

    In JupyterLab, VS Code and Colab charts are drawn by Altair's own ``html`` renderer, which loads its
    library from a CDN. In a run for the site (``GNA_SITE=1``) they are left to the site's script, which needs
    no network. ``GNA_CHARTS=html|svg|png`` overrides both; the pictures need no script at all.
    """
    default = "site" if os.environ.get("GNA_SITE") == "1" else "html"
    name = os.environ.get("GNA_CHARTS") or default
    if name not in RENDERERS:
        raise GnaError(f"unknown GNA_CHARTS '{name}': choose one of {', '.join(RENDERERS)}")
    alt.theme.enable("gna")
    alt.renderers.register("site", site_mimebundle)
    alt.renderers.enable(name)


def site_mimebundle(spec: dict, **_options) -> dict[str, str]:
    """Return a chart as the site shows it: its data and description, to be drawn by the site's script.

    The description stays visible until the chart is drawn, so that a page without scripts still says
    something.
    """
    # "<" is the only character that could end the script element (or start a comment) inside the JSON text.
    text = json.dumps(spec, separators=(",", ":")).replace("<", "\\u003c")
    description = html.escape(str(spec.get("description", "")))
    return {
        "text/html": (
            f'<div class="gna-chart"><p class="gna-chart-text">{description}</p>'
            f'<script type="application/json">{text}</script></div>'
        ),
        "text/plain": f"Chart: {spec.get('description', 'no description')}",
    }


@alt.theme.register("gna", enable=False)
def theme() -> alt.theme.ThemeConfig:
    """Return the book's Altair theme, in its light colours."""
    layout = {
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', sans-serif",
        "view": {"continuousWidth": 480, "continuousHeight": 280, "stroke": None},
        "title": {"anchor": "start", "frame": "bounds", "fontSize": 14, "fontWeight": 600, "offset": 12},
        "axis": {
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "ticks": False,
            "labelPadding": 6,
            "labelSeparation": 4,
        },
        "axisQuantitative": {"tickCount": 5},
        "axisX": {"grid": False, "labelFlush": False},
        "legend": {
            "orient": "top",
            "direction": "horizontal",
            "titleFontWeight": "normal",
            "titleFontSize": 12,
            "labelFontSize": 12,
            "labelLimit": 220,
            "symbolSize": 90,
            "gradientLength": 160,
        },
        "line": {"strokeWidth": 2},
        "point": {"filled": True, "size": 60},
        "rule": {"strokeWidth": 2},
    }
    return {"config": _merged(layout, colours(dark=False))}


def colours(*, dark: bool) -> dict:
    """Return the part of the theme that differs between a light and a dark page, as a Vega-Lite config."""
    text, muted, grid = ("#d9dfe6", "#98a2ad", "#333b45") if dark else ("#2b2f36", "#6a717b", "#e4e6ea")
    page = PAGE["dark" if dark else "light"]
    # Zero is the colour of the page, so that what stands out is what is large, in both modes.
    ramp = [page, "#1c5f8c", "#56b4e9", "#e8f4fc"] if dark else [page, "#9ccae6", "#2f84bd", "#06304f"]
    ends = (
        ("#ff9d63", "#a3541f", "#24668f", "#7cc6f2") if dark else ("#8f3b00", "#e9a578", "#8dbfe0", "#00507e")
    )
    return {
        "background": page,
        "mark": {"color": (DARK if dark else LIGHT)[0]},
        "title": {"color": text, "subtitleColor": muted},
        "axis": {"labelColor": text, "titleColor": text, "gridColor": grid, "domainColor": muted},
        "legend": {"labelColor": text, "titleColor": text},
        "text": {"color": text},
        "range": {
            "category": list(DARK if dark else LIGHT),
            "ramp": ramp,
            "heatmap": ramp,
            "diverging": [*ends[:2], page, *ends[2:]],
        },
        "style": {
            "chance": {"color": muted, "strokeDash": [5, 4], "strokeWidth": 1.5},
            "chance-label": {"color": muted, "fontSize": 12},
            "outline": {"color": text, "strokeWidth": 2},
            "bar-interval": {"color": text, "strokeWidth": 1.5},
        },
    }


def _merged(base: dict, extra: dict) -> dict:
    out = dict(base)
    for key, value in extra.items():
        out[key] = (
            _merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        )
    return out
