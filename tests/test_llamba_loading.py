"""Llamba checkpoints in the official layout, its configuration, and its mixers under nnsight."""

from __future__ import annotations

import copy
import json

import nnsight
import pytest
import tiny
import torch
from nnsight.modeling.transformers import TransformersModel
from safetensors.torch import save_file
from tiny_llamba import SSM, build, close
from transformers import AutoConfig, AutoModelForCausalLM

from gna_utils import layers, load, transfer_matrix
from gna_utils.errors import GnaError
from gna_utils.llamba import LlambaConfig, LlambaForCausalLM


@pytest.fixture(scope="module")
def model() -> LlambaForCausalLM:
    return build()


def official_folder(folder, model, *, form="safetensors", drop=(), **changes):
    """Write what the official release holds: its config.json, and weights under the official names."""
    config = {
        "model_type": "llamba",
        "vocab_size": 64,
        "tie_embeddings": model.config.tie_embeddings,
        "pad_vocab_size_multiple": 8,
        "lm_head_bias": False,
        "d_model": 32,
        "n_layer": 2,
        "resid_dropout": 0.0,
        "norm_epsilon": 1e-5,
        "mlp_cfg": {"intermediate_size": 48, "bias": False, "act_fn": "silu"},
        "ssm_cfg": {"expand": 1, "activation": "identity", "bias": False, **SSM},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    names = ["backbone.embedding.weight", "backbone.final_layernorm.weight"]
    names += [] if model.config.tie_embeddings else ["lm_head.weight"]
    for i in range(2):
        mixer = ("in_proj.weight", "conv1d.weight", "conv1d.bias", "D", "z_bias", "out_proj.weight")
        names += [f"backbone.layers.{i}.mixer.{name}" for name in mixer]
        names += [f"backbone.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        names += [f"backbone.layers.{i}.{name}_layernorm.weight" for name in ("input", "post_attention")]
    ours = model.state_dict()
    weights = {name: ours[name].clone() for name in names if name not in drop}
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif form == "safetensors":
        save_file(weights, folder / "model.safetensors")
    else:
        files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
        for file in set(files.values()):
            save_file({k: v for k, v in weights.items() if files[k] == file}, folder / file, {"format": "pt"})
        index = {"metadata": {"total_size": 0}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin"])
@pytest.mark.parametrize("tied", [True, False])
def test_official_checkpoint_loads(tmp_path, form, tied):
    model = build(tie_embeddings=tied)
    assert (model.lm_head.weight is model.backbone.embedding.weight) == tied
    folder = official_folder(tmp_path / "official", model, form=form)
    for loader in (LlambaForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(folder)
        assert type(loaded) is LlambaForCausalLM
        assert torch.equal(loaded(tiny.ids(2, 7)).logits, model(tiny.ids(2, 7)).logits)


def test_official_checkpoint_without_a_model_type_loads(tmp_path, model):
    """Such a config.json tells transformers nothing, but Llamba itself and `load` know the layout."""
    folder = official_folder(tmp_path / "official", model)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    expected = model(tiny.ids(2, 7)).logits
    loaded = load(str(folder), tokenizer=tiny.tokenizer(), device="cpu")
    for found in (LlambaForCausalLM.from_pretrained(folder), loaded._module):
        assert torch.equal(found(tiny.ids(2, 7)).logits, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_saving_and_loading_is_bit_equal(tmp_path, tied):
    model = build(tie_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.ssm_cfg, config.mlp_cfg) == (model.config.ssm_cfg, model.config.mlp_cfg)
    assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (32, 2, tied)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    """transformers only warns and leaves random numbers where weights are missing."""
    model = build()
    lost = official_folder(tmp_path / "lost", model, drop=("backbone.layers.1.mixer.D",))
    with pytest.raises(GnaError, match=r"1 weights are missing .*layers\.1\.mixer\.D"):
        AutoModelForCausalLM.from_pretrained(lost)
    shallow = official_folder(tmp_path / "shallow", model, n_layer=1)
    with pytest.raises(GnaError, match="11 weights are unexpected"):
        AutoModelForCausalLM.from_pretrained(shallow)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 64}, "lacks 'd_model'"),
        ({"vocab_size": 64, "d_model": 32, "n_layers": 2}, "unknown keys n_layers.*n_layer"),
        (
            {"vocab_size": 64, "d_model": 32, "ssm_cfg": {"d_sate": 8}},
            "ssm_cfg has unknown keys d_sate.*d_state",
        ),
        ({"vocab_size": 64, "d_model": 32, "mlp_cfg": {"size": 8}}, "mlp_cfg has unknown keys size"),
        ({"vocab_size": 64, "d_model": 32, "ssm_cfg": {"n_v_heads": 5}}, "5 value heads"),
        ({"vocab_size": 64, "d_model": 32, "ssm_cfg": {"n_qk_heads": 3}}, "3 query-key heads"),
        ({"vocab_size": 64, "d_model": 32, "ssm_cfg": {"chunk_size": 0}}, "chunk_size = 0"),
        ({"vocab_size": 64, "d_model": 32, "ssm_cfg": {"activation": "gelu"}}, "activation 'gelu'"),
        ({"vocab_size": 64, "d_model": 32, "lm_head_prenorm": "layer"}, "lm_head_prenorm 'layer'"),
    ],
)
def test_bad_configurations_are_refused(options, message):
    with pytest.raises(GnaError, match=message):
        LlambaConfig(**options)


def test_configuration_with_the_entries_of_older_transformers():
    config = LlambaConfig(
        vocab_size=61, d_model=32, torch_dtype="bfloat16", tie_word_embeddings=True, is_decoder=False
    )
    assert config.vocab_size == 64
    assert not config.tie_word_embeddings


@pytest.fixture(scope="module")
def wrapped(model) -> TransformersModel:
    return TransformersModel(model, tokenizer=tiny.tokenizer(), task="text-generation")


def test_layer_table(wrapped):
    table = layers(wrapped)
    assert [(m.kind, m.n_heads, m.head_dim, m.out_proj) for m in table] == [
        ("discrete_ssd", 4, 8, "out_proj")
    ] * 2


@pytest.mark.parametrize("remote", [False, "local"])
def test_transfer_matrix_rebuilds_the_scan(wrapped, model, remote):
    """With and without D, in the order asked for; 0 at padding; heads share B and C with their neighbours."""
    kept = {}
    hook = model.backbone.layers[1].mixer.conv1d.register_forward_hook(lambda m, a, out: kept.update(x=out))
    try:
        T = transfer_matrix(wrapped, "w1 w2 w3 w4 w5 w6", "L1H3, L1H0", remote=remote)
    finally:
        hook.remove()
    x = kept["x"][:, :32, :7].reshape(1, 4, 8, 7).transpose(2, 3)
    ids = torch.tensor([wrapped.tokenizer("w1 w2 w3 w4 w5 w6").input_ids])
    with torch.no_grad(), wrapped.trace(ids, remote=remote):
        y = wrapped.backbone.layers[1].mixer.source.discrete_ssd_scan_0.output[0].save()
    close(T @ x[:, [3, 0]], y[:, :, [3, 0]].transpose(1, 2))
    bare = transfer_matrix(wrapped, "w1 w2 w3 w4 w5 w6", "L1H3, L1H0", skip=False, remote=remote)
    close(
        (T - bare).diagonal(dim1=-2, dim2=-1),
        model.backbone.layers[1].mixer.D[[3, 0]][None, :, None].expand(1, 2, 7),
        1e-5,
    )
    padded = transfer_matrix(wrapped, ["w1 w2 w3 w4 w5 w6", "w7 w8"], "L1H3", remote=remote)
    close(padded[0, 0], T[0, 0], 1e-5)
    assert padded[1, 0, 3:].abs().max() == 0 and padded[1, 0, :, 3:].abs().max() == 0


@pytest.mark.parametrize("remote", [False, "local"])
def test_zeroing_a_head_in_a_trace_equals_zeroing_its_columns(wrapped, model, remote):
    """No norm stands between scan and projection, so both places give the ablation of the weights."""
    ids = tiny.ids(2, 7)
    edited = copy.deepcopy(model)
    edited.backbone.layers[0].mixer.out_proj.weight[:, 8:16] = 0
    expected = edited(ids).logits
    with torch.no_grad(), wrapped.trace(ids, remote=remote):
        wrapped.backbone.layers[0].mixer.out_proj.input[..., 8:16] = 0
        logits = wrapped.lm_head.output.save()
    close(logits, expected, 1e-6)
    with torch.no_grad(), wrapped.trace(ids, remote=remote):
        wrapped.backbone.layers[0].mixer.source.discrete_ssd_scan_0.output[0][:, :, 1] = 0
        logits = wrapped.lm_head.output.save()
    close(logits, expected, 1e-6)
    assert (expected - model(ids).logits).abs().max() > 1e-3


def test_folder_loads_under_nnsight_and_generates(tmp_path, model):
    folder = official_folder(tmp_path / "official", model)
    loaded = TransformersModel(str(folder), tokenizer=tiny.tokenizer(), task="text-generation", dispatch=True)
    ids = tiny.ids(1, 5)
    with loaded.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0) as tracer:
        out = nnsight.save(tracer.result)
    assert torch.equal(out, model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0))


def test_hooks_on_every_projection_fire(model):
    """In transformers' own Mamba models `conv1d` is never called and hooks on it stay silent (mamba 59)."""
    fired = []
    mixer = model.backbone.layers[0].mixer
    hooks = [
        m.register_forward_hook(lambda m, a, out: fired.append(m))
        for m in (mixer.in_proj, mixer.conv1d, mixer.out_proj)
    ]
    model(tiny.ids(1, 5))
    for hook in hooks:
        hook.remove()
    assert fired == [mixer.in_proj, mixer.conv1d, mixer.out_proj]
