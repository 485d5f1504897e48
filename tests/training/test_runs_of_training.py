"""Training runs: repeatable, resumable, refused where they cannot go on."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from training_runs import REAL, STEPS, interrupted, record, weights, without_seconds

from gna_utils.errors import GnaError
from gna_utils.models import load
from gna_utils.tasks import world
from gna_utils.training import loop, recipes, train
from gna_utils.training.curriculum import Curriculum

# ----------------------------------------------------------------------------------------------- recipes


def built_for_real(name: str, seed: int = 0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipes.RECIPES, name, REAL[name])
        return recipes.build(name, seed)


@pytest.mark.parametrize("name", REAL)
def test_models_are_of_one_size_and_small(name):
    size, first = (sum(p.numel() for p in built_for_real(n).parameters()) for n in (name, "tiny-transformer"))
    assert abs(size / first - 1) < 0.15
    assert 4 * size < 4e6  # bytes


def test_first_weights_depend_on_the_seed_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = recipes.build("tiny-mamba2", 5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    again, other = (recipes.build("tiny-mamba2", seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_rate_rises_stays_and_falls():
    made = replace(REAL["tiny-transformer"], warm_up=100, steps=1000)
    expected = {0: 0.01, 49: 0.5, 99: 1, 100: 1, 750: 1, 875: 0.5, 990: 0.05, 999: 0.05}
    assert {step: loop.share_of_rate(step, made) for step in expected} == pytest.approx(expected)
    shares = [loop.share_of_rate(step, made) for step in range(1000)]
    assert max(shares) == 1 and max(abs(a - b) for a, b in pairwise(shares)) < 0.0101


# -------------------------------------------------------------------------------------------------- runs


def test_same_seed_gives_the_same_losses_whatever_was_drawn_before(finished, tmp_path):
    random.seed(9), torch.manual_seed(9)
    before = random.getstate(), torch.get_rng_state()
    again = train("tiny-transformer", steps=3, out=tmp_path / "again")
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    other = train("tiny-transformer", steps=3, seed=1, out=tmp_path / "other")
    losses = record(finished)["first_losses"]
    assert len(losses) == STEPS and record(again)["first_losses"] == losses[:3]
    assert record(other)["first_losses"] != losses[:3]


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_stopped_run_ends_as_one_in_one_go(finished, tmp_path, stop):
    """Stopped before the first checkpoint, right after one, and between two."""
    interrupted(stop, "tiny-transformer", out=tmp_path)
    assert not (tmp_path / "training.json").exists()
    assert train("tiny-transformer", out=tmp_path) == tmp_path
    assert weights(tmp_path) == weights(finished)
    assert without_seconds(record(tmp_path)) == without_seconds(record(finished))


def test_run_asked_for_in_two_parts_has_the_record_of_one(finished, tmp_path):
    train("tiny-transformer", steps=3, out=tmp_path)
    train("tiny-transformer", out=tmp_path)
    assert without_seconds(record(tmp_path)) == without_seconds(record(finished))


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-mamba2"])
def test_stopped_recurrent_run_ends_as_one_in_one_go(tmp_path, name):
    whole = train(name, steps=4, out=tmp_path / "whole")
    interrupted(3, name, steps=4, out=tmp_path / "parts")
    assert weights(train(name, steps=4, out=tmp_path / "parts")) == weights(whole)


def test_shorter_run_is_the_start_of_the_full_one(finished, tmp_path):
    train("tiny-transformer", steps=4, out=tmp_path)
    short, full = record(tmp_path), record(finished)
    assert short["first_losses"] == full["first_losses"][:4]
    assert without_seconds(short["curve"]) == without_seconds(full["curve"][:2])
    assert (short["steps"], short["planned_steps"]) == (4, STEPS) and "accuracies" not in short
    train("tiny-transformer", out=tmp_path)
    assert weights(tmp_path) == weights(finished)


def test_record_says_what_was_done(finished):
    found = record(finished)
    model = load(finished)._module
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert (found["name"], found["seed"], found["rate"]) == ("tiny-transformer", 0, REAL[found["name"]].rate)
    assert [point["step"] for point in found["curve"]] == [2, 4, 6]
    losses = found["first_losses"]
    means = [sum(losses[k : k + 2]) / 2 for k in (0, 2, 4)]
    assert [point["loss"] for point in found["curve"]] == pytest.approx(means, abs=1e-4)
    assert [(row["task"], row["size"], row["n"]) for row in found["accuracies"]] == [
        ("key_value", 2, 4), ("letter", 2, 4), ("cloze", 2, 4),
    ]  # fmt: skip


def test_loss_of_a_step_is_the_mean_over_its_documents(tmp_path):
    run = loop.Run("tiny-transformer", recipes.recipe("tiny-transformer"), 0, 1e-3, tmp_path)
    run.curriculum = Curriculum.finished()
    parts = run.curriculum.draw(0, 0, 4, 30)
    each = []
    for part in parts:
        logits = run.model(part.ids, use_cache=False).logits.log_softmax(-1).detach()
        for i, row in enumerate(part.ids):
            places = part.asked[i].nonzero()[:, 0].tolist()
            each.append(-sum(float(logits[i, at - 1, row[at]]) for at in places) / len(places))
    assert len(parts) == 2 and len(each) == 4
    assert run.step() == pytest.approx(sum(each) / 4, abs=1e-5)


def test_right_answers_are_counted_by_task(tmp_path, monkeypatch):
    """With a model that is right in the cloze form and always wrong elsewhere."""
    run = loop.Run("tiny-transformer", recipes.recipe("tiny-transformer"), 0, 1e-3, tmp_path)
    expected = {}
    for part in Curriculum.finished().draw(0, 0, 12, 30):
        wanted, tasks = part.ids[part.asked], [part.tasks[row] for row in part.row]
        wrong = torch.tensor([task != "cloze" for task in tasks])
        said = F.one_hot(wanted + wrong, len(world.vocabulary()) + 1).float()
        monkeypatch.setattr(loop, "answers", lambda *_, found=(said, wanted): found)
        run.loss(part)
        for task in tasks:
            expected.setdefault(task, []).append(task == "cloze")
    assert run.right == expected and len(expected) > 3 and "cloze" in expected


def test_training_learns(tmp_path):
    """The gradient goes the right way: a few documents are learned by heart."""
    run = loop.Run("tiny-transformer", recipes.recipe("tiny-transformer"), 0, 1e-2, tmp_path)
    parts = Curriculum().draw(0, 0, 4, 30)
    run.curriculum.draw = lambda *_: parts
    losses = []
    for _ in range(30):
        losses.append(run.step())
        run.progress.step = 2  # past the warm-up
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "tiny-rnn"}, "no recipe for 'tiny-rnn': choose one of tiny-transformer, tiny-mamba"),
        ({"steps": 0}, "steps=0 is not possible"),
        ({"steps": 2.5}, "steps=2.5 is not possible"),
        ({"steps": STEPS + 1}, f"{STEPS + 1} steps .* its recipe has {STEPS}"),
        ({"rate": 0.0}, "learning rate of 0.0 is not possible: give a number between 0 and 1"),
        ({"rate": -0.1}, "learning rate of -0.1"),
        ({"rate": 1.0}, "learning rate of 1.0"),
        ({"rate": "fast"}, "learning rate of 'fast'"),
        ({"rate": float("nan")}, "learning rate of nan"),
        ({"seed": -1}, "seed=-1 is not possible"),
        ({"seed": 0.5}, "seed=0.5 is not possible"),
        ({"seed": True}, "seed=True is not possible"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message, tmp_path):
    with pytest.raises(GnaError, match=message):
        train(**({"name": "tiny-transformer", "out": tmp_path / "run"} | options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [{"seed": 1}, {"rate": 0.015}, {"name": "tiny-mamba2"}])
def test_checkpoint_of_other_settings_is_refused(options, tmp_path):
    first = {"name": "tiny-transformer", "steps": 2, "out": tmp_path}
    train(**first)
    before = weights(tmp_path)
    with pytest.raises(
        GnaError, match=r"holds a run with another .*: give another folder, or start anew with --again"
    ):
        train(**first | options)
    assert weights(tmp_path) == before
    train(**first | options, again=True)
    assert weights(tmp_path) != before
