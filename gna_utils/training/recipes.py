"""How each tiny model is built and trained: everything that is needed to train it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from ..errors import GnaError
from ..llamba import LlambaForCausalLM
from ..llamba_config import LlambaConfig
from ..tasks import world

_WORDS = {
    "vocab_size": len(world.vocabulary()),
    "pad_token_id": world.vocabulary()[world.PAD],
    "bos_token_id": world.vocabulary()[world.BOS],
    "eos_token_id": None,
    "initializer_range": 0.02,
}
_SIZE = {"hidden_size": 64, "tie_word_embeddings": False}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
_LLAMBA = {
    "d_model": 64,
    "n_layer": 4,
    "ssm_cfg": {"n_v_heads": 4, "n_qk_heads": 4, "d_state": 16},
    "mlp_cfg": {"intermediate_size": 144},
    "norm_epsilon": 1e-6,  # that of the teacher
    "pad_vocab_size_multiple": 1,
}


@dataclass(frozen=True)
class Recipe:
    """One tiny model: its architecture and the settings of its training.

    ``rate`` is the highest learning rate, ``rates`` all that were tried; it rises over ``warm_up`` steps and
    falls over the last quarter of ``steps``. ``batch`` documents of about ``length`` tokens make a step.

    ``objective`` says what is learned: the ``"answers"`` of the documents; what each of the ``"layers"`` of a
    ``teacher`` does to its input; or the ``"logits"`` of the teacher. ``start`` names a model to start from.
    """

    what: str
    config: type
    model: type
    settings: Mapping[str, object] = field(default_factory=dict)
    rate: float = 1e-3
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    warm_up: int = 50
    steps: int = 4000
    batch: int = 128
    length: int = 40
    objective: str = "answers"
    teacher: str | None = None
    start: str | None = None


RECIPES: dict[str, Recipe] = {
    "tiny-transformer": Recipe(
        "4 layers of attention and feed-forward, trained on the small world",
        LlamaConfig,
        LlamaForCausalLM,
        {"num_hidden_layers": 4, "intermediate_size": 144, **_ATTENTION, **_SIZE},
    ),
    "tiny-mamba": Recipe(
        "6 layers of Mamba (selective scan), trained on the small world",
        MambaConfig,
        MambaForCausalLM,
        {"num_hidden_layers": 6, "state_size": 8, "residual_in_fp32": False, **_SIZE},
    ),
    "tiny-mamba2": Recipe(
        "6 layers of Mamba-2 (SSD), trained on the small world",
        Mamba2Config,
        Mamba2ForCausalLM,
        {
            "num_hidden_layers": 6,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
            "state_size": 32,
            "chunk_size": 64,
            "residual_in_fp32": False,
            **_SIZE,
        },
    ),
    "tiny-hybrid": Recipe(
        "3 layers of Mamba-2 and 1 of attention (the third), trained on the small world",
        BambaConfig,
        BambaForCausalLM,
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [2],
            "intermediate_size": 96,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_chunk_size": 64,
            **_ATTENTION,
            **_SIZE,
        },
    ),
    "tiny-llamba": Recipe(
        "tiny-transformer with each layer distilled into a Llamba layer on its own (the unaligned student)",
        LlambaConfig,
        LlambaForCausalLM,
        _LLAMBA,
        objective="layers",
        teacher="tiny-transformer",
        rate=4e-3,
        rates=(2e-3, 4e-3, 8e-3),
        warm_up=100,
        steps=2000,
    ),
    "tiny-llamba-aligned": Recipe(
        "tiny-llamba after its layers have learned the answers of tiny-transformer together",
        LlambaConfig,
        LlambaForCausalLM,
        _LLAMBA,
        objective="logits",
        teacher="tiny-transformer",
        start="tiny-llamba",
        rate=1e-3,
        rates=(5e-4, 1e-3, 2e-3),
        warm_up=100,
        steps=1000,
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of that name; raises :class:`GnaError` with the names that exist."""
    if name not in RECIPES:
        raise GnaError(f"there is no recipe for '{name}': choose one of {', '.join(RECIPES)}.")
    return RECIPES[name]


def build(name: str, seed: int) -> PreTrainedModel:
    """The untrained model of a recipe; the same seed gives the same weights, whatever was drawn before."""
    made = recipe(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return made.model(made.config(**_WORDS, **made.settings))
