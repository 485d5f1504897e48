"""The curriculum: tasks from easy to hard, each after those that it needs."""

from __future__ import annotations

import random

import torch

from gna_utils.tasks import world
from gna_utils.training import curriculum
from gna_utils.training.curriculum import LESSONS, PATIENCE, WINDOW, Batch, Curriculum


def answer(found: Curriculum, step: int, share: float = 1.0) -> None:
    """One step in which that share of 20 answers is right in every task."""
    found.note(step, {task: [k < 20 * share for k in range(20)] for task in found.active})


def test_task_becomes_harder_when_answers_are_right_and_not_otherwise():
    good, bad = Curriculum(), Curriculum()
    (task,) = good.active
    for step in range(WINDOW):
        assert good.sizes[task] == bad.sizes[task] == LESSONS[task].first
        answer(good, step), answer(bad, step, 0.85)
    assert good.sizes[task] == LESSONS[task].first + 1 and bad.sizes[task] == LESSONS[task].first
    assert all(good.sizes[other] == LESSONS[other].first for other in LESSONS if other != task)
    answer(good, WINDOW)  # the count starts anew at each size
    assert good.sizes[task] == LESSONS[task].first + 1


def test_early_mistakes_are_forgotten():
    found = Curriculum()
    for step in range(3 * WINDOW):
        answer(found, step, 0.0 if step < 2 * WINDOW else 1.0)
    assert found.sizes["key_value"] == LESSONS["key_value"].first + 1


def test_tasks_begin_after_those_they_need_and_end_at_their_largest_size():
    found = Curriculum()
    assert found.active == ["key_value"]
    for step in range(PATIENCE - 1):
        answer(found, step)
        ready = [t for t, lesson in LESSONS.items() if all(found.sizes[o] >= n for o, n in lesson.after)]
        assert sorted(found.active) == sorted(ready)
    assert found.sizes == Curriculum.finished().sizes == {task: l.last for task, l in LESSONS.items()}
    assert sorted(found.active) == sorted(LESSONS) and all(map(found.mastered, LESSONS))


def test_patience_ends_where_a_model_learns_nothing():
    found = Curriculum()
    answer(found, PATIENCE - 2, 0.0)
    assert len(found.active) == 1
    answer(found, PATIENCE - 1, 0.0)
    assert found.active == list(LESSONS) and found.sizes == Curriculum().sizes


def test_state_survives_a_checkpoint(tmp_path):
    found = Curriculum()
    for step in range(WINDOW + 3):
        answer(found, step)
    torch.save(found.state(), tmp_path / "state")
    again = Curriculum(**torch.load(tmp_path / "state", weights_only=True))
    assert again == found
    for step in range(WINDOW + 3, 8 * WINDOW):
        answer(again, step), answer(found, step)
    assert again == found


def test_documents_of_a_step_depend_on_seed_step_and_sizes_alone():
    def drawn(step, seed):
        return [part.ids.tolist() for part in Curriculum.finished().draw(step, seed, 8, 60)]

    first = drawn(3, 1)
    random.seed(0)
    assert drawn(3, 1) == first and drawn(4, 1) != first and drawn(3, 2) != first


def test_documents_are_of_sizes_reached_and_of_tasks_begun(monkeypatch):
    drawn, make = [], curriculum.document
    monkeypatch.setattr(curriculum, "document", lambda *a: (drawn.append(a[:2]), make(*a))[1])
    found = Curriculum()
    found.sizes["key_value"], found.sizes["cloze"] = 4, 3
    found.active = ["key_value", "cloze"]
    parts = found.draw(0, 0, 60, 60)
    low = LESSONS["key_value"].first, LESSONS["cloze"].first
    expected = {("key_value", n) for n in range(low[0], 5)} | {("cloze", n) for n in range(low[1], 4)}
    assert set(drawn) == expected
    assert sorted(task for part in parts for task in part.tasks) == sorted(task for task, _ in drawn)


def test_parts_hold_documents_of_similar_length(monkeypatch):
    monkeypatch.setattr(curriculum, "PART", 3)
    parts = Curriculum.finished().draw(0, 0, 20, 30)
    lengths = [int(n) for part in parts for n in part.real.sum(1)]
    assert len(lengths) == 20 and lengths == sorted(lengths)
    assert [len(part.tasks) for part in parts] == [3] * 6 + [2]


def test_batch_is_padded_right_and_marks_what_is_real_and_asked():
    batch = Batch.of([("a", [1, 7, 8, 3], [False, False, True, False]), ("b", [1, 9], [False, True])])
    pad = world.vocabulary()[world.PAD]
    assert batch.tasks == ["a", "b"] and batch.ids.tolist() == [[1, 7, 8, 3], [1, 9, pad, pad]]
    assert batch.real.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.asked.nonzero().tolist() == [[0, 2], [1, 1]] and batch.row.tolist() == [0, 1]
