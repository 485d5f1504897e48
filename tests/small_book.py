"""Build a book of three small pages with everything that the site's script and style have to cope with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import altair as alt
import nbformat
import numpy as np
import pandas as pd

from gna_utils import charts
from gna_utils.charts.style import site_mimebundle
from gna_utils.runs.assets import write_assets

ROOT = Path(__file__).resolve().parent.parent

INTRO = r"""# Start

Inline $x^2$ and displayed maths:

$$y_i = \sum_{j \le i} T_{ij} v_j$$

See {cite:t}`someone2020work`.

```{exercise}
:label: add

What is $1 + 1$?
```

```{solution} add
:class: dropdown

Two.
```

```{dropdown} A folded box
Some text.
```

```{bibliography}
```
"""


def rows() -> pd.DataFrame:
    out = []
    for wording, start in (("plain", 0.95), ("paper", 0.8)):
        for n in (2, 5, 10, 20, 40):
            mean = start / (1 + n / 20)
            out.append((n, wording, mean, max(0, mean - 0.06), min(1, mean + 0.06), 1 / n))
    return pd.DataFrame(out, columns=["n_pairs", "wording", "accuracy", "low", "high", "level"])


def sample_charts() -> list[alt.TopLevelMixin]:
    """One chart of each kind, with a name that tries to end the script element."""
    alt.theme.enable("gna")
    random = np.random.default_rng(0)
    length = 32
    weights = np.tril(random.random((length, length)) ** 6)
    weights /= weights.sum(1, keepdims=True)
    tokens = ["fox", ":", " lemon", "\n"] * (length // 4)
    segments = [f"line {i // 4}" for i in range(length)]
    heads = [
        {
            "layer": layer,
            "head": head,
            "drop": random.normal(0, 0.04) + (0.4 if (layer, head) == (17, 4) else 0),
        }
        for layer in range(30)
        for head in range(9)
    ]
    bars = [
        {"ablated": "L17H4", "drop": 0.4, "low": 0.3, "high": 0.5},
        {"ablated": "</script><b>random head</b>", "drop": 0.01, "low": -0.1, "high": 0.1},
    ]
    measured = ("n_pairs", "accuracy", "low", "high")
    return [
        charts.interval_line(
            rows(),
            *measured,
            "wording",
            "level",
            title="Accuracy falls with the number of pairs, and lies lower in the wording of the paper",
            description="Accuracy falls from 0.9 at 2 pairs to 0.3 at 40.",
            x_title="pairs in the prompt",
            log_x=True,
        ),
        charts.interval_bars(
            bars,
            "ablated",
            "drop",
            "low",
            "high",
            unit="accuracy points",
            title="One head",
            description="L17H4 counts.",
        ),
        charts.heatmap(weights, tokens, segments, title="L17H4", description="A map over 32 tokens."),
        charts.head_grid(heads, "drop", mark="L17H4", title="Drop per head", description="L17H4 stands out."),
    ]


def chapter() -> nbformat.NotebookNode:
    """Return an executed chapter: parameters, charts, a marked prompt, a wide table, maths around them."""
    v4 = nbformat.v4
    cells = [v4.new_markdown_cell("# Charts\n\nA scan $y = Tx$ next to charts.\n\n## Parameters")]
    cells.append(v4.new_code_cell('model: str = "tiny"  # which model', metadata={"tags": ["parameters"]}))
    cells.append(v4.new_code_cell('model = "other"', metadata={"tags": ["injected-parameters"]}))
    cells.append(v4.new_markdown_cell("## Pictures"))
    shown = [site_mimebundle(chart.to_dict()) for chart in sample_charts()]
    strip = charts.token_strip(
        ["river", ":", " piano", "\n", "fox", ":", " <b>", "\n", "\n", "river", ":"],
        ["key", None, "value", None] * 2 + [None, "query", None],
        title="A prompt",
        description="Two lines of a dictionary, then the key river again.",
    )
    shown.append({"text/html": strip._repr_html_(), "text/plain": repr(strip)})
    wide = pd.DataFrame({f"column_{i}": [0.123456] * 3 for i in range(16)})
    shown.append({"text/html": wide.to_html(), "text/plain": str(wide)})
    for number, data in enumerate(shown):
        output = v4.new_output("display_data", data=data)
        cells.append(v4.new_code_cell(f"picture({number})", outputs=[output], execution_count=number + 1))
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return v4.new_notebook(cells=cells, metadata=metadata)


def build(folder: Path) -> Path:
    """Build the book below ``folder`` with warnings as errors and return the folder of its pages."""
    stage = folder / "stage"
    (stage / "book").mkdir(parents=True)
    shutil.copy(ROOT / "_config.yml", stage)
    toc = "format: jb-book\nroot: book/intro\nchapters:\n  - file: book/charts\n  - file: book/plain\n"
    (stage / "_toc.yml").write_text(toc)
    (stage / "book" / "intro.md").write_text(INTRO)
    (stage / "book" / "plain.md").write_text("# Plain\n\nWords, and nothing to draw.\n")
    work = "@article{someone2020work, author={One, Some}, title={A Work}, journal={J}, year={2020}}\n"
    (stage / "book" / "references.bib").write_text(work)
    notebook = chapter()
    nbformat.validate(notebook)
    nbformat.write(notebook, stage / "book" / "charts.ipynb")
    write_assets(stage)
    program = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()"]
    command = [*program, "build", "-W", "--keep-going", "--path-output", str(folder), str(stage)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "_build" / "html"
