"""The same code here and on a real NDIF server gives the same numbers; run by `make test-remote`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import nnsight
import numpy as np
import pytest
import server
import tiny
import torch

import gna_utils as gna
from gna_utils import remote
from gna_utils.forward import forward, tokens
from gna_utils.scoring import score
from gna_utils.tasks import Example, Segment

pytestmark = pytest.mark.remote

PROMPTS = ["w1 w2 w3 w4 w5 w6 w7", "w8 w9 w10"]  # of different length: the batch is padded
REFERENCE = ["w20 w21 w22 w23", "w30 w31", "w40 w41 w42"]
HEADS = "L1H1, L2H0, L2H3"


@pytest.fixture(autouse=True, scope="session")
def quiet() -> None:
    nnsight.CONFIG.APP.REMOTE_LOGGING = False


@pytest.fixture(params=server.MODELS, scope="module")
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def local(family):
    return gna.load(str(server.MODELS[family]), device="cpu")


@pytest.fixture(scope="module")
def away(family):
    """The structure alone: no weight of it is on this side."""
    model = gna.load(str(server.MODELS[family]), remote=True)
    assert all(parameter.is_meta for parameter in model._module.parameters())
    return model


@pytest.fixture(scope="module")
def batch(local):
    return tokens(local, PROMPTS)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Three pairs, then a key: `w1 w31 w2 w32 w3 w33 w2`, in which a value has one word or two."""
    made = []
    for i, second in enumerate(["", "", " w50", " w51"]):
        keys, values = [f"w{1 + i + j}" for j in range(3)], [f" w{31 + i + j}{second}" for j in range(3)]
        prompt, segments = "", []
        for key, value in zip(keys, values):
            start = len(prompt) + bool(prompt)
            prompt = f"{prompt} {key}{value}".strip()
            segments.append(Segment(start, len(prompt), f"{key}:{value}"))
        asked = segments[1]
        spans = {"value": (asked.start + len(keys[1]) + 1, asked.end)}
        text = f"{prompt} {keys[1]}"
        made.append(Example("pairs", text, tuple(values), 1, tuple(segments), 1, {}, spans=spans))
    return made


def test_logits(away, local, batch, same):
    same(forward(away, *batch, remote=True), forward(local, *batch))


def test_logits_at_several_positions(away, local, batch, same):
    where = torch.tensor([[0, 6], [1, 2]])
    same(forward(away, *batch, positions=where, remote=True), forward(local, *batch, positions=where))


def test_a_read_in_a_trace_of_ones_own(away, local, same):
    """The reader's own blocks go to the server too; the output of all heads enters the output projection."""
    path = gna.layers(local).find(gna.Head(1, 0)).path + (
        "." + gna.layers(local).find(gna.Head(1, 0)).out_proj
    )
    with away.trace(PROMPTS[0], backend=remote.backend(away, True)):
        there = away.get(path).input.save()
    with local.trace(PROMPTS[0]):
        here = local.get(path).input.save()
    same(there, here)


def test_an_address_instead_of_true(away, local, batch, same):
    same(forward(away, *batch, remote=os.environ["NDIF_HOST"]), forward(local, *batch))


@pytest.mark.parametrize("positions", ["all", "query"])
@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_ablation(away, local, batch, same, kind, positions):
    reference = None if kind == "zero" else REFERENCE
    options = {"kind": kind, "positions": positions, "reference": reference}
    with gna.ablate(away, HEADS, remote=True, **options):
        there = forward(away, *batch, remote=True)
    with gna.ablate(local, HEADS, **options):
        here = forward(local, *batch)
    same(there, here)
    assert (here - forward(local, *batch)).abs().max() > 1e-2
    same(forward(away, *batch, remote=True), forward(local, *batch))  # nothing of it stays on the server


def test_ablation_before_the_gated_norm(away, local, batch, same, family):
    if family == "llama":
        with pytest.raises(gna.GnaError), gna.ablate(away, HEADS, where="scan"):
            pass
        return
    with gna.ablate(away, HEADS, where="scan"):
        there = forward(away, *batch, remote=True)
    with gna.ablate(local, HEADS, where="scan"):
        same(there, forward(local, *batch))


def test_keep_only(away, local, batch, same):
    with gna.keep_only(away, HEADS):
        there = forward(away, *batch, remote=True)
    with gna.keep_only(local, HEADS):
        same(there, forward(local, *batch))


def test_fewer_layers(away, local, batch, same):
    with gna.drop_layers(away, [1]), gna.keep_layers(away, 3):
        there = forward(away, *batch, remote=True)
    with gna.drop_layers(local, [1]), gna.keep_layers(local, 3):
        same(there, forward(local, *batch))


def test_masked_rows(away, local, batch, same, family):
    if family == "mamba2":
        with pytest.raises(gna.GnaError, match="no attention map"), gna.mask_rows(away):
            pass
        return
    with gna.mask_rows(away, positions="query"):
        there = forward(away, *batch, remote=True)
    with gna.mask_rows(local, positions="query"):
        same(there, forward(local, *batch))


@pytest.mark.parametrize("positions", ["value", "summary", "query"])
def test_patch(away, local, examples, same, positions):
    donors = examples[1::-1]
    there = gna.patch(away, HEADS, examples[:2], donors, positions=positions, remote=True)
    same(there, gna.patch(local, HEADS, examples[:2], donors, positions=positions))


@pytest.mark.parametrize("skip", [True, False])
def test_transfer_matrix(away, local, same, skip):
    there = gna.transfer_matrix(away, PROMPTS, HEADS, skip=skip, remote=True)
    same(there, gna.transfer_matrix(local, PROMPTS, HEADS, skip=skip))


def test_transfer_matrix_inside_an_ablation(away, local, same):
    with gna.ablate(away, "L0H0"):
        there = gna.transfer_matrix(away, PROMPTS, HEADS, remote=True)
    with gna.ablate(local, "L0H0"):
        same(there, gna.transfer_matrix(local, PROMPTS, HEADS))


@pytest.mark.filterwarnings("ignore::gna_utils.scoring.GnaWarning")
def test_sweep_over_four_heads(away, local, examples, same):
    """Every candidate's score under each ablation; two-word candidates need several requests."""
    for head in ["L0H0", "L0H1", "L1H2", "L3H3"]:
        with gna.ablate(away, head):
            there = score(away, examples, remote=True)
        with gna.ablate(local, head):
            here = score(local, examples)
        same(torch.tensor(np.stack(there.logprobs)), torch.tensor(np.stack(here.logprobs)))
        assert there.frame["predicted"].tolist() == here.frame["predicted"].tolist()


def test_generation_inside_an_ablation(away, local, family):
    """Every generated token sees the ablation."""
    found = []
    for model, place in ((away, remote.backend(away, True)), (local, None)):
        with gna.ablate(model, HEADS):
            with model.generate(PROMPTS[0], max_new_tokens=5, do_sample=False, backend=place) as tracer:
                ids = tracer.result.save()
            found.append(ids.tolist())
    assert found[0] == found[1]


def test_the_attention_implementation_travels():
    """A server shares its model between users: the one asked for here must be the one that runs there."""
    eager = gna.load(str(server.MODELS["llama"]), remote=True, attn_implementation="eager")
    with eager.trace(PROMPTS[0], backend=remote.backend(eager, True)):
        weights = eager.model.layers[1].self_attn.output[1].save()
    assert weights.sum(-1).allclose(torch.ones(1))


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The package as users have it: installed, in a folder of its own, instead of this checkout."""
    site = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        site,
        server.REPOSITORY,
    ]
    subprocess.run(command, check=True, timeout=300)
    return site


@pytest.mark.parametrize("registered", [True, False])
def test_the_installed_package_outside_the_repository(installed, tmp_path, registered):
    """A server gets the source of packages in the working directory, and of installed ones that say so."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import gna_utils as gna
            import nnsight
            from gna_utils.forward import forward, tokens

            assert gna.__file__.startswith({str(installed)!r})
            if not {registered}:
                nnsight.register = lambda name: None
            model = gna.load({str(server.MODELS["mamba2"])!r}, remote=True)
            with gna.ablate(model, "L1H1"):
                print("logits", forward(model, *tokens(model, ["w1 w2"]), remote=True).shape)
            """
        )
    )
    variables = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=300)
    if registered:
        assert "logits torch.Size([1, 64])" in done.stdout, done.stderr
    else:
        assert "GnaError" in done.stderr and "No module named 'gna_utils'" in done.stderr


def test_a_model_that_the_server_does_not_have(tmp_path):
    folder = tmp_path / "elsewhere"
    tiny.build_hf("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    model = gna.load(str(folder), remote=True)
    with pytest.raises(gna.GnaError, match=r"cannot serve the model .*elsewhere"):
        forward(model, *tokens(model, PROMPTS), remote=True)


def test_an_error_in_the_block_names_the_readers_line(away):
    with (
        pytest.raises(gna.GnaError, match="IndexError") as caught,
        away.trace(PROMPTS[0], backend=remote.backend(away, True)),
    ):
        away.lm_head.output[7].save()
    assert "away.lm_head.output[7].save()" in "".join(caught.value.__notes__)


def test_a_result_larger_than_the_server_returns(away):
    """This server has no store for large results, as the public one has."""
    with (
        pytest.raises(gna.GnaError, match="the result is larger"),
        away.trace(PROMPTS[0], backend=remote.backend(away, True)),
    ):
        large = torch.rand(4_000_000).save()
    assert "large" not in locals()


def test_a_key_that_the_server_does_not_check_stays_secret(away, batch, monkeypatch, capfd):
    """Without accounts a server takes every key; it must not show up anywhere."""
    monkeypatch.setattr(nnsight.CONFIG.API, "APIKEY", "planted-key")
    forward(away, *batch, remote=True)
    with pytest.raises(gna.GnaError) as caught, away.trace(PROMPTS[0], backend=remote.backend(away, True)):
        away.lm_head.output[7].save()
    text = "".join([str(caught.value), *caught.value.__notes__, *capfd.readouterr()])
    assert "planted-key" not in text
