"""Trained models put where they are found by name, with the records of all runs."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from training_runs import record, weights

from gna_utils.errors import GnaError
from gna_utils.models import load
from gna_utils.training import saving, train


def test_ship_copies_records_and_renews_hashes(finished, tmp_path):
    other = train("tiny-transformer", seed=1, out=tmp_path / "other")
    home = tmp_path / "models"
    (home / "kept").mkdir(parents=True)
    (home / "kept" / "config.json").write_text("{}")
    folder = saving.ship("tiny-transformer", [other, finished], home=home)
    assert folder == home / "tiny-transformer" and weights(folder) == weights(finished)
    content = record(folder)
    (another,) = content.pop("other_runs")
    assert content == record(finished)
    assert another == {k: v for k, v in record(other).items() if k != "first_losses"}
    assert "| key_value | 2 |" in (folder / "README.md").read_text(encoding="utf-8")
    hashes = json.loads((home / "manifest.json").read_text(encoding="utf-8"))
    files = [path for path in home.glob("*/*") if path.is_file()]
    assert hashes == {
        path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }
    assert "kept/config.json" in hashes and not list(folder.glob("*.pt"))
    ids = torch.tensor([[1, 5, 6]])
    assert torch.equal(load(folder)._module(ids).logits, load(finished)._module(ids).logits)


def test_ship_refuses_an_unfinished_run_and_a_missing_seed(finished, tmp_path):
    half = train("tiny-transformer", steps=2, out=tmp_path / "half")
    for runs, seed in (([half], 0), ([finished], 1), ([], 0), ([tmp_path / "begun"], 0)):
        with pytest.raises(GnaError, match=f"no finished run of 'tiny-transformer' with seed {seed}"):
            saving.ship("tiny-transformer", runs, seed=seed, home=tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_ship_refuses_a_run_of_another_model(finished, tmp_path):
    with pytest.raises(GnaError, match="no finished run of 'tiny-mamba2'"):
        saving.ship("tiny-mamba2", [finished], home=tmp_path / "models")
