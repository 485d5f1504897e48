"""Names of heads and the instant import of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gna_utils
from gna_utils import GnaError, Head, parse_heads


def test_head_round_trips_through_its_name():
    assert str(Head(17, 24)) == "L17H24"
    assert Head.parse("L17H24") == Head(17, 24)
    assert Head.parse(" l3h0 ") == Head(3, 0)


def test_parse_heads_accepts_every_spelling_and_keeps_order():
    assert parse_heads("L2H1, L0H3 L2H1") == [Head(2, 1), Head(0, 3)]
    assert parse_heads([(2, 1), "L0H3", Head(2, 1)]) == [Head(2, 1), Head(0, 3)]
    assert parse_heads(Head(5, 6)) == [Head(5, 6)]


@pytest.mark.parametrize(
    "bad", ["", [], "17.24", "L17", [(1,)], [(-1, 0)], [None], None, 3, [(0, 1.7)], [("0", "1")]]
)
def test_bad_head_is_refused_with_one_sentence(bad):
    with pytest.raises(GnaError, match="head"):
        parse_heads(bad)


def test_import_needs_no_heavy_library():
    heavy = ("torch", "transformers", "nnsight", "altair", "pandas", "numpy")
    code = f"import sys, gna_utils; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_loads():
    for name in gna_utils.__all__:
        assert getattr(gna_utils, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        gna_utils.loda
