"""Tiny random models of every family that the package must handle, for tests and benchmarks.

>>> model, hf_model, tokenizer = build("llama")

Hidden size 32, two to four layers, 64 tokens, float32. Weights depend on ``seed`` alone.
"""

from __future__ import annotations

import torch
import transformers
from nnsight.modeling.transformers import TransformersModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB = 64
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
_ATTENTION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **_GQA, "head_dim": 16}
_MAMBA_1 = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 3}
_HYBRID = {"hidden_size": 32, "intermediate_size": 48, **_GQA}
_SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4}

# family: (config class, model class, config options)
_FAMILIES: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _ATTENTION),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_ATTENTION, "head_dim": None}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _ATTENTION),
    "mistral": ("MistralConfig", "MistralForCausalLM", _ATTENTION),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_ATTENTION, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**_ATTENTION, "head_dim": None}),
    "mamba": ("MambaConfig", "MambaForCausalLM", _MAMBA_1),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA_1),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**_MAMBA_1, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_HYBRID,
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
        },
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {**_HYBRID, **_SSD, "num_hidden_layers": 2, "attn_layer_indices": [1]},
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            **_HYBRID,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "mamba_d_state": 4,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "chunk_size": 4,
            "num_key_value_heads": 4,  # the adapters are as wide as all query heads
            "use_shared_attention_adapter": True,
            "adapter_rank": 4,
            "use_mem_rope": True,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_HYBRID, **_SSD, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_HYBRID,
            "head_dim": 16,
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "ssm_state_size": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_HYBRID,
            **_SSD,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 48,
            "attention_multiplier": 0.35,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_ATTENTION,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)
# kinds of the mixers of each layer, written down by hand from the architectures
KINDS: dict[str, list[list[str]]] = {
    **{name: [["attention"]] * 2 for name in FAMILIES[:8]},
    "mamba": [["selective_scan"]] * 2,
    "falcon_mamba": [["selective_scan"]] * 2,
    "mamba2": [["ssd"]] * 2,
    "jamba": [["selective_scan"], ["attention"]],
    "bamba": [["ssd"], ["attention"]],
    "zamba2": [["ssd"], ["attention", "ssd"], ["ssd"], ["attention", "ssd"]],
    "falcon_h1": [["attention", "ssd"]] * 2,
    "nemotron_h": [["ssd"], ["attention"], ["mlp"]],
    "granitemoehybrid": [["ssd"], ["attention"]],
    "qwen3_next": [["delta_rule"], ["attention"]],
}


def build(family: str, *, seed: int = 0, **options):
    """A tiny random model: the nnsight model, the same model in transformers, its tokenizer.

    ``options`` override entries of the family's config, for example ``num_hidden_layers=4``.
    """
    hf_model, words = build_hf(family, seed=seed, **options), tokenizer()
    return TransformersModel(hf_model, tokenizer=words, task="text-generation"), hf_model, words


def build_hf(family: str, *, seed: int = 0, **options) -> transformers.PreTrainedModel:
    """The model of :func:`build` without nnsight around it."""
    config_class, model_class, defaults = _FAMILIES[family]
    values = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    values |= {key: value for key, value in (defaults | options).items() if value is not None}
    config = getattr(transformers, config_class)(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # inside the fork: the caller's random state stays as it was
        hf_model = getattr(transformers, model_class)(config)
    _draw(hf_model, torch.Generator().manual_seed(seed))
    return hf_model.float().eval().requires_grad_(False)


@torch.no_grad()
def _draw(hf_model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every head matters, and biases that are not 0."""
    for name, parameter in hf_model.named_parameters():
        if name.endswith("bias"):
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
        elif parameter.ndim >= 2 and "conv1d" not in name and "A_log" not in name:
            parameter.normal_(0, 0.25, generator=generator)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word-level tokenizer: words ``w1`` ... ``w59``; puts ``<bos>`` before every text."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{i}": i + len(SPECIAL) - 1 for i in range(1, VOCAB - len(SPECIAL) + 1)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="right",
    )


def ids(rows: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Random ordinary tokens, a LongTensor (rows, length)."""
    return torch.randint(4, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
