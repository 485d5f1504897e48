"""Key-value retrieval and MQAR: what a prompt holds, that seeds alone decide, and what is refused."""

from __future__ import annotations

import random

import bpe
import numpy as np
import pytest
import torch

from gna_utils import GnaError
from gna_utils.tasks import encode, key_value, mqar
from gna_utils.tasks.words import nouns, pool

WAYS = [(wording, query) for wording in ("plain", "paper") for query in ("last", "first")]


def lines(example):
    return [example.prompt[s.start : s.end] for s in example.segments]


def _global_states():
    numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
    return numpy_state, random.getstate(), torch.get_rng_state().tolist()


def test_plain_prompt_letter_by_letter():
    example = key_value(
        1, 2, tokenizer=bpe.build(), keys=["fox", "cat"], values=["sun", "map"], position="last"
    )[0]
    first, second = lines(example)
    assert example.prompt == f"Dictionary:\n{first}{second}\n{second.partition(':')[0]}:"
    assert {first.partition(":")[0], second.partition(":")[0]} == {"fox", "cat"}
    assert example.candidates == tuple(f" {line.split(': ')[1].strip()}" for line in (first, second))


def test_paper_prompt_letter_by_letter():
    example = key_value(1, 3, tokenizer=bpe.build(), wording="paper", values="numbers", position=1)[0]
    key, value = lines(example)[1].strip().split(":")
    expected = "Memorize the following dictionary:\n" + "".join(lines(example))
    assert example.prompt == f"{expected}The value of the key '{key}' is"
    assert example.candidates[example.answer] == f" {value}" and value.isdigit()


@pytest.mark.parametrize(("wording", "query"), WAYS)
@pytest.mark.parametrize("values", ["words", "numbers"])
def test_every_example_can_be_answered_from_its_dictionary(wording, query, values):
    for example in key_value(
        30, 12, tokenizer=bpe.build(), wording=wording, query=query, values=values, seed=5
    ):
        pairs = [line.strip().replace(": ", ":").split(":") for line in lines(example)]
        keys, answers = zip(*pairs)
        assert len(set(keys)) == len(set(answers)) == 12 and not set(keys) & set(answers)
        assert example.candidates == tuple(f" {answer}" for answer in answers)
        named = {name: example.prompt[a:b] for name, (a, b) in example.spans.items()}
        assert named == {
            "key": keys[example.answer],
            "value": answers[example.answer],
            "asked": keys[example.answer],
        }
        start, end = example.segments[example.target][:2]
        assert example.target == example.answer and start <= example.spans["value"][0] < end
        assert all(line.endswith("\n") for line in lines(example))


@pytest.mark.parametrize("wording", ["plain", "paper"])
def test_query_first_names_the_key_before_the_dictionary_only(wording):
    for example in key_value(20, 5, tokenizer=bpe.build(), wording=wording, query="first"):
        key = example.meta["key"]
        assert key in example.prompt[: example.segments[0].start]
        assert key not in example.prompt[example.segments[-1].end :]


def test_same_dictionary_in_every_wording_and_at_every_position():
    """A comparison of wordings or positions is paired only when nothing else changes with them."""
    made = {way: key_value(8, 6, tokenizer=bpe.build(), wording=way[0], query=way[1]) for way in WAYS}
    made |= {place: key_value(8, 6, tokenizer=bpe.build(), position=place) for place in (0, "last", 0.5)}
    dictionaries = [[[s.label for s in example.segments] for example in some] for some in made.values()]
    assert all(dictionary == dictionaries[0] for dictionary in dictionaries)


def test_example_depends_on_seed_and_number_alone():
    tokenizer = bpe.build()
    many = key_value(40, 5, tokenizer=tokenizer, seed=3)
    before = _global_states()
    few = key_value(10, 5, tokenizer=tokenizer, seed=3)
    assert few == many[:10]
    assert key_value(10, 5, tokenizer=tokenizer, seed=4) != few
    assert _global_states() == before
    assert len({example.prompt for example in many}) == 40


def test_queried_position_is_uniform_or_as_asked():
    tokenizer = bpe.build()
    counts = np.bincount([e.answer for e in key_value(600, 4, tokenizer=tokenizer)], minlength=4)
    assert ((counts - 150) ** 2 / 150).sum() < 16.3  # chi-squared, 3 degrees of freedom, p = 0.001
    for position, place in {"first": 0, "last": 8, 3: 3, 0.0: 0, 0.5: 4, 1.0: 8}.items():
        assert {e.answer for e in key_value(5, 9, tokenizer=tokenizer, position=position)} == {place}


@pytest.mark.parametrize(("multi", "fits"), [(False, lambda n: n == 1), (True, lambda n: n > 1)])
def test_words_have_as_many_tokens_as_asked(multi, fits):
    tokenizer = bpe.build()
    for wording, query in WAYS:
        examples = key_value(20, 8, tokenizer=tokenizer, wording=wording, query=query, multi_token=multi)
        for row in encode(examples, tokenizer):
            assert all(fits(len(ids)) for ids in row.candidate_ids)
            assert all(fits(stop - start) for start, stop in row.spans.values())


def test_numbers_all_have_one_length():
    """A sum of log-probabilities would favour the numbers with fewer digits."""
    tokenizer = bpe.build(split_digits=True)
    examples = key_value(20, 30, tokenizer=tokenizer, values="numbers")
    assert {len(ids) for row in encode(examples, tokenizer) for ids in row.candidate_ids} == {3}


def test_too_many_pairs_name_the_size_of_the_pool():
    tokenizer = bpe.build()
    limit = len(pool("numbers", "value", tokenizer))
    assert limit == 90 and len(key_value(1, limit, tokenizer=tokenizer, values="numbers")) == 1
    with pytest.raises(GnaError, match=r"91 pairs .* 90 values: at most 90 pairs"):
        key_value(1, limit + 1, tokenizer=tokenizer, values="numbers")
    with pytest.raises(GnaError, match="at most 2 pairs"):  # three words are left when two are keys
        key_value(1, 3, tokenizer=tokenizer, keys=["a", "b", "c"], values=["a", "b", "c", "d", "e"])


def test_shared_pool_never_runs_out_at_its_limit():
    words = [f"w{i}" for i in range(10)]
    for example in key_value(50, 5, tokenizer=bpe.build(), keys=words, values=words):
        assert len({*example.candidates, *(f" {s.label.split(':')[0]}" for s in example.segments)}) == 10


def test_tokenizer_that_knows_no_word_offers_an_empty_pool(tiny_model):
    with pytest.raises(GnaError, match=r"keys=\[...\] and values=\[...\], or try multi_token=True"):
        key_value(1, 2, tokenizer=tiny_model("llama")[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wording": "fancy"}, "no wording 'fancy'.*plain, paper"),
        ({"query": "middle"}, "query 'middle'.*last, first"),
        ({"values": "letters"}, "unknown values 'letters'.*'words', 'numbers'"),
        ({"position": 5}, "position 5 .* 5 pairs.*0 to 4"),
        ({"position": -1}, "position -1"),
        ({"position": 1.5}, "position 1.5"),
        ({"position": "middle"}, "position 'middle'"),
        ({"n_pairs": 1}, "at least 1 example and 2 pairs"),
        ({"n_examples": 0}, "at least 1 example and 2 pairs"),
    ],
)
def test_bad_options_are_named(options, message):
    call = {"n_examples": 1, "n_pairs": 5, "tokenizer": bpe.build()} | options
    with pytest.raises(GnaError, match=message):
        key_value(**call)


def test_nouns_are_plain_words():
    assert len(nouns()) >= 400 and list(nouns()) == sorted(set(nouns()))
    assert all(word.isascii() and word.isalpha() and word.islower() for word in nouns())


def test_pretrained_pools_reach_forty_pairs(smollm2):
    """The first chapter asks SmolLM2 for up to 40 pairs of single-token words and of numbers."""
    assert len(pool("words", "key", smollm2.tokenizer)) >= 400
    assert len(pool("words", "value", smollm2.tokenizer)) >= 400
    assert len(pool("words", "value", smollm2.tokenizer, multi_token=True)) >= 100
    assert pool("numbers", "value", smollm2.tokenizer) == tuple(str(n) for n in range(10, 100))


# ------------------------------------------------------------------------------------------------ MQAR


@pytest.mark.parametrize("random_filler", [True, False])
def test_mqar_asks_each_key_exactly_once_and_the_label_is_its_value(random_filler):
    """In a small vocabulary random filler hits keys again and again, unless they are left out."""
    data = mqar(200, 4, length=32, vocab_size=24, random_filler=random_filler, seed=1)
    assert data.inputs.shape == data.labels.shape == (200, 32)
    for row, labels in zip(data.inputs, data.labels):
        table = dict(zip(row[0:8:2].tolist(), row[1:8:2].tolist()))
        assert len(table) == 4 and all(1 <= k < 12 <= v < 24 for k, v in table.items())
        asked = np.flatnonzero(labels != -100)
        assert len(asked) == 4 and (asked >= 8).all() and (asked % 2 == 0).all()
        assert {int(row[t]): int(labels[t]) for t in asked} == table
        assert np.isin(row[8:], list(table)).sum() == 4
        rest = np.setdiff1d(np.arange(8, 32), asked)
        assert random_filler or not row[rest].any()
    assert (np.sort(data.queries, axis=1) == np.argwhere(data.labels != -100)[:, 1].reshape(200, 4)).all()


def test_mqar_gaps_follow_the_power_law():
    """With one pair the gap is one draw, so its frequencies are the weights k ** (alpha - 1) themselves."""
    data = mqar(4000, 1, length=18, vocab_size=64, alpha=0.1, seed=2)
    found = np.bincount((data.queries[:, 0] - 2) // 2, minlength=8)
    weights = np.arange(1, 9) ** -0.9
    expected = 4000 * weights / weights.sum()
    assert ((found - expected) ** 2 / expected).sum() < 24.3  # chi-squared, 7 degrees of freedom, p = 0.001


def test_mqar_depends_on_seed_and_number_alone():
    few, many = mqar(5, 3, seed=9), mqar(50, 3, seed=9)
    np.testing.assert_array_equal(few.inputs, many.inputs[:5])
    np.testing.assert_array_equal(few.labels, many.labels[:5])
    assert (mqar(5, 3, seed=10).inputs != few.inputs).any()
    assert few.inputs.shape == (5, 32)  # the smallest power of 2 from 8 tokens per pair on


def test_mqar_text_shows_pairs_and_answers():
    data = mqar(1, 2, length=12, vocab_size=20, seed=4)
    pairs, rest = data.text(0).split(" | ")
    asked = [entry.replace("→", ":") for entry in rest.split() if entry != "."]
    assert sorted(pairs.split()) == sorted(asked) and len(rest.split()) == 8
    assert all(key[0] == "k" and value[0] == "v" for key, value in (pair.split(":") for pair in asked))


@pytest.mark.parametrize(
    "options",
    [{"length": 15}, {"length": 14}, {"n_pairs": 0}, {"n_examples": 0}, {"vocab_size": 8}, {"vocab_size": 2}],
)
def test_mqar_refuses_what_does_not_fit(options):
    with pytest.raises(GnaError, match="pair"):
        mqar(**({"n_examples": 2, "n_pairs": 4, "length": 16} | options))


def test_other_values_and_wordings_leave_the_question_as_it_is():
    """Probes are compared on the same keys and the same question, or the comparison is not paired."""
    probes = [
        key_value(20, 8, tokenizer=bpe.build(), seed=3, **options)
        for options in ({}, {"values": "numbers"}, {"wording": "paper"}, {"query": "first"})
    ]
    asked = [[(e.meta["key"], e.answer) for e in examples] for examples in probes]
    assert all(one == asked[0] for one in asked)
    assert len({place for _, place in asked[0]}) > 3


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, None])
def test_a_seed_is_a_whole_number_from_0_on(seed):
    with pytest.raises(GnaError, match="give a whole number from 0 on"):
        key_value(1, 2, tokenizer=bpe.build(), seed=seed)
    with pytest.raises(GnaError, match="give a whole number from 0 on"):
        mqar(1, 2, seed=seed)


@pytest.mark.parametrize(("n_examples", "n_pairs"), [(1.5, 2), ("a", 2), (0, 2), (1, 2.5), (1, 1)])
def test_numbers_of_examples_and_pairs_are_whole(n_examples, n_pairs):
    with pytest.raises(GnaError, match="at least 1 example and 2 pairs"):
        key_value(n_examples, n_pairs, tokenizer=bpe.build())
