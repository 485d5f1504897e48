"""The small world: every word, the facts that hold in it, and the tokenizer that reads it.

The tiny models of this book know nothing else. Its facts are invented, so that no model can know them
before it is trained, and each fact is a phrase of two words that other facts use as well, so that one word
alone never gives an answer away.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import TYPE_CHECKING

from ..weights import data_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_WORDS = json.loads((data_dir() / "small_world.json").read_text(encoding="utf-8"))
KEYS, NUMBERS = tuple(_WORDS["keys"]), tuple(str(number) for number in range(100))
LETTERS = tuple(_WORDS["letters"])
ENTITIES, RELATIONS = tuple(_WORDS["entities"]), tuple(_WORDS["relations"])
FIRST_WORDS, SECOND_WORDS = tuple(_WORDS["first_words"]), tuple(_WORDS["second_words"])
PEOPLE, VERBS = tuple(_WORDS["people"]), tuple(_WORDS["verbs"])
PHRASINGS = tuple(_WORDS["phrasings"])
PAD, BOS, UNKNOWN = "<pad>", "<s>", "<unk>"


@cache
def facts() -> dict[tuple[str, str], tuple[str, str]]:
    """Every fact of the small world: (relation, entity) to a phrase of two words; no phrase occurs twice.

    >>> facts()["crest", "Bradan"]
    ('quiet', 'island')
    """
    phrases = [(first, second) for first in FIRST_WORDS for second in SECOND_WORDS]
    # The world is the same for everybody, so this seed is a part of it and not an option.
    random.Random(2504).shuffle(phrases)
    return dict(zip(((r, e) for r in RELATIONS for e in ENTITIES), phrases))


@cache
def stated() -> dict[tuple[str, str], tuple[int, str, str]]:
    """The facts the other way round: phrase to number, relation and entity."""
    return {phrase: (number, *fact) for number, (fact, phrase) in enumerate(facts().items())}


@cache
def vocabulary() -> dict[str, int]:
    """Every token of the small world and its id."""
    words = [
        PAD,
        BOS,
        UNKNOWN,
        "\n",
        *NUMBERS,
        *LETTERS,
        *(f"{letter}." for letter in LETTERS),
        *_WORDS["other_words"],
    ]
    for more in (KEYS, ENTITIES, RELATIONS, FIRST_WORDS, SECOND_WORDS, PEOPLE, VERBS):
        words += more
    return {word: i for i, word in enumerate(words)}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and per newline, with a start token before each text.

    >>> tokenizer().decode(tokenizer()("fox 42\\n\\nfox")["input_ids"], skip_special_tokens=True)
    'fox 42\\n\\nfox'

    Spaces separate words and are no tokens, so a word is the same token at the start of a line and within it.
    Each call makes a new one, because wrapping a model changes the padding side of its tokenizer.
    """
    # imported here because it takes seconds, and the words alone do not need it
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("\n", "isolated")]
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary()[BOS])]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),  # a space before every word but the first
            decoders.Fuse(),
            decoders.Replace(Regex(" ?\n ?"), "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, bos_token=BOS, unk_token=UNKNOWN, padding_side="right"
    )
