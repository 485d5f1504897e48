"""The scans used in training against those of transformers."""

from __future__ import annotations

from importlib import import_module

import pytest
import tiny
import torch

from gna_utils.fast_scans import fast_scans

FAMILIES = ("mamba", "mamba2", "bamba")
NAMES = ("mamba_selective_scan", "mamba2_chunk_scan", "causal_conv1d_fn")
# two groups and a limit of dt that binds: tiled groups, or a limit forgotten, would show
OPTIONS = {"mamba2": {"time_step_limit": (0.05, 0.3)}}


def built(family: str, **options) -> torch.nn.Module:
    model = tiny.build_hf(family, **(OPTIONS.get(family, {}) | options))
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):  # steps from 0.02 to 0.9
            parameter.copy_(torch.linspace(-4, 0.4, len(parameter)))
    return model


def gradients(model, ids) -> list[torch.Tensor]:
    """Logits, and the gradient of every parameter and of the embedded tokens."""
    model.requires_grad_(True).zero_grad(set_to_none=True)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().div(logits.numel()).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [logits.detach(), embedded.grad, *found]


def functions() -> list:
    modules = [import_module(f"transformers.models.{family}.modeling_{family}") for family in FAMILIES]
    return [getattr(module, name, None) for module in modules for name in NAMES]


def close(a, b) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max()))


def counted(monkeypatch, family: str) -> list[str]:
    """Names of the scans of transformers, in the order in which they are called."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    calls: list[str] = []

    def wrap(name, original):
        return lambda *args, **options: (calls.append(name), original(*args, **options))[1]

    for name in NAMES:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, wrap(name, getattr(module, name)))
    return calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 3, 13])
def test_logits_and_gradients_are_those_of_transformers(family, length):
    model, ids = built(family), tiny.ids(2, length, seed=length)
    expected = gradients(model, ids)
    with fast_scans():
        found = gradients(model, ids)
    assert len(found) == len(expected) > 10
    for a, b in zip(found, expected):
        close(a, b)


@pytest.mark.parametrize("options", [{"use_conv_bias": False}, {"conv_kernel": 1}, {"hidden_act": "gelu"}])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_convolution_follows_the_configuration(family, options):
    model, ids = built(family, **options), tiny.ids(2, 9)
    expected = gradients(model, ids)
    with fast_scans():
        for a, b in zip(gradients(model, ids), expected):
            close(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_calls_never_reach_the_scans_of_transformers(family, monkeypatch):
    """Without this the tests above would also pass if nothing was exchanged at all."""
    calls = counted(monkeypatch, family)
    model = built(family)
    with fast_scans():
        model(tiny.ids(1, 5), use_cache=False)
    assert not calls
    model(tiny.ids(1, 5), use_cache=False)
    assert calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family, side):
    model, ids = built(family), tiny.ids(2, 8)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 3) if side == "left" else slice(5, 8)] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    with fast_scans():
        found = model(ids, attention_mask=mask, use_cache=False).logits
    close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_calls_run_the_scans_of_transformers(family, monkeypatch):
    calls = counted(monkeypatch, family)
    model, ids = built(family), tiny.ids(2, 6)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    expected_calls = [name for name in calls if "scan" in name]
    calls.clear()
    with fast_scans():
        found = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected)
    assert [name for name in calls if "scan" in name] == expected_calls != []


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_that_goes_on_from_a_state_gives_what_transformers_gives(family):
    model, ids = built(family), tiny.ids(2, 9)

    def in_two_parts():
        cache = model(ids[:, :5], use_cache=True).cache
        return model(ids[:, 5:], cache=cache, use_cache=True).logits

    expected = in_two_parts()
    with fast_scans():
        close(in_two_parts(), expected)


def test_functions_are_put_back_also_after_an_error():
    before = functions()
    with pytest.raises(ZeroDivisionError), fast_scans():
        assert functions() != before
        1 / 0
    with fast_scans(), fast_scans():
        pass
    assert functions() == before
