"""Exercise checks say what was expected, what was seen and which mistake it looks like; guesses score."""

from __future__ import annotations

import numpy as np
import pytest

from gna_utils.checks import check_close, check_equal, predict, reveal
from gna_utils.errors import GnaError
from gna_utils.heads import Head


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GNA_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "got, want",
    [
        (3, 3),
        ("a", "a"),
        ([1, 2], [1, 2]),
        ((1, 2), (1, 2)),
        (Head(1, 2), Head(1, 2)),
        ({"a": 1}, {"a": 1}),
        (np.arange(3), np.arange(3)),
        ([0, 1, 2], np.arange(3)),
        (True, True),
    ],
)
def test_equal_answers_are_right(got, want, capsys):
    assert check_equal("it", got, want)
    assert capsys.readouterr().out.startswith("it: right")


@pytest.mark.parametrize(
    "got, want, said",
    [
        (..., 3, "no answer yet"),
        (None, 3, "no answer yet"),
        (4, 3, "Expected 3, got 4 (off by one"),
        ("a ", "a", "only the spaces"),
        ("A", "a", "upper and lower case"),
        ([2, 1], [1, 2], "another order"),
        ([1], [1, 2], "2 entries were expected, 1 came"),
        ("3", 3, "Expected an int (3), got a str ('3')"),
        ([3], 3, "got a list"),
        (np.arange(4), np.arange(3), "Expected shape (3,), got shape (4,)"),
    ],
)
def test_wrong_answers_are_explained(got, want, said, capsys):
    assert not check_equal("it", got, want, hint="look again")
    out = capsys.readouterr().out
    assert said in out and out.rstrip().endswith("Hint: look again.") and out.count("\n") == 1


T = np.array([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.2, 0.3, 0.5]])


@pytest.mark.parametrize(
    "got, want, said",
    [
        (62.0, 0.62, "100 times as much: a share is meant"),
        (-0.5, 0.5, "sign is turned"),
        (-T, T, "sign is turned"),
        (T.T, T, "last two axes are exchanged"),
        (T[:, :2], T, "Expected shape (3, 3), got shape (3, 2)"),
        (T[:, :2].T, T[:, :2], "That is the transpose"),
        (np.roll(np.arange(5.0), 1), np.arange(5.0), "shifted by one position"),
        (np.array([3.0, 1.0, 2.0, 9.0]), np.array([1.0, 9.0, 3.0, 2.0]), "another order"),
        (T / 4, T, "Every entry is 0.25 times the expected one"),
        (np.array([2.0, 5.0]) + 3, np.array([2.0, 5.0]), "off by the same 3"),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0]), "There is NaN"),
        ("a", 1.0, "Expected a float, got a str"),
        (..., 1.0, "no answer yet"),
        (
            np.array([1.0, 2.0, 3.5]),
            np.array([1.0, 2.0, 3.0]),
            "1 of 3 entries differ; at [2] expected 3, got 3.5",
        ),
    ],
)
def test_numbers_that_differ_name_the_likely_mistake(got, want, said, capsys):
    assert not check_close("it", got, want)
    assert said in capsys.readouterr().out


def test_close_numbers_are_right_within_the_tolerance_only(capsys):
    assert check_close("it", T + 1e-7, T)
    assert not check_close("it", 0.62, 0.63)
    assert check_close("it", 0.62, 0.63, atol=0.02)
    torch = pytest.importorskip("torch")
    assert check_close("it", torch.tensor(T, dtype=torch.bfloat16), T, rtol=1e-2)


def test_expected_text_is_a_mistake_of_the_author():
    with pytest.raises(GnaError, match="compares numbers"):
        check_close("it", 1.0, "one")


def test_a_guess_is_kept_and_scored(capsys):
    predict("accuracy", 0.4)
    reveal("accuracy", 0.62, 0.57, 0.67, n=100)
    noted, scored = capsys.readouterr().out.splitlines()
    assert noted == "Noted: you guess 0.4 for accuracy."
    assert scored == (
        "accuracy: you guessed 0.4; measured 0.62 (0.57 to 0.67), n = 100. Off by 0.22, outside the interval."
    )
    predict("accuracy", 0.6)
    reveal("accuracy", 0.62, 0.57, 0.67)
    assert "Inside the interval" in capsys.readouterr().out


def test_guessing_is_optional_and_a_withdrawn_guess_is_gone(capsys):
    reveal("accuracy", 0.62, 0.57, 0.67, n=100)
    assert capsys.readouterr().out == "accuracy: measured 0.62 (0.57 to 0.67), n = 100.\n"
    predict("accuracy", 0.4)
    predict("accuracy")
    capsys.readouterr()
    reveal("accuracy", 0.62)
    assert "guessed" not in capsys.readouterr().out


def test_text_guesses_and_estimates(capsys):
    class Estimate:
        value, low, high, n = 0.5, 0.4, 0.6, 20

    predict("winner", "mamba")
    reveal("winner", "Mamba")
    predict("share", 0.1)
    reveal("share", Estimate())
    out = capsys.readouterr().out
    assert "Right." in out and "measured 0.5 (0.4 to 0.6), n = 20. Off by 0.4" in out


@pytest.mark.parametrize("guess", [True, [1], float("nan"), float("inf")])
def test_a_guess_that_cannot_be_scored_is_refused(guess):
    with pytest.raises(GnaError, match="guess"):
        predict("accuracy", guess)
