"""Pattern scores of every head of SmolLM2-135M: one trace for all layers against one trace per layer.

    python benchmarks/bench_patterns.py    # 270 heads, 8 prompts of 10 pairs

Both measure the same maps in the same way; only where the model is started again differs. The plain forward
pass of the same prompts says how much of the time is the model itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pandas as pd
import torch

from gna_utils import Head, key_value, layers, load, pattern_scores, transfer_matrix
from gna_utils.forward import forward, tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import memory

N_PROMPTS, N_PAIRS = 8, 10


def timed(call) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def per_layer(model, examples) -> pd.DataFrame:
    """The same frame from one run of the model per layer."""
    heads = [[(mixer.layer, head) for head in range(mixer.n_heads)] for mixer in layers(model)]
    return pd.concat([pattern_scores(model, examples, part) for part in heads], ignore_index=True)


def main() -> None:
    model = load("smollm2-135m", device="cpu")
    examples = key_value(N_PROMPTS, N_PAIRS, tokenizer=model.tokenizer)
    ids, mask = tokens(model, examples)
    every = [Head(mixer.layer, number) for mixer in layers(model) for number in range(mixer.n_heads)]
    pattern_scores(model, examples[:1])  # nnsight reads the source of a module once
    plain, _ = timed(lambda: forward(model, ids, mask))
    ours, frame = timed(lambda: pattern_scores(model, examples))
    layer_wise, same = timed(lambda: per_layer(model, examples))
    difference = (frame["value"] - same["value"]).abs().max()
    print(f"{len(every)} heads, {N_PROMPTS} prompts of {ids.shape[1]} tokens")
    print(f"time: all layers in one trace {ours:.1f} s, {ours / plain:.1f} times a plain forward")
    print(f"one trace per layer {layer_wise:.1f} s, {layer_wise / ours:.1f} times as long", end=", ")
    print(f"largest difference {difference:.0e}")
    ours, all_maps = (
        memory.peak(call) / 2**20
        for call in (
            lambda: pattern_scores(model, examples),
            lambda: transfer_matrix(model, examples, every),
        )
    )
    print(f"peak memory: {ours:.0f} MB, all maps at once {all_maps:.0f} MB")


if __name__ == "__main__":
    with torch.no_grad():
        main()
