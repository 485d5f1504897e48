"""The identity ``T @ v == the mixer's own output``, measured on every family, and its table in the book.

    python tests/identity_table.py      # writes book/identity_table.md

``tests/test_transfer.py`` checks the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import tiny
import tiny_llamba
import torch
from nnsight.modeling.transformers import TransformersModel

from gna_utils.heads import Head
from gna_utils.mixers import layers
from gna_utils.mixers.adapters import call_site
from gna_utils.mixers.transfer import mixing

LENGTHS = (1, 2, 7, 11, 65)  # the scans work in chunks of 4 (SSD) and 64 (delta rule): 65 is one above
PADDINGS = ("none", "right")
FAMILIES = (*tiny.FAMILIES, "llamba")
BOOK = Path(__file__).parents[1] / "book" / "identity_table.md"
_OPTIONS = {"gpt2": {"n_positions": 128}}


class Row(NamedTuple):
    family: str
    kind: str
    call: str
    error: float
    scale: float


def build(family: str):
    """The tiny model, with convolutions as large as its other weights: otherwise D alone makes the output."""
    if family == "llamba":
        hf_model, tokenizer = tiny_llamba.build({"n_qk_heads": 4}), tiny.tokenizer()
        return TransformersModel(hf_model, tokenizer=tokenizer, task="text-generation"), hf_model, tokenizer
    model, hf_model, tokenizer = tiny.build(family, **_OPTIONS.get(family, {}))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in hf_model.named_parameters():
        if name.endswith("conv1d.weight"):
            parameter.normal_(0, 0.3, generator=generator)
    return model, hf_model, tokenizer


def batch(length: int, padding: str = "none", seed: int = 0) -> SimpleNamespace:
    """Two rows of random tokens; with padding, the second row has only the first half of them."""
    input_ids = tiny.ids(2, length, seed=seed)
    attention_mask = torch.ones_like(input_ids)
    if padding == "right":
        attention_mask[1, (length + 1) // 2 :] = 0
    elif padding == "left":
        attention_mask[1, : length // 2] = 0
    return SimpleNamespace(input_ids=input_ids, attention_mask=attention_mask)


def measure(family: str) -> list[Row]:
    """Largest difference over all heads, layers, lengths and paddings, one row for each kind of mixer."""
    grid = [(length, padding) for length in LENGTHS for padding in PADDINGS] + [(11, "left")]
    model, _, _ = build(family)
    rows = []
    for kind in sorted({mixer.kind for mixer in layers(model) if mixer.n_heads}):
        mixers = [mixer for mixer in layers(model) if mixer.kind == kind]
        heads = [Head(mixer.layer, number) for mixer in mixers for number in range(mixer.n_heads)]
        site = call_site(model.get(mixers[0].path).source.names, kind)
        error = scale = 0.0
        for length, padding in grid:
            read = mixing(model, batch(length, padding, seed=length), heads, mixer=kind)
            error = max(error, (read.rebuilt - read.output).abs().max().item())
            scale = max(scale, (read.matrix(skip=False) @ read.values).abs().max().item())
        rows.append(Row(family, kind, site, error, scale))
    return rows


def table(rows: list[Row]) -> str:
    """The page of the book; differences are rounded to one digit, the rest depends on the processor."""
    lines = [
        "# Does the transfer matrix rebuild the mixer?",
        "",
        "Tiny random models of every family, float32 on a CPU: the largest difference between `T @ v` (times",
        "the output gate, where the function applies one) and what the mixer's own function returned, over",
        f"all heads and layers, lengths {', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]},",
        "with and without padding. The last column is the largest entry of `T @ v` without the skip weight.",
        "Written by `python tests/identity_table.py`; the tests check the same numbers against 1e-4.",
        "",
        "| family | mixer | call site | largest difference | largest entry |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        scale = float(f"{row.scale:.1g}")
        lines.append(f"| {row.family} | {row.kind} | `{row.call}` | {row.error:.0e} | {scale:g} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    BOOK.write_text(table([row for family in FAMILIES for row in measure(family)]), encoding="utf-8")


if __name__ == "__main__":
    main()
