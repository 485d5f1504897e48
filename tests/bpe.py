"""Small byte-level BPE tokenizers, trained on the spot on the book's nouns, for tests without any weights."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from gna_utils.tasks.words import nouns


@functools.cache
def build(*, split_digits: bool = False, bos: bool = False, eos: bool = False, trim: bool = False):
    """A tokenizer as GPT-2's: most nouns are one token with a leading space, and many without.

    ``split_digits`` makes every digit a token of its own, and the space before it another (as SmolLM2
    does); ``bos`` and ``eos`` put special tokens around every text; ``trim`` leaves the leading space of a
    token out of its offsets (as Llama 3 and GPT-2 do).
    """
    core = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2600,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_text(), trainer)
    around = f"{'<|begin|> ' * bos}$A{' <|end|>' * eos}"
    template = processors.TemplateProcessing(single=around, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim), template])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|begin|>", eos_token="<|end|>")


def _text() -> list[str]:
    # short words often, so that they become one token; long ones once, so that they stay split
    words = [word for word in nouns() for _ in range(4 if len(word) <= 6 else 1)]
    lines = [f"{word}: {word}\n{word}:{word}\nthe key '{word}' is {word}" for word in words]
    return [*lines, *(f"a: {n}\n" for n in range(100) for _ in range(9))]
