"""Where ablation applies, and the mean and resample kinds with their reference prompts."""

from __future__ import annotations

import nnsight
import pytest
import tiny
import torch

from gna_utils import GnaError, ablate, key_value
from gna_utils.forward import forward, tokens
from gna_utils.tasks import batches, encode

IDS = tiny.ids(3, 11)
LENGTHS = torch.tensor([4, 9, 11])
MASK = (torch.arange(11) < LENGTHS[:, None]).long()
IDS = IDS * MASK


def run(model, **options):
    return forward(model, IDS, MASK, **options)


def everywhere(model):
    """Logits at every position, (3, 11, 64)."""
    return forward(model, IDS, MASK, positions=torch.arange(11).expand(3, 11))


@pytest.fixture(scope="module")
def examples():
    words = [f"w{i}" for i in range(1, 60)]
    return key_value(4, 3, tokenizer=tiny.tokenizer(), seed=1, keys=words[:29], values=words[29:])


def test_positions_choose_what_is_ablated(tiny_model):
    model, _, _ = tiny_model("llama")
    where = torch.zeros(3, 11, dtype=torch.bool)
    where[torch.arange(3), LENGTHS - 1] = True
    plain = everywhere(model)
    with ablate(model, "L0H1", positions="query"):
        query = everywhere(model)
    with ablate(model, "L0H1", positions=where):
        assert torch.equal(everywhere(model), query)
    with ablate(model, "L0H1", positions=where[2]):
        last = everywhere(model)
    for i, n in enumerate(LENGTHS.tolist()):
        assert torch.equal(query[i, : n - 1], plain[i, : n - 1])
        assert (query[i, n - 1] - plain[i, n - 1]).abs().max() > 1e-3
        assert torch.equal(last[i, :10], plain[i, :10])


@pytest.mark.parametrize("name", ["summary", "value", "key", "query"])
def test_positions_by_name_come_from_the_examples(tiny_model, examples, name):
    model, _, _ = tiny_model("llama")
    rows = encode(examples, model.tokenizer)
    ids, mask = tokens(model, rows)
    where = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        span = row.spans.get(name, (0, 0))
        where[i, list({"summary": row.summary, "query": [row.query]}.get(name, range(*span)))] = True
    with ablate(model, "L0H0", positions=where):
        expected = forward(model, ids, mask)
    with ablate(model, "L0H0", positions=name):
        assert torch.equal(forward(model, ids, mask, rows=rows), expected)
        assert torch.equal(forward(model, ids, mask, rows=rows, remote="local"), expected)
        (batch,) = batches(rows)
        again = forward(model, batch.input_ids, batch.attention_mask, rows=batch.rows)
    assert torch.allclose(again[torch.tensor(batch.index).argsort()], expected, atol=1e-5)
    assert (forward(model, ids, mask) - expected).abs().max() > 1e-4


def test_segment_positions_of_plain_text_are_refused(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L0H0", positions="summary"):
        with pytest.raises(GnaError, match="'summary' is only known for examples with marked segments"):
            run(model)
        with pytest.raises(GnaError, match="'summary' is only known"), model.trace("w1 w2"):
            model.output.logits.save()


def test_named_positions_end_with_the_prompt(tiny_model):
    model = tiny_model("llama")[0]
    attention = model.model.layers[0].self_attn
    zero = {}
    for positions in ("query", "all"):
        options = {"max_new_tokens": 4, "min_new_tokens": 4}
        with ablate(model, "L0H1", positions=positions), model.generate(IDS[2:], **options) as tracer:
            sites = nnsight.save([])
            for _ in tracer.iter[:4]:
                sites.append(attention.o_proj.input[0, -1, 16:32])
        zero[positions] = [bool((site == 0).all()) for site in sites]
    assert zero == {"query": [True, False, False, False], "all": [True] * 4}


# ---- mean and resample ----

REFERENCE = ["w1 w2 w3 w4", "w5 w6", "w7 w8 w9 w10 w11"]


def head_inputs(model, prompts, path="model.layers.0.self_attn.o_proj", columns=slice(16, 32)):
    """The head's values in single runs of each prompt, without padding."""
    found = []
    for prompt in prompts:
        with model.trace(input_ids=tokens(model, prompt)[0]):
            found.append(model.get(path).input[0, :, columns].save())
    return found


def test_mean_is_one_vector_over_all_real_tokens(tiny_model):
    """Padding of the reference must not enter the mean."""
    model, _, _ = tiny_model("llama")
    mean = torch.cat(head_inputs(model, REFERENCE)).mean(0)
    with ablate(model, "L0H1", kind="mean", reference=REFERENCE):
        (site,) = head_inputs(model, ["w20 w21 w22"])
        ablated, remote = run(model), run(model, remote="local")
    assert torch.allclose(site, mean.expand(4, 16), atol=1e-6)
    assert torch.equal(ablated, remote) and (ablated - run(model)).abs().max() > 1e-3


def test_mean_at_the_query_is_the_mean_of_queries(tiny_model):
    model, _, _ = tiny_model("llama")
    mean = torch.stack([values[-1] for values in head_inputs(model, REFERENCE)]).mean(0)
    plain = head_inputs(model, ["w20 w21 w22"])[0]
    with ablate(model, "L0H1", kind="mean", reference=REFERENCE, positions="query"):
        (site,) = head_inputs(model, ["w20 w21 w22"])
    assert torch.equal(site[:-1], plain[:-1]) and torch.allclose(site[-1], mean, atol=1e-6)


def test_reference_runs_on_the_plain_model(tiny_model):
    model, _, _ = tiny_model("llama")
    with ablate(model, "L1H0", kind="mean", reference=REFERENCE), ablate(model, "L0H1"):
        inner = run(model)
    with ablate(model, "L0H1"), ablate(model, "L1H0", kind="mean", reference=REFERENCE):
        assert torch.equal(run(model), inner)


def test_resample_takes_another_prompt_and_repeats_with_the_seed(tiny_model):
    model, _, _ = tiny_model("llama")
    donors = head_inputs(model, REFERENCE)

    def donor_of(values):
        """Which reference prompt these values come from; beyond its end, its last token."""
        matches = []
        for number, donor in enumerate(donors):
            index = torch.arange(len(values)).clamp(max=len(donor) - 1)
            matches += [number] if torch.allclose(values, donor[index], atol=1e-6) else []
        return matches

    prompts = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4}" for i in range(20, 40)]
    chosen = {}
    for seed in (0, 0, 1):
        with ablate(model, "L0H1", kind="resample", reference=REFERENCE, seed=seed):
            found = [donor_of(values) for values in head_inputs(model, prompts)]
            own = [donor_of(values) for values in head_inputs(model, REFERENCE)]
        assert all(len(matches) == 1 for matches in found)
        assert all(number not in matches for number, matches in enumerate(own))
        chosen.setdefault(seed, []).append(found)
    assert chosen[0][0] == chosen[0][1] != chosen[1][0]
    assert len({tuple(matches) for matches in chosen[0][0]}) == 3


def test_resample_does_not_depend_on_the_batch(tiny_model):
    model, _, _ = tiny_model("mamba2")
    with ablate(model, "L0H1, L1H2", kind="resample", reference=REFERENCE, seed=3):
        together, remote = run(model), run(model, remote="local")
        alone = [
            forward(model, IDS[i : i + 1, :n], MASK[i : i + 1, :n]) for i, n in enumerate(LENGTHS.tolist())
        ]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5) and torch.equal(together, remote)
