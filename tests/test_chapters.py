"""Chapters run on the reader's own model, without any CUDA-only package, and their solutions are right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bpe
import nbformat
import pytest
import tiny

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("mamba_ssm", "causal_conv1d", "flash_attn", "fla")


def printed(notebook: Path) -> str:
    cells = nbformat.read(notebook, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs if output.output_type == "stream")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_chapter_01_runs_on_a_folder_without_cuda_packages(family, tmp_path):
    """A model with random weights is at chance, and the chapter says so instead of failing."""
    tokenizer = bpe.build(split_digits=True)
    model = tiny.build_hf(family, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "blocked").mkdir()
    # every Python process reads this at its start, the chapter's kernel too
    (tmp_path / "blocked" / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({KERNELS}))\n"
    )
    values = [f"model={tmp_path / 'model'}", "n_examples=12", "n_pairs=3,4"]
    command = [sys.executable, "-m", "gna_utils.cli", "run", "01", "--out", str(tmp_path / "out")]
    path = os.pathsep.join(filter(None, [str(tmp_path / "blocked"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, *(part for value in values for part in ("-p", value))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [notebook] = (tmp_path / "out").rglob("*.ipynb")
    said = printed(notebook)
    assert "luck: right" in said  # the reference solution passes its own check
    assert "chance 0.25" in said and "Refused: the first token does not tell candidates" in said
