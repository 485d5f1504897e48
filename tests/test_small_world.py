"""The tasks of the small world: right answers, no leaks, no shortcuts, exact training documents."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from gna_utils.errors import GnaError
from gna_utils.tasks import encode, world
from gna_utils.tasks.scenes import document, small_world, tasks

SIZES = {
    "key_value": (2, 8, 32),
    "cloze": (2, 3, 4),
    "letter": (2, 3, 4),
    "arithmetic": (1, 4, 8),
    "tracking": (0, 1, 4),
    "dialogue": (2, 3, 4),
}
CASES = [(task, size) for task, sizes in SIZES.items() for size in sizes]
SPLITS = ("train", "test")
TOKENIZER = world.tokenizer()
N = 150
FACTS = {" ".join(phrase): fact for fact, phrase in world.facts().items()}


def documents(task: str, size: int, n: int = 60, length: int = 120) -> list[tuple[list[int], list[bool]]]:
    rng = random.Random(5)
    return [document(task, size, length, rng) for _ in range(n)]


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def parts(example) -> tuple[list[str], str]:
    """The lines of a prompt that are segments, and what is left: the question."""
    lines, rest = [], example.prompt
    for start, end, _ in reversed(example.segments):
        lines.insert(0, rest[start:end].removesuffix("\n"))
        rest = rest[:start] + rest[end:]
    return lines, " ".join(rest.split())


def scenes(task: str, size: int, **options) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Lines, and questions with their answers, of all scenes of some training documents."""
    texts = [text_of(ids).rstrip("\n") for ids, _ in documents(task, size, **options)]
    if task == "cloze":
        return [([], [asked(line, words=2) for line in text.split("\n")]) for text in texts]
    blocks = [block.split("\n") for text in texts for block in text.split("\n\n")]
    if task == "letter":  # question, options, answer
        return [(block[1:-1], [asked(f"{block[0]} {block[-1]}")]) for block in blocks]
    return [(lines, list(map(asked, below))) for lines, below in zip(blocks[::2], blocks[1::2])]


def asked(line: str, words: int = 1) -> tuple[str, str]:
    question = line.rsplit(maxsplit=words)[0]
    return question, line[len(question) + 1 :]


def solve(task: str, lines: list[str], question: str) -> str:
    """The answer, read from the text alone."""
    said = [line.split(maxsplit=1) for line in lines]
    words = question.split()
    if task == "key_value":
        return dict(said)[question]
    if task == "arithmetic":
        assert words[0::2] == ["Add", "to"]
        return str(int(words[1]) + int(dict(said)[words[3]]))
    if task == "dialogue":
        assert question.startswith("Who ")
        (who,) = [person for person, rest in said if question == f"Who {rest}"]
        return who
    if task == "tracking":
        has = {}
        for person, rest in said:
            if rest.startswith("swaps "):
                other = rest.split()[1]
                has[person], has[other] = has[other], has[person]
            else:
                has[person] = rest
        return has[question]
    relation = next(word for word in words if word in world.RELATIONS)
    entity = next(word for word in words if word in world.ENTITIES)
    phrase = " ".join(world.facts()[relation, entity])
    return phrase if task == "cloze" else next(letter[0] for letter, option in said if option == phrase)


def options(example) -> tuple[str, ...]:
    """What the answer is chosen from, in order: candidates, or the phrases behind the letters."""
    if example.task == "letter":
        return tuple(segment.label[3:] for segment in example.segments)
    return tuple(candidate[1:] for candidate in example.candidates)


# ---------------------------------------------------------------------------------------- right answers


@pytest.mark.parametrize(("task", "size"), CASES)
@pytest.mark.parametrize("split", SPLITS)
def test_answer_is_what_the_text_says(task, size, split):
    for example in small_world(task, N, size=size, split=split):
        assert solve(task, *parts(example)) == example.candidates[example.answer][1:]
        assert len(set(example.candidates)) == len(example.candidates)


@pytest.mark.parametrize(("task", "size"), CASES)
def test_documents_answer_every_question_rightly(task, size):
    found = scenes(task, size, n=10)
    assert found
    for lines, questions in found:
        for question, answer in questions:
            assert solve(task, lines, question) == answer


def test_letter_and_cloze_ask_for_the_same_facts():
    for size in (2, 3, 4):
        pairs = zip(small_world("letter", 50, size=size), small_world("cloze", 50, size=size))
        for letter, cloze in pairs:
            assert options(letter) == options(cloze) and letter.answer == cloze.answer


# ------------------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize("task", tasks())
def test_example_depends_on_seed_and_number_alone(task):
    many = small_world(task, 30, seed=3)
    random.seed(8), np.random.seed(8), torch.manual_seed(8)  # noqa: NPY002
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002
    assert small_world(task, 10, seed=3) == many[:10]
    assert small_world(task, 10, seed=4) != many[:10]
    document(task, 2, 60, random.Random(0))
    assert before == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
    assert len({example.prompt for example in many}) > 25


@pytest.mark.parametrize("task", tasks())
def test_document_depends_on_its_generator_alone(task):
    first = document(task, 2, 60, random.Random("1/7"))
    random.seed(8)
    assert document(task, 2, 60, random.Random("1/7")) == first != document(task, 2, 60, random.Random("1/8"))


# ------------------------------------------------------------------------------------------------ leaks


def shown(task: str, lines: list[str], questions: list[str]) -> set:
    """What may not occur in both splits, for one scene."""
    said = [line.split(maxsplit=1) for line in lines]
    if task == "key_value":
        return {tuple(pair) for pair in said}
    if task == "cloze":
        return set(questions)
    if task == "arithmetic":
        numbers, sums = dict(said), [question.split() for question in questions]
        return {frozenset(map(int, (words[1], numbers[words[3]]))) for words in sums}
    return {frozenset(rest for _, rest in said if not rest.startswith("swaps "))}


@pytest.mark.parametrize("task", tasks())
def test_splits_share_nothing(task):
    """A set of two options was in both splits, because two that were not shown decided (size 2)."""
    found = defaultdict(set)
    for size in SIZES[task]:
        for split in SPLITS:
            for example in small_world(task, N, size=size, split=split):
                lines, question = parts(example)
                found[split] |= shown(task, lines, [question])
        for lines, questions in scenes(task, size):
            found["documents"] |= shown(task, lines, [question for question, _ in questions])
    assert min(map(len, found.values())) > N / 2
    assert not found["test"] & (found["train"] | found["documents"])


def test_every_fact_is_taught_in_every_wording_but_the_one_of_its_test():
    taught, tested = defaultdict(set), defaultdict(set)
    for _, questions in scenes("cloze", 4, n=150, length=400):
        for question, _ in questions:
            note(taught, question)
    for example in small_world("cloze", 2500):
        note(tested, example.prompt)
    assert set(tested) == set(taught) == set(world.facts())
    for fact, wordings in tested.items():
        assert len(wordings) == 1 and len(wordings | taught[fact]) == len(world.PHRASINGS)


def note(found: dict[tuple[str, ...], set[str]], text: str) -> None:
    fact = tuple(next(w for w in text.split() if w in some) for some in (world.RELATIONS, world.ENTITIES))
    found[fact].add(text.replace(fact[0], "r").replace(fact[1], "e"))


# -------------------------------------------------------------------------------------------- shortcuts


@pytest.mark.parametrize(("task", "size"), [case for case in CASES if case[0] != "arithmetic"])
def test_every_place_holds_the_answer_equally_often(task, size):
    examples = small_world(task, 600, size=size)
    places = len(examples[0].candidates)
    counts = np.bincount([example.answer for example in examples], minlength=places)
    expected = len(examples) / places
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < places - 1 + 4 * (2 * (places - 1)) ** 0.5 + 4


@pytest.mark.parametrize("task", tasks())
def test_no_constant_answer_helps(task):
    examples = small_world(task, 1000)
    answers = Counter(example.candidates[example.answer] for example in examples)
    chance = np.mean([1 / len(example.candidates) for example in examples])
    # sums are not spread evenly: 49 is the sum of 50 of the 2500 pairs of numbers
    chance = 1 / 50 if task == "arithmetic" else chance
    assert answers.most_common(1)[0][1] / len(examples) < chance + 4 * (chance / len(examples)) ** 0.5


def _word_counts(options):
    return Counter(word for option in options for word in option.split())


def _overlap(option, options):
    return sum(_word_counts(options)[word] for word in option.split())


OPTION_RULES = {
    "hub": lambda option, options: _overlap(option, options),
    "odd one out": lambda option, options: -_overlap(option, options),
    "most frequent first word": lambda option, options: _word_counts(options)[option.split()[0]],
    "most frequent last word": lambda option, options: _word_counts(options)[option.split()[-1]],
    "first in the alphabet": lambda option, options: -sorted(options).index(option),
    "first fact of the world": lambda option, options: -list(FACTS).index(option),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("task", ["letter", "cloze"])
@pytest.mark.parametrize("rule", OPTION_RULES)
def test_options_alone_do_not_give_the_answer_away(task, size, rule):
    """With three options that all share a word with the answer, the answer was the one in the middle."""
    expected = []
    for example in small_world(task, 1000, size=size, split="train", seed=2):
        names = options(example)
        ranks = [OPTION_RULES[rule](name, names) for name in names]
        best = [k for k, rank in enumerate(ranks) if rank == max(ranks)]
        expected.append((example.answer in best) / len(best))
    deviation = 4 * (1 / size * (1 - 1 / size) / len(expected)) ** 0.5
    assert abs(np.mean(expected) - 1 / size) < deviation


def test_four_options_share_their_words_crosswise():
    for example in small_world("letter", 50):
        first, second = zip(*(option.split() for option in options(example)))
        assert {*Counter(first).values(), *Counter(second).values()} == {2}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_values_not_said_yet_are_not_the_better_guess(size):
    """Asked for each key once, models learned to name a value that had not been said: 0.52 at 4 pairs."""
    expected = []
    for lines, questions in scenes("key_value", size):
        unsaid = {line.split()[1] for line in lines}
        for _, answer in questions:
            if unsaid:
                expected.append((answer in unsaid) / len(unsaid))
            unsaid.discard(answer)
    deviation = np.std(expected) / len(expected) ** 0.5
    assert abs(np.mean(expected) - 1 / size) < 4 * deviation


# ---------------------------------------------------------------------------------- documents and places


@pytest.mark.parametrize(("task", "size"), CASES)
def test_document_ids_are_those_of_its_text(task, size):
    for ids, _ in documents(task, size, n=10):
        assert TOKENIZER(text_of(ids))["input_ids"] == ids


@pytest.mark.parametrize(("task", "size"), CASES)
def test_marks_are_on_the_answers_and_nothing_else(task, size):
    """An answer ends every line of a cloze document, every "Answer:", and every line below a blank one."""
    for ids, marks in documents(task, size, n=10):
        expected, below = [False], task == "cloze"
        for line in text_of(ids).split("\n")[:-1]:
            words = line.split()
            n_answer = 2 if task == "cloze" else 1
            answers = words and (words[0] == "Answer:" if task == "letter" else below)
            n_answer = n_answer if answers else 0
            expected += [False] * (len(words) - n_answer) + [True] * n_answer + [False]
            below = below if words or task == "cloze" else not below
        assert marks == expected


@pytest.mark.parametrize(("task", "size"), CASES)
def test_document_fills_its_length_and_keeps_to_it(task, size):
    one = max(len(ids) for ids, _ in documents(task, size, length=1))  # one scene, whatever its length
    for ids, marks in documents(task, size, length=3 * one):
        assert 2 * one < len(ids) <= 3 * one and any(marks)


@pytest.mark.parametrize(("task", "size"), CASES)
def test_encoded_places_hold_what_their_names_say(task, size):
    examples, tokenizer = small_world(task, 20, size=size), TOKENIZER
    for example, row in zip(examples, encode(examples, tokenizer)):
        words = tokenizer.convert_ids_to_tokens(row.input_ids)
        lines = [line for line in example.prompt.split("\n")[:-1] if line and line[:5] != "Which"]
        assert [words[a:b] for a, b in row.segments] == [[*line.split(), "\n"] for line in lines]
        assert all(words[at] == "\n" for at in row.summary) and len(row.summary) == len(lines)
        assert row.query == len(words) - 1 and words[-1] == example.prompt.split()[-1]
        assert [tokenizer.convert_ids_to_tokens(list(ids)) for ids in row.candidate_ids] == [
            candidate.split() for candidate in example.candidates
        ]
        named = {name: words[a:b] for name, (a, b) in row.spans.items()}
        assert named == _spans(task, lines, example)
        if lines:
            start, stop = row.segments[row.target]
            assert all(start <= a < b <= stop for a, b in row.spans.values())


def _spans(task: str, lines: list[str], example) -> dict[str, list[str]]:
    answer, key = example.candidates[example.answer][1:], example.prompt.split()[-1]
    if task == "arithmetic":
        return {"key": [key], "value": [dict(line.split() for line in lines)[key]]}
    return {
        "key_value": {"key": [key], "value": [answer]},
        "cloze": {},
        "letter": {"value": [f"{answer}."]},
    }.get(task, {"value": [answer]})


# ----------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chess"}, "unknown task 'chess' of the small world: choose one of key_value, cloze"),
        ({"split": "dev"}, "unknown split 'dev': choose one of train, test"),
        ({"split": None}, "unknown split None"),
        ({"n_examples": 0}, "n_examples=0 is not possible: give a whole number, at least 1"),
        ({"n_examples": 1.5}, "n_examples=1.5 is not possible"),
        ({"size": 2.5}, "size=2.5 is not possible: give a whole number, at least 2"),
        ({"seed": -1}, "seed -1 is not possible: give a whole number from 0 on"),
        ({"seed": 1.5}, "seed 1.5 is not possible"),
        ({"seed": True}, "seed True is not possible"),
        ({"seed": None}, "seed None is not possible"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(GnaError, match=message):
        small_world(**({"task": "key_value", "n_examples": 2} | options))


@pytest.mark.parametrize("task", tasks())
def test_size_beyond_the_world_is_refused(task):
    low, high = SIZES[task][0], SIZES[task][-1]
    with pytest.raises(GnaError, match=f"at least {low}"):
        small_world(task, 1, size=low - 1)
    with pytest.raises(
        GnaError, match=f"size {high + 1} of the task '{task}' is not possible: at most {high}"
    ):
        small_world(task, 1, size=high + 1)


def test_unknown_task_of_a_document_is_refused():
    with pytest.raises(GnaError, match="unknown task 'chess'"):
        document("chess", 2, 60, random.Random(0))
