"""``gna doctor`` tells what this machine has, without a network, and exits with 0."""

from __future__ import annotations

import json
import platform
import socket

import pytest
import torch

from gna_utils import cli, weights
from gna_utils.runs import doctor


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GNA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _no_network(*arguments):
    raise AssertionError("the network was used")


def test_report_is_complete_and_needs_no_network(monkeypatch, capsys):
    monkeypatch.setattr(socket, "create_connection", _no_network)
    monkeypatch.setattr(socket, "getaddrinfo", _no_network)
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["python"] == platform.python_version()
    assert report["libraries"]["torch"] == torch.__version__
    assert report["devices"][0]["name"] == "cpu"
    assert set(report["dtype"].values()) <= {"float32", "bfloat16"} and "cpu" in report["dtype"]
    assert report["memory_gib"]["total"] >= report["memory_gib"]["available"] > 0
    assert all(free > 0 for free in report["disk_free_gib"].values())
    smol = next(entry for entry in report["weights"] if entry["name"] == "smollm2-135m")
    assert smol == {
        "name": "smollm2-135m",
        "file": "not fetched yet",
        "sha256": weights.manifest()["smollm2-135m"]["wheel"]["sha256"],
    }


def test_damaged_weights_are_seen(cache):
    """A truncated download has to show in the report, whatever the cache believes."""
    wheel = weights.manifest()["smollm2-135m"]["wheel"]
    file = cache / "smollm2-135m" / wheel["member"].rpartition("/")[2]
    file.parent.mkdir(parents=True)
    file.write_bytes(b"half of it")
    smol = next(entry for entry in doctor._weights() if entry["name"] == "smollm2-135m")
    assert smol["file"] == f"damaged: {wheel['sha256']} was expected"
    assert smol["sha256"] == weights.file_sha256(file)


def test_text_has_a_line_for_each_fact(capsys):
    lines = doctor.text(
        {"python": "3.11", "libraries": {"torch": "2"}, "devices": [{"name": "cpu", "type": "x86"}]}
    ).splitlines()
    assert lines == [
        "python: 3.11",
        "libraries:",
        "  torch                  2",
        "devices:",
        "  cpu, type x86",
    ]
