"""Scores of maps whose values are known: uniform, diagonal, previous token, one-hot, zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gna_utils import GnaError
from gna_utils.patterns import map_scores, row_shares
from gna_utils.tasks import Encoded

# three segments of 3 tokens from token 2 on, then a question of 2 tokens
ROW = Encoded(
    input_ids=tuple(range(4, 17)),
    segments=((2, 5), (5, 8), (8, 11)),
    summary=(4, 7, 10),
    query=12,
    candidate_ids=((20,), (21,), (22,)),
    answer=1,
    target=1,
    spans={"value": (6, 8), "first": (1, 5), "second": (7, 11)},
)
LENGTH = 13
SCORES = ("gather", "aggregate", "retrieval", "induction")
ARGMAX = ("aggregate_argmax", "aggregate_argmax_all")


def scored(T, row=ROW, scores=SCORES):
    """One map's scores as plain numbers."""
    found = map_scores(T[None, None], [row], scores)
    return {name: (value.item(), chance.item()) for name, (value, chance) in found.items()}


def offset(k: int) -> torch.Tensor:
    """Each token looks ``k`` tokens back; the first ones at the first token."""
    T = torch.zeros(LENGTH, LENGTH)
    T[range(LENGTH), [max(0, i - k) for i in range(LENGTH)]] = 1
    return T


def uniform() -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH).tril() / torch.arange(1, LENGTH + 1)[:, None]


def random_map(seed: int = 0) -> torch.Tensor:
    return row_shares(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed)).tril())


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_head_that_looks_at_a_fixed_place_does_not_gather(k):
    found = scored(offset(k))
    assert found["gather"] == (0, 0)
    assert found["gather_mass"] == (1, 1)


def test_any_mix_of_fixed_offsets_does_not_gather():
    T = 0.5 * offset(0) + 0.2 * offset(1) + 0.2 * offset(3) + 0.1 * offset(5)
    assert scored(T)["gather"][0] == pytest.approx(0, abs=1e-6)
    assert scored(T)["gather_mass"][0] == pytest.approx(0.7)


def test_only_a_summary_token_that_takes_its_segment_gathers():
    T = torch.zeros(LENGTH, LENGTH)
    T[:, 0] = 1  # all others rest on the first token
    for start, stop in ROW.segments[:2]:
        T[stop - 1] = 0
        T[stop - 1, start:stop] = 1 / 3
    assert scored(T)["gather"][0] == pytest.approx(2 / 3)
    assert scored(T)["gather_mass"] == pytest.approx((2 / 3, 0))


def test_uniform_map_scores_what_chance_gives():
    found = scored(uniform())
    assert found["aggregate"] == pytest.approx((1 / 13, 1 / 13))
    assert found["aggregate_argmax"] == pytest.approx((1 / 3, 1 / 3))
    assert found["aggregate_argmax_all"] == pytest.approx((1 / 13, 1 / 3))
    assert found["retrieval"] == pytest.approx((2 / 13, 2 / 13))
    assert found["induction"] == pytest.approx([sum(1 / n for n in (8, 9, 10, 11)) / 4] * 2)
    assert abs(found["gather"][0]) < 0.02


def test_query_that_takes_all_from_the_right_summary_token():
    T = uniform()
    T[12] = 0
    T[12, 7] = 1
    found = scored(T)
    assert found["aggregate"] == pytest.approx((1, 1 / 3))
    assert [found[name][0] for name in ARGMAX] == [1, 1]
    assert found["retrieval"][0] == 1
    T[12, 7], T[12, 4], T[12, 1] = 0.3, 0.2, 0.5
    found = scored(T)
    assert [found[name][0] for name in ARGMAX] == [1, 0]  # the first of summary tokens, the second of all
    assert found["aggregate"] == pytest.approx((0.3, 0.5 / 3))


def test_wrong_summary_token_gets_nothing():
    T = uniform()
    T[12] = 0
    T[12, 10] = 1
    found = scored(T)
    assert [found[name][0] for name in ("aggregate", *ARGMAX, "retrieval")] == [0, 0, 0, 0]


def test_induction_head():
    T = offset(0)
    for k in range(4):
        T[7 + k] = 0
        T[7 + k, 1 + k + 1] = 0.75
    assert scored(T)["induction"][0] == pytest.approx(0.75)
    assert scored(offset(5))["induction"][0] == 1
    assert scored(offset(6))["induction"][0] == 0  # the earlier occurrence itself is not the token after it


def test_zero_map_is_never_nan():
    T = row_shares(torch.zeros(LENGTH, LENGTH))
    found = scored(T)
    assert {found[name][0] for name in ("gather", "gather_mass", "aggregate", "retrieval", "induction")} == {
        0
    }
    assert found["aggregate_argmax"][0] == pytest.approx(1 / 3)  # all tie
    assert found["aggregate_argmax_all"][0] == pytest.approx(1 / 13)


def test_row_shares():
    T = torch.tensor([[0.0, 0, 0], [-1, 3, 0], [1e-30, -3e-30, 0]])
    expected = torch.tensor([[0, 0, 0], [0.25, 0.75, 0], [0.25, 0.75, 0]])
    torch.testing.assert_close(row_shares(T), expected)


def by_loops(T, row):
    """Gather and induction, entry by entry, as the definition says."""
    mass, near = [], []
    for start, stop in row.segments:
        t, n = stop - 1, stop - start
        mass.append(sum(T[t, j] for j in range(start, stop)).item())
        others = []
        for i in range(len(row.input_ids)):
            both = [i, 2 * t - i]
            fits = all(j not in row.summary and n <= j < len(row.input_ids) for j in both)
            if fits and abs(i - t) < n:
                others.append(sum(T[i, i - o] for o in range(n)).item())
        near.append(sum(others) / len(others))
    induction = [T[7 + k, 1 + k + 1].item() for k in range(4)]
    return sum(mass) / 3, sum(near) / 3, sum(induction) / 4


@pytest.mark.parametrize("seed", range(3))
def test_against_the_definition_in_loops(seed):
    T = random_map(seed)
    mass, near, induction = by_loops(T, ROW)
    found = scored(T)
    assert found["gather_mass"] == pytest.approx((mass, near), abs=1e-6)
    assert found["gather"] == pytest.approx((mass - near, 0), abs=1e-6)
    assert found["induction"][0] == pytest.approx(induction, abs=1e-6)


def test_padding_changes_nothing_and_prompts_do_not_mix():
    short = replace(ROW, input_ids=ROW.input_ids[:9], segments=((2, 5), (5, 8)), summary=(4, 7), query=8)
    maps = torch.stack([random_map(seed) for seed in range(4)]).reshape(2, 2, LENGTH, LENGTH)
    maps[1, :, 9:] = 0
    both = map_scores(maps, [ROW, short], SCORES[:3])
    alone = map_scores(maps[1:, :, :9, :9], [short], SCORES[:3])
    whole = map_scores(maps[:1], [ROW], SCORES[:3])
    for name in both:
        for kind in range(2):
            assert torch.equal(both[name][kind][0], whole[name][kind][0])
            torch.testing.assert_close(both[name][kind][1], alone[name][kind][0])


@pytest.mark.parametrize(
    ("score", "change", "missing"),
    [
        ("gather", {"segments": (), "summary": ()}, "example 1 has no segments"),
        ("gather", {"segments": ((3, 4),), "summary": (3,)}, "no segment of two or more tokens"),
        ("aggregate", {"target": None}, "example 1 has no target"),
        ("retrieval", {"spans": {}}, "example 1 has no span 'value', which the retrieval score needs"),
        ("induction", {"spans": {}}, "repeated_tokens"),
    ],
)
def test_refuses_examples_without_marks(score, change, missing):
    with pytest.raises(GnaError, match=missing):
        map_scores(torch.zeros(2, 1, LENGTH, LENGTH), [ROW, replace(ROW, **change)], score)


def test_refuses_unknown_scores():
    with pytest.raises(GnaError, match="choose gather, aggregate, retrieval, induction"):
        map_scores(offset(0)[None, None], [ROW], "sharpness")
    with pytest.raises(GnaError, match="scores=none"):
        map_scores(offset(0)[None, None], [ROW], [])
