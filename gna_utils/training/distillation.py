"""Turn the tiny Transformer into a recurrent model, layer by layer.

First each layer of the student learns to map what the teacher's layer reads to what it writes. The layers
never see each other, so any of them can be exchanged with the teacher's. Then, for the "aligned" student, all
layers together learn the teacher's answers. Source: MOHAWK (arXiv 2408.10189) and Llamba (arXiv 2502.14458).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import GnaError
from ..llamba import LlambaForCausalLM
from .curriculum import Batch


def start_student(student: LlambaForCausalLM, teacher: PreTrainedModel) -> None:
    """Copy what both models share: embedding, norms, feed-forward parts, output. Only the mixers are new."""
    own, given = student.state_dict(), teacher.state_dict()
    renamed = {
        name.replace("model.embed_tokens", "backbone.embedding")
        .replace("model.layers", "backbone.layers")
        .replace("model.norm", "backbone.final_layernorm"): value
        for name, value in given.items()
        if ".self_attn." not in name
    }
    shared = {name: value for name, value in own.items() if ".mixer." not in name}
    for name in sorted({*shared, *renamed}):
        if name not in shared or name not in renamed or shared[name].shape != renamed[name].shape:
            raise GnaError(
                f"teacher and student differ at {name}: the teacher must be a Llama of the same sizes."
            )
    student.load_state_dict({**own, **renamed})


def layer_loss(student: LlambaForCausalLM, teacher: PreTrainedModel, batch: Batch) -> Tensor:
    """How far each student layer is from the teacher's layer, given the teacher's input; mean over layers.

    1 is what a layer that adds nothing would have: the squared distance is divided by that of the teacher's
    input and output, so that every layer counts the same.
    """
    real = batch.real
    with torch.no_grad():
        states = layer_states(teacher, batch)
    losses = []
    for layer, before, after in zip(student.backbone.layers, states, states[1:]):
        made = layer(before, None, None)
        losses.append((made - after)[real].square().mean() / (after - before)[real].square().mean())
    return torch.stack(losses).mean()


def layer_states(teacher: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """What each layer of a Llama reads, and at the end what the last one writes (before the final norm)."""
    states: list[Tensor] = []
    layers = teacher.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _, args, out: states.append(out)))
    try:
        teacher.model(batch.ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def answers(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits where a document is asked something, and the tokens that are right there."""
    hidden = model.base_model(batch.ids, use_cache=False)[0]
    asked = batch.asked[:, 1:]
    return model.lm_head(hidden[:, :-1][asked]), batch.ids[:, 1:][asked]
