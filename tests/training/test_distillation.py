"""Students that learn from a teacher, layer by layer and together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from training_runs import interrupted, weights

from gna_utils.errors import GnaError
from gna_utils.models import load
from gna_utils.training import loop, recipes, train
from gna_utils.training.curriculum import Batch, Curriculum
from gna_utils.training.distillation import answers, layer_loss, layer_states, start_student


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


@pytest.mark.parametrize(
    "settings", [{"num_hidden_layers": 3}, {"hidden_size": 32}, {"intermediate_size": 8}]
)
def test_teacher_of_another_size_is_refused(settings, monkeypatch):
    made = recipes.recipe("tiny-transformer")
    other = replace(made, settings={**made.settings, **settings})
    monkeypatch.setitem(recipes.RECIPES, "tiny-transformer", other)
    with pytest.raises(GnaError, match=r"differ at .*: the teacher must be a Llama of the same sizes"):
        start_student(recipes.build("tiny-llamba", 0), recipes.build("tiny-transformer", 0))


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


def test_checkpoint_that_cannot_serve_is_refused(tmp_path, monkeypatch):
    train("tiny-transformer", steps=4, out=tmp_path)
    with pytest.raises(GnaError, match="is at step 4 already: ask for at least as many steps"):
        train("tiny-transformer", steps=2, out=tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(loop.LESSONS, "cloze", replace(loop.LESSONS["cloze"], weight=9.0))
        with pytest.raises(GnaError, match="holds a run with another curriculum"):
            train("tiny-transformer", out=tmp_path)
    file = tmp_path / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(GnaError, match=r"checkpoint.pt' is damaged: start anew with --again"):
        train("tiny-transformer", out=tmp_path)
