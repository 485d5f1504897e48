"""A tiny random Llamba, and its logits from an independent implementation; shared by the tests of Llamba."""

from __future__ import annotations

import numpy as np
import torch

from gna_utils.llamba import LlambaConfig, LlambaForCausalLM

CHUNK = 4
SSM = {"d_state": 8, "n_v_heads": 4, "n_qk_heads": 2, "chunk_size": CHUNK}


def build(ssm=None, *, seed: int = 0, **options) -> LlambaForCausalLM:
    """A tiny model whose every weight is random, so that each part of the mixer matters."""
    sizes = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "mlp_cfg": {"intermediate_size": 48}}
    model = LlambaForCausalLM(LlambaConfig(**(sizes | options), ssm_cfg=SSM | (ssm or {})))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shift = 1.0 if "norm" in name else 0.0
            parameter.normal_(0, 0.25, generator=generator).add_(shift)
    return model.eval().requires_grad_(False)


def numpy_logits(model: LlambaForCausalLM, tokens: list[int]) -> np.ndarray:
    """Logits (length, vocab) of one row, token by token in float64, written from the formulas alone."""
    w = {name: value.double().numpy() for name, value in model.state_dict().items()}
    ssm, d = model.config.ssm_cfg, model.config.d_inner
    heads, qk, n, width = ssm["n_v_heads"], ssm["n_qk_heads"], ssm["d_state"], ssm["d_conv"]

    def norm(x, weight):
        return x / np.sqrt((x**2).mean() + 1e-5) * weight

    def silu(x):
        return x / (1 + np.exp(-x))

    def linear(x, name):
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)

    window = np.zeros((model.config.n_layer, width, d + 2 * qk * n))
    state = np.zeros((model.config.n_layer, heads, d // heads, n))
    logits = []
    for token in tokens:
        h = w["backbone.embedding.weight"][token]
        for i in range(model.config.n_layer):
            at = f"backbone.layers.{i}"
            mixer = f"{at}.mixer"
            xBC, z, A_log = np.split(
                linear(norm(h, w[f"{at}.input_layernorm.weight"]), f"{mixer}.in_proj"),
                [d + 2 * qk * n, 2 * d + 2 * qk * n],
            )
            window[i] = np.vstack([window[i][1:], xBC])
            mixed = (window[i] * w[f"{mixer}.conv1d.weight"][:, 0].T).sum(0) + w.get(
                f"{mixer}.conv1d.bias", 0
            )
            mixed = silu(mixed) if ssm["activation"] == "silu" else mixed
            x, B, C = np.split(mixed, [d, d + qk * n])
            y = np.empty((heads, d // heads))
            for head in range(heads):
                shared = slice(head // (heads // qk) * n, (head // (heads // qk) + 1) * n)
                v = x.reshape(heads, -1)[head]
                state[i, head] = state[i, head] / (1 + np.exp(A_log[head])) + np.outer(v, B[shared])
                y[head] = state[i, head] @ C[shared] + w[f"{mixer}.D"][head] * v
            h = h + linear(y.ravel() * silu(z + w.get(f"{mixer}.z_bias", 0.0)), f"{mixer}.out_proj")
            u = norm(h, w[f"{at}.post_attention_layernorm.weight"])
            gated = silu(linear(u, f"{at}.mlp.gate_proj")) * linear(u, f"{at}.mlp.up_proj")
            h = h + linear(gated, f"{at}.mlp.down_proj")
        logits.append(linear(norm(h, w["backbone.final_layernorm.weight"]), "lm_head"))
    return np.stack(logits)


def close(a, b, tolerance=1e-4) -> None:
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance
