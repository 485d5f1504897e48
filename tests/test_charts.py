"""Charts: what they demand, what they put into the page, whether everybody can tell their colours apart."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser

import altair as alt
import nbformat
import numpy as np
import pandas as pd
import pytest
import small_book
import vl_convert

from gna_utils import GnaError, charts
from gna_utils.charts import rows, style
from gna_utils.tasks.encoding import Encoded

WORDS = {"title": "A title", "description": "What it shows."}
POINTS = [
    {"n": 2, "accuracy": 0.912345678, "low": 0.85, "high": 0.95, "model": "a", "guess": 0.5},
    {"n": 4, "accuracy": 0.7, "low": 0.6, "high": 0.8, "model": "b", "guess": 0.25},
]
MEASURED = ("n", "accuracy", "low", "high")


@pytest.fixture(autouse=True)
def _restore_altair():
    theme, renderer = alt.theme.active, alt.renderers.active
    yield
    alt.theme.enable(theme)
    alt.renderers.enable(renderer)


def layers(chart) -> list[dict]:
    return chart.to_dict()["layer"]


def values(chart) -> list[dict]:
    return max(chart.to_dict()["datasets"].values(), key=len)


class Scripts(HTMLParser):
    """Collects the text of every script element, the way a browser would end it."""

    def __init__(self, text: str):
        super().__init__()
        self.found, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.found.append(data)


# --- what every chart demands ---


@pytest.mark.parametrize("missing", ["title", "description"])
def test_charts_without_words_are_refused(missing):
    words = WORDS | {missing: " "}
    makers = [
        lambda: charts.interval_line(POINTS, *MEASURED, **words),
        lambda: charts.interval_bars(POINTS, "model", "accuracy", **words),
        lambda: charts.heatmap(np.eye(2), **words),
        lambda: charts.head_grid([{"layer": 0, "head": 0, "drop": 1.0}], "drop", **words),
        lambda: charts.token_strip(["a"], **words),
    ]
    for make in makers:
        with pytest.raises(GnaError, match=f"needs a {missing}"):
            make()


def test_missing_columns_and_empty_frames_are_named():
    with pytest.raises(GnaError, match="no column 'acc' to draw: the columns are n, accuracy"):
        charts.interval_line(POINTS, "n", "acc", **WORDS)
    with pytest.raises(GnaError, match="no rows"):
        charts.interval_line(pd.DataFrame(columns=["n", "accuracy"]), "n", "accuracy", **WORDS)


def test_row_budget():
    """Altair writes every row into the page; 5001 would be refused late, or make pages of many megabytes."""
    frame = pd.DataFrame({"n": range(5001), "accuracy": 0.5})
    with pytest.raises(GnaError, match="5001 rows are too many for one chart"):
        charts.interval_line(frame, "n", "accuracy", **WORDS)
    with pytest.raises(GnaError, match="5050 rows"):
        charts.heatmap(np.tril(np.ones((100, 100))), **WORDS)
    charts.heatmap(np.tril(np.ones((100, 100))), rows=[98, 99], **WORDS)


def test_every_kind_of_chart_draws():
    for chart in small_book.sample_charts():
        spec = chart.to_dict()
        assert spec["description"] and spec["title"]
        svg = vl_convert.vegalite_to_svg(spec)
        assert len(re.findall(r"<path|<rect|<text", svg)) > 10


# --- numbers ---


def test_significant_digits_against_python_formatting():
    random = np.random.default_rng(0)
    numbers = random.normal(size=200) * 10.0 ** random.integers(-8, 8, size=200)
    expected = np.array([float(f"{x:.3e}") for x in numbers])
    np.testing.assert_allclose(rows.significant(numbers), expected, rtol=1e-12)
    special = np.array([0.0, np.nan, np.inf, -np.inf])
    np.testing.assert_array_equal(rows.significant(special), special)


def test_data_are_rounded_and_unused_columns_left_out():
    frame = pd.DataFrame(POINTS).assign(secret="x" * 1000)
    text = charts.interval_line(frame, *MEASURED, **WORDS).to_json()
    assert "0.9123" in text and "0.91234" not in text and "xxx" not in text


def test_accuracy_axis_runs_from_zero_to_one():
    for chart in (
        charts.interval_line(POINTS, *MEASURED, **WORDS),
        charts.interval_bars(POINTS, "model", "accuracy", "low", "high", **WORDS),
    ):
        encodings = [layer["encoding"] for layer in layers(chart)]
        scales = [
            e[c]["scale"] for e in encodings for c in ("x", "y") if "domain" in e.get(c, {}).get("scale", {})
        ]
        assert scales and all(scale["domain"] == [0, 1] for scale in scales)
        assert "accuracy (proportion)" in chart.to_json()


def test_a_proportion_outside_its_range_is_refused():
    drops = [{"head": "L0H0", "drop": -0.2}]
    with pytest.raises(GnaError, match=r"'drop' runs from -0\.2 to -0\.2, which is no proportion"):
        charts.interval_bars(drops, "head", "drop", **WORDS)
    chart = charts.interval_bars(drops, "head", "drop", unit="accuracy points", **WORDS)
    assert layers(chart)[0]["encoding"]["x"]["scale"]["zero"] is True


def test_chance_as_level_and_as_column():
    level = charts.interval_line(POINTS, *MEASURED, chance=0.1, **WORDS)
    assert "chance 0.1" in level.to_json() and len(layers(level)) == 5
    curve = charts.interval_line(POINTS, *MEASURED, "model", "guess", **WORDS)
    drawn = [layer for layer in layers(curve) if layer["mark"].get("style") == "chance"]
    assert [layer["encoding"]["y"]["field"] for layer in drawn] == ["guess"]
    assert len(layers(charts.interval_line(POINTS, *MEASURED, **WORDS))) == 3


def test_names_on_the_x_axis_get_error_bars_and_no_line():
    marks = [
        layer["mark"]["type"]
        for layer in layers(charts.interval_line(POINTS, "model", *MEASURED[1:], **WORDS))
    ]
    assert marks == ["rule", "point"]


def test_colours_split_a_label_only_where_it_has_several_bars():
    single = layers(charts.interval_bars(POINTS, "n", "accuracy", color="model", **WORDS))[0]["encoding"]
    assert single["color"]["field"] == "model" and "yOffset" not in single
    twice = [*POINTS, POINTS[0] | {"model": "b"}]
    chart = charts.interval_bars(twice, "n", "accuracy", color="model", **WORDS)
    assert layers(chart)[0]["encoding"]["yOffset"]["field"] == "model"


def test_colour_never_stands_alone():
    points = layers(charts.interval_line(POINTS, *MEASURED, "model", **WORDS))[-1]["encoding"]
    assert points["shape"]["field"] == points["color"]["field"] == "model"


def test_column_names_with_dots_and_brackets_draw():
    frame = pd.DataFrame({"n.pairs": [1, 2], "acc[0]": [0.25, 0.75]})
    svg = vl_convert.vegalite_to_svg(charts.interval_line(frame, "n.pairs", "acc[0]", **WORDS).to_dict())
    heights = re.findall(r'aria-roledescription="point"[^>]*transform="translate\([\d.]+,([\d.]+)\)"', svg)
    assert len({*heights}) == 2


# --- maps ---


def test_causal_maps_leave_out_the_future_and_others_do_not():
    causal = charts.heatmap(np.tril(np.full((4, 4), 0.5)), list("abcd"), **WORDS)
    assert {(r["from"], r["to"]) for r in values(causal)} == {(i, j) for i in range(4) for j in range(i + 1)}
    full = charts.heatmap(np.full((3, 3), 0.5), **WORDS)
    assert len(values(full)) == 9


def test_map_cells_carry_the_value_and_the_tokens_of_their_row_and_column():
    matrix = np.tril(np.random.default_rng(1).random((5, 5)))
    for row in values(charts.heatmap(matrix, ["a", " b", "\n", "d", "e"], **WORDS)):
        assert row["weight"] == pytest.approx(matrix[row["from"], row["to"]], rel=5e-3)
        assert row["column"] == ["a", "·b", "↵", "d", "e"][row["to"]]


def test_one_declared_scale():
    def scale(matrix, **options):
        return layers(charts.heatmap(matrix, **options, **WORDS))[0]["encoding"]["color"]["scale"]

    assert scale([[0.4]])["domain"] == [0, 0.4] and scale([[0.4]])["range"] == "ramp"
    signed = scale([[0.1, 0], [-0.4, 0.2]])
    assert signed["domain"] == [-0.4, 0.4] and signed["domainMid"] == 0 and signed["range"] == "diverging"
    assert scale([[0.4]], domain=(0, 1))["domain"] == [0, 1]
    assert scale([[0.0]])["domain"] == [0, 1]


def test_tokens_that_could_break_the_label_expression():
    nasty = ['"', "'", "\\", "</script>", "\u2028", "${x}"]
    svg = vl_convert.vegalite_to_svg(charts.heatmap(np.eye(6), nasty, cell=40, **WORDS).to_dict())
    for shown in ("&lt;/script", "${x}"):
        assert shown in svg


def test_map_lengths_must_agree():
    with pytest.raises(GnaError, match="3 positions, but there are 2 tokens"):
        charts.heatmap(np.eye(3), ["a", "b"], **WORDS)
    with pytest.raises(GnaError, match="3 tokens, but 1 segment names"):
        charts.heatmap(np.eye(3), segments=["a"], **WORDS)
    with pytest.raises(GnaError, match=r"square matrix .* \(2, 3\)"):
        charts.heatmap(np.ones((2, 3)), **WORDS)


def test_head_grid_is_symmetric_and_marks_only_what_exists():
    grid = [{"layer": 0, "head": 0, "drop": 0.1}, {"layer": 1, "head": 2, "drop": -0.3}]
    chart = charts.head_grid(grid, "drop", mark="L1H2", **WORDS)
    assert layers(chart)[0]["encoding"]["color"]["scale"]["domain"] == [-0.3, 0.3]
    with pytest.raises(GnaError, match="cannot mark L5H5"):
        charts.head_grid(grid, "drop", mark="L5H5", **WORDS)
    with pytest.raises(GnaError, match="two rows for L0H0"):
        charts.head_grid(grid + grid[:1], "drop", **WORDS)


# --- tokens ---


def test_token_strip_shows_whitespace_and_escapes_html():
    strip = charts.token_strip(["<b>", " x", "\n"], ["key", None, 'a"b'], **WORDS)
    text = strip._repr_html_()
    assert "<b>" not in text and "&lt;b&gt;" in text and "·" in text and "↵</span></span><br>" in text
    assert 'title="a&quot;b"' in text and 'aria-label="What it shows."' in text
    assert repr(strip) == "<b>|·x|↵"


def test_token_texts_use_real_whitespace():
    class Tokenizer:
        def decode(self, ids, **options):
            assert options == {"clean_up_tokenization_spaces": False}
            return {1: " fox", 2: "\n"}[ids[0]]

    assert charts.token_texts(Tokenizer(), np.array([1, 2])) == [" fox", "\n"]


def test_roles_of_tokens_in_an_encoded_example():
    encoded = Encoded(
        input_ids=(0, 11, 12, 13, 21, 22, 23, 11),
        segments=((1, 4), (4, 7)),
        summary=(3, 6),
        query=7,
        candidate_ids=((12,), (22,)),
        answer=1,
        target=1,
        spans={},
    )
    other, right = ["other segment"] * 2, ["right segment"] * 2
    expected = [None, *other, "summary token", *right, "summary token", "query position"]
    assert charts.token_roles(encoded) == expected


# --- renderers ---


def test_site_output_validates_and_cannot_end_its_script():
    """A notebook with another MIME type than nbformat knows stops the whole build (MyST-NB issue 266)."""
    chart = small_book.sample_charts()[1]
    bundle = style.site_mimebundle(chart.to_dict())
    scripts = Scripts(bundle["text/html"])
    assert scripts.tags == ["div", "p", "script"]
    spec = json.loads("".join(scripts.found))
    assert spec == chart.to_dict() and "</script>" in json.dumps(spec)
    nbformat.validate(small_book.chapter())


@pytest.mark.parametrize(
    ("environment", "renderer"),
    [
        ({}, "html"),
        ({"GNA_SITE": "1"}, "site"),
        ({"GNA_SITE": "1", "GNA_CHARTS": "svg"}, "svg"),
        ({"GNA_CHARTS": "png"}, "png"),
    ],
)
def test_setup_chooses_the_renderer(monkeypatch, environment, renderer):
    for name in ("GNA_SITE", "GNA_CHARTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    charts.setup()
    assert (alt.theme.active, alt.renderers.active) == ("gna", renderer)
    bundle = charts.interval_line(POINTS, *MEASURED, **WORDS)._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    wanted = {"html": "text/html", "site": "text/html", "svg": "image/svg+xml", "png": "image/png"}[renderer]
    assert wanted in data
    assert not any(kind.startswith("application/vnd.vega") for kind in data)


def test_setup_refuses_unknown_renderers(monkeypatch):
    monkeypatch.setenv("GNA_CHARTS", "gif")
    with pytest.raises(GnaError, match="unknown GNA_CHARTS 'gif': choose one of html, svg, png"):
        charts.setup()


# --- colours ---

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    dark, light = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_palette_is_readable_and_safe_for_colour_blind_readers(mode):
    config, page = style.colours(dark=mode == "dark"), style.PAGE[mode]
    palette = config["range"]["category"]
    assert min(contrast(colour, page) for colour in palette) >= 3  # WCAG 2.1, 1.4.11
    for matrix in BLINDNESS.values():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in palette]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 10
    for text in (
        config["axis"]["labelColor"],
        config["title"]["color"],
        config["style"]["chance-label"]["color"],
    ):
        assert contrast(text, page) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_scales_get_steadily_further_from_the_page(dark):
    config = style.colours(dark=dark)
    page = lab(linear(config["background"]))

    def distances(colours):
        return [np.linalg.norm(lab(linear(colour)) - page) for colour in colours]

    ramp, diverging = config["range"]["ramp"], config["range"]["diverging"]
    assert distances(ramp)[0] == 0 and distances(ramp) == sorted(distances(ramp))
    left, right = distances(diverging[2::-1]), distances(diverging[2:])
    assert left == sorted(left) and right == sorted(right) and left[0] == right[0] == 0
