"""Maps: one cell per pair of tokens, or per head of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence

import altair as alt
import numpy as np
import pandas as pd

from ..errors import GnaError
from ..heads import parse_heads
from .rows import checked, field, heading, require_budget, require_words, significant, tooltip, words
from .tokens import segment_names, show_token

NAMED_SEGMENTS = 5  # more names than colours: the strips still separate neighbours, a legend would mislead


def heatmap(
    matrix,
    tokens: Sequence[str] | None = None,
    segments: Sequence[str | None] | None = None,
    *,
    title: str,
    description: str,
    rows: Sequence[int] | None = None,
    value: str = "weight",
    domain: tuple[float, float] | None = None,
    cell: int = 16,
) -> alt.LayerChart:
    """Draw a square matrix over the tokens of a prompt: row i tells where position i takes its content from.

    >>> weights = [[1.0, 0.0], [0.3, 0.7]]
    >>> chart = heatmap(weights, ["fox", "\\n"], title="A head", description="The newline sees both tokens.")

    ``matrix`` is (length, length); where all of it above the diagonal is 0, as in a causal model, those cells
    stay empty. Whitespace in ``tokens`` is made visible. ``segments`` holds one name (or None) per token:
    equal names get one colour, on strips along both axes. ``rows`` shows these positions only. The colour
    scale runs from 0 to the largest value, or symmetrically around 0 when there are negative values;
    ``domain`` fixes it, so that several maps can be compared. ``cell`` is the size of a cell in pixels; the
    site shrinks it on narrow screens.
    Raises GnaError when lengths differ or over 5000 cells would be drawn.
    """
    require_words(title, description)
    matrix = np.asarray(matrix, dtype=float)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise GnaError(f"heatmap needs one square matrix (length, length), got the shape {matrix.shape}")
    length = len(matrix)
    labels = (
        [show_token(token) for token in tokens] if tokens is not None else [str(i) for i in range(length)]
    )
    if len(labels) != length:
        raise GnaError(f"the matrix has {length} positions, but there are {len(labels)} tokens")
    names = segment_names(segments, length)
    shown = sorted(set(range(length) if rows is None else rows))
    data = _cells(matrix, labels, shown, value)
    x = _positions("to", labels, range(length), "content taken from", orient="top", angle=-90)
    y = _positions("from", labels, shown, "position", orient="left", angle=0)
    cells = alt.Chart(data).mark_rect(aria=False)
    cells = cells.encode(x=x, y=y, color=_colour(data, value, domain), tooltip=tooltip(data))
    layers = [cells, *_strips(names, x, y, shown)]
    return (
        alt.layer(*layers)
        .resolve_scale(color="independent")
        .properties(**heading(title, description), width=alt.Step(cell), height=alt.Step(cell))
        .properties(usermeta={"columns": length})
    )


def head_grid(
    frame,
    value: str,
    layer: str = "layer",
    head: str = "head",
    *,
    title: str,
    description: str,
    mark=None,
    unit: str | None = None,
    domain: tuple[float, float] | None = None,
    cell: int = 18,
) -> alt.LayerChart:
    """Draw one value per head of a model, layers from left to right, heads from top to bottom.

    >>> rows = [{"layer": 0, "head": 0, "drop": 0.02}, {"layer": 1, "head": 0, "drop": -0.4}]
    >>> chart = head_grid(rows, "drop", mark="L1H0", title="Drop per head", description="L1H0 stands out.")

    The colour scale is symmetric around 0, so that no effect has the colour of the page; ``domain`` fixes it.
    Heads in ``mark`` (any form that `parse_heads` reads) get an outline. Heads without a row stay blank.
    Raises GnaError for a missing column, two rows for one head, a marked head without a row, or over 5000
    heads.
    """
    require_words(title, description)
    data = checked(frame, [layer, head, value])
    if data.duplicated([layer, head]).any():
        twice = data[data.duplicated([layer, head])].iloc[0]
        raise GnaError(f"two rows for L{twice[layer]:g}H{twice[head]:g}: head_grid needs one row per head")
    label = f"{words(value)} ({unit})" if unit else words(value)
    color = _colour(data, value, domain or _symmetric(data[value]), label)
    x = alt.X(field=field(layer), type="ordinal", title="layer").axis(labelAngle=0, labelOverlap=True)
    y = alt.Y(field=field(head), type="ordinal", title="head").axis(labelOverlap=True)
    base = alt.Chart(data).encode(x=x, y=y)
    layers = [base.mark_rect(aria=False).encode(color=color, tooltip=tooltip(data))]
    if mark is not None:
        layers.append(_outlines(data, layer, head, parse_heads(mark), x, y))
    return (
        alt.layer(*layers)
        .properties(**heading(title, description), width=alt.Step(cell), height=alt.Step(cell))
        .properties(usermeta={"columns": int(data[layer].nunique())})
    )


def _cells(matrix: np.ndarray, labels: list[str], shown: list[int], value: str) -> pd.DataFrame:
    causal = not np.triu(matrix, 1).any()
    cells = [(i, j) for i in shown for j in range(i + 1 if causal else len(matrix))]
    require_budget(len(cells))
    at, source = np.array(cells).T
    return pd.DataFrame(
        {
            "from": at,
            "to": source,
            "row": [labels[i] for i in at],
            "column": [labels[j] for j in source],
            value: significant(matrix[at, source], 3),
        }
    )


def _positions(name: str, labels: list[str], shown, title: str, *, orient: str, angle: int):
    channel = alt.X if orient == "top" else alt.Y
    axis = alt.Axis(
        orient=orient,
        labelExpr=f"{json.dumps(labels)}[datum.value]",
        labelAngle=angle,
        labelOverlap=True,
        labelFont="monospace",
        labelFontSize=11,
        labelLimit=90,
        offset=10,  # room for the strips
        domain=False,
    )
    return channel(field=name, type="ordinal", title=title, scale=alt.Scale(domain=list(shown)), axis=axis)


def _strips(names: list[str | None], x, y, shown: list[int]) -> list[alt.Chart]:
    marked = pd.DataFrame(
        [{"to": i, "from": i, "segment": name} for i, name in enumerate(names) if name is not None]
    )
    if marked.empty:
        return []
    known = list(dict.fromkeys(marked["segment"]))
    legend = alt.Legend(title="segment") if len(known) <= NAMED_SEGMENTS else None
    color = alt.Color("segment:N", scale=alt.Scale(domain=known))
    start, end = alt.value(-9), alt.value(-3)
    across = alt.Chart(marked).mark_rect(aria=False).encode(x=x, y=start, y2=end, color=color.legend(legend))
    side = marked[marked["from"].isin(shown)]
    down = alt.Chart(side).mark_rect(aria=False).encode(y=y, x=start, x2=end, color=color.legend(None))
    return [across, down]


def _colour(data: pd.DataFrame, value: str, domain, label: str | None = None) -> alt.Color:
    low, high = domain or _domain(data[value])
    diverging = low < 0 < high
    scale = alt.Scale(
        domain=[low, high],
        domainMid=0 if diverging else alt.Undefined,
        range="diverging" if diverging else "ramp",
        interpolate="lab",  # the default path through hues would tint what is nearly zero
        clamp=True,
    )
    legend = alt.Legend(title=label or words(value), orient="bottom", format=".2~g", tickCount=4)
    return alt.Color(field=field(value), type="quantitative", scale=scale, legend=legend)


def _domain(values: pd.Series) -> tuple[float, float]:
    return _symmetric(values) if values.min() < 0 else (0.0, float(values.max()) or 1.0)


def _symmetric(values: pd.Series) -> tuple[float, float]:
    largest = float(values.abs().max()) or 1.0
    return -largest, largest


def _outlines(data: pd.DataFrame, layer: str, head: str, heads, x, y) -> alt.Chart:
    known = set(zip(data[layer], data[head]))
    for one in heads:
        if tuple(one) not in known:
            raise GnaError(f"cannot mark {one}: the frame has no row for it")
    marked = pd.DataFrame([{layer: one.layer, head: one.head, "name": str(one)} for one in heads])
    return (
        alt.Chart(marked)
        .mark_rect(style="outline", filled=False)
        .encode(x=x, y=y, tooltip=alt.Tooltip("name:N"))
    )
