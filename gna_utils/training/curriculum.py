"""What a tiny model is asked at which time: retrieval first, then everything, each task from easy to hard."""

from __future__ import annotations

import random
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
    after: tuple[tuple[str, int], ...] = (("letter", 3),)


LESSONS = {
    "key_value": Lesson(2, 14, 1.0, after=()),
    "cloze": Lesson(2, 4, 2.0, after=(("key_value", 4),)),
    "letter": Lesson(2, 4, 3.0, after=(("key_value", 4),)),
    "dialogue": Lesson(2, 4, 1.5),
    "tracking": Lesson(0, 2, 1.0),
    "arithmetic": Lesson(1, 4, 1.5),
}
REHEARSED = 0.5  # the weight of a task that is mastered
PART = 32  # documents that run together


@dataclass
class Curriculum:
    """The sizes reached so far, and which tasks have begun.

    Started with everything at once, a Transformer stays at chance: it first has to find out how to look a key
    up, and that goes fastest with two pairs and nothing else.
    """

    sizes: dict[str, int] = field(default_factory=lambda: {task: l.first for task, l in LESSONS.items()})
    active: list[str] = field(default_factory=lambda: [task for task, l in LESSONS.items() if not l.after])
    counts: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {task: [] for task in LESSONS})

    @classmethod
    def finished(cls) -> Curriculum:
        """Every task at its largest size, for a student whose teacher has learned them all."""
        return cls({task: lesson.last for task, lesson in LESSONS.items()}, list(LESSONS))

    def draw(self, step: int, seed: int, batch: int, length: int) -> list[Batch]:
        """The documents of one step in parts of similar length; they depend on the seed, the step and the
        sizes reached alone."""
        rng = random.Random(f"{seed}/{step}")
        weights = [REHEARSED if self.mastered(task) else LESSONS[task].weight for task in self.active]
        rows = []
        for task in rng.choices(self.active, weights, k=batch):
            # more documents of large sizes, but small ones are not forgotten
            size = max(rng.randint(LESSONS[task].first, self.sizes[task]) for _ in range(2))
            rows.append((task, *document(task, size, length, rng)))
        rows.sort(key=lambda row: len(row[1]))
        return [Batch.of(rows[k : k + PART]) for k in range(0, len(rows), PART)]

    def note(self, step: int, right: dict[str, list[bool]]) -> None:
        """Count the right answers of a step; where enough are right a task becomes harder, others begin."""
        for task in self.active:
            if mine := right.get(task):
                self.counts[task] = [*self.counts[task][1 - WINDOW :], (sum(mine), len(mine))]
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
    def of(cls, rows: list[tuple[str, list[int], list[bool]]]) -> Batch:
        """From documents: task, token ids, which of them answer."""
        longest = max(len(ids) for _, ids, _ in rows)
        ids = torch.full((len(rows), longest), world.vocabulary()[world.PAD])
        asked = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, (_, tokens, marks) in enumerate(rows):
            ids[i, : len(tokens)], asked[i, : len(marks)] = torch.tensor(tokens), torch.tensor(marks)
        tasks = [task for task, _, _ in rows]
        return cls(tasks, ids, ids != world.vocabulary()[world.PAD], asked, asked.nonzero()[:, 0])
