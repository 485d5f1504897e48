"""Friendly checks for the exercises, and guesses that a chapter asks for and later scores.

Every function prints one or two plain sentences and returns whether things are well; none raises for a wrong
answer.

>>> from gna_utils.checks import check_close
>>> check_close("accuracy", 0.5, 0.5)
accuracy: right, 0.5.
True
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .errors import GnaError
from .runs.project import write_json
from .runs.records import run_dir

_GUESSES = "guesses.json"


def check_equal(name: str, got: Any, want: Any, hint: str = "") -> bool:
    """Compare an answer with the expected one and say what was seen.

    >>> check_equal("heads", ["L1H2"], ["L1H2"])
    heads: right, ['L1H2'].
    True
    >>> check_equal("heads", "L2H1", "L1H2", hint="layer comes first")
    heads: not yet. Expected 'L1H2', got 'L2H1'. Hint: layer comes first.
    False

    Arrays and tensors are compared entry by entry, with exact equality.
    """
    if got is Ellipsis or (got is None and want is not None):
        return _no(name, "there is no answer yet: replace the `...` by yours", hint)
    if hasattr(got, "shape") or hasattr(want, "shape"):
        got_array, want_array = _array(got), _array(want)
        if got_array is not None and want_array is not None:
            return _check_arrays(name, got_array, want_array, 0.0, 0.0, hint)
    if isinstance(want, (str, bytes)) != isinstance(got, (str, bytes)) or _shape_of(got) != _shape_of(want):
        return _no(name, f"expected {_kind(want)} ({_short(want)}), got {_kind(got)} ({_short(got)})", hint)
    if got == want:
        return _yes(name, _short(got))
    return _no(name, f"expected {_short(want)}, got {_short(got)}{_likely_text(got, want)}", hint)


def check_close(
    name: str, got: Any, want: Any, hint: str = "", *, rtol: float = 1e-4, atol: float = 1e-6
) -> bool:
    """Compare numbers, arrays or tensors within a tolerance, and name the mistake that a difference looks
    like.

    >>> check_close("accuracy", 62.0, 0.62)
    accuracy: not yet. Expected 0.62, got 62. That is 100 times as much: a share is meant, not per cent.
    False

    Recognised mistakes: another shape, transposed, another sign, per cent for a share, a constant factor or
    offset, shifted by one position, NaN.
    """
    if got is Ellipsis or got is None:
        return _no(name, "there is no answer yet: replace the `...` by yours", hint)
    got_array, want_array = _array(got), _array(want)
    if want_array is None:
        raise GnaError(f"check_close compares numbers; the expected value of '{name}' is {_kind(want)}.")
    if got_array is None:
        return _no(name, f"expected {_kind(want)}, got {_kind(got)} ({_short(got)})", hint)
    return _check_arrays(name, got_array, want_array, rtol, atol, hint)


def predict(name: str, guess: float | str | None = None) -> None:
    """Keep a guess, to be scored by :func:`reveal` once the value is measured; without one nothing happens.

    >>> predict("accuracy at 10 pairs", 0.4)          # doctest: +SKIP
    Noted: you guess 0.4 for accuracy at 10 pairs.
    """
    if guess is None or guess is Ellipsis:
        print(f"No guess for {name} yet. Guessing is optional; it makes the answer stick.")
        _store(name, None)
        return
    if isinstance(guess, bool) or not isinstance(guess, (int, float, str)):
        raise GnaError(f"a guess is a number or a text, not {_kind(guess)}: predict({name!r}, 0.4).")
    if isinstance(guess, (int, float)) and not math.isfinite(guess):
        raise GnaError(f"a guess for {name} must be finite, not {guess}.")
    _store(name, guess)
    print(f"Noted: you guess {_short(guess)} for {name}.")


def reveal(
    name: str, value: float | str, low: float | None = None, high: float | None = None, n: int | None = None
) -> None:
    """Show a measured value and, when there was a guess of that name, how good it was.

    >>> reveal("accuracy at 10 pairs", 0.62, 0.57, 0.67, n=100)       # doctest: +SKIP
    accuracy at 10 pairs: you guessed 0.4; measured 0.62 (0.57 to 0.67), n = 100. Off by 0.22, outside the
    interval.

    ``low`` and ``high`` bound the 95 % interval of the measurement. An :class:`~gna_utils.stats.Estimate` can
    stand for all four.
    """
    if hasattr(value, "low") and hasattr(value, "high"):
        value, low, high, n = value.value, value.low, value.high, value.n
    measured = f"measured {_short(value)}"
    if low is not None and high is not None:
        measured += f" ({_short(low)} to {_short(high)})"
    if n is not None:
        measured += f", n = {n}"
    guess = _guesses().get(name)
    if guess is None:
        print(f"{name}: {measured}.")
        return
    print(f"{name}: you guessed {_short(guess)}; {measured}. {_score(guess, value, low, high)}")


def _score(guess: float | str, value: float | str, low: float | None, high: float | None) -> str:
    if isinstance(guess, str) or isinstance(value, str):
        return "Right." if str(guess).strip().lower() == str(value).strip().lower() else "Not this time."
    if low is not None and high is not None:
        if low <= guess <= high:
            return "Inside the interval: as good as a guess can be."
        return f"Off by {_short(abs(guess - value))}, outside the interval."
    off = abs(guess - value)
    return "Exactly." if off == 0 else f"Off by {_short(off)}."


def _guesses() -> dict[str, Any]:
    try:
        return json.loads((run_dir() / _GUESSES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _store(name: str, guess: float | str | None) -> None:
    guesses = _guesses() | {name: guess}
    write_json(run_dir() / _GUESSES, {key: value for key, value in guesses.items() if value is not None})


def _check_arrays(name: str, got: np.ndarray, want: np.ndarray, rtol: float, atol: float, hint: str) -> bool:
    if got.shape != want.shape:
        turned = " That is the transpose." if got.shape == want.shape[::-1] else ""
        return _no(name, f"expected shape {want.shape}, got shape {got.shape}", hint, turned)
    if np.allclose(got, want, rtol=rtol, atol=atol):
        return _yes(name, _short(got.item()) if got.ndim == 0 else f"all {got.size} entries")
    likely = _likely(got, want, max(rtol, 1e-6), atol)
    if got.ndim == 0:
        return _no(name, f"expected {_short(want.item())}, got {_short(got.item())}", hint, likely)
    off = np.abs(got - want)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape)
    place = ", ".join(str(int(i)) for i in worst)
    wrong = int((~np.isclose(got, want, rtol=rtol, atol=atol)).sum())
    what = (
        f"{wrong} of {got.size} entries differ; at [{place}] expected {_short(want[worst].item())}, "
        f"got {_short(got[worst].item())}"
    )
    return _no(name, what, hint, likely)


def _likely(got: np.ndarray, want: np.ndarray, rtol: float, atol: float) -> str:
    """Which common mistake explains the difference; empty when none does."""

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        return a.shape == b.shape and a.size > 0 and np.allclose(a, b, rtol=rtol, atol=atol)

    if np.isnan(got).any():
        return " There is NaN in it: look for 0/0, log(0) or a masked row."
    if same(got, -want):
        return " The sign is turned around."
    if same(got, 100 * want):
        return " That is 100 times as much: a share is meant, not per cent."
    if got.ndim and got.size > 1:
        if got.ndim >= 2 and same(got, np.swapaxes(want, -1, -2)):
            return " The last two axes are exchanged."
        long = got.shape[-1] >= 3  # of two entries, one alone would decide
        if long and (same(got[..., 1:], want[..., :-1]) or same(got[..., :-1], want[..., 1:])):
            return " It is shifted by one position."
        if same(np.sort(got, axis=None), np.sort(want, axis=None)):
            return " These are the right numbers in another order."
        return _constant(got, want, same)
    return ""


def _constant(got: np.ndarray, want: np.ndarray, same: Any) -> str:
    divisible = np.abs(want) > 1e-12
    if divisible.any():
        factor = float(np.median(got[divisible] / want[divisible]))
        if factor and same(got, factor * want):
            return f" Every entry is {_short(factor)} times the expected one: is a factor missing?"
    offset = float(np.median(got - want))
    if offset and same(got, want + offset):
        return f" Every entry is off by the same {_short(offset)}: was something left out of the sum?"
    return ""


def _likely_text(got: Any, want: Any) -> str:
    if isinstance(got, str) and isinstance(want, str):
        if got.strip() == want.strip():
            return " (only the spaces around it differ)"
        if got.lower() == want.lower():
            return " (only upper and lower case differ)"
    if type(got) is type(want) is int and abs(got - want) == 1:
        return " (off by one: is the count from 0?)"
    if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f" ({len(want)} entries were expected, {len(got)} came)"
        if _sorted(got) == _sorted(want):
            return " (the right entries in another order)"
    return ""


def _sorted(entries: Iterable[Any]) -> list[str]:
    return sorted(map(repr, entries))


def _array(value: Any) -> np.ndarray | None:
    """Numbers, arrays, tensors and lists of numbers as float64; None for anything else."""
    if hasattr(value, "detach"):  # a tensor: numpy knows no bfloat16
        value = value.detach().cpu().double().numpy()
    if isinstance(value, (str, bytes, dict, set, bool)) or value is None:
        return None
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None


def _shape_of(value: Any) -> str:
    """Kinds that can be equal at all: a list never equals a number."""
    return "many" if isinstance(value, (list, tuple, set, dict)) else "one"


def _kind(value: Any) -> str:
    article = "an" if type(value).__name__[0] in "aeiou" else "a"
    return f"{article} {type(value).__name__}"


def _short(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    text = repr(value) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 80 else text[:77] + "..."


def _yes(name: str, seen: str) -> bool:
    print(f"{name}: right, {seen}.")
    return True


def _no(name: str, what: str, hint: str, likely: str = "") -> bool:
    tail = f" Hint: {hint.rstrip('.')}." if hint else ""
    print(f"{name}: not yet. {what[0].upper()}{what[1:]}.{likely}{tail}")
    return False
