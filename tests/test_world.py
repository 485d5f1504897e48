"""The words and facts of the small world, and the tokenizer that reads them."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter

import pytest
from transformers import AutoTokenizer

from gna_utils.tasks import encode_texts, world
from gna_utils.tasks.scenes import small_world, tasks

# Shipped weights have one row per word in this order: a changed word list makes all of them worthless.
VOCABULARY = "84c6e07a6c8a3f475caf0e24fc45960042a61b3f71477814fa8664df6e0a39d5"
FACTS = "366eb000ae3440d4d30c8aad8f8c4952e212d02cd66429289184cdc3e524e165"


@pytest.fixture(scope="module", params=["made", "saved"])
def tokenizer(request, tmp_path_factory):
    if request.param == "made":
        return world.tokenizer()
    folder = tmp_path_factory.mktemp("tokenizer")
    world.tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def sha256(content) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def test_ids_of_words_are_fixed():
    assert sha256(list(world.vocabulary().items())) == VOCABULARY


def test_facts_are_fixed_whatever_was_drawn_before():
    random.seed(1)
    world.facts.cache_clear()
    assert sha256([[*fact, *phrase] for fact, phrase in world.facts().items()]) == FACTS


def test_no_word_has_two_meanings():
    lists = [world.KEYS, world.NUMBERS, world.LETTERS, world.ENTITIES, world.RELATIONS]
    lists += [world.FIRST_WORDS, world.SECOND_WORDS, world.PEOPLE, world.VERBS]
    words = [word for some in lists for word in some]
    assert max(Counter(words).values()) == 1
    assert not set(words) & {word for phrasing in world.PHRASINGS for word in phrasing.split()}
    ids = sorted(world.vocabulary().values())
    assert ids == list(range(len(ids)))  # a word listed twice would leave a gap


def test_each_pair_of_relation_and_entity_has_a_phrase_of_its_own():
    facts = world.facts()
    assert set(facts) == {(r, e) for r in world.RELATIONS for e in world.ENTITIES}
    assert len(set(facts.values())) == len(facts)
    for place, words in enumerate((world.FIRST_WORDS, world.SECOND_WORDS)):
        uses = Counter(phrase[place] for phrase in facts.values())
        assert set(uses) == set(words) and len(set(uses.values())) == 1  # one word alone tells nothing
    assert all(facts[r, e] == phrase for phrase, (_, r, e) in world.stated().items())


@pytest.mark.parametrize("task", tasks())
@pytest.mark.parametrize("split", ["train", "test"])
def test_prompts_come_back_from_their_ids(task, split, tokenizer):
    for example in small_world(task, 20, split=split, seed=3):
        text = example.prompt + example.candidates[example.answer]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.unk_token_id not in ids and tokenizer.pad_token_id not in ids
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
        assert encode_texts([text], tokenizer) == [ids]


def test_saved_tokenizer_is_the_same(tmp_path):
    world.tokenizer().save_pretrained(tmp_path)
    saved, made = AutoTokenizer.from_pretrained(tmp_path), world.tokenizer()
    assert saved.is_fast and saved.get_vocab() == made.get_vocab() == world.vocabulary()
    assert saved.special_tokens_map == made.special_tokens_map
    assert saved.padding_side == made.padding_side == "right"
    assert saved.eos_token is None and saved.model_max_length == made.model_max_length


def test_word_is_one_token_anywhere_and_unknown_words_are_marked(tokenizer):
    v = world.vocabulary()
    start, line, unknown = v[world.BOS], v["\n"], v[world.UNKNOWN]
    assert tokenizer("fox 42\nfox\n\n7")["input_ids"] == [
        start, v["fox"], v["42"], line, v["fox"], line, line, v["7"],
    ]  # fmt: skip
    assert tokenizer("fox zebra 100 Fox")["input_ids"] == [start, v["fox"], unknown, unknown, unknown]


def test_padding_leaves_the_tokens_where_they_are(tokenizer):
    padded = tokenizer(["fox", "fox 42 bell"], padding=True)
    assert padded["attention_mask"] == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert padded["input_ids"][0][2:] == [tokenizer.pad_token_id] * 2


def test_tokenizer_is_nobody_elses():
    """A wrapped model pads left: with one tokenizer for all, so did all later ones."""
    world.tokenizer().padding_side = "left"
    assert world.tokenizer().padding_side == "right"
