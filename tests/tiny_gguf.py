"""A tiny random Llama as a GGUF file, written the way llama.cpp's converter does, and a wheel around it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import tiny
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *"abcdefghijklmnopqrstuvwxyz0123456789",
    "Ġ",
    "Ċ",
    "Ġa",
    "ab",
]
MERGES = ["Ġ a", "a b"]


def write(path: Path, *, pre: str = "smollm"):
    """Write the file and return the transformers model whose weights are exactly those in it."""
    model = tiny.build_hf("llama", vocab_size=len(TOKENS), tie_word_embeddings=True, intermediate_size=64)
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    for name, number in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(number)
    for name, parameter in model.named_parameters():
        _add(writer, name, parameter, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add(writer: GGUFWriter, name: str, parameter: torch.nn.Parameter, config) -> None:
    *place, suffix = name.removeprefix("model.").split(".")
    if place[0] == "layers":
        gguf_name = f"blk.{place[1]}.{NAMES['.'.join(place[2:])]}"
    else:
        gguf_name = {"embed_tokens": "token_embd", "norm": "output_norm"}[place[0]]
    values, kind = parameter.detach().numpy(), None
    if values.ndim == 2:
        kind = GGMLQuantizationType.Q8_0
        parameter.copy_(torch.from_numpy(dequantize(quantize(values, kind), kind)))
    if gguf_name.endswith("attn_q"):
        values = _rotated_rows(values, config.num_attention_heads)
    elif gguf_name.endswith("attn_k"):
        values = _rotated_rows(values, config.num_key_value_heads)
    if kind is not None:
        values = quantize(values, kind)
    writer.add_tensor(f"{gguf_name}.{suffix}", values, raw_dtype=kind)


def _rotated_rows(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows: row i of the first half, then row i of the second half."""
    size = weight.shape[0] // n_heads
    order = [
        head * size + half * size // 2 + i
        for head in range(n_heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return weight[order]


def wheel(folder: Path, weights_file: Path, version: str = "1.0") -> dict:
    """Build a wheel ``tiny-weights`` that pip accepts; returns what the manifest says about its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    info, member = f"tiny_weights-{version}.dist-info", f"tiny_weights/{weights_file.name}"
    content = weights_file.read_bytes()
    with zipfile.ZipFile(folder / f"tiny_weights-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-weights\nVersion: {version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return {
        "requirement": f"tiny-weights=={version}",
        "member": member,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
