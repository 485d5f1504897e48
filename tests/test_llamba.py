"""Llamba against an independent recurrence; padding, cache, generation, gradients."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest
import tiny
import torch
from tiny_llamba import CHUNK, build, close, numpy_logits
from torch.utils._python_dispatch import TorchDispatchMode

from gna_utils.errors import GnaError
from gna_utils.llamba import (
    LlambaForCausalLM,
    discrete_ssd_matrix,
    discrete_ssd_recurrence,
    discrete_ssd_scan,
)


@pytest.fixture(scope="module")
def model() -> LlambaForCausalLM:
    return build()


@pytest.mark.parametrize("length", [1, 2, 7, CHUNK + 1, 3 * CHUNK + 2])
@pytest.mark.parametrize(
    "ssm",
    [
        {},
        {"n_qk_heads": 4},
        {"activation": "silu", "bias": True, "expand": 2},
        {"d_conv": 1, "conv_bias": False},
    ],
)
def test_logits_equal_an_independent_recurrence(ssm, length):
    """Mixed-up groups, a state lost between chunks, or a shifted convolution would show here."""
    model = build(ssm)
    ids = tiny.ids(1, length, seed=length)
    close(model(ids).logits[0], numpy_logits(model, ids[0].tolist()))


@pytest.mark.parametrize("chunk", [1, 3, 14, 128])
def test_chunk_size_does_not_matter(model, chunk):
    ids = tiny.ids(2, 14)
    close(build({"chunk_size": chunk})(ids).logits, model(ids).logits)


def test_logits_do_not_depend_on_later_tokens(model):
    """The state must cross chunk borders: a cut prompt has the same last logits (transformers 47246)."""
    ids = tiny.ids(2, 11)
    full = model(ids).logits
    for t in range(1, 12):
        close(full[:, t - 1], model(ids[:, :t]).logits[:, -1])


def operands(length: int, *, heads: int = 4, groups: int = 2) -> dict:
    draw = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    return {
        "x": normal(2, length, heads, 5),
        "log_decay": -torch.nn.functional.softplus(3 * normal(2, length, heads)),
        "B": normal(2, length, groups, 3),
        "C": normal(2, length, groups, 3),
        "D": normal(heads),
    }


@pytest.mark.parametrize("length", [1, 2, 7, CHUNK + 1, 3 * CHUNK + 2])
def test_scan_recurrence_and_matrix_are_one_map(length):
    ops = operands(length)
    expected = discrete_ssd_recurrence(**ops)
    close(discrete_ssd_scan(**ops, chunk_size=CHUNK)[0], expected)
    decay, B, C = (
        ops[name].repeat_interleave(4 // ops[name].shape[2], dim=2).transpose(1, 2)
        for name in ("log_decay", "B", "C")
    )
    T = discrete_ssd_matrix(decay, B, C, ops["D"])
    close((T @ ops["x"].transpose(1, 2)).transpose(1, 2), expected)
    assert T.triu(1).abs().max() == 0
    without = discrete_ssd_matrix(decay, B, C)
    close((T - without).diagonal(dim1=-2, dim2=-1), ops["D"][None, :, None].expand(2, 4, length), 1e-5)


def test_scan_continues_from_a_state():
    ops = operands(11)
    whole, end = discrete_ssd_scan(**ops, chunk_size=CHUNK)
    first, state = discrete_ssd_scan(
        **{k: v[:, :6] if k != "D" else v for k, v in ops.items()}, chunk_size=CHUNK
    )
    rest = {k: v[:, 6:] if k != "D" else v for k, v in ops.items()}
    second, last = discrete_ssd_scan(**rest, chunk_size=CHUNK, initial_state=state)
    close(torch.cat([first, second], 1), whole)
    close(last, end)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_scan_memory_is_linear_in_length():
    """No matrix of all pairs of positions may be formed: twice the length needs twice the largest tensor."""
    largest = []
    for length in (1024, 2048):
        with LargestTensor() as seen:
            discrete_ssd_scan(**operands(length), chunk_size=8)
        largest.append(seen.numel)
    assert largest[1] <= 2 * largest[0]


def test_matrix_has_right_gradients():
    """The product is formed in place; its gradient must be that of the plain product."""
    decay = -torch.rand(1, 1, 5, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    B, C = torch.randn(2, 1, 1, 5, 3, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    D = torch.ones(1, dtype=torch.double)
    inputs = [t.requires_grad_() for t in (decay, B.clone(), C.clone(), D)]
    assert torch.autograd.gradcheck(discrete_ssd_matrix, inputs)


def test_gradients_are_finite_under_extreme_decays():
    """A decay of exactly 0 or 1 must not turn masked entries into NaN gradients."""
    model = build().train().requires_grad_(True)
    with torch.no_grad():
        model.backbone.layers[0].mixer.in_proj.weight[-4:] *= 1e4
    ids = tiny.ids(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bfloat16_is_close_to_float32(model):
    ids = tiny.ids(2, 14)
    half = build().bfloat16()
    hidden = half.backbone(ids).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    reference = model.backbone(ids).last_hidden_state
    assert (hidden.float() - reference).norm() < 0.05 * reference.norm()
    assert half(ids).cache.layers[0].recurrent_states[0].dtype == torch.float32


def test_fresh_convolution_is_the_identity():
    """A fresh model starts as a plain scan: the convolution passes x, B and C on unchanged."""
    model = LlambaForCausalLM(build().config)
    mixer = model.backbone.layers[0].mixer
    xBC = torch.randn(2, 7, mixer.sizes[0], generator=torch.Generator().manual_seed(0))
    assert torch.equal(mixer.convolve(xBC, None, None), xBC)
    assert torch.equal(mixer.D, torch.ones(4))
    assert torch.equal(mixer.z_bias, torch.zeros(32))


@pytest.mark.parametrize("side", ["left", "right", "both", "inside"])
def test_padding_changes_nothing(model, side):
    """Padded prompts must give the answers of the bare prompt (transformers 31540), now and from cache."""
    bare = tiny.ids(1, 6)
    place = {
        "left": [3] * 3,
        "right": [0] * 6 + [3] * 3,
        "both": [3, 3, 0, 0, 0, 0, 0, 0, 3],
        "inside": [0, 0, 3, 3, 0, 0, 0, 0, 3],
    }[side]
    place = torch.tensor((place + [0] * 9)[:9])
    mask = (place == 0).long()[None]
    ids = torch.where(mask.bool(), 0, place[None])
    ids[mask.bool()] = bare[0]
    expected, got = model(bare), model(ids, attention_mask=mask)
    close(got.logits[mask.bool()], expected.logits[0], 1e-5)
    following = tiny.ids(1, 3, seed=5)
    wide = torch.cat([mask, torch.ones(1, 3, dtype=torch.long)], 1)
    after = model(following, cache=got.cache, attention_mask=wide).logits
    close(after, model(following, cache=expected.cache).logits, 1e-5)
    close(after[0], numpy_logits(model, bare[0].tolist() + following[0].tolist())[6:])


def test_batch_of_unequal_prompts(model):
    """Several prompts in one batch must not change the answer of a short one (nnsight 672)."""
    ids, lengths = tiny.ids(3, 9), (9, 1, 4)
    for left in (True, False):
        rows, masks = [], []
        for row, length in zip(ids, lengths):
            pad, real = torch.zeros(9 - length, dtype=torch.long), row[:length]
            rows.append(torch.cat([pad, real] if left else [real, pad]))
            masks.append(torch.cat([pad, torch.ones_like(real)] if left else [torch.ones_like(real), pad]))
        batch, mask = torch.stack(rows), torch.stack(masks)
        logits = model(batch, attention_mask=mask).logits
        for i, length in enumerate(lengths):
            close(logits[i][mask[i].bool()], model(ids[i : i + 1, :length]).logits[0], 1e-5)


@pytest.mark.parametrize("cuts", [range(1, 11), (1, 2, 7), (5, 6)])
def test_stepping_with_the_cache_equals_the_full_run(model, cuts):
    ids = tiny.ids(2, 11)
    cache, pieces = None, []
    for start, stop in zip((0, *cuts), (*cuts, 11)):
        out = model(ids[:, start:stop], cache=cache, use_cache=True)
        cache = out.cache
        pieces.append(out.logits)
    close(torch.cat(pieces, 1), model(ids, use_cache=False).logits, 1e-5)


def test_cache_can_be_copied_and_spread_over_rows(model):
    """One cached prompt serves several continuations; reading one must not touch the others."""
    prompt, ends = tiny.ids(2, 5), tiny.ids(6, 2, seed=1)
    cache = model(prompt).cache
    spread = copy.deepcopy(cache)
    spread.reorder_cache(torch.arange(2).repeat_interleave(3))
    got = model(ends, cache=spread).logits
    close(got, model(torch.cat([prompt.repeat_interleave(3, 0), ends], 1)).logits[:, 5:], 1e-5)
    close(model(ends[:2], cache=cache).logits, model(torch.cat([prompt, ends[:2]], 1)).logits[:, 5:], 1e-5)


def test_generate_is_the_argmax_loop(model):
    ids = tiny.ids(2, 5)
    ids[1, :2] = 0
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        got = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for row, real, out in zip(ids, mask, got):
        text = row[real.bool()].tolist()
        for _ in range(6):
            text.append(int(numpy_logits(model, text)[-1].argmax()))
        assert out.tolist()[5:] == text[-6:]


def test_beam_search_reorders_the_states(model):
    ids = tiny.ids(1, 5)
    options = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


def test_hidden_states_and_kept_logits(model):
    ids = tiny.ids(2, 6)
    out = model(ids, output_hidden_states=True, logits_to_keep=2)
    assert len(out.hidden_states) == 3
    close(model.lm_head(out.hidden_states[-1])[:, -2:], out.logits, 1e-5)


def test_bad_inputs_are_refused(model):
    ids = tiny.ids(2, 5)
    with pytest.raises(GnaError, match=r"shape \(2, 4\).*\(2, 5\)"):
        model(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(GnaError, match="exactly one"):
        model(ids, inputs_embeds=model.backbone.embedding(ids))


@pytest.mark.slow
def test_needs_no_cuda_only_package():
    """mamba-ssm cannot be installed without nvcc (mamba 602): nothing here may need it."""
    code = (
        "import sys\n"
        "for name in ('mamba_ssm', 'causal_conv1d', 'flash_attn'):\n    sys.modules[name] = None\n"
        "import torch\nfrom gna_utils.llamba import LlambaConfig, LlambaForCausalLM\n"
        "config = LlambaConfig(vocab_size=8, d_model=32, n_layer=1, mlp_cfg={'intermediate_size': 8})\n"
        "ids = torch.zeros(1, 3, dtype=torch.long)\n"
        "print(LlambaForCausalLM(config).generate(ids, max_new_tokens=2, do_sample=False).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "[1, 5]" in done.stdout
