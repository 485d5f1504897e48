"""The adapters: one module per mixer kind, never one per model family.

transformers sends every family through a few functions, and nnsight's ``.source`` shows the call with all its
arguments. An adapter says which functions these are and what to do with the arguments:

- ``CALLS``: names of the functions, in order of preference;
- ``operands(args, kwargs, heads) -> dict``: runs inside the trace (so it uses torch only) and picks what the
  chosen heads need, each tensor as ``(batch, head, L, ...)``;
- ``matrix(operands, skip) -> (batch, head, L, L)`` float32 and ``values(operands) -> (batch, head, L,
  head_dim)``: run after the trace, are differentiable, and never loop over positions;
- ``output(result, heads) -> (batch, head, L, head_dim)``: picks the same heads out of what the call returned,
  also inside the trace;
- ``gate(operands)``, only where the function multiplies rows before it returns: the factor of each row.

They agree on ``output == (matrix(operands, skip=True) @ values(operands)) * gate``. To serve another kind of
mixer, write such a module and add it to :data:`ADAPTERS` under the word that :func:`gna_utils.layers` uses.
"""

from __future__ import annotations

from types import ModuleType

from . import attention, delta_rule, discrete_ssd, selective_scan, ssd

ADAPTERS: dict[str, ModuleType] = {
    "attention": attention,
    "ssd": ssd,
    "selective_scan": selective_scan,
    "delta_rule": delta_rule,
    "discrete_ssd": discrete_ssd,
}


def call_site(names: tuple[str, ...], kind: str) -> str | None:
    """The operation among nnsight's ``source.names`` of a mixer where its kind's function is called.

    >>> call_site(("attention_interface_0", "attention_interface_1", "attn_output_0"), "attention")
    'attention_interface_1'

    A name that is first assigned and then called counts twice, so the last one is the call. None when the
    mixer calls no such function.
    """
    for function in ADAPTERS[kind].CALLS:
        found = [name for name in names if name.rpartition("_")[0] == function]
        if found:
            return found[-1]
    return None
