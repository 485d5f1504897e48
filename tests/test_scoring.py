"""Scores against complete rows, against an oracle, and against a model that knows nothing."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import replace

import bpe
import numpy as np
import pytest
import tiny
import torch

from gna_utils import GnaError, ablate, layers, scoring
from gna_utils.scoring import GnaWarning, accuracy, next_tokens, score, window
from gna_utils.tasks import Encoded, Example, encode, key_value

# random models give candidates little probability; the tests of warnings ask for them
pytestmark = pytest.mark.filterwarnings("ignore::gna_utils.scoring.GnaWarning")

TREE, ROWS, LAST = "prefix tree on the cached prompt", "complete rows", "last logits"


WORDS = Example("test", "w1 w2", (" w4", " w5"), 0)


def coded(n, *, single=False, seed=0, lengths=(11, 12, 9)):
    """Random prompts with six candidates of one token, or of one to three tokens with shared beginnings."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        prompt = tuple(int(t) for t in rng.integers(4, tiny.VOCAB, lengths[i % len(lengths)]))
        found = set()
        while len(found) < 6:
            found.add(
                tuple(int(t) for t in rng.choice([5, 6, 7, 8, 9, 10], 1 if single else rng.integers(1, 4)))
            )
        marks = {"segments": ((1, 4), (4, 7)), "summary": (3, 6)}
        rows.append(
            Encoded(
                prompt,
                **marks,
                query=len(prompt) - 1,
                candidate_ids=tuple(sorted(found)),
                answer=i % 6,
                target=None,
                spans={},
            )
        )
    return rows


def one_row_per_candidate(hf_model, row):
    """The plain way: prompt and candidate in one row, the log-probabilities of its tokens summed."""
    sums = []
    for ids in row.candidate_ids:
        text = torch.tensor([row.input_ids + ids])
        logits = hf_model(text, attention_mask=torch.ones_like(text), use_cache=False).logits[0].double()
        tail = logits.log_softmax(-1)[len(row.input_ids) - 1 : -1]
        sums.append(float(tail.gather(1, torch.tensor(ids)[:, None]).sum()))
    return np.array(sums)


def largest_difference(ones, others):
    return max(np.abs(a - b).max() for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_prefix_tree_equals_one_row_per_candidate(tiny_model, family, monkeypatch):
    """Attention caches grow, recurrent states are overwritten in place: copies must not share either."""
    model, hf_model, _ = tiny_model(family)
    rows = coded(5)
    expected = [one_row_per_candidate(hf_model, row) for row in rows]
    found = score(model, rows)
    assert found.method == TREE and largest_difference(found.logprobs, expected) <= 1e-4
    monkeypatch.setattr(scoring, "_keeps_cache", lambda model: False)
    found = score(model, rows)
    assert found.method == ROWS and largest_difference(found.logprobs, expected) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba2", "zamba2"])
@pytest.mark.parametrize("single", [True, False])
def test_batch_size_and_order_change_nothing(tiny_model, family, single):
    model, hf_model, _ = tiny_model(family)
    rows = coded(9, single=single)
    whole = score(model, rows)
    assert whole.method == (LAST if single else TREE)
    assert largest_difference(whole.logprobs, [one_row_per_candidate(hf_model, row) for row in rows]) <= 1e-4
    order = np.random.default_rng(1).permutation(9)
    shuffled = score(model, [rows[i] for i in order], max_tokens=25)
    assert largest_difference(shuffled.logprobs, [whole.logprobs[i] for i in order]) <= 1e-5
    alone = [score(model, [row], max_tokens=1).logprobs[0] for row in rows]
    assert largest_difference(alone, whole.logprobs) <= 1e-5


def test_examples_of_one_and_of_several_tokens_mix(tiny_model):
    model, hf_model, _ = tiny_model("llama")
    rows = [
        *coded(2, single=True),
        replace(coded(1, seed=3)[0], candidate_ids=((5, 6), (5, 7), (8,)), answer=2),
    ]
    rows = [rows[0], rows[2], rows[1]]
    found = score(model, rows)
    assert found.method == f"{LAST} + {TREE}" and list(found.frame["example"]) == [0, 1, 2]
    assert largest_difference(found.logprobs, [one_row_per_candidate(hf_model, row) for row in rows]) <= 1e-4
    assert [lengths.tolist() for lengths in found.lengths] == [[1] * 6, [2, 2, 1], [1] * 6]
    assert list(found.frame["n_tokens"]) == [1, 1, 1]


def test_one_forward_of_the_prompt_per_example(tiny_model, monkeypatch):
    """However many candidates there are, a prompt is read once; then at most one step per depth and part."""
    model = tiny_model("llama")[0]
    calls = []

    def counted(model, input_ids, *args, **options):
        calls.append(tuple(input_ids.shape))
        return forward(model, input_ids, *args, **options)

    forward = scoring.forward
    monkeypatch.setattr(scoring, "forward", counted)
    score(model, coded(4, single=True))
    assert sum(rows for rows, _ in calls) == 4
    calls.clear()
    row = coded(1, lengths=(11,))[0]
    numbers = tuple((5, tens, ones) for tens in (6, 7, 8) for ones in (6, 7, 8))
    score(model, [replace(row, candidate_ids=numbers)] * 2)
    assert calls == [(2, 11), (2, 1), (6, 1)]


def test_serialised_run_gives_the_same_scores(tiny_model):
    """A server keeps no cache, so remote runs score complete rows; "local" packs them as for a server."""
    model = tiny_model("llama")[0]
    rows = coded(3)
    away = score(model, rows, remote="local")
    assert away.method == ROWS
    assert largest_difference(away.logprobs, score(model, rows).logprobs) <= 1e-5


@pytest.mark.parametrize("positions", ["all", "query", "summary"])
def test_active_ablations_apply_alike_with_and_without_a_cache(tiny_model, positions, monkeypatch):
    model, _, _ = tiny_model("llama")
    rows, heads = coded(4), ["L0H1", "L1H2"]
    assert {info.kind for info in layers(model)} == {"attention"}
    plain = score(model, rows)
    with ablate(model, heads, positions=positions):
        cached = score(model, rows)
        monkeypatch.setattr(scoring, "_keeps_cache", lambda model: False)
        complete = score(model, rows)
    assert largest_difference(cached.logprobs, plain.logprobs) > 1e-3
    assert (cached.method, complete.method) == (TREE, ROWS)
    assert largest_difference(cached.logprobs, complete.logprobs) <= 1e-4


# ---------------------------------------------------------------------- models that know all, or nothing


class Fake:
    """A stand-in for a model: only ``forward`` looks at it. ``answers`` maps prompts to what follows them."""

    def __init__(self, tokenizer, answers=(), shift=0.0):
        self.tokenizer, self.answers, self.shift = tokenizer, dict(answers), shift
        self.config = type(
            "Config", (), {"get_text_config": lambda self: self, "vocab_size": len(tokenizer)}
        )()

    def logits(self, input_ids, attention_mask):
        out = torch.full((len(input_ids), len(self.tokenizer)), self.shift)
        for line, ids, mask in zip(out, input_ids.tolist(), attention_mask):
            ids = tuple(ids[: int(mask.sum())])
            for prompt, answer in self.answers.items():
                if (prompt + answer)[: len(ids)] == ids and len(prompt) <= len(ids) < len(prompt + answer):
                    line[(prompt + answer)[len(ids)]] = 9.0
        return out


@pytest.fixture
def fake_forward(monkeypatch):
    def forward(model, input_ids, attention_mask, *, positions, rows=None, remote=False):
        assert torch.equal(positions, attention_mask.sum(1) - 1)
        return model.logits(input_ids, attention_mask)

    monkeypatch.setattr(scoring, "forward", forward)
    monkeypatch.setattr(scoring, "require_model", lambda model: None)
    monkeypatch.setattr(scoring, "_keeps_cache", lambda model: False)


def oracle(tokenizer, examples):
    rows = encode(examples, tokenizer)
    return Fake(tokenizer, [(row.input_ids, row.candidate_ids[row.answer]) for row in rows])


@pytest.mark.parametrize("split_digits", [True, False])
@pytest.mark.parametrize("options", [{}, {"values": "numbers"}, {"multi_token": True}])
def test_oracle_is_always_right(fake_forward, options, split_digits):
    """First-token scoring of " 42" could not tell numbers apart (number-token-loss issue 67)."""
    tokenizer = bpe.build(split_digits=split_digits)
    examples = key_value(25, 20, tokenizer=tokenizer, seed=2, **options)
    found = score(oracle(tokenizer, examples), examples)
    assert accuracy(found).value == 1 and (found.frame["predicted"] == found.frame["answer"]).all()
    assert (found.frame["margin"] > 1).all() and accuracy(found).chance == pytest.approx(0.05)


@pytest.mark.parametrize("shift", [0.0, 3.3])
@pytest.mark.parametrize("options", [{}, {"values": "numbers"}, {"wording": "paper", "values": "numbers"}])
def test_constant_model_gets_exactly_chance(fake_forward, options, shift):
    """Ties went to the first candidate, and sums to numbers with one digit (inspect_ai issue 4591)."""
    tokenizer = bpe.build(split_digits=True)
    examples = key_value(40, 20, tokenizer=tokenizer, seed=2, **options)
    found = score(Fake(tokenizer, shift=shift), examples)
    assert found.frame["correct"].tolist() == pytest.approx([1 / 20] * 40)
    assert (found.frame["predicted"] == -1).all() and (found.frame["margin"].abs() < 1e-6).all()


def test_shorter_candidate_that_begins_another_is_reported(fake_forward):
    tokenizer = bpe.build(split_digits=True)
    mixed = Example("test", "fox: sun\ncat:", (" 4", " 42", " 77"), 1)
    with pytest.warns(GnaWarning, match="candidate ' 4' of example 0 begins candidate ' 42'"):
        found = score(Fake(tokenizer), [mixed])
    assert found.frame["predicted"][0] == 0  # the bias that the warning is about
    closed = Example("test", mixed.prompt, tuple(f"{c}\n" for c in mixed.candidates), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score(oracle(tokenizer, [closed]), [closed]).frame["predicted"][0] == 1


def test_ties_count_as_lots(fake_forward):
    """Two of four candidates tie for the best score: right in half of the draws, if at all."""
    tokenizer = bpe.build()
    one = Example("test", "fox:", (" cat", " sun", " map", " tree"), 1)
    row = encode(one, tokenizer)[0]
    model = Fake(tokenizer, [(row.input_ids, row.candidate_ids[1])])
    model.logits = lambda ids, mask, logits=model.logits: logits(ids, mask).index_fill_(
        1, torch.tensor(row.candidate_ids[3]), 9.0
    )
    found = score(model, [one, replace(one, answer=3), replace(one, answer=0)]).frame
    assert found["correct"].tolist() == [0.5, 0.5, 0] and (found["predicted"] == -1).all()
    assert found["margin"][0] == 0 and found["margin"][2] < -5


def test_frame_holds_what_the_logits_say(tiny_model):
    model, hf_model, _ = tiny_model("gpt2")
    rows = coded(3, single=True)
    found = score(model, rows, progress=False)
    for i, row in enumerate(rows):
        text = torch.tensor([row.input_ids])
        probabilities = hf_model(text).logits[0, -1].double().softmax(-1)
        mine = probabilities[[ids[0] for ids in row.candidate_ids]].numpy()
        line = found.frame.loc[i]
        assert line["predicted"] == mine.argmax() and line["correct"] == (mine.argmax() == row.answer)
        assert line["mass"] == pytest.approx(mine.sum(), abs=1e-5)
        assert line["logprob"] == pytest.approx(np.log(mine[row.answer]), abs=1e-4)
        others = np.delete(mine, row.answer).max()
        assert line["margin"] == pytest.approx(np.log(mine[row.answer] / others), abs=1e-4)
        assert line["n_candidates"] == 6 and line["answer"] == row.answer


def test_next_tokens_are_the_largest_probabilities(tiny_model):
    model, hf_model, words = tiny_model("gpt2")
    [row] = coded(1, single=True)
    best = hf_model(torch.tensor([row.input_ids])).logits[0, -1].softmax(-1).topk(5)
    found = next_tokens(model, row, 5)
    assert list(found["token"]) == [words.decode([i]) for i in best.indices.tolist()]
    assert found["probability"].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)
    assert len(next_tokens(model, row, 1000)) == tiny.VOCAB


def test_low_mass_is_reported_and_high_mass_is_not(fake_forward):
    """The model says " A" where "A" is scored (lm-evaluation-harness issue 614): the mass shows it."""
    tokenizer = bpe.build()
    examples = [Example("test", "Question: fox\nAnswer:", (" cat", " sun"), 0)]
    with pytest.warns(GnaWarning, match="hold only 0.00. of the probability"):
        score(Fake(tokenizer), examples)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score(oracle(tokenizer, examples), examples)


def test_first_token_scoring_is_refused_where_it_cannot_work(fake_forward):
    tokenizer = bpe.build(split_digits=True)
    numbers = key_value(2, 5, tokenizer=tokenizer, values="numbers")
    with pytest.raises(GnaError, match=r"candidates ' \d\d' and ' \d\d' of example 0 apart.*method='full'"):
        score(oracle(tokenizer, numbers), numbers, method="first_token")
    words = [Example("test", "fox: 12", ("34", "56"), 1)]
    row = encode(words, tokenizer)[0]
    model = Fake(tokenizer, [(row.input_ids, row.candidate_ids[1])])
    found = score(model, words, method="first_token")
    assert found.method == LAST and found.frame["predicted"][0] == 1 and found.lengths[0].tolist() == [1, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_of_the_tokenizer_does_not_matter(tiny_model, side):
    model = tiny_model("gpt2")[0]
    examples = [Example("test", f"w1 w{n} " * n, ("w4", "w5"), 0) for n in (2, 7, 4)]
    before = model.tokenizer.padding_side
    model.tokenizer.padding_side = side
    try:
        found = score(model, examples)
    finally:
        model.tokenizer.padding_side = before
    rows = encode(examples, model.tokenizer)
    assert (
        largest_difference(found.logprobs, [one_row_per_candidate(tiny_model("gpt2")[1], r) for r in rows])
        <= 1e-5
    )


def test_prompt_beyond_the_window_is_refused(tiny_model):
    """GPT-2 of the tests has 64 positions; a prompt of 65 tokens must not be cut or wrapped."""
    model = tiny_model("gpt2")[0]
    assert window(model) == 64 and window(tiny_model("mamba2")[0]) is None
    fits = Example("test", " ".join(["w1"] * 63), (" w4", " w5"), 0)
    assert len(score(model, [fits]).frame) == 1
    with pytest.raises(GnaError, match=r"needs 65 tokens .*window of the model is 64: .*fewer pairs"):
        score(model, [replace(fits, prompt=fits.prompt + " w1")])


def test_one_example_is_scored_like_a_list_of_one(tiny_model):
    for model, one in ((tiny_model("llama")[0], one) for one in (WORDS, coded(1)[0])):
        assert score(model, one).frame.equals(score(model, [one]).frame)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: score(model, []), "no examples were given"),
        (lambda m: score(m, coded(1), method="best"), "unknown method 'best'.*auto, full, first_token"),
        (lambda model: score(model, ["text"]), "str is not an Example or Encoded: give one, or a list"),
        (lambda model: score(model, None), "NoneType is not an Example or Encoded"),
        (lambda model: score(model, [*coded(1), WORDS]), "Encoded is not an Example"),
        (lambda _: score(None, WORDS), r"give the model that gna_utils.load returns .*, not NoneType"),
        (lambda model: score(model._module, WORDS), "gna_utils.load returns .*, not LlamaForCausalLM"),
        (lambda model: score(model, WORDS, max_tokens=0), "max_tokens=0 .* at least 1"),
        (
            lambda m: score(m, replace(coded(1)[0], candidate_ids=((5,), (70,)))),
            "token 70 is not in the model",
        ),
        (
            lambda m: score(m, replace(coded(1)[0], input_ids=(1, 70), query=1)),
            "token 70 is not in the model",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(tiny_model, call, message):
    with pytest.raises(GnaError, match=message):
        call(tiny_model("llama")[0])


def test_a_model_that_gives_nan_is_refused():
    """Damaged weights and float16 overflow give NaN, of which no candidate is the best."""
    model, hf_model, _ = tiny.build("llama")
    hf_model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(GnaError, match="NaN for example 0: its weights are damaged, or its dtype"):
        score(model, coded(1))


def test_progress_stays_short_where_nobody_watches(tiny_model):
    """A bar wrote one line per update into logs (papermill issue 765)."""
    for progress, most in ((None, 0), (False, 0), (True, 4)):
        shown = io.StringIO()
        with contextlib.redirect_stderr(shown):
            score(tiny_model("llama")[0], coded(40, single=True), max_tokens=12, progress=progress)
        assert len(shown.getvalue().splitlines()) <= most
        assert progress is None or bool(shown.getvalue()) == progress


def test_scoring_neither_reads_nor_changes_global_random_state(tiny_model):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = score(tiny_model("llama")[0], coded(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again = score(tiny_model("llama")[0], coded(3))
    assert largest_difference(first.logprobs, again.logprobs) == 0


@pytest.mark.slow
def test_pretrained_model_retrieves(smollm2):
    """SmolLM2 finds the value of a key among five far more often than chance, in words and in numbers."""
    for values in ("words", "numbers"):
        found = score(smollm2, key_value(24, 5, tokenizer=smollm2.tokenizer, values=values))
        assert accuracy(found).low > accuracy(found).chance


def test_mass_on_letters_of_a_pretrained_model(smollm2):
    """Letters without their space get nearly nothing after a space has been promised; the mass tells."""
    question = "Which animal barks?\nA. cat\nB. dog\nC. cow\nD. hen\nAnswer:"
    masses = {}
    for letters in ((" A", " B", " C", " D"), ("A", "B", "C", "D")):
        one = Example("letters", question, letters, 1)
        row = encode(one, smollm2.tokenizer)[0]
        with pytest.warns(GnaWarning, match="of the probability on average"):
            found = score(smollm2, [one])
        logits = smollm2._module(torch.tensor([row.input_ids])).logits[0, -1].double()
        expected = logits.softmax(-1)[[ids[0] for ids in row.candidate_ids]].sum()
        assert found.method == LAST and found.frame["mass"][0] == pytest.approx(float(expected), rel=1e-3)
        masses[letters[0]] = found.frame["mass"][0]
    assert masses[" A"] > 10 * masses["A"]
