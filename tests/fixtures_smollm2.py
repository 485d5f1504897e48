"""The pretrained model that the book uses first, loaded once for all tests that need it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """The nnsight model of SmolLM2-135M-Instruct, float32 on the CPU. Leave it as it was."""
    from gna_utils import load

    return load("smollm2-135m", device="cpu")
