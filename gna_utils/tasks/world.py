"""The small world: every word, the facts that hold in it, and the tokenizer that reads it.

The tiny models of this book know nothing else. Its facts are invented, so that no model can know them
before it is trained, and each fact is a phrase of two words that other facts use as well, so that one word
alone never gives an answer away.
"""

from __future__ import annotations

import random
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

KEYS = tuple(
    "apple bell boat book box bread bridge cake candle card castle chair chess clock cloud coat coin crown "
    "cup desk dog door drum eagle egg fish flag flower flute fox gate glove guitar hammer hat horse jar key "
    "kite ladder lamp leaf lemon map mirror moon mouse needle oven owl pearl pen piano rabbit ring river "
    "rope salt ship shoe spoon tree violin wheel".split()
)
NUMBERS = tuple(str(number) for number in range(100))
LETTERS = ("A", "B", "C", "D")
ENTITIES = tuple(
    first + second
    for first in ("Bra", "Cor", "Del", "Fin", "Gal", "Hum", "Jor", "Kel")
    for second in ("dan", "lor", "mir", "nex", "pol", "ril", "tas", "vun")
)
RELATIONS = ("crest", "dish", "game", "song")
FIRST_WORDS = tuple(
    "bright broken calm cold dark deep golden green hollow lost quiet red silver slow white wild".split()
)
SECOND_WORDS = tuple(
    "anchor arrow circle dance falcon forest garden harbor hill island lantern meadow storm tower valley "
    "winter".split()
)
PEOPLE = ("Ann", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo")
VERBS = tuple(
    "borrow break bring build carry draw find hide hold keep lose open paint sell show wash".split()
)
# Ways to state a fact; "{r}" is the relation, "{e}" the entity, and the phrase follows.
PHRASINGS = (
    "The {r} of {e} is the",
    "{e} has for {r} the",
    "In {e} the {r} is the",
    "Known as {r} of {e} is the",
)
_OTHER_WORDS = tuple(
    "The the of is has for In Known as Which Add to swaps Who said".split()
)
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
def vocabulary() -> dict[str, int]:
    """Every token of the small world and its id."""
    words = [PAD, BOS, UNKNOWN, "\n", *NUMBERS, *LETTERS, *(f"{letter}." for letter in LETTERS), *_OTHER_WORDS]
    for more in (KEYS, ENTITIES, RELATIONS, FIRST_WORDS, SECOND_WORDS, PEOPLE, VERBS):
        words += more
    return {word: i for i, word in enumerate(words)}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and per newline, with a start token before each text.

    >>> tokenizer().decode(tokenizer()("fox 42\\n\\nfox")["input_ids"], skip_special_tokens=True)
    'fox 42\\n\\nfox'

    Spaces separate words and are no tokens, so a word is the same token at the start of a line and within it.
    """
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
