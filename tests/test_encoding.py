"""From text to token ids: special tokens, the border to the answer, spans, windows, batches."""

from __future__ import annotations

from dataclasses import replace

import bpe
import pytest
import torch

from gna_utils import GnaError
from gna_utils.tasks import Example, Segment, batches, encode, encode_texts, key_value

KINDS = [{}, {"trim": True}, {"split_digits": True, "trim": True, "bos": True}, {"bos": True, "eos": True}]
CHAT = "<|begin|>user\n{question}\nmodel\n"


def example(prompt="Question: fox?\nAnswer:", candidates=(" cat", " sun"), **fields):
    return Example("test", prompt, tuple(candidates), 0, **fields)


def decoded(tokenizer, row, span):
    return tokenizer.decode(row.input_ids[span[0] : span[1]])


@pytest.mark.parametrize("start", ["", "<|begin|>", "<|begin|><|begin|>"])
@pytest.mark.parametrize(("kind", "count"), [({}, None), ({"bos": True}, 1), ({"bos": True, "eos": True}, 1)])
def test_exactly_one_bos_where_the_tokenizer_adds_one(kind, count, start):
    """A missing or doubled BOS moved MMLU by several points (lm-evaluation-harness issue 2676)."""
    tokenizer = bpe.build(**kind)
    prompt = start + CHAT.removeprefix("<|begin|>").format(question="fox?") + "Answer:"
    row = encode(example(prompt), tokenizer)[0]
    bos = tokenizer.bos_token_id
    # without an adding tokenizer the text alone decides: nothing is put in, nothing taken out
    assert row.input_ids.count(bos) == (start.count("<|begin|>") if count is None else count)
    assert count is None or row.input_ids[0] == bos
    assert tokenizer.eos_token_id not in row.input_ids and row.query == len(row.input_ids) - 1
    assert bos not in [token for ids in row.candidate_ids for token in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_chat_template_and_plain_text_give_the_same_ids(kind):
    tokenizer = bpe.build(**kind)
    turns = [{"role": "user", "content": "fox?"}]
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}model\n"
    chat = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    assert chat.startswith("<|begin|>")
    with_template = encode(example(chat), tokenizer)[0]
    by_hand = encode(example(chat.removeprefix("<|begin|>")), tokenizer)[0]
    assert kind.get("bos") is None or with_template == by_hand
    assert with_template.input_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_candidate_are_the_ids_of_the_whole_text(kind):
    """Prompt lengths were counted on other ids than those scored (open-instruct, the public notebook)."""
    tokenizer = bpe.build(**kind)
    special = {tokenizer.eos_token_id}
    for one in key_value(10, 6, tokenizer=tokenizer, values="numbers"):
        row = encode(one, tokenizer)[0]
        for text, ids in zip(one.candidates, row.candidate_ids):
            whole = [token for token in tokenizer(one.prompt + text)["input_ids"] if token not in special]
            assert [*row.input_ids, *ids] == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wording", ["plain", "paper"])
@pytest.mark.parametrize("query", ["last", "first"])
def test_segments_spans_and_summary_tokens(kind, wording, query):
    tokenizer = bpe.build(**kind)
    made = key_value(10, 6, tokenizer=tokenizer, wording=wording, query=query, multi_token=True)
    for one, row in zip(made, encode(made, tokenizer)):
        for segment, span, last in zip(one.segments, row.segments, row.summary):
            assert decoded(tokenizer, row, span) == one.prompt[segment.start : segment.end]
            assert last == span[1] - 1 and decoded(tokenizer, row, (last, last + 1)) == "\n"
        assert [b for _, b in row.segments[:-1]] == [a for a, _ in row.segments[1:]]
        for name, (start, end) in one.spans.items():
            assert decoded(tokenizer, row, row.spans[name]).strip() == one.prompt[start:end]
        start, stop = row.segments[row.target]
        assert start <= row.spans["key"][0] < row.spans["value"][1] <= stop - 1
        assert row.query == len(row.input_ids) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_token_that_spans_two_segments_belongs_to_both(kind):
    """Where two newlines are one token, it is still the summary token of the line before."""
    core = bpe.build(**kind)
    tokenizer = type(core)(
        tokenizer_object=core.backend_tokenizer, bos_token="<|begin|>", eos_token="<|end|>"
    )
    tokenizer.add_tokens("\n\n")
    prompt = "fox: sun\n\ncat:"
    one = example(prompt, segments=(Segment(0, 9, "line"), Segment(9, 14, "question")))
    row = encode(one, tokenizer)[0]
    newlines = row.summary[0]
    assert decoded(tokenizer, row, (newlines, newlines + 1)) == "\n\n"
    assert row.segments[0][1] - 1 == newlines == row.segments[1][0]
    assert core.get_vocab().get("\n\n") is None


def test_leading_space_is_part_of_its_token_also_where_offsets_leave_it_out():
    for trim in (False, True):
        tokenizer = bpe.build(trim=trim, split_digits=True)
        one = example("a: 42", ("x", "y"), segments=(Segment(0, 3, "a: "), Segment(3, 5, "42")))
        row = encode(one, tokenizer)[0]
        assert tokenizer.convert_ids_to_tokens(row.input_ids) == ["a", ":", "Ġ", "4", "2"]
        assert row.segments == ((0, 3), (3, 5)) and row.summary == (2, 4)


def test_character_of_several_tokens_and_dropped_whitespace(tiny_model):
    tokenizer = bpe.build()
    row = encode(example("a €\nb:", segments=(Segment(0, 3, "a €"), Segment(3, 4, "nl"))), tokenizer)[0]
    assert decoded(tokenizer, row, row.segments[0]) == "a €" and row.segments[1] == (
        row.summary[0] + 1,
    ) * 1 + (row.summary[0] + 2,)
    words = tiny_model("llama")[2]  # drops newlines: the summary token is the last token of the line
    row = encode(example("w1 w2\nw3", (" w4", " w5"), segments=(Segment(0, 6, "line"),)), words)[0]
    assert row.segments == ((1, 3),) and row.summary == (2,) and row.input_ids[0] == words.bos_token_id


def test_trailing_spaces_move_to_the_candidates():
    """`"Answer: " + "A"` scored a token that the model never writes, or none (lm-evaluation-harness 614)."""
    tokenizer = bpe.build()
    moved = encode(example("Answer: ", ("cat", "sun")), tokenizer)
    assert moved == encode(example("Answer:", (" cat", " sun")), tokenizer)
    kept = encode(example("Answer:\n", ("cat", "sun")), tokenizer)[0]
    assert tokenizer.decode(kept.input_ids) == "Answer:\n"


def test_token_across_the_border_is_refused_and_named():
    """A token of both prompt and answer leaves the answer without tokens, and log-probability 0 wins."""
    tokenizer = bpe.build()
    with pytest.raises(GnaError, match=r"' cast' spans .* candidate 'tle' \(example 1\)"):
        encode([example(), example("a cas", ("tle", "ino"))], tokenizer)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"candidates": (" cat", "")}, "candidate '' of example 0 has no token"),
        ({"candidates": (" cat", " sun", " cat")}, "' cat' and ' cat' of example 0 have the same tokens"),
        ({"candidates": (" cat",)}, "1 candidates and answer 0: it takes at least two"),
        ({"prompt": ""}, "example 0 has an empty prompt"),
        ({"prompt": "   "}, "example 0 has an empty prompt"),
        ({"segments": (Segment(3, 3, "none"),)}, r"segment 'none' of example 0 \(characters 3 to 3\)"),
        ({"spans": {"value": (90, 95)}}, r"'value' of example 0 \(characters 90 to 95\)"),
    ],
)
def test_what_cannot_be_scored_is_refused(bad, message):
    with pytest.raises(GnaError, match=message):
        encode(example(**bad), bpe.build())


def test_answer_must_be_a_candidate():
    with pytest.raises(GnaError, match="2 candidates and answer 2"):
        encode(replace(example(), answer=2), bpe.build())


def test_window_counts_what_is_read():
    """The last token of a candidate is predicted and never read, so a prompt may fill the window."""
    tokenizer = bpe.build(split_digits=True)
    one = example("fox: sun\ncat:", (" 42", " 43"))  # 6 + 3 tokens
    length = len(encode(one, tokenizer)[0].input_ids)
    assert encode(one, tokenizer, max_length=length + 2)
    with pytest.raises(GnaError, match=f"needs {length + 2} tokens .*window of the model is {length + 1}"):
        encode(one, tokenizer, max_length=length + 1)
    tokenizer.model_max_length = 4
    try:
        with pytest.raises(GnaError, match=r"window of the model is 4: .*fewer pairs, or use a model"):
            encode(one, tokenizer)
    finally:
        tokenizer.model_max_length = int(1e30)


@pytest.mark.parametrize(("wrong", "name"), [("text", "str"), (["text"], "str"), (None, "NoneType")])
def test_only_examples_are_encoded(wrong, name):
    with pytest.raises(GnaError, match=f"{name} is not an Example: give one"):
        encode(wrong, bpe.build())


def test_batches_need_room_for_a_token():
    for wrong in (0, -1, 1.5, None):
        with pytest.raises(GnaError, match=f"max_tokens={wrong} is not possible"):
            batches(encode(example(), bpe.build()), max_tokens=wrong)


def test_slow_tokenizers_are_refused():
    class Slow:
        is_fast = False

    with pytest.raises(GnaError, match="Slow cannot tell which characters"):
        encode(example(), Slow())


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_hold_every_prompt_once_padded_right(side):
    """Positions were read at -1 under another padding side (nnsight issue 234)."""
    tokenizer = bpe.build()
    made = [one for n in (2, 7, 4, 3) for one in key_value(5, n, tokenizer=tokenizer)]
    tokenizer.padding_side = side
    try:
        rows = encode(made, tokenizer)
    finally:
        tokenizer.padding_side = "right"
    found = batches(rows, max_tokens=120, pad_id=1)
    assert sorted(i for batch in found for i in batch.index) == list(range(20))
    for batch in found:
        assert batch.input_ids.numel() <= 120 and batch.input_ids.shape == batch.attention_mask.shape
        assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
        for k, i in enumerate(batch.index):
            n = len(rows[i].input_ids)
            assert batch.rows[k] is rows[i] and batch.lengths[k] == n and batch.query[k] == n - 1
            assert tuple(batch.input_ids[k, :n].tolist()) == rows[i].input_ids
            assert (batch.input_ids[k, n:] == 1).all()
            assert batch.attention_mask[k].tolist() == [1] * n + [0] * (batch.input_ids.shape[1] - n)
    waste = sum(int((batch.attention_mask == 0).sum()) for batch in found)
    assert waste <= 0.1 * sum(batch.input_ids.numel() for batch in found)
    assert [len(batch.index) for batch in batches(rows, max_tokens=1)] == [1] * 20
    assert batches([]) == []


def test_letters_and_digits_of_the_pretrained_tokenizer(smollm2):
    """`" A"` to `" D"` are four single tokens, but `" 42"` is a space and two digits."""
    tokenizer = smollm2.tokenizer
    letters = encode(example("Answer:", (" A", " B", " C", " D")), tokenizer)[0].candidate_ids
    assert {len(ids) for ids in letters} == {1} and len(set(letters)) == 4
    numbers = encode(example("Answer:", (" 42", " 7", " 70")), tokenizer)[0].candidate_ids
    assert [len(ids) for ids in numbers] == [3, 2, 3] and len({ids[0] for ids in numbers}) == 1
    assert encode(example("Answer: ", ("A", "B")), tokenizer)[0].candidate_ids == letters[:2]
    assert tokenizer.bos_token_id not in encode(example(), tokenizer)[0].input_ids


def test_plain_texts_get_the_lead_once_and_nothing_behind_them():
    """A doubled BOS, or an EOS where the answer is read, moves accuracies (lm-evaluation-harness 2676)."""
    tokenizer = bpe.build(bos=True, eos=True)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain, written = encode_texts(["fox: sun", "<|begin|>fox: sun"], tokenizer)
    assert plain == written and plain.count(begin) == 1 and end not in plain
    assert encode_texts(["fox: sun"], bpe.build())[0] == plain[1:]
