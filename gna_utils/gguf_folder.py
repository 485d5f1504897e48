"""Turn a quantised GGUF file of the Llama family into a model folder that everything can load.

transformers can read GGUF files itself, but anew for every load (half a minute, and it needs accelerate), and
it ignores the file's pre-tokenizer: text where a digit follows two spaces or two newlines gets other tokens
than the model was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from .errors import GnaError

_CONTROL = 3  # GGUF's type of tokens such as <|im_start|>
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, target: Path) -> None:
    """Write config, tokenizer and float32 weights of a GGUF file into a new folder.

    >>> convert(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smollm2"))

    Known are files of architecture "llama" with the byte-level tokenizer of SmolLM ("smollm"). Unpacking is
    exact arithmetic (scale times integer plus offset), so the folder holds the very numbers of the file.
    Raises :class:`GnaError` for other files.
    """
    reader = GGUFReader(source)
    fields = {name: reader.fields[name].contents() for name in reader.fields}
    kind = tuple(
        fields.get(f) for f in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if kind != ("llama", "gpt2", "smollm"):
        raise GnaError(
            f"'{source}' is a GGUF file of kind {kind}: only ('llama', 'gpt2', 'smollm') can be converted."
        )
    target.mkdir(parents=True)
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    _tokenizer(fields).save_pretrained(target)
    save_file(_weights(reader, config), target / "model.safetensors", metadata={"format": "pt"})


def _config(fields: dict[str, Any], tied: bool) -> LlamaConfig:
    def of(key: str) -> Any:
        value = fields[f"llama.{key}"]
        # The file keeps float32: 9.9999997e-06 was written as 1e-05.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=of("attention.head_count"),
        num_key_value_heads=of("attention.head_count_kv"),
        head_dim=of("rope.dimension_count"),
        max_position_embeddings=of("context_length"),
        rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of("rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm" splits off every digit first, then words and spaces as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"]) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=fields["llama.context_length"],
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in named.items()},
    )


def _weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, np.ndarray]:
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        block, rest = _split(tensor.name)
        part, _, suffix = rest.rpartition(".")
        if part == "attn_q":
            values = _rows_in_halves(values, config.num_attention_heads)
        elif part == "attn_k":
            values = _rows_in_halves(values, config.num_key_value_heads)
        name = f"model.layers.{block}.{_INSIDE[part]}" if block else _OUTSIDE[part]
        weights[f"{name}.{suffix}"] = np.ascontiguousarray(values, dtype=np.float32)
    return weights


def _split(name: str) -> tuple[str, str]:
    """``"blk.3.attn_q.weight"`` as block "3" and the rest; the block is empty outside the layers."""
    if not name.startswith("blk."):
        return "", name
    _, block, rest = name.split(".", 2)
    return block, rest


def _rows_in_halves(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo GGUF's row order of query and key: it rotates neighbouring rows together, Llama the two halves."""
    pairs = weight.reshape(n_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
