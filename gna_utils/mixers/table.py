"""The table of a model's layers: which mixers each layer holds, read from the modules themselves.

Configs name layer kinds in many ways ("mamba", "linear_attention", "hybrid", nothing at all); the modules do
not lie. One rule per kind of mixer covers every family.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import SupportsIndex

import transformers
from packaging.version import Version
from torch import nn

from ..errors import GnaError
from ..heads import Head

KINDS = ("attention", "ssd", "selective_scan", "delta_rule", "discrete_ssd")
SCANS = KINDS[1:]
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_QUERIES = ("q_proj", "c_attn", "query_key_value", "qkv_proj", "q_b_proj", "Wqkv", "in_proj_qkv")
# the call inside the mixer's forward that takes all the arguments of the mixing itself
_CALL_SITES = {
    "attention": "attention_interface_1",
    "ssd": "mamba2_chunk_scan_0",
    "selective_scan": "mamba_selective_scan_0",
    "delta_rule": "torch_chunk_gated_delta_rule_0",
    "discrete_ssd": "discrete_ssd_scan_0",
}


@dataclass(frozen=True)
class MixerInfo:
    """One mixer: the layer it is in, its kind, its path from the nnsight model, its heads.

    ``n_heads * head_dim`` is the width of the input of ``out_proj``, where a head is a slice. In a
    ``selective_scan`` (Mamba-1) a head is one channel. A layer without a mixer has kind ``mlp`` and no heads.
    ``source`` is the name of the mixing call for nnsight's ``.source``; ``norm`` the gated norm between scan
    and projection, where there is one.
    """

    layer: int
    kind: str
    path: str
    n_heads: int
    head_dim: int
    out_proj: str
    source: str | None = None
    norm: str | None = None

    def __str__(self) -> str:
        if not self.n_heads:
            return f"layer {self.layer}: {self.kind}"
        return f"layer {self.layer}: {self.kind}, {self.n_heads} heads of {self.head_dim}"


class LayerTable(list[MixerInfo]):
    """The mixers of a model, layer by layer; a layer with two mixers has two entries."""

    def __init__(self, mixers: list[MixerInfo], name: str, list_path: str) -> None:
        super().__init__(mixers)
        self.name = name
        self.list_path = list_path

    @property
    def n_layers(self) -> int:
        return 1 + max(mixer.layer for mixer in self)

    def layer_path(self, layer: int) -> str:
        """Dotted path of a layer, for ``model.get(...)``; raises :class:`GnaError` when it does not exist."""
        if not isinstance(layer, SupportsIndex) or not 0 <= layer < self.n_layers:
            raise GnaError(f"layer {layer!r} was asked; {self.name} has layers 0 to {self.n_layers - 1}.")
        return f"{self.list_path}.{layer}"

    def in_layer(self, layer: int) -> list[MixerInfo]:
        """The mixers of one layer."""
        self.layer_path(layer)
        return [mixer for mixer in self if mixer.layer == layer]

    def find(self, head: Head | tuple[int, int], kind: str | None = None) -> MixerInfo:
        """The mixer that holds ``head``; ``kind`` chooses where a layer holds two.

        Raises :class:`GnaError` when layer or head do not exist, when the layer has no mixer of that kind,
        and when it has two and ``kind`` was not given.
        """
        layer, number = head
        if kind is not None and kind not in KINDS:
            raise GnaError(f"unknown kind of mixer '{kind}': choose one of {', '.join(KINDS)}.")
        here = self.in_layer(layer)
        with_heads = [mixer for mixer in here if mixer.n_heads and kind in (None, mixer.kind)]
        if not with_heads:
            raise GnaError(
                f"L{layer}H{number}: layer {layer} of {self.name} is {_kinds(here)} and has no "
                f"{'heads' if kind is None else kind + ' heads'}; layers with them: {self._with_heads(kind)}."
            )
        if len(with_heads) > 1:
            raise GnaError(
                f"L{layer}H{number}: layer {layer} of {self.name} holds two mixers, {_kinds(with_heads)}: "
                "say which one by its kind."
            )
        if not 0 <= number < with_heads[0].n_heads:
            raise GnaError(
                f"L{layer}H{number}: {with_heads[0].kind} layer {layer} of {self.name} has heads "
                f"0 to {with_heads[0].n_heads - 1}."
            )
        return with_heads[0]

    def frame(self):
        """The table as a pandas frame, one row per mixer."""
        import pandas as pd

        return pd.DataFrame([asdict(mixer) for mixer in self]).drop(columns=["source", "norm"])

    def _with_heads(self, kind: str | None) -> str:
        found = sorted({m.layer for m in self if m.n_heads and kind in (None, m.kind)})
        return ", ".join(map(str, found)) or "none"

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.n_layers} layers"]
        for mixers, first, last in self._runs():
            span = f"layer {first}" if first == last else f"layers {first}-{last}"
            lines.append(f"  {span}: " + " and ".join(_describe(mixer) for mixer in mixers))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def _runs(self) -> Iterator[tuple[list[MixerInfo], int, int]]:
        """Neighbouring layers that hold the same mixers, as (mixers, first layer, last layer)."""
        first, mixers = 0, self.in_layer(0)
        for layer in range(1, self.n_layers + 1):
            here = self.in_layer(layer) if layer < self.n_layers else []
            if list(map(_describe, here)) != list(map(_describe, mixers)):
                yield mixers, first, layer - 1
                first, mixers = layer, here


def layers(model) -> LayerTable:
    """The table of layers of any causal language model.

    >>> layers(model)
    LlamaForCausalLM: 30 layers
      layers 0-29: attention, 9 heads of 64

    ``model`` is an nnsight model, or the module it wraps. Works without weights (remote models). Raises
    :class:`GnaError` for anything else, when no layer holds a known mixer (the message lists what was
    found), and when scan layers would run on a version of transformers that computes them wrongly.
    """
    module = getattr(model, "_module", model)
    if not isinstance(module, nn.Module):
        raise GnaError(
            "give the model that gna_utils.load returns (an nnsight model), or the module it wraps, not "
            f"{type(model).__name__}."
        )
    name = type(module).__name__
    list_path, stack = _layer_list(module, name)
    mixers = []
    for index, layer in enumerate(stack):
        path = f"{list_path}.{index}"
        found = _mixers_of(layer, index, path)
        mixers += found or [MixerInfo(index, "mlp", path, 0, 0, "")]
    if all(mixer.kind == "mlp" for mixer in mixers):
        classes = sorted({type(part).__name__ for part in stack.modules()} - {"ModuleList"})
        raise GnaError(
            f"{name} has no known mixer ({', '.join(KINDS)}); its layers are made of: {', '.join(classes)}."
        )
    check_transformers(module)
    return LayerTable(mixers, name, list_path)


def check_transformers(module: nn.Module) -> None:
    """Refuse to run scan layers on the transformers versions that lose their state between chunks on a CPU.

    Reported for Mamba-2, Zamba2 and Nemotron-H: huggingface/transformers 47246, 47250, 47513.
    """
    if not Version("5.6.0") <= Version(transformers.__version__) <= Version("5.13.0"):
        return
    scans = filter(None, map(_scan, module.modules()))
    if any(kind != "discrete_ssd" for kind, _, _ in scans):  # Llamba's scan is our own
        raise GnaError(
            f"transformers {transformers.__version__} loses the state of scan layers between chunks, so "
            f"{type(module).__name__} would give wrong numbers: install transformers 5.24 or newer."
        )


def _layer_list(module: nn.Module, name: str) -> tuple[str, nn.ModuleList]:
    """The stack of decoder layers: the outermost, then the longest, list of modules of the text model."""
    lists = [
        (path, part)
        for path, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) and not _is_foreign(path)
    ]
    if not lists:
        raise GnaError(
            f"{name} has no list of layers, so it is not a language model that this package can read."
        )
    depth = min(path.count(".") for path, _ in lists if len(path))
    return max((item for item in lists if item[0].count(".") == depth), key=lambda item: len(item[1]))


def _is_foreign(path: str) -> bool:
    return any(word in path for word in ("vision", "audio", "visual", "mtp"))


def _mixers_of(layer: nn.Module, index: int, path: str) -> list[MixerInfo]:
    found = []
    for inner, part in layer.named_modules():
        mixer = _attention(part) or _scan(part)
        if mixer is not None:
            kind, head_dim, out_proj = mixer
            width = _in_features(getattr(part, out_proj))
            norm = "norm" if kind in ("ssd", "delta_rule") and _is_gated_norm(part) else None
            full = f"{path}.{inner}" if inner else path
            found.append(
                MixerInfo(
                    index, kind, full, width // head_dim, head_dim, out_proj, _CALL_SITES.get(kind), norm
                )
            )
    return found


def _attention(part: nn.Module) -> tuple[str, int, str] | None:
    children = part._modules
    out_proj = next((name for name in _PROJECTIONS if name in children), None)
    if out_proj is None or not any(name in children for name in _QUERIES):
        return None
    # multi-head latent attention has its own width of values; GPT-NeoX calls the width head_size
    sizes = [getattr(part, key, None) for key in ("v_head_dim", "head_dim", "head_size")]
    head_dim = next((size for size in sizes if isinstance(size, int)), None)
    return None if head_dim is None else ("attention", head_dim, out_proj)


def _scan(part: nn.Module) -> tuple[str, int, str] | None:
    if "out_proj" not in part._modules:
        return None
    if "A_log" not in part._parameters:
        # Llamba projects its decay from the input: what is left of a Mamba-2 mixer without A_log
        discrete = "D" in part._parameters and {"in_proj", "conv1d"} <= part._modules.keys()
        return ("discrete_ssd", part.head_dim, "out_proj") if discrete else None
    if part.A_log.ndim > 1:  # one row of decays per channel: Mamba-1
        return "selective_scan", 1, "out_proj"
    if hasattr(part, "head_v_dim"):
        return "delta_rule", part.head_v_dim, "out_proj"
    return "ssd", part.head_dim, "out_proj"


def _is_gated_norm(part: nn.Module) -> bool:
    return not isinstance(part._modules.get("norm", nn.Identity()), nn.Identity)


def _in_features(projection: nn.Module) -> int:
    # Conv1D of GPT-2 keeps (in, out); its `nx` is the input width
    return getattr(projection, "in_features", None) or projection.nx


def _describe(mixer: MixerInfo) -> str:
    if not mixer.n_heads:
        return mixer.kind
    unit = "channels" if mixer.head_dim == 1 else f"heads of {mixer.head_dim}"
    return f"{mixer.kind}, {mixer.n_heads} {unit}"


def _kinds(mixers: list[MixerInfo]) -> str:
    return " and ".join(mixer.kind for mixer in mixers)
