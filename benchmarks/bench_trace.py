"""What nnsight costs over bare PyTorch hooks: one read and one edit in a forward pass.

    python benchmarks/bench_trace.py                  # a tiny model and smollm2-135m
    python benchmarks/bench_trace.py smollm2-135m     # any name or folder that gna_utils.load takes

The edit removes one head at the input of its output projection, the read keeps the last layer's output. All
ways run in turn on the same input; printed are median times per forward, and their ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import nnsight
import torch

from gna_utils import ablate, layers, load
from gna_utils.forward import forward

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny

ROUNDS, SECONDS, ROWS, LENGTH = 30, 60, 4, 64  # rounds end early when the seconds are used up


def ways(model, ids: torch.Tensor, mask: torch.Tensor) -> dict:
    """The same forward pass: untouched, under hooks, under nnsight, and through this package."""
    module, table = model._module, layers(model)
    first, last = table[0], table.layer_path(table.n_layers - 1)
    site, columns = f"{first.path}.{first.out_proj}", slice(0, first.head_dim)
    inputs = {"attention_mask": mask, "use_cache": False, "logits_to_keep": 1}

    def plain():
        return module(ids, **inputs).logits

    def hooks():
        kept = []

        def edit(_, args):
            x = args[0].clone()
            x[..., columns] = 0
            return (x, *args[1:])

        handles = [
            module.get_submodule(site).register_forward_pre_hook(edit),
            module.get_submodule(last).register_forward_hook(lambda *call: kept.append(call[-1])),
        ]
        logits = module(ids, **inputs).logits
        for handle in handles:
            handle.remove()
        return logits

    def trace():
        with model.trace(input_ids=ids, **inputs):
            x = model.get(site).input.clone()
            x[..., columns] = 0
            model.get(site).input = x
            nnsight.save(model.get(last).output)
            logits = nnsight.save(model.output.logits)
        return logits

    def package():
        with ablate(model, [(first.layer, 0)]):
            return forward(model, ids, mask)[:, None]

    return {"plain": plain, "hooks": hooks, "nnsight": trace, "ablate + forward": package}


@torch.no_grad()
def measure(name: str, model) -> None:
    ids = torch.randint(4, tiny.VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    runs = ways(model, ids, torch.ones_like(ids))
    found = {way: run() for way, run in runs.items()}  # also warms everything up
    for way in ("nnsight", "ablate + forward"):
        assert torch.allclose(found[way], found["hooks"], atol=1e-3), f"{way} gave other logits than hooks"
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    end = time.perf_counter() + SECONDS
    while len(seconds["plain"]) < ROUNDS and (len(seconds["plain"]) < 3 or time.perf_counter() < end):
        for way, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    print(f"{name}: {ROWS} prompts of {LENGTH} tokens, median of {len(seconds['plain'])} rounds")
    for way, median in medians.items():
        over = f", {median / medians['hooks']:.2f} x hooks" if way in ("nnsight", "ablate + forward") else ""
        print(f"  {way:17} {1000 * median:8.2f} ms, {median / medians['plain']:.2f} x plain{over}")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ("tiny llama", "smollm2-135m"):
        measure(chosen, tiny.build("llama")[0] if chosen == "tiny llama" else load(chosen))
