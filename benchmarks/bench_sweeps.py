"""Sweeps over all heads against one nnsight trace per head, and cheap rankings against the exact one.

    python benchmarks/bench_sweeps.py                                  # smollm2-135m, 40 prompts of 10 pairs
    python benchmarks/bench_sweeps.py --prompts 8 --heads 12           # a quick look
    python benchmarks/bench_sweeps.py --rankings --keep sweep.npz      # compare all rankings, reuse the sweep

The loop runs one nnsight trace per head on the same batch: zero the head's columns at the input of its output
projection, save the logits of the last token. It is timed on heads spread evenly over the model (``--loop``),
whose drops must agree with the sweep's; every way then is given in seconds per head, side by side in one run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nnsight
import numpy as np
import pandas as pd
import torch
from rankings import RANKINGS, drops

from gna_utils import ablate, key_value, layers, load, score, sweep
from gna_utils.forward import tokens
from gna_utils.scoring import encoded_of
from gna_utils.sweeps.units import units_of

TOP, VERIFY = 10, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", default="smollm2-135m", help="any name or folder that gna_utils.load takes"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--heads", type=int, help="how many heads, spread evenly; by default all")
    parser.add_argument("--loop", type=int, default=15, help="how many heads the loops are timed on")
    parser.add_argument("--rankings", action="store_true", help="also compare rankings (takes all heads)")
    parser.add_argument("--keep", type=Path, help="file that keeps the exact sweep (see sweep(resume=...))")
    options = parser.parse_args()
    model = load(options.model, dtype=options.dtype)
    examples = key_value(options.prompts, options.pairs, tokenizer=model.tokenizer)
    every = [unit.name for unit in units_of(layers(model), "heads", None)]
    heads = spread(every, options.heads or len(every))
    size = f"{len(heads)} heads, {options.prompts} prompts of {options.pairs} pairs"
    print(f"{options.model}, {options.dtype}: {size}")
    sweep(
        model, examples[:2], units=heads[:1], progress=False
    )  # the first trace of a process pays for imports
    loop, logprobs = timed_loop(model, examples, spread(heads, options.loop))
    exact, seconds = compare(model, examples, heads, loop, logprobs, options.keep)
    if options.rankings:
        print(rankings(model, examples, drops(exact), loop * len(every), seconds).to_string(index=False))


def spread(items: list[str], number: int) -> list[str]:
    return [items[int(i)] for i in np.linspace(0, len(items) - 1, min(number, len(items)))]


@torch.no_grad()
def timed_loop(model, examples, heads: list[str]) -> tuple[float, dict[str, np.ndarray]]:
    """Seconds per head of one nnsight trace per head, and the log-probabilities of the answers."""
    rows = encoded_of(model, examples)
    ids, mask = tokens(model, rows)
    answers = torch.tensor([row.candidate_ids[row.answer][0] for row in rows])
    lines, last = torch.arange(len(ids)), mask.sum(1) - 1
    found, start = {}, time.perf_counter()
    for unit in units_of(layers(model), heads, None):
        [site] = unit.sites
        with model.trace(input_ids=ids, attention_mask=mask, use_cache=False):
            whole = model.get(site.path).input.clone()
            whole[..., site.columns] = 0
            model.get(site.path).input = whole
            logits = nnsight.save(model.output.logits[lines, last])
        logits = logits.double()
        found[unit.name] = (logits[lines, answers] - logits.logsumexp(-1)).numpy()
    return (time.perf_counter() - start) / len(heads), found


def compare(model, examples, heads, loop: float, logprobs: dict, keep: Path | None):
    """Print what each way takes per head; returns the exact sweep and its seconds."""
    print(f"one nnsight trace per head: {loop:.3f} s per head (timed on {len(logprobs)} heads)")
    sample, start = list(logprobs), time.perf_counter()
    for head in sample:
        with ablate(model, head):
            score(model, examples, progress=False)
    report("ablate and score", (time.perf_counter() - start) / len(sample), loop)
    start = time.perf_counter()
    exact = sweep(model, examples, units=heads, resume=keep)
    seconds = time.perf_counter() - start
    report("exact", seconds / len(heads), loop)
    values = exact.examples[exact.examples["metric"] == "logprob"].set_index("unit")["value"]
    gap = max(np.abs(values[head].to_numpy() - line).max() for head, line in logprobs.items())
    print(f"  largest difference from the loop: {gap:.1e} in log-probability")
    for mode in ("query", "screen"):
        start = time.perf_counter()
        found = sweep(model, examples, units=heads, mode=mode, verify=VERIFY)
        report(mode, (time.perf_counter() - start) / len(heads), loop)
        if mode == "screen":
            best = set(exact.top(TOP))
            hits = len(best & set(found.top(VERIFY)))
            print(f"  {hits} of the exact top {len(best)} are among its {VERIFY} heads")
    return exact, seconds


def report(name: str, seconds: float, loop: float) -> None:
    print(f"{name}: {seconds:.3f} s per head, {loop / seconds:.1f} times faster than the loop")


def rankings(model, examples, exact: pd.Series, loop: float, seconds: float) -> pd.DataFrame:
    """Each ranking: its time, what it finds among its first heads, and where it puts the two best."""
    best = exact.nlargest(TOP).index
    rows = [{"ranking": "exact", "seconds": seconds, "times faster": loop / seconds}]
    for name, rank in RANKINGS.items():
        start = time.perf_counter()
        scores = rank(model, examples, VERIFY)
        taken = time.perf_counter() - start
        order = scores.sort_values(ascending=False).index
        rows.append({"ranking": name, "seconds": taken, "times faster": loop / taken})
        rows[-1] |= {f"of top {TOP} in {VERIFY}": int(best.isin(order[:VERIFY]).sum())}
        rows[-1] |= {f"rank of number {i + 1}": order.get_loc(best[i]) + 1 for i in range(2)}
    return pd.DataFrame(rows).round(2)


if __name__ == "__main__":
    main()
