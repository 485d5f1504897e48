"""Score the map of every head of a model, from one trace per batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import nnsight
import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import GnaError
from ..forward import encode_prompts, marks, require_eval, require_model, window
from ..heads import Head, parse_heads
from ..interventions import can_stop, running
from ..mixers.adapters import ADAPTERS
from ..mixers.table import SCANS, layers
from ..mixers.transfer import site_of
from ..models import name_of
from ..remote import backend
from ..sites import Site, grouped, sites_of
from ..stats import bootstrap_each
from ..tasks import Batch, Encoded, Example, batches, encode_texts
from ..tasks.encoding import listed, whole
from ..tasks.example import generator
from . import maps

REPEATED = "repeated tokens"
_BLOCK = 2**23  # entries of the maps that exist at one time: 32 MB, and a few times that to make them


def pattern_scores(
    model,
    examples: Example | Encoded | Iterable[Example | Encoded],
    heads=None,
    scores: str | Iterable[str] = ("gather", "aggregate", "retrieval"),
    *,
    mixer: str | None = None,
    max_tokens: int = 4096,
    seed: int = 0,
    remote: bool | str = False,
    progress: bool | None = None,
) -> pd.DataFrame:
    """How much the map of each head looks like that of a Gather, Aggregate, retrieval or induction head.

    >>> frame = pattern_scores(model, key_value(40, 10, tokenizer=model.tokenizer))
    >>> frame[frame["score"] == "aggregate"].nlargest(5, "value")
    >>> pattern_scores(model, repeated_tokens(model, 20), "L17H3", scores="induction")

    A *share* is an entry of a softmax head's attention map. For a scan head it is an entry of
    :func:`~gna_utils.patterns.row_shares` of its transfer matrix without the skip weight ``D``, which moves
    nothing between positions; a head that takes in nothing has shares of 0, never NaN.

    - ``gather_mass``: what the summary token of a segment takes from its own segment (itself included), mean
      over segments of two or more tokens. Its ``chance`` is what position alone would give: what neighbours
      take from the same offsets, that is, from as many tokens up to themselves. Neighbours end no segment,
      are less than a segment away, and come in pairs before and after. ``gather`` is the difference: 0 for a
      head that looks at fixed offsets, whatever the tokens, and close to 0 for one that spreads evenly. It
      stays small also for a head that, at *every* token, looks no further than its own segment. The first
      token of a prompt, on which many heads rest, counts nowhere.
    - ``aggregate``: what the query position takes from the summary token of the target segment; ``chance`` is
      the mean over all summary tokens, that is, the share of a head that cannot tell them apart.
    - ``aggregate_argmax``, ``aggregate_argmax_all``: how often that token has the largest share of all
      summary tokens, or of all tokens; k tokens that tie count 1/k. ``chance`` is 1 / number of segments.
    - ``retrieval``: what the query position takes from the ``"value"`` span; ``chance`` is even spreading.
    - ``induction``: what a token takes from the one after its earlier occurrence, mean over the second half
      of :func:`repeated_tokens`; ``chance`` is even spreading.

    ``heads`` are all heads by default, whatever their kind; ``mixer`` chooses one kind. Returns one row per
    head and measurement, in the order of the layers: ``model, task, layer, head, mixer, score, value, low,
    high, n, chance``, with 95 % bootstrap intervals over the ``n`` examples. ``max_tokens`` changes memory
    and speed only. All layers are read in one trace per batch, and the maps of some heads of one layer exist
    at a time. Active contexts such as ``ablate`` apply.

    Raises :class:`GnaError` for unknown scores, heads and mixers that cannot be read, examples that do not
    mark what a score needs, and a model that gives NaN.

    Sources: Gather and Aggregate, Bick et al. 2025
    (arXiv:2504.18574); induction, Olsson et al. 2022 (arXiv:2209.11895), "prefix matching"; retrieval heads,
    Wu et al. 2024 (arXiv:2404.15574), who count while the model writes how often the largest weight is on the
    copied token: here it is the mass before it writes.
    """
    require_eval(model)
    scores = maps.chosen(scores)
    plan = _chosen_heads(model, heads, mixer)
    rows, task = _encoded(model, examples)
    maps.require_marks(rows, scores)
    names = [name for score in scores for name in maps.SCORES[score]]
    found = [np.empty((len(names), 2, len(rows), len(site.heads)), dtype=np.float32) for site in plan]
    parts = batches(rows, max_tokens=max_tokens)
    for batch in tqdm(parts, disable=None if progress is None else not progress, mininterval=2):
        for number, values in _measure(model, plan, batch, scores, remote):
            found[number][:, :, list(batch.index)] = values
    first = {"model": name_of(model), "task": task}
    frames = [_frames(first, site, names, values, seed) for site, values in zip(plan, found)]
    return pd.concat([frame for part in frames for frame in part], ignore_index=True)


def repeated_tokens(model, n: int, length: int = 32, *, seed: int = 0) -> list[Encoded]:
    """Random tokens, twice in a row: the prompts on which induction heads show.

    >>> pattern_scores(model, repeated_tokens(model, 20), scores="induction")

    Each of the ``n`` sequences has ``length`` different ordinary tokens and then the same ones again, after
    the special token that the tokenizer puts before a text; spans ``"first"`` and ``"second"`` mark the
    copies. Sequence ``i`` depends on ``seed`` and ``i`` alone. Raises :class:`GnaError` when the vocabulary
    or the window of the model is too small.
    """
    require_model(model)
    whole("n", n, 1)
    whole("length", length, 2)
    special = set(model.tokenizer.all_special_ids)
    tokens = np.array([t for t in range(model.config.get_text_config().vocab_size) if t not in special])
    [lead] = encode_texts([""], model.tokenizer)
    longest = min(len(tokens), ((window(model) or 2 * len(tokens) + len(lead)) - len(lead)) // 2)
    if length > longest:
        raise GnaError(f"{length} tokens, twice, were asked for: this model reads at most {longest} twice.")
    rows = []
    for i in range(n):
        drawn = generator(seed, i).choice(tokens, length, replace=False).tolist()
        ids = (*lead, *drawn, *drawn)
        start, middle, stop = len(lead), len(lead) + length, len(ids)
        spans = {"first": (start, middle), "second": (middle, stop)}
        rows.append(Encoded(ids, (), (), stop - 1, (), 0, None, spans))
    return rows


def _encoded(model, examples) -> tuple[list[Encoded], str]:
    """The examples in token ids, and the name of their task."""
    examples = listed(examples, Example, Encoded)
    _, _, rows = encode_prompts(model, examples)
    tasks = {example.task if isinstance(example, Example) else _task(example) for example in examples}
    return rows, ", ".join(sorted(tasks))


def _task(row: Encoded) -> str:
    return REPEATED if "second" in row.spans else "encoded examples"


def _chosen_heads(model, heads, mixer: str | None) -> list[Site]:
    table = layers(model)
    if heads is not None:
        return sites_of(table, parse_heads(heads), mixer)
    if mixer is not None and all(found.kind != mixer for found in table):
        table.find(Head(0, 0), mixer)  # says which kinds there are
    return [
        Site(found, tuple(range(found.n_heads)), f"{found.path}.{found.out_proj}")
        for found in table
        if found.n_heads and mixer in (None, found.kind)
    ]


@torch.no_grad()
def _measure(
    model, plan: Sequence[Site], batch: Batch, scores: Sequence[str], remote
) -> Iterator[tuple[int, np.ndarray]]:
    """Run a batch; yields the number of each site and its (measurement, 2, batch, head)."""
    length = batch.input_ids.shape[1]
    at = maps.probe(batch.rows, length, scores)
    size = max(1, _BLOCK // (len(batch.rows) * length**2))
    for group in grouped(list(plan)):  # a layer with two mixers takes two traces
        jobs = [_job(model, site, size) for site in group]
        with (
            running(model, marks(batch.rows, length)),
            model.trace(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                use_cache=False,
                backend=backend(model, remote),
            ) as tracer,
        ):
            kept = nnsight.save(read_heads(model, jobs, at))
            if can_stop(model):
                tracer.stop()
        for site, values in zip(group, kept):
            yield plan.index(site), values.cpu().numpy()


def _job(model, site: Site, size: int) -> tuple:
    adapter = ADAPTERS[site.mixer.kind]
    blocks = [list(site.heads[k : k + size]) for k in range(0, len(site.heads), size)]
    call = site_of(model, site.mixer)
    return site.mixer.path, call, blocks, site.mixer.kind in SCANS, adapter.operands, adapter.matrix


def read_heads(model, jobs: list[tuple], at: dict[str, Tensor]) -> list[Tensor]:
    """Runs inside the trace: the measurements of each mixer's heads, some of its maps at a time."""
    found = []
    for path, call, blocks, is_scan, operands, matrix in jobs:
        args, kwargs = getattr(model.get(path).source, call).inputs
        parts = []
        for block in blocks:
            T = matrix(operands(args, kwargs, block), False)
            parts.append(maps.read(maps.row_shares(T) if is_scan else T, at))
            del T  # or it would still be there while the next one is made
        found.append(torch.cat(parts, dim=-1))
    return found


def _frames(
    first: dict, site: Site, names: list[str], values: np.ndarray, seed: int
) -> Iterator[pd.DataFrame]:
    """The rows of one mixer: ``values`` is (measurement, value or chance, example, head)."""
    if not np.isfinite(values).all():
        raise GnaError(
            f"{site.mixer.kind} layer {site.mixer.layer} gives NaN: the weights are damaged, or the dtype is "
            "too narrow for the model (load it with dtype='float32')."
        )
    for name, (value, chance) in zip(names, values.astype(float)):
        mean, low, high = bootstrap_each(value.T, seed=seed)
        columns = {"layer": site.mixer.layer, "head": site.heads, "mixer": site.mixer.kind, "score": name}
        measured = {"value": mean, "low": low, "high": high, "n": value.shape[0], "chance": chance.mean(0)}
        yield pd.DataFrame(first | columns | measured)
