"""What a tiny model is asked at which time: retrieval first, then everything, each task from easy to hard."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch
from torch import BoolTensor, LongTensor

from ..tasks import world
from ..tasks.scenes import document

PATIENCE = 1500  # steps after which every task begins in any case
PASSED = 0.9
WINDOW = 10  # steps over which answers are counted before a task becomes harder


@dataclass(frozen=True)
class Lesson:
    """How one task is taught: from which size to which, how often, and after which sizes of which tasks."""

    first: int
    last: int
    weight: float
    after: tuple[tuple[str, int], ...] = (("key_value", 5),)


LESSONS = {
    "key_value": Lesson(2, 14, 1.0, after=()),
    "cloze": Lesson(2, 4, 3.0),
    "arithmetic": Lesson(1, 4, 2.0),
    "tracking": Lesson(0, 2, 1.5),
    "dialogue": Lesson(2, 4, 2.0),
    # who cannot recall a fact cannot find it among options
    "letter": Lesson(2, 4, 4.0, after=(("cloze", 3),)),
}
REHEARSED = 0.5  # the weight of a task that is mastered


@dataclass
class Curriculum:
    """The sizes reached so far, and which tasks have begun.

    Started with everything at once, a Transformer stays at chance: it must first find out how to look a key
    up, with two pairs only, and can then learn the rest.
    """

    sizes: dict[str, int] = field(default_factory=lambda: {task: l.first for task, l in LESSONS.items()})
    active: list[str] = field(default_factory=lambda: [task for task, l in LESSONS.items() if not l.after])
    counts: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {task: [] for task in LESSONS})

    @classmethod
    def finished(cls) -> Curriculum:
        """Every task at its largest size, for a student whose teacher has learned them all."""
        return cls({task: lesson.last for task, lesson in LESSONS.items()}, list(LESSONS))

    def draw(self, step: int, seed: int, batch: int, length: int) -> Batch:
        """The documents of one step; they depend on the seed, the step and the sizes reached alone."""
        rng = random.Random(f"{seed}/{step}")
        weights = [REHEARSED if self.mastered(task) else LESSONS[task].weight for task in self.active]
        names, rows = rng.choices(self.active, weights, k=batch), []
        for task in names:
            # half of the documents are of the largest size, so that small ones are not forgotten
            size = max(rng.randint(LESSONS[task].first, self.sizes[task]) for _ in range(2))
            rows.append(document(task, size, length, rng))
        return Batch.of(names, rows)

    def note(self, step: int, batch: Batch, right: BoolTensor) -> None:
        """Count right answers; where enough are right the task becomes harder, and others begin."""
        for task in self.active:
            mine = right[torch.tensor([name == task for name in batch.tasks])[batch.row]]
            if len(mine):
                self.counts[task] = [*self.counts[task][1 - WINDOW :], (int(mine.sum()), len(mine))]
            passed = len(self.counts[task]) >= WINDOW and self.share(task) > PASSED
            if passed and self.sizes[task] < LESSONS[task].last:
                self.sizes[task] += 1
                self.counts[task] = []
        for task, lesson in LESSONS.items():
            ready = all(self.sizes[other] >= size for other, size in lesson.after)
            if task not in self.active and (ready or step + 1 >= PATIENCE):
                self.active.append(task)

    def mastered(self, task: str) -> bool:
        """Whether the model does a task so well that others may have its place."""
        return self.sizes[task] == LESSONS[task].last and self.share(task) > PASSED

    def share(self, task: str) -> float:
        """The share of right answers among the latest."""
        counts = self.counts[task]
        return sum(good for good, _ in counts) / max(sum(n for _, n in counts), 1)

    def state(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Batch:
    """Documents side by side, padded on the right.

    ``real`` marks tokens that are no padding, ``asked`` those that answer; ``row`` says in which document
    each answer stands.
    """

    tasks: list[str]
    ids: LongTensor
    real: BoolTensor
    asked: BoolTensor
    row: LongTensor

    @classmethod
    def of(cls, tasks: list[str], rows: Iterable[tuple[list[int], list[bool]]]) -> Batch:
        rows = list(rows)
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), world.vocabulary()[world.PAD])
        asked = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, (tokens, marks) in enumerate(rows):
            ids[i, : len(tokens)], asked[i, : len(marks)] = torch.tensor(tokens), torch.tensor(marks)
        return cls(tasks, ids, ids != world.vocabulary()[world.PAD], asked, asked.nonzero()[:, 0])
