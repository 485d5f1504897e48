"""The table of layers: kinds, heads and paths of every family, and its error messages."""

from __future__ import annotations

import pytest
import tiny
import tiny_llamba
import torch
import transformers
from torch import nn

from gna_utils import GnaError, Head, layers
from gna_utils.forward import forward, tokens
from gna_utils.mixers import LayerTable, MixerInfo


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_kinds_come_from_the_modules(tiny_model, family):
    """Configs rename layer kinds ("mamba", "linear_attention", "hybrid"); the table must not follow them."""
    table = layers(tiny_model(family)[0])
    kinds = [sorted(mixer.kind for mixer in table.in_layer(i)) for i in range(table.n_layers)]
    assert kinds == [sorted(kind) for kind in tiny.KINDS[family]]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_heads_cover_the_input_of_the_output_projection(tiny_model, family):
    model, hf_model, _ = tiny_model(family)
    for mixer in layers(model):
        if mixer.kind == "mlp":
            assert mixer.n_heads == 0
            continue
        projection = hf_model.get_submodule(f"{mixer.path}.{mixer.out_proj}")
        width = projection.weight.shape[0 if family == "gpt2" else 1]
        assert mixer.n_heads * mixer.head_dim == width
        assert model.get(mixer.path)._module is hf_model.get_submodule(mixer.path)
        assert mixer.source in model.get(mixer.path).source.names


@pytest.mark.parametrize(
    ("family", "layer", "kind", "shape"),
    [
        ("llama", 0, "attention", (4, 16)),  # not hidden size / heads, which is 8
        ("qwen2", 1, "attention", (4, 8)),
        ("gpt2", 0, "attention", (4, 8)),
        ("mamba", 1, "selective_scan", (64, 1)),
        ("mamba2", 0, "ssd", (8, 8)),
        ("zamba2", 3, "attention", (4, 16)),
        ("zamba2", 3, "ssd", (8, 8)),
        ("qwen3_next", 0, "delta_rule", (4, 8)),
    ],
)
def test_number_and_width_of_heads(tiny_model, family, layer, kind, shape):
    mixer = layers(tiny_model(family)[0]).find(Head(layer, 0), kind)
    assert (mixer.n_heads, mixer.head_dim) == shape


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_contributions_of_heads_and_bias_add_up_to_the_output(tiny_model, family):
    """A head width taken as hidden size / heads would cut elsewhere (TransformerLens 1593)."""
    model, hf_model, _ = tiny_model(family)
    ids = tiny.ids(2, 9)
    for mixer in layers(model):
        if not mixer.n_heads:
            continue
        path = f"{mixer.path}.{mixer.out_proj}"
        projection, width = hf_model.get_submodule(path), mixer.head_dim
        with model.trace(input_ids=ids, attention_mask=torch.ones_like(ids)):
            heads, output = model.get(path).input.save(), model.get(path).output.save()
        weight = projection.weight.T if family == "gpt2" else projection.weight
        parts = [
            heads[..., width * h : width * (h + 1)] @ weight[:, width * h : width * (h + 1)].T
            for h in range(mixer.n_heads)
        ]
        bias = 0 if projection.bias is None else projection.bias
        assert torch.allclose(sum(parts) + bias, output, atol=1e-4)
    assert family not in ("gpt2", "gpt_neox") or bias.abs().max() > 0


def test_llamba_is_a_kind_of_its_own():
    table = layers(tiny_llamba.build())
    assert [(mixer.kind, mixer.n_heads, mixer.head_dim) for mixer in table] == [("discrete_ssd", 4, 8)] * 2


def test_works_without_weights():
    config = tiny.build_hf("llama").config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert [mixer.kind for mixer in layers(model)] == ["attention"] * 2


def test_table_can_be_read(tiny_model):
    table = layers(tiny_model("nemotron_h")[0])
    assert isinstance(table, LayerTable) and isinstance(table[0], MixerInfo)
    assert repr(table).splitlines() == [
        "NemotronHForCausalLM: 3 layers",
        "  layer 0: ssd, 8 heads of 8",
        "  layer 1: attention, 4 heads of 16",
        "  layer 2: mlp",
    ]
    assert "layer 1: attention, 4 heads of 16" in table._repr_html_()
    frame = table.frame()
    assert list(frame["kind"]) == ["ssd", "attention", "mlp"] and list(frame["n_heads"]) == [8, 4, 0]


@pytest.mark.parametrize(
    ("family", "head", "kind", "words"),
    [
        ("llama", (2, 0), None, ["layer 2", "layers 0 to 1"]),
        ("llama", ("1", 0), None, ["layer '1'", "layers 0 to 1"]),
        ("llama", (1, 4), None, ["L1H4", "attention layer 1", "0 to 3"]),
        ("mamba", (0, 64), None, ["L0H64", "selective_scan", "0 to 63"]),
        ("nemotron_h", (2, 0), None, ["layer 2", "mlp", "0, 1"]),
        ("mamba2", (0, 0), "attention", ["layer 0", "ssd", "attention", "none"]),
        ("bamba", (0, 0), "attention", ["layer 0", "ssd", "attention", "1"]),
        ("zamba2", (1, 0), None, ["layer 1", "two mixers", "attention", "ssd"]),
        ("llama", (0, 0), "softmax", ["softmax", "attention, ssd"]),
    ],
)
def test_errors_name_layer_kind_and_choices(tiny_model, family, head, kind, words):
    """A scan layer must never be handed out as attention (nnterp issue 18)."""
    with pytest.raises(GnaError) as error:
        layers(tiny_model(family)[0]).find(head, kind)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_model_without_known_mixer_lists_what_was_found():
    strange = nn.Module()
    strange.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.GELU())])
    with pytest.raises(GnaError, match=r"no known mixer .*GELU, Linear, Sequential"):
        layers(strange)
    with pytest.raises(GnaError, match="no list of layers"):
        layers(nn.Linear(4, 4))
    with pytest.raises(GnaError, match="or the module it wraps, not NoneType"):
        layers(None)


@pytest.mark.parametrize(
    ("version", "refused"),
    [("5.5.4", False), ("5.6.0", True), ("5.10.2", True), ("5.13.0", True), ("5.14.0", False)],
)
def test_known_bad_transformers_are_refused_for_scan_models(tiny_model, monkeypatch, version, refused):
    """These versions did not carry the scan state from chunk to chunk (transformers issue 47246)."""
    monkeypatch.setattr("gna_utils.mixers.table.transformers.__version__", version)
    assert layers(tiny_model("llama")[0])
    if not refused:
        assert layers(tiny_model("mamba2")[0])
        return
    with pytest.raises(GnaError, match=f"transformers {version} loses the state"):
        layers(tiny_model("mamba2")[0])
    model = tiny_model("mamba2")[0]
    with pytest.raises(GnaError, match=f"transformers {version} loses the state"):
        forward(model, *tokens(model, "w1 w2"))
