"""The models that come with the project: intact, loadable without a network, as accurate as recorded."""

from __future__ import annotations

import json
import shutil

import pytest

from gna_utils.catalogue import registry
from gna_utils.errors import GnaError
from gna_utils.models import info, load
from gna_utils.scoring import score
from gna_utils.tasks import small_world, world
from gna_utils.training import train
from gna_utils.weights import data_dir, file_sha256

HOME = data_dir() / "models"
NAMES = sorted(path.parent.name for path in HOME.glob("*/training.json"))


def record(name: str) -> dict:
    return json.loads((HOME / name / "training.json").read_text(encoding="utf-8"))


def test_hashes_match_the_manifest():
    hashes = json.loads((HOME / "manifest.json").read_text(encoding="utf-8"))
    files = {path.relative_to(HOME).as_posix(): path for path in HOME.glob("*/*") if path.is_file()}
    assert hashes == {name: file_sha256(path) for name, path in files.items()}


@pytest.mark.parametrize("name", NAMES)
def test_model_is_small_and_speaks_the_words_of_the_world(name):
    model = load(name)
    assert (HOME / name / "model.safetensors").stat().st_size < 4e6
    assert info(model).n_parameters == record(name)["parameters"]
    assert model.tokenizer.get_vocab() == world.vocabulary()
    config = json.loads((HOME / name / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["padding_side"] == "right"  # nnsight pads the loaded one on the left


@pytest.mark.parametrize("name", NAMES)
def test_card_tells_the_recorded_accuracies(name):
    card = registry()[name]
    usual = {row["task"]: row["value"] for row in record(name)["accuracies"] if row["usual"]}
    assert card.accuracies == usual and card.cached and card.licence == "MIT"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_recorded_accuracies_are_those_of_the_weights(name):
    """Every example: an accuracy that is off by one example differs."""
    model = load(name)
    for row in record(name)["accuracies"]:
        scores = score(model, small_world(row["task"], row["n"], size=row["size"]))
        assert scores.frame["correct"].mean() == pytest.approx(row["value"], abs=1e-9), row


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_starts_with_the_recorded_losses(name, tmp_path):
    again = json.loads((train(name, steps=2, out=tmp_path) / "training.json").read_text(encoding="utf-8"))
    assert again["first_losses"] == pytest.approx(record(name)["first_losses"][:2], abs=1e-3)


@pytest.mark.parametrize("kept", [100, 400_000])
def test_truncated_weights_are_refused(kept, tmp_path):
    shutil.copytree(HOME / "tiny-transformer", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(GnaError, match="are damaged"):
        load(tmp_path / "cut")
