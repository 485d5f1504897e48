"""The configuration of Llamba in the official layout: ``d_model``, ``n_layer``, ``ssm_cfg``, ``mlp_cfg``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import ClassVar

from transformers import GenerationConfig, PretrainedConfig

from .errors import GnaError

_SSM = {
    "d_state": 64,
    "n_v_heads": 32,
    "n_qk_heads": 32,
    "d_conv": 4,
    "conv_bias": True,
    "expand": 1,
    "chunk_size": 128,
    "activation": "identity",
    "bias": False,
}
_MLP = {"intermediate_size": 14336, "bias": False, "act_fn": "silu"}
_ACTIVATIONS = ("identity", "silu", "swish")

# Entries that transformers itself writes into a config.json, in this version or in an older one.
_COMMON = {
    *GenerationConfig._get_default_generation_params(),
    *("model_type", "torch_dtype", "auto_map", "name_or_path", "attn_implementation", "output_attentions"),
    *("num_labels", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "is_decoder", "prefix"),
    *("cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder", "finetuning_task"),
    *("tokenizer_class", "task_specific_params", "sep_token_id", "decoder_start_token_id"),
}


class LlambaConfig(PretrainedConfig):
    """Sizes and options of a Llamba model, with the official names and defaults.

    >>> config = LlambaConfig(vocab_size=64, d_model=32, n_layer=2, ssm_cfg={"n_v_heads": 4, "n_qk_heads": 2},
    ...                       mlp_cfg={"intermediate_size": 64})
    >>> config.d_inner, config.hidden_size, config.num_hidden_layers
    (32, 32, 2)

    ``ssm_cfg`` takes ``d_state``, ``n_v_heads``, ``n_qk_heads`` (a divisor of ``n_v_heads``), ``d_conv``,
    ``conv_bias``, ``expand``, ``chunk_size``, ``activation`` ("identity" or "silu") and ``bias``; ``mlp_cfg``
    takes ``intermediate_size``, ``bias`` and ``act_fn``. ``vocab_size`` is rounded up to a multiple of
    ``pad_vocab_size_multiple``; ``resid_dropout`` is kept but not used, as in the official code.
    Raises :class:`GnaError` on a missing or unknown key, and on sizes that do not fit together.
    """

    model_type = "llamba"
    attribute_map: ClassVar = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }

    vocab_size: int | None = None
    d_model: int | None = None
    n_layer: int = 32
    tie_embeddings: bool = False
    pad_vocab_size_multiple: int = 8
    lm_head_bias: bool = False
    lm_head_prenorm: str = "rms"
    norm_epsilon: float = 1e-5
    resid_dropout: float = 0.0
    ssm_cfg: dict | None = None
    mlp_cfg: dict | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        for name in ("vocab_size", "d_model"):
            if getattr(self, name) is None:
                raise GnaError(f"the Llamba configuration lacks '{name}': it has no default.")
        # Older versions of transformers wrote their own default beside the official key, which decides.
        kwargs.pop("tie_word_embeddings", None)
        own = [
            name for name in self.__dataclass_fields__ if name not in PretrainedConfig.__dataclass_fields__
        ]
        given = [name for name in kwargs if name not in _COMMON and not name.startswith("_")]
        _refuse_unknown("the Llamba configuration", given, own)
        self.ssm_cfg = _filled("ssm_cfg", self.ssm_cfg, _SSM)
        self.mlp_cfg = _filled("mlp_cfg", self.mlp_cfg, _MLP)
        self.vocab_size += -self.vocab_size % self.pad_vocab_size_multiple
        self._check()
        super().__post_init__(**kwargs)

    @property
    def d_inner(self) -> int:
        """Width of the mixer: ``expand * d_model``."""
        return self.ssm_cfg["expand"] * self.d_model

    @property
    def layer_types(self) -> list[str]:
        """Tells transformers' cache that every layer keeps a convolution state and a recurrent state."""
        return ["linear_attention"] * self.n_layer

    def _check(self) -> None:
        sizes = {name: value for name, value in self.ssm_cfg.items() if type(_SSM[name]) is int}
        if wrong := [name for name, value in sizes.items() if type(value) is not int or value < 1]:
            raise GnaError(
                f"ssm_cfg has {wrong[0]} = {sizes[wrong[0]]!r}: it must be a whole number above 0."
            )
        v, qk = self.ssm_cfg["n_v_heads"], self.ssm_cfg["n_qk_heads"]
        if self.d_inner % v or v % qk:
            raise GnaError(
                f"a mixer of width {self.d_inner} cannot have {v} value heads and {qk} query-key heads: "
                "n_v_heads must divide expand * d_model, and n_qk_heads must divide n_v_heads."
            )
        if self.ssm_cfg["activation"] not in _ACTIVATIONS:
            given = self.ssm_cfg["activation"]
            raise GnaError(
                f"unknown activation '{given}' in ssm_cfg: choose one of {', '.join(_ACTIVATIONS)}."
            )
        if self.lm_head_prenorm not in ("rms", None):
            raise GnaError(f"lm_head_prenorm '{self.lm_head_prenorm}' is not possible: Llamba has 'rms'.")


def _filled(name: str, given: dict | None, defaults: dict) -> dict:
    _refuse_unknown(name, given or {}, defaults)
    return {**defaults, **(given or {})}


def _refuse_unknown(where: str, given: Iterable[str], known: Collection[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise GnaError(f"{where} has unknown keys {', '.join(unknown)}: possible are {', '.join(known)}.")
