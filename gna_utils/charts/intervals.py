"""Measurements with their 95 % intervals: lines and bars."""

from __future__ import annotations

import altair as alt
import pandas as pd

from .rows import chance_level, checked, field, heading, require_words, tooltip, value_scale, with_unit, words


def interval_line(
    frame,
    x: str,
    y: str,
    low: str | None = None,
    high: str | None = None,
    color: str | None = None,
    chance: str | float | None = None,
    *,
    title: str,
    description: str,
    x_title: str | None = None,
    y_title: str | None = None,
    unit: str | None = "proportion",
    log_x: bool = False,
    height: int = 300,
) -> alt.LayerChart:
    """Draw points joined by lines, each line inside its 95 % interval.

    >>> rows = [
    ...     {"n_pairs": 2, "accuracy": 0.9, "low": 0.8, "high": 1.0},
    ...     {"n_pairs": 8, "accuracy": 0.5, "low": 0.4, "high": 0.6},
    ... ]
    >>> chart = interval_line(
    ...     rows, "n_pairs", "accuracy", "low", "high", chance=0.1,
    ...     title="Retrieval", description="Accuracy falls from 0.9 at 2 pairs to 0.5 at 8.",
    ... )

    ``x`` is a number (a band around a line) or a name (points with error bars, no line). ``color`` names the
    column that tells the lines apart; colour and point shape both carry it. ``chance`` is one level or a
    column of levels. ``unit`` stands on the y axis: ``"proportion"`` makes it run from 0 to 1, any other unit
    makes it include 0. ``log_x`` spaces doublings evenly. Extra rows of ``frame`` are not summed up: one row
    is one point.
    Raises GnaError without title or description, for a missing column, over 5000 rows, or a proportion
    outside 0..1.
    """
    require_words(title, description)
    column = chance if isinstance(chance, str) else None
    data = checked(frame, [x, y, low, high, color, column])
    numeric = pd.api.types.is_numeric_dtype(data[x])
    xs = _x_channel(data, x, x_title, numeric, log_x)
    scale = value_scale(data, unit, [y, low, high])
    ys = alt.Y(field=field(y), type="quantitative", title=with_unit(y_title or y, unit), scale=scale)
    base = alt.Chart(data).encode(x=xs, y=ys, tooltip=tooltip(data))
    markers = {}
    if color:
        # The same explicit domain lets the two legends, of colour and of shape, become one.
        names = alt.Scale(domain=data[color].unique().tolist())
        named = {"field": field(color), "type": "nominal", "scale": names, "title": words(color)}
        # The band comes first and would lend its transparency to the legend.
        base = base.encode(color=alt.Color(**named, legend=alt.Legend(symbolOpacity=1)))
        markers = {"shape": alt.Shape(**named)}
        if not numeric and data.duplicated([x]).any():
            base = base.encode(xOffset=alt.XOffset(field=field(color), type="nominal", sort=None))
    layers = _interval(base, ys, low, high, band=numeric)
    if numeric:
        layers.append(base.mark_line())
    layers.append(base.mark_point(opacity=1).encode(**markers))
    if column:
        layers += _chance_curve(data, xs, x, column)
    elif chance is not None:
        layers += chance_level(float(chance), "y")
    return alt.layer(*layers).properties(**heading(title, description), width="container", height=height)


def interval_bars(
    frame,
    label: str,
    value: str,
    low: str | None = None,
    high: str | None = None,
    color: str | None = None,
    chance: float | None = None,
    *,
    title: str,
    description: str,
    label_title: str | None = None,
    value_title: str | None = None,
    unit: str | None = "proportion",
    step: int = 26,
) -> alt.LayerChart:
    """Draw one horizontal bar per row of the frame, in its order, with the 95 % interval on top.

    >>> rows = [
    ...     {"ablated": "L17H4", "drop": 0.4, "low": 0.3, "high": 0.5},
    ...     {"ablated": "random head", "drop": 0.0, "low": -0.1, "high": 0.1},
    ... ]
    >>> chart = interval_bars(
    ...     rows, "ablated", "drop", "low", "high", unit="accuracy points",
    ...     title="One head", description="Without L17H4 accuracy drops by 0.4, without a random head by 0.",
    ... )

    Bars start at 0. ``color`` colours the bars; a label with several rows gets one bar per colour. ``step``
    is the height of a bar in pixels. ``chance`` (one level), ``unit`` and what is raised are those of
    `interval_line`.
    """
    require_words(title, description)
    data = checked(frame, [label, value, low, high, color])
    scale = value_scale(data, unit, [value, low, high])
    xs = alt.X(
        field=field(value), type="quantitative", title=with_unit(value_title or value, unit), scale=scale
    )
    xs = xs.axis(grid=True)
    ys = alt.Y(field=field(label), type="nominal", sort=None, title=words(label_title or label))
    base = alt.Chart(data).encode(x=xs, y=ys.axis(labelLimit=150), tooltip=tooltip(data))
    groups = int(data[label].value_counts().max())
    if color and groups > 1:
        base = base.encode(yOffset=alt.YOffset(field=field(color), type="nominal", sort=None))
    bars = base.mark_bar()
    if color:
        fill = alt.Color(field=field(color), type="nominal", sort=None, title=words(color))
        bars = bars.encode(color=fill)
    layers = [bars]
    if low and high:
        span = {"x": alt.X(field=field(low), type="quantitative"), "x2": alt.X2(field=field(high))}
        layers.append(base.mark_rule(style="bar-interval").encode(**span))
    if chance is not None:
        layers += chance_level(float(chance), "x")
    height = step * max(1, 0.7 * groups) * data[label].nunique()
    return alt.layer(*layers).properties(**heading(title, description), width="container", height=height)


def _x_channel(data: pd.DataFrame, x: str, title: str | None, numeric: bool, log: bool) -> alt.X:
    title = title or words(x)
    if not numeric:
        return alt.X(field=field(x), type="nominal", sort=None, title=title).axis(labelAngle=0)
    scale = (
        alt.Scale(type="log", base=2, nice=False, padding=12) if log else alt.Scale(zero=False, padding=12)
    )
    measured = sorted(data[x].unique().tolist())
    # Ticks at what was measured: a tick between two points suggests a measurement that nobody made.
    axis = alt.Axis(values=measured, format="~g") if len(measured) <= 12 else alt.Axis()
    return alt.X(field=field(x), type="quantitative", title=title, scale=scale, axis=axis)


def _interval(
    base: alt.Chart, ys: alt.Y, low: str | None, high: str | None, *, band: bool
) -> list[alt.Chart]:
    if not (low and high):
        return []
    mark = base.mark_area(opacity=0.18) if band else base.mark_rule()
    bottom = ys.copy()
    bottom.field = field(low)
    return [mark.encode(y=bottom, y2=alt.Y2(field=field(high)))]


def _chance_curve(data: pd.DataFrame, xs: alt.X, x: str, column: str) -> list[alt.Chart]:
    levels = data[[x, column]].drop_duplicates().sort_values(x)
    place = alt.Y(field=field(column), type="quantitative")
    curve = alt.Chart(levels).mark_line(style="chance").encode(x=xs, y=place)
    middle = levels.iloc[[len(levels) // 2]]  # the ends of a falling curve lie close to lines and axes
    label = alt.Chart(middle).mark_text(style="chance-label", align="left", baseline="bottom", dx=3, dy=-3)
    return [curve, label.encode(x=xs, y=place, text=alt.value("chance"))]
