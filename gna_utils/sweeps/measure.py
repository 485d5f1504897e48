"""Measure units on examples: by restarts where they are exact, else by ``ablate`` and ``score``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np

from ..errors import GnaError
from ..forward import forward, tokens
from ..heads import Head
from ..mixers.table import LayerTable
from ..scoring import GnaWarning, Tree, outcome, score
from ..tasks import Encoded
from ..trace import ablate, replacements
from .restart import Front, Layer, Replaced, restarts_exactly, survey
from .units import Unit, whole_mixers


@dataclass(frozen=True)
class Ablation:
    """How units are removed, as in :func:`gna_utils.ablate`."""

    kind: str
    positions: str
    reference: object
    seed: int
    remote: bool | str


@dataclass(frozen=True)
class Cells:
    """Measurements of some units on some examples: arrays (unit, example)."""

    units: list[int]
    examples: list[int]
    correct: np.ndarray
    logprob: np.ndarray


class Meter:
    """Measures units on examples, both fixed and called by their numbers; ``max_tokens`` run together."""

    def __init__(
        self,
        model,
        table: LayerTable,
        units: list[Unit],
        encoded: list[Encoded],
        how: Ablation,
        max_tokens: int,
    ) -> None:
        self.model, self.units, self.encoded = model, units, encoded
        self.how, self.max_tokens = how, max_tokens
        # the inner nodes of an example's prefix tree: each is a row of its own
        self.nodes = [list(chain(*Tree(row.candidate_ids).levels)) for row in encoded]
        # by layer, then by name: the order in which units were named changes nothing, not even rounding
        self.order = sorted(range(len(units)), key=lambda u: (units[u].start, units[u].name))
        self.stack: list[Layer] | None = None
        self.values: dict[str, dict] = {}
        if not self._may_restart():
            return
        stack = survey(model, table, *tokens(model, encoded[:1]))
        front, _, _ = self._front(stack, [0])
        if restarts_exactly(front, [unit.start for unit in units]):
            self.stack = stack
            if how.kind != "zero":
                whole = whole_mixers(units)
                given = replacements(model, whole, how.kind, how.positions, how.reference, how.seed, False)
                self.values = {site.path: step for site, step in given.items()}

    def cells(self, todo: np.ndarray) -> Iterator[Cells]:
        """Measure what the map ``todo`` (unit, example) asks for, and sometimes cells beside it."""
        return self._one_by_one(todo) if self.stack is None else self._by_restarts(todo)

    def _may_restart(self) -> bool:
        """Servers, and edits of the model (active contexts are edits), want whole runs."""
        several = any(len(nodes) > 1 for nodes in self.nodes)
        # one token on a cache is no answer of several, and donors are drawn by the prompt without its answer
        bound = self.how.positions == "query" or self.how.kind == "resample"
        return not (self.how.remote or self.model._edits or (several and bound))

    # ------------------------------------------------------------------------------------- by restarts

    def _by_restarts(self, todo: np.ndarray) -> Iterator[Cells]:
        for examples in self._groups(np.flatnonzero(todo.any(0)).tolist()):
            front, replaced, rows = self._front(self.stack, examples)
            waiting = [u for u in self.order if todo[u, examples].any()]
            by_layer = [(at, list(units)) for at, units in groupby(waiting, lambda u: self.units[u].start)]
            # what is kept of the clean run, and what runs stacked, is as large as one full batch
            for some in _pieces(by_layer, self.max_tokens // front.ids.numel()):
                front.read([at for at, _ in some])
                for at, units in some:
                    for part in _pieces(units, self.max_tokens // front.mask.numel()):
                        logits = front.logits(at, [self.units[u] for u in part], replaced)
                        yield self._read(part, examples, rows, logits)

    def _groups(self, examples: list[int]) -> Iterator[list[int]]:
        """Examples that run together; on a cache they must be of one length."""
        length = {i: len(self.encoded[i].input_ids) + max(map(len, self.nodes[i])) for i in examples}
        group: list[int] = []
        for i in sorted(examples, key=length.get):
            n_rows = sum(len(self.nodes[k]) for k in (*group, i))
            other = self.how.positions == "query" and group and length[group[0]] != length[i]
            if group and (other or n_rows * length[i] > self.max_tokens):
                yield group
                group = []
            group.append(i)
        if group:
            yield group

    def _front(self, stack: list[Layer], examples: list[int]) -> tuple[Front, Replaced, list]:
        """A new run of some examples; the (example, node) of each of its rows comes last."""
        rows = [(i, node) for i in examples for node in self.nodes[i]]
        texts = [replace(self.encoded[i], input_ids=self.encoded[i].input_ids + node) for i, node in rows]
        ids, mask = tokens(self.model, texts)
        how = {"kind": self.how.kind, "positions": self.how.positions}
        replaced = Replaced(how, self.values, ids, mask)
        if self.how.positions != "query" or ids.shape[1] == 1:
            return Front(self.model, stack, ids, mask), replaced, rows
        _, past = forward(self.model, ids[:, :-1], mask[:, :-1], keep_past=True)
        return Front(self.model, stack, ids[:, -1:], mask, past), replaced, rows

    def _read(self, part: list[int], examples: list[int], rows: list, logits) -> Cells:
        found = []
        for lines in logits:
            trees = {i: Tree(self.encoded[i].candidate_ids) for i in examples}
            for (i, node), line in zip(rows, lines):
                trees[i].add(node, line)
            found.append([outcome(i, self.encoded[i], trees[i].logprobs) for i in examples])
        return _cells(part, examples, found)

    # ---------------------------------------------------------------------------------------- one by one

    def _one_by_one(self, todo: np.ndarray) -> Iterator[Cells]:
        for u in np.flatnonzero(todo.any(1)).tolist():
            examples = np.flatnonzero(todo[u]).tolist()
            with warnings.catch_warnings(), ExitStack() as contexts:
                warnings.simplefilter("ignore", GnaWarning)  # given once, for the baseline
                for site in self.units[u].sites:
                    contexts.enter_context(self._ablated(site))
                scores = score(
                    self.model,
                    [self.encoded[i] for i in examples],
                    max_tokens=self.max_tokens,
                    remote=self.how.remote,
                    progress=False,
                )
            yield _cells([u], examples, [scores.frame.to_dict("records")])

    def _ablated(self, site):
        how = self.how
        return ablate(
            self.model,
            [Head(site.mixer.layer, n) for n in site.heads],
            how.kind,
            how.positions,
            reference=how.reference,
            seed=how.seed,
            mixer=site.mixer.kind,
            remote=how.remote,
        )


def _pieces(items: list, size: int) -> list[list]:
    size = max(1, size)
    return [items[k : k + size] for k in range(0, len(items), size)]


def _cells(units: list[int], examples: list[int], found: list[list[dict]]) -> Cells:
    correct, logprob = (
        np.array([[row[key] for row in one] for one in found]) for key in ("correct", "logprob")
    )
    if not np.isfinite(logprob).all():
        raise GnaError(
            "the model gives NaN or no probability at all to an answer after an ablation: its dtype is too "
            "narrow for it (load it with dtype='float32')."
        )
    return Cells(units, examples, correct, logprob)
