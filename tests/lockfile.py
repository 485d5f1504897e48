"""Resolve the project's packages in an empty environment and print them as constraints (`make lock`)."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = "torch==2.13.0"
HEAD = """\
# Exact versions of every package of the book and its tests, resolved from pyproject.toml by `make lock`.
# Used as constraints: `pip install --constraint requirements.lock --editable '.[dev]'`.
# torch has CPU and CUDA builds of one version; the CUDA build brings its own exact nvidia packages.
"""


def resolve() -> list[str]:
    """Install torch and the project into a throwaway environment and return ``name==version`` lines."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder, "bin", "python"))
        for what in ([TORCH], [TORCH, "--editable", ".[dev]"]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True, stdout=sys.stderr)
        out = subprocess.run(
            [python, "-m", "pip", "list", "--format=freeze", "--exclude-editable"],
            check=True,
            capture_output=True,
            text=True,
        )
    lines = [re.sub(r"\+\w+$", "", line) for line in out.stdout.splitlines()]
    skip = re.compile(r"^(pip|setuptools|wheel|nvidia-.*|triton|cuda-.*)==")
    return sorted((line for line in lines if not skip.match(line)), key=str.lower)


if __name__ == "__main__":
    print(HEAD + "\n".join(resolve()))
