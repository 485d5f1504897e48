"""The server's own environment: Python 3.12 or 3.13, ndif, and the client's torch, nnsight, transformers.

It lies in the user's cache folder and is built once. The server gets the library versions of the client, so
that a difference between local and remote numbers cannot come from them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from gna_utils.weights import cache_dir

NDIF = "ndif[api,ray]==0.1.2"
SAME_AS_CLIENT = ("torch", "nnsight", "transformers")
ROOT = cache_dir() / "ndif"
ENV = ROOT / "env"
BIN = ENV / "bin"


def requirements() -> list[str]:
    """What pip installs; a build tag such as ``+cpu`` is the client's own and left out."""
    return [f"{name}=={version(name).partition('+')[0]}" for name in SAME_AS_CLIENT] + [NDIF]


def installed() -> bool:
    """Whether the environment is complete and still fits the client's library versions."""
    done = ROOT / "installed.txt"
    return done.is_file() and done.read_text().splitlines() == requirements()


def install() -> None:
    """Build the environment, or go on where an interrupted run stopped; does nothing when it is complete.

    Downloads about 3 GB (PyPI's torch holds CUDA) and needs 6 GB of disk. pip's output goes to install.log.
    """
    ROOT.mkdir(parents=True, exist_ok=True)
    with FileLock(ROOT / "lock"):
        _redis()
        if installed():
            return
        begin = time.monotonic()
        python = find_python()
        print(f"installing the NDIF server into {ENV} with {python}; log: {ROOT / 'install.log'}", flush=True)
        with (ROOT / "install.log").open("a") as log:
            if not _runs(BIN / "python"):
                _logged([python, "-m", "venv", "--clear", ENV], log)
            # One resolution for all: a later step could otherwise replace the pinned versions.
            _logged([BIN / "python", "-m", "pip", "install", *requirements()], log)
        (ROOT / "installed.txt").write_text("\n".join(requirements()) + "\n")
        print(f"installed in {time.monotonic() - begin:.0f} s", flush=True)


def find_python() -> str:
    """A Python that ndif supports: GNA_NDIF_PYTHON, this one, one on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [os.environ.get("GNA_NDIF_PYTHON"), sys.executable, "python3.12", "python3.13"]
    found += sorted(str(path) for minor in (12, 13) for path in pyenv.glob(f"3.{minor}.*/bin/python"))
    for candidate in filter(None, found):
        # pyenv's shims are on PATH also for versions that are not active: only a run tells.
        if _runs(
            candidate, "import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in {(3, 12), (3, 13)})"
        ):
            return candidate
    raise SystemExit(
        "The NDIF server needs Python 3.12 or 3.13 with venv, and none was found: "
        "install one or name it with GNA_NDIF_PYTHON=/path/to/python3.12."
    )


def redis_server() -> str | None:
    """Where redis-server is, or None."""
    return shutil.which("redis-server")


def tail(path: Path, lines: int = 25) -> str:
    """The last lines of a log, for a message."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else "(no log)"


def _redis() -> None:
    if redis_server():
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise SystemExit(
            "The NDIF server needs redis-server on PATH; on Debian: sudo apt-get install redis-server"
        )
    with (ROOT / "install.log").open("a") as log:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        _logged(["apt-get", "update", "-qq"], log, environment)
        _logged(["apt-get", "install", "-y", "-qq", "redis-server"], log, environment)


def _runs(python: str | Path, code: str = "pass") -> bool:
    try:
        return subprocess.run([python, "-c", code], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _logged(command: list, log, environment: dict | None = None) -> None:
    command = [str(part) for part in command]
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode:
        raise SystemExit(
            f"'{' '.join(command)}' failed; run it again to go on. End of {log.name}:\n{tail(Path(log.name))}"
        )
