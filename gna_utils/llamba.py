"""Llamba in plain PyTorch: a Llama whose attention is replaced by a discrete state-space mixer.

Official checkpoints load into it, because configuration keys and parameter names are the official ones, and
no CUDA-only package is needed. Importing this module registers it with transformers:

>>> import gna_utils.llamba
>>> model = AutoModelForCausalLM.from_pretrained("cartesia-ai/Llamba-1B")   # or a local folder

Read it from top to bottom: the recurrence one step at a time, the same map as a matrix, the fast scan that
mixes both, then the mixer, the layer and the model around them.
Source: Bick et al., "Llamba: Scaling Distilled Recurrent Models for Efficient Language Processing"
(arXiv 2502.14458); the mixer is the "discrete Mamba-2" of MOHAWK (arXiv 2408.10189).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg

from .errors import GnaError
from .llamba_config import LlambaConfig


def discrete_ssd_recurrence(x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The mixer's scan one token at a time: slow, and the definition of what the fast scan computes.

    At each token every head forgets a little, writes ``B_t x_t`` into its state and reads it with ``C_t``.
    Shapes as in :func:`discrete_ssd_scan`.
    """
    share = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(share, dim=2) for t in (B, C))
    state = x.new_zeros(x.shape[0], x.shape[2], B.shape[-1], x.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        keep = log_decay[:, t].exp()[..., None, None]
        state = keep * state + B[:, t, :, :, None] * x[:, t, :, None, :]
        read = (C[:, t, :, :, None] * state).sum(dim=2)
        outputs.append(read + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1)


def discrete_ssd_matrix(log_decay: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None) -> Tensor:
    """The same scan written as one matrix per head, ``y = T x``.

    ``T_ij = (C_i . B_j) exp(log_decay_{j+1} + ... + log_decay_i)`` for ``j <= i``, 0 above the diagonal, plus
    the skip weight ``D`` on it. Heads come first here: ``log_decay`` is ``(batch, head, L)``, ``B`` and ``C``
    are ``(batch, head, L, d_state)``, ``D`` is ``(head,)``, the result ``(batch, head, L, L)``, all float32.
    """
    length = log_decay.shape[-1]
    # Row i, column j holds log_decay_i where i > j, so running sums down the columns add up j+1..i. No large
    # number is ever subtracted, and no exponent is positive. In place, memory is twice the result.
    kept = log_decay[..., None].expand(*log_decay.shape, length).tril(-1).cumsum(-2).exp_()
    matrix = (C @ B.mT).tril_().mul_(kept)
    if D is not None:
        matrix.diagonal(dim1=-2, dim2=-1).add_(D[:, None])
    return matrix


def discrete_ssd_scan(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    chunk_size: int = 128,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The scan in chunks: a small matrix inside each chunk, a carried state between chunks; linear in length.

    >>> y, state = discrete_ssd_scan(x, log_decay, B, C, D)
    >>> y_next, state = discrete_ssd_scan(x_next, ..., initial_state=state)      # continue where it stopped

    ``x`` is ``(batch, L, n_v_heads, head_dim)``, ``log_decay`` ``(batch, L, n_v_heads)``, ``B`` and ``C``
    ``(batch, L, n_qk_heads, d_state)`` where neighbouring heads share one row, ``D`` ``(n_v_heads,)``.
    Returns the output, shaped and typed like ``x``, and the state ``(batch, n_v_heads, d_state, head_dim)``
    in float32. Source: the block decomposition of Dao and Gu (arXiv 2405.21060, section 6).
    """
    share = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(share, dim=2) for t in (B, C))
    values, decays, B, C = (t.float().transpose(1, 2) for t in (x, log_decay, B, C))
    D = D.float()
    state = values.new_zeros(*values.shape[:2], B.shape[-1], values.shape[-1])
    if initial_state is not None:
        state = initial_state.float()

    outputs = []
    for start in range(0, x.shape[1], chunk_size):
        part = slice(start, start + chunk_size)
        v, decay, b, c = values[:, :, part], decays[:, :, part], B[:, :, part], C[:, :, part]
        since_start = decay.cumsum(-1)
        total = since_start[..., -1:]
        carried = since_start.exp()[..., None] * (c @ state)
        outputs.append(discrete_ssd_matrix(decay, b, c, D) @ v + carried)
        written = (b * (total - since_start).exp()[..., None]).mT @ v
        state = total.exp()[..., None] * state + written
    return torch.cat(outputs, dim=2).transpose(1, 2).to(x.dtype), state


class DiscreteSSDMixer(nn.Module):
    """The token mixer: project, convolve, scan, gate, project.

    ``in_proj`` gives ``[x B C | z | A_log]`` for every token. A short causal convolution runs over ``x B C``,
    the scan mixes the tokens with decay ``sigmoid(-A_log)``, and ``silu(z + z_bias)`` gates what ``out_proj``
    reads. A head is a slice of ``head_dim`` columns of ``out_proj``.
    """

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__()
        ssm = config.ssm_cfg
        self.layer_idx = layer_idx
        self.num_heads, self.n_qk_heads = ssm["n_v_heads"], ssm["n_qk_heads"]
        self.d_inner, self.d_state, self.chunk_size = config.d_inner, ssm["d_state"], ssm["chunk_size"]
        self.head_dim = self.d_inner // self.num_heads
        self.d_qk = self.n_qk_heads * self.d_state
        conv_dim = self.d_inner + 2 * self.d_qk
        self.sizes = [conv_dim, self.d_inner, self.num_heads]

        self.in_proj = nn.Linear(config.d_model, sum(self.sizes), bias=ssm["bias"])
        # The official module has a bias for the gate exactly when its projections have none.
        self.register_parameter("z_bias", None if ssm["bias"] else nn.Parameter(torch.zeros(self.d_inner)))
        self.conv1d = nn.Conv1d(
            conv_dim,
            conv_dim,
            ssm["d_conv"],
            groups=conv_dim,
            padding=ssm["d_conv"] - 1,
            bias=ssm["conv_bias"],
        )
        self.act = nn.Identity() if ssm["activation"] == "identity" else nn.SiLU()
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.out_proj = nn.Linear(self.d_inner, config.d_model, bias=ssm["bias"])

    def forward(self, hidden_states: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden_states.shape
        xBC, z, A_log = self.in_proj(hidden_states).split(self.sizes, dim=-1)
        past = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        xBC = self.convolve(xBC, cache, mask)
        log_decay = F.logsigmoid(-A_log.float())
        if mask is not None:
            # A padding token writes nothing into the state, and the state forgets nothing while it passes.
            xBC, log_decay = xBC * mask[..., None], log_decay * mask[..., None]
        x, B, C = xBC.split([self.d_inner, self.d_qk, self.d_qk], dim=-1)
        y, state = discrete_ssd_scan(
            x.reshape(batch, length, self.num_heads, self.head_dim),
            log_decay,
            B.reshape(batch, length, self.n_qk_heads, self.d_state),
            C.reshape(batch, length, self.n_qk_heads, self.d_state),
            self.D,
            chunk_size=self.chunk_size,
            initial_state=past,
        )
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        gate = z if self.z_bias is None else z + self.z_bias
        return self.out_proj(y.reshape(batch, length, self.d_inner) * F.silu(gate))

    def convolve(self, xBC: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        """Mix each token with the few *real* tokens before it, wherever the padding stands.

        Cached columns of earlier tokens come in front. With a mask the padding is moved to the very front,
        where its zeros stand for "before the text", and moved back afterwards.
        """
        past = None if cache is None else cache.get_conv_state(self.layer_idx)
        n_past = 0 if past is None else past.shape[-1]
        if past is not None:
            xBC = torch.cat([past.transpose(1, 2), xBC], dim=1)
        if mask is not None:
            mask = F.pad(mask, (n_past, 0), value=1)
            row = torch.arange(len(mask), device=mask.device)[:, None]
            order = mask.argsort(dim=1, stable=True)
            xBC = (xBC * mask[..., None])[row, order]
        columns = xBC.transpose(1, 2)
        if cache is not None:
            cache.update_conv_state(columns, self.layer_idx, conv_kernel_size=self.conv1d.kernel_size[0])
        # The module pads both sides; without its tail the convolution is causal.
        mixed = self.act(self.conv1d(columns)[..., : columns.shape[-1]]).transpose(1, 2)
        if mask is not None:
            mixed = mixed[row, order.argsort(dim=1)]
        return mixed[:, n_past:]


class LlambaMLP(nn.Module):
    """The feed-forward half of a layer: ``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: LlambaConfig):
        super().__init__()
        size, bias = config.mlp_cfg["intermediate_size"], config.mlp_cfg["bias"]
        self.gate_proj = nn.Linear(config.d_model, size, bias=bias)
        self.up_proj = nn.Linear(config.d_model, size, bias=bias)
        self.down_proj = nn.Linear(size, config.d_model, bias=bias)
        self.act_fn = ACT2FN[config.mlp_cfg["act_fn"]]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class LlambaLayer(nn.Module):
    """One layer: norm, mixer, add; norm, feed-forward, add. The same frame as a Llama layer."""

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_epsilon)
        self.mixer = DiscreteSSDMixer(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_epsilon)
        self.mlp = LlambaMLP(config)

    def forward(self, hidden_states: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.input_layernorm(hidden_states), cache, mask)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LlambaPreTrainedModel(PreTrainedModel):
    """What both Llamba models share: their configuration, fresh weights, and loading without surprises."""

    config_class = LlambaConfig
    base_model_prefix = "backbone"
    _no_split_modules: ClassVar = ["LlambaLayer"]
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DiscreteSSDMixer):
            # A fresh mixer convolves with the identity, so that it starts as a plain scan.
            identity = torch.zeros_like(module.conv1d.weight)
            identity[..., -1] = 1
            init.copy_(module.conv1d.weight, identity)
            init.ones_(module.D)
            if module.z_bias is not None:
                init.zeros_(module.z_bias)

    @classmethod
    def from_pretrained(cls, name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """Load a checkpoint (safetensors, sharded or not, or ``pytorch_model.bin``).

        >>> model = LlambaForCausalLM.from_pretrained("folder")

        Raises :class:`GnaError` when weights are missing or left over: transformers alone would only warn and
        leave random numbers in their place.
        """
        model, found = super().from_pretrained(name_or_path, *args, output_loading_info=True, **kwargs)
        for kind in ("missing", "unexpected"):
            if names := sorted(found[f"{kind}_keys"]):
                shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
                raise GnaError(
                    f"'{name_or_path}' does not fit its configuration, {len(names)} weights are {kind} "
                    f"({shown}): check config.json against the weights."
                )
        return (model, found) if output_loading_info else model


class LlambaModel(LlambaPreTrainedModel):
    """Embedding, layers and final norm; returns hidden states."""

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(LlambaLayer(config, i) for i in range(config.n_layer))
        self.final_layernorm = nn.RMSNorm(config.d_model, eps=config.norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def set_input_embeddings(self, embedding: nn.Embedding) -> None:
        self.embedding = embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise GnaError("Llamba needs input_ids or inputs_embeds: give exactly one of them.")
        hidden_states = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        mask = _token_mask(attention_mask, hidden_states)

        every = []
        for layer in self.layers:
            if output_hidden_states:
                every.append(hidden_states)
            hidden_states = layer(hidden_states, cache, mask)
        hidden_states = self.final_layernorm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            cache=cache if use_cache else None,
            hidden_states=(*every, hidden_states) if output_hidden_states else None,
        )


def _token_mask(attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """1 for tokens and 0 for padding, of the tokens given now: a mask may also cover cached tokens."""
    if attention_mask is None:
        return None
    batch, length, _ = hidden_states.shape
    if attention_mask.ndim != 2 or len(attention_mask) != batch or attention_mask.shape[1] < length:
        raise GnaError(
            f"the attention mask has shape {tuple(attention_mask.shape)}: Llamba takes (batch, length), here "
            f"({batch}, {length}), with 1 for a token and 0 for padding."
        )
    return attention_mask[:, -length:].to(torch.int8)


class LlambaForCausalLM(LlambaPreTrainedModel, GenerationMixin):
    """Llamba with its language-model head; a drop-in for any causal model of transformers.

    >>> heads = {"n_v_heads": 4, "n_qk_heads": 2, "d_state": 8}
    >>> model = LlambaForCausalLM(LlambaConfig(vocab_size=64, d_model=32, n_layer=2, ssm_cfg=heads))
    >>> model(input_ids).logits.shape
    torch.Size([1, 7, 64])
    """

    _tied_weights_keys: ClassVar = {"lm_head.weight": "backbone.embedding.weight"}

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.backbone = LlambaModel(config)
        bias = config.lm_head_bias and not config.tie_embeddings
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=bias)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        outputs = self.backbone(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states
        )


AutoConfig.register("llamba", LlambaConfig, exist_ok=True)
AutoModel.register(LlambaConfig, LlambaModel, exist_ok=True)
AutoModelForCausalLM.register(LlambaConfig, LlambaForCausalLM, exist_ok=True)
