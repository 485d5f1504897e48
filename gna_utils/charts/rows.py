"""What every chart function needs: checked rows, axis words, scales."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

import altair as alt
import numpy as np
import pandas as pd

from ..errors import GnaError

MAX_ROWS = 5000  # a chart's rows travel inside the page; this many make about 300 kB
DIGITS = 4


def require_words(title: str, description: str) -> None:
    """Refuse a chart that says nothing to a reader who cannot see it."""
    for name, text in (("title", title), ("description", description)):
        if not isinstance(text, str) or not text.strip():
            raise GnaError(f"a chart needs a {name}: say in one sentence what it shows, got {text!r}")


def checked(frame, columns: Iterable[str | None]) -> pd.DataFrame:
    """Return the named columns only, floats rounded to 4 significant digits.

    Raises GnaError for a missing column, no rows, or more than 5000 rows.
    """
    data = pd.DataFrame(frame)
    wanted = list(dict.fromkeys(name for name in columns if name is not None))
    missing = [name for name in wanted if name not in data.columns]
    if missing:
        raise GnaError(
            f"no column {missing[0]!r} to draw: the columns are {', '.join(map(str, data.columns))}"
        )
    if not len(data):
        raise GnaError("nothing to draw: the frame has no rows")
    require_budget(len(data))
    data = data[wanted].reset_index(drop=True)
    for name in data.select_dtypes("floating"):
        data[name] = significant(data[name].to_numpy(dtype=float))
    return data


def require_budget(n_rows: int) -> None:
    """Refuse to put more than 5000 rows into a page."""
    if n_rows > MAX_ROWS:
        raise GnaError(
            f"{n_rows} rows are too many for one chart, at most {MAX_ROWS}: aggregate them or show a part"
        )


def significant(values: np.ndarray, digits: int = DIGITS) -> np.ndarray:
    """Round to significant digits: pages get smaller, and nothing visible changes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.floor(np.log10(np.abs(values)))
    power = np.where(np.isfinite(power), power, 0)
    scale = 10.0 ** (digits - 1 - power)
    return np.where(np.isfinite(values), np.round(values * scale) / scale, values)


def field(name: str) -> str:
    """Escape the characters that Vega-Lite reads as a path into a nested record."""
    return "".join("\\" + c if c in ".[]\\" else c for c in str(name))


def words(name: str) -> str:
    return str(name).replace("_", " ")


def with_unit(name: str, unit: str | None) -> str:
    return f"{words(name)} ({unit})" if unit else words(name)


def tooltip(data: pd.DataFrame) -> list[alt.Tooltip]:
    """Show every column of a row, numbers to 3 digits."""
    return [
        alt.Tooltip(field=field(name), type="quantitative", title=words(name), format=".3~g")
        if pd.api.types.is_float_dtype(data[name])
        else alt.Tooltip(field=field(name), type="nominal", title=words(name))
        for name in data.columns
    ]


def value_scale(data: pd.DataFrame, unit: str | None, columns: Iterable[str | None]) -> alt.Scale:
    """Return 0..1 for proportions, otherwise a scale that includes 0.

    Raises GnaError where a "proportion" lies outside 0..1.
    """
    if unit != "proportion":
        return alt.Scale(zero=True, nice=True)
    for name in filter(None, columns):
        if ((data[name] < 0) | (data[name] > 1)).any():
            raise GnaError(
                f"column {name!r} runs from {data[name].min():g} to {data[name].max():g}, "
                "which is no proportion: name its unit (unit='accuracy points')"
            )
    return alt.Scale(domain=[0, 1])


def chance_level(level: float, axis: str) -> list[alt.Chart]:
    """Draw one dashed line across the plot at a fixed level of ``axis``, and say what it is."""
    source = alt.Chart(pd.DataFrame({"chance": [significant(np.array(level), 2).item()]}))
    text = alt.value(f"chance {level:.2g}")
    if axis == "y":
        end = {"y": alt.Y("chance:Q"), "x": alt.value(alt.ExprRef("width"))}
        label = source.mark_text(style="chance-label", align="right", baseline="bottom", dy=-3)
    else:
        end = {"x": alt.X("chance:Q"), "y": alt.value(0)}
        label = source.mark_text(style="chance-label", align="center", baseline="bottom", dy=-3)
    return [source.mark_rule(style="chance").encode(**{axis: end[axis]}), label.encode(text=text, **end)]


def heading(title: str, description: str) -> dict:
    """Return title and description as chart properties; a long title becomes several lines."""
    lines = textwrap.wrap(title, 64)
    return {"title": lines if len(lines) > 1 else title, "description": description}
