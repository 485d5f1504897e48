"""What `make test-remote` does: install the server once, start it, run the tests in this folder, stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import environment
import server


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code; `arguments` go to pytest."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as for Ctrl-C: leave through `finally`
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    environment.install()
    variables = {**os.environ, "NDIF_HOST": server.start(), "GNA_REMOTE": "1"}
    try:
        command = [sys.executable, "-m", "pytest", "-m", "remote", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, env=variables).returncode
    finally:
        server.stop()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
