"""These tests need the server of run.py: a plain run of pytest does not collect them at all."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

collect_ignore_glob = [] if os.environ.get("GNA_REMOTE") else ["test_*.py"]

_differences: dict[tuple[str, str], list[float]] = defaultdict(list)


@pytest.fixture
def same(request):
    """Compare a remote tensor with the local one, to 1e-4; the largest differences are listed at the end."""

    def compare(remote, local) -> None:
        assert remote.shape == local.shape and remote.dtype == local.dtype
        difference = float((remote - local).abs().max())
        family = request.getfixturevalue("family")
        _differences[family, request.node.originalname].append(difference)
        assert difference <= 1e-4

    return compare


def pytest_terminal_summary(terminalreporter) -> None:
    for (family, name), values in sorted(_differences.items()):
        terminalreporter.write_line(f"{family:8} {max(values):.1e} over {len(values)} comparisons: {name}")
