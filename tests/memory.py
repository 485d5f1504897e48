"""Peak memory of one call, for tests and benchmarks (Linux with glibc)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_SELF = Path("/proc/self")


def peak(call: Callable[[], object]) -> int:
    """Bytes by which the process grew at most while `call` ran, over its size before.

    The kernel's own high-water mark is reset first: torch's buffers are invisible to Python's tracemalloc. So
    is the memory that malloc keeps of earlier calls, which would be used again without being counted.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (_SELF / "clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = (_SELF / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
