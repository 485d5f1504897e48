"""Shared set-up: tiny models built once per family, one thread, and no context left open by a test."""

from __future__ import annotations

import functools
import sys
import warnings

import pytest
import tiny
import torch
from fixtures_smollm2 import smollm2  # noqa: F401  (a fixture for every test file)

build_once = functools.cache(tiny.build)


@pytest.fixture
def tiny_model():
    """``tiny_model("llama")`` is ``tiny.build("llama")``, shared by all tests: leave it as it was."""
    return build_once


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """A test may not leave an intervention active, or the next ones would run on a changed model."""
    yield
    module = sys.modules.get("gna_utils.interventions")
    if module is not None:
        assert not module._ACTIVE


@pytest.fixture
def deprecations_are_errors():
    """Make every DeprecationWarning and FutureWarning of a call fail the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        warnings.simplefilter("error", FutureWarning)
        yield


def pytest_configure(config):
    # threads cost more than they bring on models of this size, and tests often share the machine
    torch.set_num_threads(1)
