"""Sweeps that are interrupted, watched, and repeated many times."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import tiny

from gna_utils import GnaError, sweep
from gna_utils.sweeps import ledger, restart
from gna_utils.tasks import Example

pytestmark = pytest.mark.filterwarnings("ignore::gna_utils.scoring.GnaWarning")

PROMPTS = [f"w{i} w{i + 1} w{i + 2} w{i + 3}"[: 5 + 3 * (i % 4)] for i in range(10, 22)]
EXAMPLES = [Example("test", prompt, (" w40", " w41", " w42"), i % 3) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")[0]


def counted(monkeypatch, stop_after=None):
    """Count the runs of the model, and interrupt after some of them."""
    runs, plain = [], restart.forward

    def count(*arguments, **options):
        if len(runs) == stop_after:
            raise KeyboardInterrupt
        runs.append(1)
        return plain(*arguments, **options)

    monkeypatch.setattr(restart, "forward", count)
    return runs


@pytest.mark.parametrize("mode", ["exact", "query", "screen"])
def test_interrupted_and_resumed_equals_uninterrupted(model, tmp_path, monkeypatch, mode):
    options = {"mode": mode, "verify": 3, "max_tokens": 30}
    with monkeypatch.context() as patched:
        all_runs = counted(patched)
        whole = sweep(model, EXAMPLES, **options)
    file = tmp_path / "new" / "sweep.npz"
    with monkeypatch.context() as patched:
        first = counted(patched, stop_after=len(all_runs) // 2)
        with pytest.raises(KeyboardInterrupt):
            sweep(model, EXAMPLES, resume=file, **options)
    with monkeypatch.context() as patched:
        second = counted(patched)
        resumed = sweep(model, EXAMPLES, resume=file, **options)
    assert resumed.frame.equals(whole.frame)
    assert resumed.examples.equals(whole.examples)
    assert len(second) < 0.8 * len(all_runs) and len(first) > 5
    assert [path.name for path in file.parent.iterdir()] == ["sweep.npz"]
    with monkeypatch.context() as patched:
        third = counted(patched)
        assert sweep(model, EXAMPLES, resume=file, **options).frame.equals(whole.frame)
    assert len(third) < 0.3 * len(all_runs)  # nothing is measured again


def test_a_screen_goes_on_to_an_exact_sweep(model, tmp_path):
    file = tmp_path / "sweep.npz"
    sweep(model, EXAMPLES, mode="screen", verify=2, resume=file)
    found = sweep(model, EXAMPLES, resume=file)
    assert np.allclose(found.examples["value"], sweep(model, EXAMPLES).examples["value"], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"units": "layers"}, "units"),
        ({"mode": "query"}, "positions"),
        ({"kind": "mean", "reference": ["w1 w2"]}, "kind and reference"),
        ({"examples": EXAMPLES[:5]}, "examples"),
        ({"model": "gpt2"}, "model and units"),
        ({"model": "llama", "seed": 1}, "weights"),
    ],
)
def test_a_file_of_another_sweep_is_refused(model, tmp_path, options, words):
    file = tmp_path / "sweep.npz"
    sweep(model, EXAMPLES, resume=file)
    before = file.read_bytes()
    if "model" in options:
        model = tiny.build(options.pop("model"), seed=options.pop("seed", 0))[0]
    with pytest.raises(GnaError, match=f"other {words}:"):
        sweep(model, options.pop("examples", EXAMPLES), resume=file, **options)
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"not a file of numpy", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_refused(model, tmp_path, content):
    file = tmp_path / "sweep.npz"
    file.write_bytes(content)
    with pytest.raises(GnaError, match="does not hold a sweep"):
        sweep(model, EXAMPLES, resume=file)


def test_a_failed_saving_leaves_the_old_file(model, tmp_path, monkeypatch):
    file = tmp_path / "sweep.npz"
    sweep(model, EXAMPLES, mode="screen", verify=2, resume=file)
    before = file.read_bytes()

    def half(stream, **arrays):
        stream.write(b"PK")
        raise OSError("no space left on device")

    monkeypatch.setattr(ledger.np, "savez", half)
    with pytest.raises(OSError, match="no space"):
        sweep(model, EXAMPLES, resume=file)
    assert file.read_bytes() == before


def test_few_lines_of_progress(model, capfd, monkeypatch):
    """Updates of a bar become thousands of lines in a log (papermill 765)."""
    sweep(model, EXAMPLES, max_tokens=20)
    assert capfd.readouterr() == ("", "")  # no terminal, no bar
    sweep(model, EXAMPLES, max_tokens=20, progress=True)
    shown = capfd.readouterr().err
    assert "96/96" in shown and shown.count("\r") + shown.count("\n") < 5


@pytest.mark.slow
def test_200_sweeps_do_not_grow_memory(model):
    def resident() -> int:
        gc.collect()
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

    def many(number):
        for i in range(number):
            sweep(model, EXAMPLES[:3], units="L0H1, L1H2", mode=("exact", "query", "screen")[i % 3])

    many(10)
    before = resident()
    many(200)
    assert resident() - before < 30e6
