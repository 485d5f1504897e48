"""Loading by name: what comes out, and what is said when it cannot be loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import tiny
import tiny_llamba
import torch
from nnsight.modeling.transformers import TransformersModel
from safetensors.torch import load_file, save_file

from gna_utils import catalogue, load, models, weights
from gna_utils.errors import GnaError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``folders("llama")`` is a folder with a tiny saved model and its tokenizer."""
    home = tmp_path_factory.mktemp("models")

    def make(family: str, dtype: torch.dtype = torch.float32):
        folder = home / f"{family}-{str(dtype).removeprefix('torch.')}"
        if not folder.exists():
            tiny.build_hf(family).to(dtype).save_pretrained(folder)
            tiny.tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def project(monkeypatch, tmp_path, folders):
    """A data folder with the included model "tiny-llama", and a manifest with the hub model "far"."""
    entry = {"what": "a model of the hub", "hub": "org/far", "licence": "MIT", "aliases": ["away"]}
    shutil.copytree(folders("llama"), tmp_path / "models" / "tiny-llama")
    monkeypatch.setattr(weights, "data_dir", lambda: tmp_path)
    monkeypatch.setattr(weights, "manifest", lambda: {"far": entry})
    return tmp_path / "models" / "tiny-llama"


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "mamba2"])
def test_a_local_folder_gives_the_model_that_was_saved(family, folders):
    model = load(folders(family), device="cpu")
    ids = tiny.ids(2, 7)
    with torch.no_grad():
        expected = tiny.build_hf(family)(ids).logits
    with model.trace(ids, attention_mask=torch.ones_like(ids)):
        logits = model.output.logits.save()
    assert isinstance(model, TransformersModel)
    assert torch.equal(logits, expected)
    assert not any(part.training for part in model._module.modules())
    assert not any(parameter.requires_grad for parameter in model._module.parameters())


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_one_asked_for_and_never_the_checkpoints(asked, folders):
    """transformers 5 loads in the checkpoint's type by default, often bfloat16 (transformers PR 42805)."""
    folder = folders("llama", torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    options = {} if asked == "float32" else {"dtype": asked}
    model = load(str(folder), device="cpu", **options)
    assert {str(p.dtype) for p in model._module.parameters()} == {f"torch.{asked}"}
    assert models.info(model).dtype == asked


def test_dtype_auto_says_what_it_chose(folders, caplog):
    models.faster_dtype.cache_clear()
    model = load(str(folders("llama")), device="cpu", dtype="auto")
    chosen = models.info(model).dtype
    assert chosen in ("float32", "bfloat16")
    assert f"dtype auto: torch.{chosen} on cpu" in caplog.text


@pytest.mark.parametrize("ratio", [0.01, 1.0, 4.0])
def test_dtype_auto_goes_by_the_clock(ratio, monkeypatch):
    seconds = {torch.float32: ratio, torch.bfloat16: 1.0}
    monkeypatch.setattr(models, "_matmul_seconds", lambda kind, device: seconds[kind])
    chosen = models.faster_dtype.__wrapped__(torch.device("cpu"))
    assert chosen == (torch.bfloat16 if ratio > 1.25 else torch.float32)


def test_options_reach_transformers(folders):
    model = load(str(folders("llama")), device="cpu", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_info_of_a_loaded_folder(folders):
    folder = folders("llama")
    facts = models.info(load(str(folder), device="cpu"))
    parameters = sum(p.numel() for p in tiny.build_hf("llama").parameters())
    assert (facts.name, facts.source, facts.device) == (str(folder), str(folder), "cpu")
    assert facts.n_parameters == parameters
    assert facts.sha256 == weights.file_sha256(folder / "model.safetensors")
    assert 0 < facts.seconds < 60


def test_info_of_a_model_that_was_built_by_hand():
    model, hf_model, _ = tiny.build("gpt2")
    facts = models.info(model)
    assert (facts.device, facts.dtype, facts.sha256, facts.seconds) == ("cpu", "float32", None, None)
    assert facts.n_parameters == sum(p.numel() for p in hf_model.parameters())


def test_the_hash_of_several_files_covers_all_of_them(folders, tmp_path):
    folder = tmp_path / "sharded"
    tiny.build_hf("llama").save_pretrained(folder, max_shard_size="20KB")
    tiny.tokenizer().save_pretrained(folder)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    whole = models.info(load(str(folder), device="cpu")).sha256
    tensors = load_file(files[-1])
    save_file({name: value + 1 for name, value in tensors.items()}, files[-1], metadata={"format": "pt"})
    assert models.info(load(str(folder), device="cpu")).sha256 != whole


def test_included_models_are_registered_by_their_folder(project):
    card = catalogue.registry()["tiny-llama"]
    assert card.parameters == sum(p.numel() for p in tiny.build_hf("llama").parameters())
    assert (card.cached, card.bytes, card.source) == (True, 0, str(project))
    assert models.info(load("tiny-llama", device="cpu")).name == "tiny-llama"


def test_an_included_model_may_describe_itself(project):
    (project / "card.json").write_text(json.dumps({"what": "a toy", "licence": "CC0", "chapters": "08"}))
    card = catalogue.registry()["tiny-llama"]
    assert (card.what, card.licence, card.chapters) == ("a toy", "CC0", "08")


def test_aliases_lead_to_the_same_place(project):
    assert catalogue.find("away").place == catalogue.find("far").place == "org/far"
    assert catalogue.registry()["far"].aliases == ("away",)


def test_the_registry_of_the_project_is_whole():
    cards = catalogue.registry()
    assert cards["smollm2-135m"].parameters == 134_515_008
    names = [*cards, *(alias for card in cards.values() for alias in card.aliases)]
    assert len(names) == len(set(names))
    assert all(card.what and card.licence and card.source for card in cards.values())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "tiny-lama",
            r"unknown model 'tiny-lama' \(did you mean 'tiny-llama'\?\): give one of far, tiny-llama, ",
        ),
        ("smol", "unknown model 'smol': give one of .* a hub id such as 'org/name', or a local folder"),
        ("", "unknown model ''"),
        ("./nowhere", "there is no folder './nowhere'"),
        ("/nowhere/at/all", "there is no folder '/nowhere/at/all'"),
        ("~nobody-at-all/x", "there is no folder '~nobody-at-all/x'"),
        (None, "None is no name of a model: give a registered name, a hub id or a folder"),
        (5, "5 is no name of a model"),
        ("x" * 300, r"unknown model 'x{96}\.\.\.'"),
        ("x" * 100 + "/" + "y" * 200, r"there is no folder 'x{96}\.\.\.'"),
    ],
)
def test_unknown_names(name, said, project):
    with pytest.raises(GnaError, match=said):
        load(name)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(GnaError, match=r"holds no model: it lacks config\.json"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int3"}, "unknown dtype 'int3': choose one of float32, bfloat16, float16, or auto"),
        ({"device": "abacus"}, "device 'abacus' is not available here: choose one of auto, cpu"),
        ({"device": "meta"}, "device 'meta' is not available"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not available"),
        ({"attn_implementation": "telepathy"}, "cannot be loaded from .*telepathy"),
        ({"no_such_option": 1}, "cannot be loaded from .*no_such_option"),
        ({"tokenizer": 5}, "tokenizer=5 is no tokenizer: give one of transformers, or the name of one"),
        ({"remote": "foo"}, "remote='foo' is not possible: give True, False, 'local' or 'http://host:port'"),
        ({"remote": "ftp://x"}, "remote='ftp://x' is not possible"),
        ({"remote": None}, "remote=None is not possible"),
        ({"tokenizer": "./nowhere"}, "no tokenizer for .* could be loaded from './nowhere': pass tokenizer="),
    ],
)
def test_bad_options(options, said, folders):
    with pytest.raises(GnaError, match=said) as error:
        load(str(folders("llama")), **{"device": "cpu", **options})
    assert "\n" not in str(error.value) and str(error.value).count(str(folders("llama"))) <= 1


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_truncated_weights(folders, tmp_path):
    folder = copied(folders("llama"), tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(GnaError, match=f"the weights in '{folder}' are damaged"):
        load(str(folder), device="cpu")


def test_missing_weights_are_not_replaced_by_random_ones(folders, tmp_path):
    """transformers only warns."""
    folder = copied(folders("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(GnaError, match=r"incomplete: 1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load(str(folder), device="cpu")


def test_weights_of_other_shapes_than_the_configuration(folders, tmp_path):
    """transformers speaks of an option that nobody set, and refers to a report above."""
    folder = copied(folders("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 2 * config["hidden_size"]}))
    with pytest.raises(GnaError, match=f"^the weights in '{folder}' do not fit its config.json") as error:
        load(folder, device="cpu")
    assert str(error.value).count(str(folder)) == 1


def test_a_configuration_that_is_a_list(folders, tmp_path):
    folder = copied(folders("llama"), tmp_path)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(GnaError, match=r"config\.json of .* is a list: it must hold names with values"):
        load(folder, device="cpu")


@pytest.mark.parametrize("content", ["{broken", '{"model_type": "nonsense"}', "{}"])
def test_bad_configuration(content, folders, tmp_path):
    folder = copied(folders("llama"), tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(GnaError, match="cannot be loaded from"):
        load(str(folder), device="cpu")


def test_a_folder_without_a_tokenizer(folders, tmp_path):
    folder = copied(folders("llama"), tmp_path)
    for path in folder.glob("token*"):
        path.unlink()
    with pytest.raises(GnaError, match="no tokenizer for"):
        load(str(folder), device="cpu")
    words = tiny.tokenizer()
    assert load(str(folder), device="cpu", tokenizer=words).tokenizer is words
    assert load(str(folder), device="cpu", tokenizer=str(folders("llama"))).tokenizer("w1").input_ids == [
        1,
        4,
    ]


def test_a_missing_padding_token_is_borrowed_and_changes_no_ids(folders):
    words = tiny.tokenizer()
    words.pad_token = None
    before = words("w1 w2 <eos>").input_ids
    model = load(str(folders("llama")), device="cpu", tokenizer=words)
    assert model.tokenizer.pad_token_id == model.tokenizer.eos_token_id == 2
    assert len(model.tokenizer) == tiny.VOCAB
    assert model.tokenizer("w1 w2 <eos>").input_ids == before


@pytest.mark.parametrize("remote", [True, "http://127.0.0.1:9"])
def test_remote_builds_the_structure_only(remote, folders):
    model = load(str(folders("llama")), remote=remote)
    assert models.info(model).device == "meta"
    assert model.repo_id == str(folders("llama"))
    assert model.tokenizer("w1").input_ids == [1, 4]


def test_remote_local_needs_the_weights_here(folders):
    assert models.info(load(str(folders("llama")), device="cpu", remote="local")).device == "cpu"


@pytest.mark.parametrize("keep_type", [True, False], ids=["with model_type", "official layout"])
def test_llamba_folders_load_like_any_other(keep_type, tmp_path):
    expected = tiny_llamba.build()
    expected.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    if not keep_type:
        config = json.loads((tmp_path / "config.json").read_text())
        del config["model_type"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(str(tmp_path), device="cpu")
    ids = tiny.ids(1, 5)
    with torch.no_grad():
        assert torch.equal(model._module(ids).logits, expected(ids).logits)


def test_nothing_is_printed_where_there_is_no_terminal(folders, capfd):
    """A progress bar writes a line per step into a log."""
    load(str(folders("llama")), device="cpu")
    assert capfd.readouterr() == ("", "")


OFFLINE = """
import sys, time
from gna_utils import load, GnaError, info
start = time.perf_counter()
try:
    print("loaded", info(load(sys.argv[1], device="cpu")).sha256)
except GnaError as error:
    print("refused", error)
print("seconds", time.perf_counter() - start)
"""


def offline(name: str, cache) -> str:
    """Load in a process for which the hub is a port where nobody listens."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(cache),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, name], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_named_at_once(tmp_path):
    """transformers by itself retries for half a minute per file."""
    said = offline("org/nowhere", tmp_path)
    assert said.startswith(
        "refused the hub model 'org/nowhere' is not on this machine and the hub cannot be reached"
    )
    assert float(re.search(r"seconds (\S+)", said)[1]) < 20


@pytest.mark.slow
def test_a_hub_model_in_the_local_cache_loads_without_the_hub(tmp_path, folders):
    revision = "0" * 40
    home = tmp_path / "hub" / "models--org--here"
    shutil.copytree(folders("llama"), home / "snapshots" / revision)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    sha = weights.file_sha256(folders("llama") / "model.safetensors")
    assert offline("org/here", tmp_path).startswith(f"loaded {sha}")
