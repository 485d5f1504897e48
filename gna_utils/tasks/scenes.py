"""The tasks of the small world: readable prompts of known words, and the documents that teach them.

A task is a short scene and questions about it. An example shows the scene and one question; a training
document is made of the same scenes with many questions and their answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import GnaError
from . import world
from .encoding import whole
from .example import Example, Segment, generator

SPLITS = ("train", "test")
_FOLDS = 5  # about one combination in five is kept for the test
# Operands are 0 to 49: with fewer numbers a model learns the table of sums by heart instead of adding.
_LARGEST = 50


@dataclass(frozen=True)
class Question:
    """What is asked after a scene: ``text``, then one of ``candidates``; the answer stands in ``line``.

    ``words`` names words of that line whose place is of interest, such as the value of a pair.
    """

    text: str
    candidates: tuple[str, ...]
    answer: int
    line: int | None = None
    words: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Scene:
    """Text before the lines, the lines (each a segment), text after them, and questions about them."""

    questions: tuple[Question, ...]
    lines: tuple[str, ...] = ()
    before: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        return self.before + "".join(self.lines) + self.after


def small_world(
    task: str, n_examples: int, *, size: int | None = None, split: str = "test", seed: int = 0
) -> list[Example]:
    """Make examples of a task of the small world.

    >>> print(small_world("key_value", 1, size=2)[0].prompt)
    >>> small_world("letter", 500)[0].candidates
    (' A', ' B', ' C', ' D')

    ========== ============================================================== ==================== =======
    task       what is asked                                                  ``size``             default
    ========== ============================================================== ==================== =======
    key_value  the number that stands behind a word in a list                 pairs                8
    cloze      a fact of the world, with no help from the prompt              options              4
    letter     the letter of the option that states a fact                    options              4
    arithmetic a number plus one that stands behind a word in a list              pairs                4
    tracking   who has what after some have swapped                           swaps                1
    dialogue   who said what                                                  speakers             4
    ========== ============================================================== ==================== =======

    Four options share their words crosswise, so that no word alone tells which is right; ``letter`` and
    ``cloze`` with the same seed ask for the same facts with the same options. The splits ``"train"`` and
    ``"test"`` of a task never share: pairs of a key and a value; for a fact its wording (``cloze``) or its
    set of options (``letter``); pairs of numbers to be added; sets of things (``tracking``) or of utterances
    (``dialogue``).

    ``arithmetic`` has 99 candidates; the best constant answer is right in 0.02 of the examples, twice chance.

    Example ``i`` depends on ``seed`` and ``i`` alone. Raises :class:`~gna_utils.errors.GnaError` on an
    unknown task or split, and on a size that the world cannot fill.
    """
    scene_of, sizes, usual = _task(task)
    if split not in SPLITS:
        raise GnaError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}.")
    n_examples = whole("n_examples", n_examples, 1)
    size = usual if size is None else whole("size", size, sizes[0])
    if size > sizes[1]:
        raise GnaError(f"size {size} of the task '{task}' is not possible: at most {sizes[1]}.")
    examples = []
    for i in range(n_examples):
        rng = random.Random(int(generator(seed, i).integers(2**63)))
        scene = scene_of(rng, split, size, 1)
        examples.append(_example(task, scene, {"seed": seed, "index": i, "size": size, "split": split}))
    return examples


def tasks() -> tuple[str, ...]:
    """The names of the tasks of the small world."""
    return tuple(_TASKS)


def document(task: str, size: int, length: int, rng: random.Random) -> tuple[list[int], list[bool]]:
    """Token ids of one training document, and which of them answer a question.

    Scenes of the split "train" follow each other until ``length`` tokens are nearly full; the first one is
    kept also when it is longer. Questions are drawn with replacement: without it a model learns to name what
    was not yet asked for.
    """
    vocabulary = world.vocabulary()
    scene_of, _, _ = _task(task)
    ids, asked = [vocabulary[world.BOS]], [False]
    while True:
        part, marks = [], []
        scene = scene_of(rng, "train", size, _QUESTIONS[task])
        for text, is_answer in _pieces(scene):
            words = _words(text)
            part += [vocabulary[word] for word in words]
            marks += [is_answer] * len(words)
        if len(ids) + len(part) > length and len(ids) > 1:
            return ids, asked
        ids, asked = ids + part, asked + marks


def _pieces(scene: Scene):
    yield scene.text, False
    for question in scene.questions:
        yield question.text, False
        yield question.candidates[question.answer], True
        yield "\n", False
    if scene.lines:
        yield "\n", False


def _words(text: str) -> list[str]:
    return [word for line in text.split("\n") for word in (*line.split(), "\n")][:-1]


def _example(task: str, scene: Scene, options: dict) -> Example:
    question = scene.questions[0]
    segments, start = [], len(scene.before)
    for line in scene.lines:
        segments.append(Segment(start, start + len(line), line.rstrip("\n")))
        start += len(line)
    spans = {}
    for name, word in question.words:
        first = segments[question.line].start
        at = first + f" {scene.lines[question.line]}".replace("\n", " ").index(f" {word} ")
        spans[name] = (at, at + len(word))
    return Example(
        task=task,
        prompt=scene.text + question.text,
        candidates=tuple(f" {candidate}" for candidate in question.candidates),
        answer=question.answer,
        segments=tuple(segments),
        target=question.line,
        meta=options,
        spans=spans,
    )


def _key_value(rng: random.Random, split: str, size: int, n_questions: int) -> Scene:
    keys = rng.sample(range(len(world.KEYS)), size)
    values: list[int] = []
    for key in keys:
        free = [v for v in range(100) if v not in values and _held_out(key + v) == (split == "test")]
        values.append(rng.choice(free))
    candidates = tuple(str(value) for value in values)
    questions = []
    for _ in range(n_questions):
        asked = rng.randrange(size)
        key = world.KEYS[keys[asked]]
        words = (("key", key), ("value", candidates[asked]))
        questions.append(Question(key, candidates, asked, asked, words))
    lines = tuple(f"{world.KEYS[key]} {value}\n" for key, value in zip(keys, values))
    return Scene(tuple(questions), lines, after="\n")


def _held_out(number: int) -> bool:
    return number % _FOLDS == 0


def _crossed(
    rng: random.Random, split: str, size: int, firsts: Sequence[str], seconds: Sequence[str]
) -> list[tuple[str, str]]:
    """``size`` pairs of two first and two second words, combined crosswise."""
    while True:
        first, second = rng.sample(range(len(firsts)), 2), rng.sample(range(len(seconds)), 2)
        chosen = rng.sample([(f, s) for f in first for s in second], size)
        # counted over what is shown: two pairs do not tell which four they were taken from
        if _held_out(sum(map(sum, chosen))) == (split == "test"):
            return [(firsts[f], seconds[s]) for f, s in chosen]


def _cloze(rng: random.Random, split: str, size: int, n_questions: int) -> Scene:
    questions = []
    for _ in range(n_questions):
        phrases = _crossed(rng, split, size, world.FIRST_WORDS, world.SECOND_WORDS)
        answer = rng.randrange(size)
        number, relation, entity = world.stated()[phrases[answer]]
        wording = number % len(world.PHRASINGS)  # this one is kept for the test
        if split == "train":
            wording = (wording + 1 + rng.randrange(len(world.PHRASINGS) - 1)) % len(world.PHRASINGS)
        text = world.PHRASINGS[wording].format(r=relation, e=entity)
        questions.append(Question(text, tuple(map(" ".join, phrases)), answer))
    return Scene(tuple(questions))


def _letter(rng: random.Random, split: str, size: int, n_questions: int) -> Scene:
    phrases = _crossed(rng, split, size, world.FIRST_WORDS, world.SECOND_WORDS)
    lines = tuple(f"{letter}. {' '.join(phrase)}\n" for letter, phrase in zip(world.LETTERS, phrases))
    answer = rng.randrange(size)
    _, relation, entity = world.stated()[phrases[answer]]
    words = (("value", f"{world.LETTERS[answer]}."),)
    question = Question("Answer:", world.LETTERS[:size], answer, answer, words)
    return Scene((question,), lines, before=f"Which is the {relation} of {entity}\n")


def _arithmetic(rng: random.Random, split: str, size: int, n_questions: int) -> Scene:
    keys = rng.sample(world.KEYS, size)
    numbers = [rng.randrange(_LARGEST) for _ in keys]
    candidates = tuple(str(total) for total in range(2 * _LARGEST - 1))
    questions = []
    while len(questions) < n_questions:
        asked, more = rng.randrange(size), rng.randrange(_LARGEST)
        if _sum_held_out(numbers[asked], more) == (split == "test"):
            words = (("key", keys[asked]), ("value", str(numbers[asked])))
            text = f"Add {more} to {keys[asked]}"
            questions.append(Question(text, candidates, numbers[asked] + more, asked, words))
    return Scene(tuple(questions), tuple(f"{k} {n}\n" for k, n in zip(keys, numbers)), after="\n")


def _sum_held_out(a: int, b: int) -> bool:
    return _held_out(7 * min(a, b) + 3 * max(a, b) + 1)


def _things(rng: random.Random, split: str, size: int, names: Sequence[str]) -> list[str]:
    """``size`` different names whose numbers add up to what the split allows."""
    while True:
        chosen = rng.sample(range(len(names)), size)
        if _held_out(sum(chosen)) == (split == "test"):
            return [names[k] for k in chosen]


def _tracking(rng: random.Random, split: str, size: int, n_questions: int) -> Scene:
    people = rng.sample(world.PEOPLE, 3)
    things = _things(rng, split, len(people), world.KEYS)
    lines = [f"{person} {thing}\n" for person, thing in zip(people, things)]
    holds = list(range(len(people)))  # person p holds the thing of line holds[p]
    for _ in range(size):
        a, b = rng.sample(range(len(people)), 2)
        holds[a], holds[b] = holds[b], holds[a]
        lines.append(f"{people[a]} swaps {people[b]}\n")
    questions = []
    for _ in range(n_questions):
        p = rng.randrange(len(people))
        words = (("value", things[holds[p]]),)
        questions.append(Question(people[p], tuple(things), holds[p], holds[p], words))
    return Scene(tuple(questions), tuple(lines), after="\n")


def _dialogue(rng: random.Random, split: str, size: int, n_questions: int) -> Scene:
    people = rng.sample(world.PEOPLE, size)
    said = [" ".join(words) for words in _crossed(rng, split, size, world.VERBS, world.KEYS)]
    questions = []
    for _ in range(n_questions):
        who = rng.randrange(size)
        words = (("value", people[who]),)
        questions.append(Question(f"Who said {said[who]}", tuple(people), who, who, words))
    lines = tuple(f"{person} said {words}\n" for person, words in zip(people, said))
    return Scene(tuple(questions), lines, after="\n")


# name: how a scene is made, the smallest and largest size, the usual size
_TASKS: dict[str, tuple[Callable[..., Scene], tuple[int, int], int]] = {
    "key_value": (_key_value, (2, 32), 8),
    "cloze": (_cloze, (2, 4), 4),
    "letter": (_letter, (2, 4), 4),
    "arithmetic": (_arithmetic, (1, 8), 4),
    "tracking": (_tracking, (0, 4), 1),
    "dialogue": (_dialogue, (2, 4), 4),
}
# how many questions a scene of a training document has
_QUESTIONS = {"key_value": 12, "cloze": 4, "letter": 1, "arithmetic": 4, "tracking": 2, "dialogue": 3}


def _task(name: str) -> tuple[Callable[..., Scene], tuple[int, int], int]:
    if name not in _TASKS:
        raise GnaError(f"unknown task {name!r} of the small world: choose one of {', '.join(_TASKS)}.")
    return _TASKS[name]
