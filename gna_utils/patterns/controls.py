"""Control heads: as many as the heads under test, drawn at random."""

from __future__ import annotations

import numpy as np

from ..errors import GnaError
from ..heads import Head, parse_heads
from ..mixers.table import LayerTable, MixerInfo, layers
from ..sites import sites_of
from ..tasks.encoding import whole


def random_heads(
    model, like, n_draws: int, *, seed: int = 0, same_layers: bool = True, mixer: str | None = None
) -> list[list[Head]]:
    """Draw sets of heads to stand beside the set ``like``: of the same size, and none of its heads.

    >>> for control in random_heads(model, "L17H3, L16H2", 20):
    ...     with ablate(model, control):
    ...         ...

    Each draw holds, for every layer, as many heads of it as ``like`` does; with ``same_layers=False``, as
    many heads as ``like`` does of every kind of mixer, from any layer. No head comes twice in a draw, but
    the draws are independent: two of them may be alike where there are few heads to choose from. ``mixer``
    names the kind of mixer where a layer holds two.

    Raises :class:`GnaError` for heads that do not exist, an ambiguous layer, and when there are not enough
    other heads.
    """
    table, given = layers(model), set(parse_heads(like))
    whole("n_draws", n_draws, 1)
    rng = np.random.default_rng(whole("seed", seed, 0))
    needs: dict[str, int] = {}
    pools: dict[str, list[Head]] = {}
    for site in sites_of(table, given, mixer):
        info = site.mixer
        group = f"layer {info.layer}" if same_layers else f"the {info.kind} layers"
        needs[group] = needs.get(group, 0) + len(site.heads)
        pools[group] = [head for head in _heads(table, info, same_layers) if head not in given]
    for group, pool in pools.items():
        if needs[group] > len(pool):
            raise GnaError(
                f"{needs[group]} random heads of {group} were asked for, but besides the given ones "
                f"there are {len(pool)}: give fewer heads{', or same_layers=False' if same_layers else ''}."
            )
    return [
        sorted(pool[i] for group, pool in pools.items() for i in rng.choice(len(pool), needs[group], False))
        for _ in range(n_draws)
    ]


def _heads(table: LayerTable, info: MixerInfo, same_layers: bool) -> list[Head]:
    """All heads of a mixer, or of all mixers of its kind."""
    mixers = [info] if same_layers else [other for other in table if other.kind == info.kind]
    return [Head(one.layer, number) for one in mixers for number in range(one.n_heads)]
