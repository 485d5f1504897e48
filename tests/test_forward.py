"""One forward pass: padding is exact, the mask goes along, only the rows asked for are projected."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tiny
import torch
from nnsight.modeling.transformers import TransformersModel

from gna_utils import GnaError, ablate, layers
from gna_utils.forward import forward, tokens

IDS = tiny.ids(3, 11)
LENGTHS = torch.tensor([4, 9, 11])
MASK = (torch.arange(11) < LENGTHS[:, None]).long()
IDS = IDS * MASK
SCANS = [family for family in tiny.FAMILIES if any("attention" not in kinds for kinds in tiny.KINDS[family])]


def last_logits(hf_model, row):
    return hf_model(row[None], use_cache=False).logits[0, -1]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_batched_prompts_equal_single_runs(tiny_model, family):
    """Several prompts in one batch must not change the answer of a short one (nnsight issue 672)."""
    model, hf_model, _ = tiny_model(family)
    expected = torch.stack([last_logits(hf_model, IDS[i, :n]) for i, n in enumerate(LENGTHS)])
    found = forward(model, IDS, MASK)
    assert found.dtype == torch.float32 and (found - expected).abs().max() <= 1e-5
    assert torch.equal(forward(model, IDS, MASK, remote="local"), found)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_positions_choose_rows_of_the_full_logits(tiny_model, family):
    model, hf_model, _ = tiny_model(family)
    full = hf_model(IDS, attention_mask=MASK, use_cache=False).logits
    several = torch.tensor([[0, 3], [2, 8], [10, 5]])
    found = forward(model, IDS, MASK, positions=several)
    assert (found - full.take_along_dim(several[..., None], 1)).abs().max() <= 1e-5
    one = forward(model, IDS, MASK, positions=several[:, 1])
    assert one.shape == (3, 64) and torch.allclose(one, found[:, 1], atol=1e-5)


@pytest.mark.parametrize("family", SCANS)
def test_state_is_carried_across_chunks(tiny_model, family):
    """Scan states were lost between chunks, which have 4 tokens here (transformers issues 34817, 47246)."""
    model, hf_model, _ = tiny_model(family)
    ids = tiny.ids(1, 11, seed=5)
    found = forward(model, ids, torch.ones_like(ids), positions=torch.arange(11)[None])[0]
    prefixes = torch.stack([last_logits(hf_model, ids[0, : t + 1]) for t in range(11)])
    assert (found - prefixes).abs().max() <= 1e-4


def test_state_is_carried_across_the_chunks_of_the_delta_rule(tiny_model):
    """Its chunks have 64 tokens, whatever the config says."""
    model, hf_model, _ = tiny_model("qwen3_next")
    ids, places = tiny.ids(1, 70, seed=5), torch.tensor([0, 62, 63, 64, 65, 69])
    found = forward(model, ids, torch.ones_like(ids), positions=places[None])[0]
    prefixes = torch.stack([last_logits(hf_model, ids[0, : t + 1]) for t in places.tolist()])
    assert (found - prefixes).abs().max() <= 1e-4


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_going_on_from_a_cache_equals_the_whole_prompt(tiny_model, family):
    model, hf_model, _ = tiny_model(family)
    ids = tiny.ids(3, 9, seed=2)
    ones = torch.ones_like(ids)
    expected = hf_model(ids, attention_mask=ones, use_cache=False).logits
    logits, past = forward(model, ids[:, :5], ones[:, :5], keep_past=True)
    assert (logits - expected[:, 4]).abs().max() <= 1e-5
    logits, past = forward(model, ids[:, 5:8], ones[:, :8], past=past, keep_past=True)
    assert (logits - expected[:, 7]).abs().max() <= 1e-5
    logits = forward(model, ids[:, 8:], ones, past=past)
    assert (logits - expected[:, 8]).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["llama", "jamba", "mamba2"])
def test_continuations_of_different_lengths(tiny_model, family):
    model, hf_model, _ = tiny_model(family)
    ids = tiny.ids(3, 9, seed=2)
    mask = (torch.arange(9) < torch.tensor([6, 7, 9])[:, None]).long()
    _, past = forward(model, ids[:, :5], mask[:, :5], keep_past=True)
    logits = forward(model, ids[:, 5:], mask, past=past)
    expected = torch.stack([last_logits(hf_model, ids[i, :n]) for i, n in enumerate((6, 7, 9))])
    assert (logits - expected).abs().max() <= 1e-5


def test_mask_always_goes_along_and_only_asked_rows_are_projected(tiny_model):
    """Without the mask, padding changes scan layers (transformers issue 31540)."""
    model, hf_model, _ = tiny_model("mamba2")
    seen = {}

    def watch(module, args, kwargs):
        seen.update(kwargs)

    handles = [
        hf_model.register_forward_pre_hook(watch, with_kwargs=True),
        hf_model.lm_head.register_forward_hook(lambda module, args, output: seen.update(rows=output.shape)),
    ]
    forward(model, IDS, MASK)
    for handle in handles:
        handle.remove()
    assert torch.equal(seen["attention_mask"], MASK) and seen["rows"] == (3, 1, 64)


def test_padding_side_of_the_tokenizer_does_not_matter():
    """The last column is not the last token of a prompt on one of the sides (nnsight issue 234)."""
    model, hf_model, tokenizer = tiny.build("gpt2")
    prompts = ["w1 w2 w3 w4 w5 w6", "w7"]
    expected = torch.stack(
        [last_logits(hf_model, torch.tensor(tokenizer(text)["input_ids"])) for text in prompts]
    )
    for side in ("left", "right"):
        tokenizer.padding_side = side
        assert (forward(model, *tokens(model, prompts)) - expected).abs().max() <= 1e-5


def test_tokens_of_every_kind_of_prompt(tiny_model):
    model = tiny_model("llama")[0]
    ids, mask = tokens(model, ["w1 w2 w3", "w4"])
    assert ids.tolist() == [[1, 4, 5, 6], [1, 7, 0, 0]] and mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert tokens(model, "w1")[0].tolist() == [[1, 4]]
    assert tokens(model, torch.tensor([3, 4]))[1].tolist() == [[1, 1]]
    for wrong, words in (
        ([], "no prompt"),
        ([7], "int is not a prompt"),
        (None, "NoneType is not a prompt"),
        ([torch.tensor(1), 2], "is not a prompt"),
    ):
        with pytest.raises(GnaError, match=words):
            tokens(model, wrong)


def test_unknown_output_projection(tiny_model):
    """A model that does not name its output projection gets its logits sliced afterwards."""
    _, hf_model, tokenizer = tiny.build("llama")
    hf_model.get_output_embeddings = lambda: None
    model = TransformersModel(hf_model, tokenizer=tokenizer, task="text-generation")
    full = hf_model(IDS, attention_mask=MASK).logits[torch.arange(3), LENGTHS - 1]
    assert (forward(model, IDS, MASK) - full).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: forward(m, IDS[0], MASK[0]), r"shape \(11,\)"),
        (lambda m: forward(m, IDS, MASK[:2]), r"attention_mask \(2, 11\)"),
        (lambda m: forward(m, IDS, MASK[:, :5]), "covers 5 tokens, but the prompts have 11"),
        (lambda m: forward(m, IDS, MASK.flip(1)), "padded at the left"),
        (lambda m: forward(m, IDS, MASK * 0), "empty"),
        (lambda m: forward(m, IDS, MASK, positions=torch.tensor([1, 2])), r"positions has shape \(2,\)"),
        (lambda m: forward(m, IDS, MASK, positions=torch.tensor([1, 2, 11])), "between 0 and 10"),
        (lambda m: forward(m, IDS, MASK, keep_past=True), "prompts of one length"),
        (lambda m: forward(m, IDS, MASK | 1, keep_past=True, remote="local"), "stays on the server"),
        (lambda m: forward(m, IDS + 64, MASK), "is not in the model's vocabulary of 64"),
        (lambda m: forward(m, IDS - 64, MASK), "token -.* is not in the model's vocabulary of 64"),
        (lambda m: forward(m, IDS.float(), MASK), "token ids of type torch.float32"),
        (lambda m: forward(m, IDS[:, :0], MASK[:, :0]), r"shape \(3, 0\) and holds no token"),
        (lambda m: forward(m, IDS[None], MASK), r"shape \(1, 3, 11\)"),
        (lambda m: forward(m, IDS.tolist(), MASK), "input_ids is of type list"),
        (lambda m: forward(None, IDS, MASK), "give the model that gna_utils.load returns .*, not NoneType"),
        (lambda m: forward(m._module, IDS, MASK), "gna_utils.load returns .*, not LlamaForCausalLM"),
        (lambda m: tokens(m._module, "w1"), "gna_utils.load returns .*, not LlamaForCausalLM"),
    ],
)
def test_errors(tiny_model, call, words):
    with pytest.raises(GnaError, match=words):
        call(tiny_model("llama")[0])


def test_more_tokens_than_the_window_are_refused(tiny_model):
    """GPT-2 of the tests has 64 learned positions, and no embedding for a token after them."""
    model = tiny_model("gpt2")[0]
    ids = tiny.ids(1, 65)
    _, past = forward(model, ids[:, :64], torch.ones(1, 64, dtype=torch.long), keep_past=True)
    for call in (
        lambda: forward(model, ids, torch.ones_like(ids)),
        lambda: forward(model, ids[:, 64:], torch.ones_like(ids), past=past),
        lambda: tokens(model, ["w1", " ".join(["w1"] * 64)]),
    ):
        with pytest.raises(GnaError, match="65 tokens were given, but the window of the model is 64"):
            call()


def test_training_mode_is_refused():
    """model.train() switches other code paths on; it must not change results quietly."""
    model, hf_model, _ = tiny.build("mamba2")
    hf_model.train()
    with pytest.raises(GnaError, match=r"call model.eval\(\) first"):
        forward(model, IDS, MASK)
    hf_model.eval()
    forward(model, IDS, MASK)


@pytest.mark.parametrize("family", ["llama", "mamba", "jamba"])
def test_no_deprecation_warning(tiny_model, family, deprecations_are_errors):
    model, _, _ = tiny_model(family)
    forward(model, IDS, MASK)
    _, past = forward(model, IDS[2:], MASK[2:], keep_past=True)
    forward(model, IDS[2:, :1], torch.ones(1, 12, dtype=torch.long), past=past)


def test_works_from_code_without_a_source_file(tiny_model):
    """nnsight cannot find a trace in a timed cell or in exec'd text (issues 551, 606); ours are in a file."""
    model, _, _ = tiny_model("llama")
    scope = {"model": model, "IDS": IDS, "MASK": MASK, "forward": forward, "ablate": ablate}
    exec("with ablate(model, 'L0H1'): found = forward(model, IDS, MASK)", scope)
    with ablate(model, "L0H1"):
        assert torch.equal(scope["found"], forward(model, IDS, MASK))


# ---- memory and long runs ----


def in_a_new_process(code: str) -> str:
    """Run code in a fresh interpreter: memory of other tests must not be counted."""
    set_up = f"""
        import sys
        from pathlib import Path
        import psutil, torch
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import tiny
        from gna_utils import ablate
        from gna_utils.forward import forward
        torch.set_num_threads(1)
        rss = lambda: psutil.Process().memory_info().rss / 2**20
        # not ru_maxrss: a new process inherits that of the one that started it
        status = lambda: Path("/proc/self/status").read_text()
        peak = lambda: int(status().split("VmHWM:")[1].split()[0]) / 2**10
    """
    script = textwrap.dedent(set_up) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


_ONE_BATCH = """
        from gna_utils import patch
        from gna_utils.scoring import score
        from gna_utils.tasks import Encoded
        options = dict(hidden_size=128, intermediate_size=2048)
        model, hf_model, _ = tiny.build("llama", **options)
        ids = tiny.ids(64, 256)
        mask = torch.ones_like(ids)
        rows = [Encoded(tuple(row), (), (), 255, ((4,), (5,)), 0, None, {{}}) for row in ids.tolist()]
        forward(model, ids[:1, :4], mask[:1, :4])
        before = peak()
        if {plain}:
            with torch.no_grad():
                hf_model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        elif {function!r} == "patch":
            patch(model, "L0H1, L1H2", rows, rows[::-1], positions="query")
        else:
            with ablate(model, "L0H1, L1H2"):
                if {function!r} == "score":
                    score(model, rows, max_tokens=ids.numel())
                else:
                    forward(model, ids, mask)
        print(peak() - before)
"""


@functools.cache
def growth(function: str) -> float:
    """Peak memory in MiB of one batch of 64 prompts, over that of the process before."""
    return float(in_a_new_process(_ONE_BATCH.format(plain=function == "plain", function=function)))


@pytest.mark.slow
@pytest.mark.parametrize("function", ["forward", "score", "patch"])
def test_peak_memory_of_one_batch(function):
    """One invoke per prompt needs several times the memory of one batch (nnsight issue 396)."""
    assert growth("plain") > 100, "too small a run to measure"
    assert growth(function) <= 1.5 * growth("plain")


@pytest.mark.slow
def test_two_hundred_traces_do_not_grow():
    code = """
        model, hf_model, _ = tiny.build("llama")
        ids = tiny.ids(8, 64)
        mask = torch.ones_like(ids)
        def some(n):
            for _ in range(n):
                with ablate(model, "L0H1"):
                    forward(model, ids, mask)
        some(50)
        before = rss()
        some(200)
        print(rss() - before)
    """
    assert float(in_a_new_process(code)) < 8


@pytest.mark.slow
def test_three_hundred_bounded_generations():
    """Many generate traces in one process crashed (nnsight issue 634)."""
    code = """
        model, hf_model, _ = tiny.build("llama")
        ids, seen = tiny.ids(1, 5), set()
        for i in range(300):
            with ablate(model, "L0H1"), model.generate(ids, max_new_tokens=3, do_sample=False) as tracer:
                result = tracer.result.save()
            seen.add(tuple(result[0].tolist()))
        print(len(seen))
    """
    assert int(in_a_new_process(code)) == 1


def test_every_kind_of_mixer_is_covered_by_the_tiny_models(tiny_model):
    kinds = {mixer.kind for family in tiny.FAMILIES for mixer in layers(tiny_model(family)[0])}
    assert kinds == {"attention", "ssd", "selective_scan", "delta_rule", "mlp"}
