"""Hidden attention of one Mamba-2 layer against a plain recurrence over positions: time and peak memory.

    python benchmarks/bench_transfer.py    # 24 heads of 64, state 128, 512 tokens: a layer of mamba2-130m

Both give the same matrices: the recurrence carries the state of every source position along, step by step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import softplus

from gna_utils.mixers import transfer_matrix
from gna_utils.mixers.transfer import mixing

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import memory
import tiny

LENGTH, HEADS, HEAD_DIM, STATE, REPEATS = 512, 24, 64, 128, 5


def recurrence(ops: dict) -> torch.Tensor:
    """``T`` row by row: the states that a unit input at every ``j`` has left, read out at position ``i``."""
    dt = softplus(ops["dt"] + ops["dt_bias"][:, None]).clamp(*ops["dt_limit"])
    keep = (dt * ops["A"][:, None]).exp()
    states = torch.zeros(*dt.shape, ops["B"].shape[-1])
    rows = []
    for i in range(dt.shape[-1]):
        states = states * keep[..., i, None, None]
        states[..., i, :] = dt[..., i, None] * ops["B"][..., i, :]
        rows.append((states @ ops["C"][..., i, :, None])[..., 0])
    mixed = torch.stack(rows, dim=-2)
    mixed.diagonal(dim1=-2, dim2=-1).add_(ops["D"][:, None])
    return mixed


def best(call) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    model, _, _ = tiny.build(
        "mamba2",
        hidden_size=768,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        state_size=STATE,
        n_groups=1,
        chunk_size=256,
        num_hidden_layers=1,
    )
    prompt = tiny.ids(1, LENGTH)
    read = mixing(model, prompt, layer=0)
    ops = read.kept[0][0]
    size = HEADS * LENGTH**2 * 4
    difference = (read.matrix() - recurrence(ops)).abs().max() / read.matrix().abs().max()
    ours, plain = best(read.matrix), best(lambda: recurrence(ops))
    whole = best(lambda: transfer_matrix(model, prompt, layer=0))
    print(f"{HEADS} heads, {LENGTH} tokens: the result takes {size / 2**20:.0f} MB")
    print(f"largest difference, relative to the largest entry: {difference:.0e}")
    print(
        f"time: matrix {ours * 1e3:.0f} ms, recurrence {plain * 1e3:.0f} ms: {plain / ours:.0f} times faster"
    )
    print(f"time with the run of the model up to the layer: {whole * 1e3:.0f} ms")
    print(
        f"peak memory, in sizes of the result: matrix {memory.peak(read.matrix) / size:.1f}, "
        f"recurrence {memory.peak(lambda: recurrence(ops)) / size:.1f}"
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
