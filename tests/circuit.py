"""A model whose heads are written by hand, so that it is known what each of them does.

>>> model = circuit.build()

A GPT-2 of two layers and five heads, whose MLPs do nothing, for the tokenizer of :mod:`tiny`. In a dictionary
of ``key : value`` lines its four working heads answer the question ``key :``

- ``L0H1`` carries the token two places back (at a value: its key), ``L0H3`` the token before;
- ``L1H2`` looks, from ``:``, for the value that carries the key asked for, and copies it to the output;
- ``L1H4`` is an induction head: it looks for the token that stands after an earlier occurrence of its own,
  and writes nothing.

Their maps have one-hot rows, up to :data:`SHARP`, where there is something to look for. The other heads
spread evenly over what they see and write nothing.
"""

from __future__ import annotations

import tiny
import torch

SIZE, HEADS = 64, 5
TOKEN, PLACE, TWO_BACK, BEFORE, OUT = (slice(SIZE * k, SIZE * (k + 1)) for k in range(5))
SHARP = 1e-3


@torch.no_grad()
def build():
    """The nnsight model; its tokenizer is ``model.tokenizer``."""
    model, hf_model, _ = tiny.build("gpt2", n_embd=SIZE * HEADS, n_head=HEADS, tie_word_embeddings=False)
    for name, parameter in hf_model.named_parameters():
        parameter.fill_(float("ln_" in name and name.endswith("weight")))
    one_hot = torch.eye(SIZE)
    hf_model.transformer.wte.weight[:, TOKEN] = one_hot
    hf_model.transformer.wpe.weight[:, PLACE] = one_hot
    hf_model.lm_head.weight[:, OUT] = one_hot
    first, second = hf_model.transformer.h
    _write(first, 1, query=(PLACE, 0), key=(PLACE, 2), output=TWO_BACK)
    _write(first, 3, query=(PLACE, 0), key=(PLACE, 1), output=BEFORE)
    _write(second, 2, query=(BEFORE, 0), key=(TWO_BACK, 0), output=OUT)
    _write(second, 4, query=(TOKEN, 0), key=(BEFORE, 0), output=None)
    return model


def _write(layer, head: int, query, key, output) -> None:
    """One head: it looks where the key block, moved by some places, equals the query block; copies tokens."""
    columns = slice(SIZE * head, SIZE * (head + 1))
    weights = layer.attn.c_attn.weight  # (input, queries | keys | values)
    for part, (block, move) in enumerate((query, key)):
        start = part * SIZE * HEADS
        weights[block, start + columns.start : start + columns.stop] = 3 * torch.eye(SIZE).roll(move, 1)
    start = 2 * SIZE * HEADS
    weights[TOKEN, start + columns.start : start + columns.stop] = torch.eye(SIZE)
    if output is not None:
        layer.attn.c_proj.weight[columns, output] = torch.eye(SIZE)
