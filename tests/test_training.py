"""Training runs: repeatable, resumable, taught from easy to hard, and shipped with their records."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gna_utils.errors import GnaError
from gna_utils.models import load
from gna_utils.tasks import world
from gna_utils.training import curriculum as lessons
from gna_utils.training import evaluation, loop, recipes, saving, train
from gna_utils.training.curriculum import Batch, Curriculum
from gna_utils.training.distillation import answers, layer_loss, layer_states, start_student

STEPS = 6
REAL = dict(recipes.RECIPES)
FROM_DATA = [name for name, made in REAL.items() if made.objective == "answers"]
_TINY = {"hidden_size": 16, "num_hidden_layers": 2}
_LLAMBA = {
    **REAL["tiny-llamba"].settings,
    "d_model": 16,
    "n_layer": 2,
    "ssm_cfg": {"n_v_heads": 2, "n_qk_heads": 2, "d_state": 4},
    "mlp_cfg": {"intermediate_size": 24},
}
SETTINGS = {
    "tiny-transformer": {
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        **_TINY,
    },
    "tiny-mamba": {"state_size": 4, **_TINY},
    "tiny-mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 4, "chunk_size": 8, **_TINY},
    "tiny-llamba": _LLAMBA,
    "tiny-llamba-aligned": _LLAMBA,
}


@pytest.fixture(scope="module", autouse=True)
def small_recipes():
    """The recipes with models and runs so small that a run takes a second; 4 examples for an accuracy."""
    with pytest.MonkeyPatch.context() as patch:
        for name, settings in SETTINGS.items():
            made = replace(REAL[name], settings=settings, steps=STEPS, batch=4, length=30, warm_up=2)
            patch.setitem(recipes.RECIPES, name, made)
        patch.setattr(loop, "EVERY", 2)
        patch.setattr(lessons, "PART", 3)  # so that the 4 documents of a step are two parts
        patch.setattr(evaluation, "SIZES", {"key_value": (2,), "letter": (2,), "cloze": (2,)})
        measure, measure_all = loop.held_out, saving.evaluate
        patch.setattr(loop, "held_out", lambda model, **options: measure(model, **options | {"n": 4}))
        patch.setattr(saving, "evaluate", lambda model: measure_all(model, n=4))
        yield


@pytest.fixture(scope="module")
def finished(small_recipes, tmp_path_factory) -> Path:
    return train("tiny-transformer", out=tmp_path_factory.mktemp("runs") / "finished")


def record(folder: Path) -> dict:
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def without_seconds(content):
    if isinstance(content, dict):
        return {key: without_seconds(value) for key, value in content.items() if key != "seconds"}
    return [without_seconds(value) for value in content] if isinstance(content, list) else content


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def interrupted(step: int, *args, **options) -> None:
    """A run that is stopped before ``step``, as by Ctrl-C."""
    step_of_run = loop.Run.step

    def step_or_stop(run):
        if run.progress.step == step:
            raise KeyboardInterrupt
        return step_of_run(run)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Run, "step", step_or_stop)
        train(*args, **options)


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
        ({"rate": float("nan")}, "learning rate of nan"),
        ({"seed": -1}, "seed=-1 is not possible"),
        ({"seed": 0.5}, "seed=0.5 is not possible"),
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
    with pytest.raises(GnaError, match=r"run of other settings .*another folder, or start anew with --again"):
        train(**first | options)
    assert weights(tmp_path) == before
    train(**first | options, again=True)
    assert weights(tmp_path) != before


# ------------------------------------------------------------------------------------------ distillation


@pytest.fixture
def pair():
    """A student that shares everything with its teacher but the mixers."""
    teacher, student = recipes.build("tiny-transformer", 1), recipes.build("tiny-llamba", 0)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(4)  # so that layers change their input by much
    start_student(student, teacher)
    (batch,) = Curriculum().draw(0, 0, 3, 30)
    return student, teacher, batch


@torch.no_grad()
def silence(*modules: torch.nn.Module) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.zero_()


def test_student_starts_with_what_the_teacher_has(pair):
    """With both kinds of mixer silent the two models are one and the same."""
    student, teacher, batch = pair
    silence(*(layer.mixer.out_proj for layer in student.backbone.layers))
    silence(*(layer.self_attn.o_proj for layer in teacher.model.layers))
    torch.testing.assert_close(student(batch.ids).logits, teacher(batch.ids).logits)


@torch.no_grad()
def test_layer_loss_is_0_for_equal_layers_and_1_for_layers_that_add_nothing(pair):
    student, teacher, batch = pair
    silence(*(layer.mixer.out_proj for layer in student.backbone.layers))
    assert float(layer_loss(student, teacher, batch)) > 0.001
    silence(*(layer.self_attn.o_proj for layer in teacher.model.layers))
    assert float(layer_loss(student, teacher, batch)) < 1e-10
    silence(*(layer.mlp.down_proj for layer in student.backbone.layers))
    assert float(layer_loss(student, teacher, batch)) == pytest.approx(1, abs=1e-6)


def test_layers_are_given_the_teachers_inputs_only(pair):
    student, teacher, batch = pair
    seen = []
    for layer in student.backbone.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    loss = layer_loss(student, teacher, batch)
    expected = teacher.model(batch.ids, output_hidden_states=True).hidden_states[:-1]
    assert len(seen) == len(expected) == 2
    for a, b in zip(seen, expected):
        torch.testing.assert_close(a, b)
        assert not a.requires_grad
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_what_layers_write_is_what_the_next_one_reads(pair):
    _, teacher, batch = pair
    states = layer_states(teacher, batch)
    final = teacher.model(batch.ids).last_hidden_state
    torch.testing.assert_close(teacher.model.norm(states[-1]), final)
    assert len(layer_states(teacher, batch)) == len(states) == 3  # no hook was left behind


def test_padding_does_not_count(pair):
    student, teacher, batch = pair
    padded = (F.pad(marks, (0, 9)) for marks in (batch.ids, batch.real, batch.asked))
    wide = Batch(batch.tasks, *padded, batch.row)
    torch.testing.assert_close(layer_loss(student, teacher, wide), layer_loss(student, teacher, batch))
    for model in (student, teacher):
        for a, b in zip(answers(model, wide), answers(model, batch)):
            torch.testing.assert_close(a, b)


def test_teacher_of_another_kind_is_refused():
    with pytest.raises(GnaError, match=r"the teacher has no weights for .*must be a Llama of the same sizes"):
        start_student(recipes.build("tiny-llamba", 0), recipes.build("tiny-mamba2", 0))


def test_students_are_trained_from_their_teacher_and_start(finished, tmp_path, monkeypatch):
    for name in ("tiny-llamba", "tiny-llamba-aligned"):
        made = replace(recipes.RECIPES[name], teacher=str(finished), start=str(tmp_path / "layers"))
        monkeypatch.setitem(recipes.RECIPES, name, made)
    train("tiny-llamba", out=tmp_path / "layers")
    interrupted(3, "tiny-llamba", out=tmp_path / "parts")
    assert weights(train("tiny-llamba", out=tmp_path / "parts")) == weights(tmp_path / "layers")
    aligned = recipes.recipe("tiny-llamba-aligned")
    run = loop.LogitRun("tiny-llamba-aligned", aligned, 0, aligned.rate, tmp_path / "aligned")
    start = load(tmp_path / "layers")._module.state_dict()
    assert all(torch.equal(value, start[name]) for name, value in run.model.state_dict().items())
    assert load(train("tiny-llamba-aligned", steps=2, out=tmp_path / "aligned"))._module.config.d_model == 16


# ---------------------------------------------------------------------------------------------- shipping


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
    for runs, seed in (([half], 0), ([finished], 1), ([], 0)):
        with pytest.raises(GnaError, match=f"no finished run of 'tiny-transformer' with seed {seed}"):
            saving.ship("tiny-transformer", runs, seed=seed, home=tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_ship_refuses_a_run_of_another_model(finished, tmp_path):
    with pytest.raises(GnaError, match="no finished run of 'tiny-mamba2'"):
        saving.ship("tiny-mamba2", [finished], home=tmp_path / "models")
