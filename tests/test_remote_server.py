"""The script around the loopback NDIF server: what it starts, hides and ends. Starts no server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "remote"))

import environment
import server

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path) -> None:
    """The script's folders in a temporary place: a server that runs now must not notice these tests."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(server, "RUN", tmp_path)
    monkeypatch.setattr(server, "STATE", tmp_path / "state.json")
    monkeypatch.setattr(server, "STARTED", tmp_path / "started.txt")


def test_stop_ends_its_own_processes_and_no_others(tmp_path):
    """ndif's own `stop` ends every Ray process of the machine, also other people's."""
    marks = {"own": str(tmp_path), "another server's": "/somewhere/else", "nobody's": ""}
    processes = {
        name: subprocess.Popen(SLEEP, env={**os.environ, server.MARK: mark}) for name, mark in marks.items()
    }
    try:
        server.stop()
        assert processes["own"].poll() is not None
        assert processes["another server's"].poll() is None and processes["nobody's"].poll() is None
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_stop_ends_processes_that_overwrote_their_environment(tmp_path):
    """redis and Ray's workers write their title over the environment that they inherited."""
    bare = f"import os, sys; os.execve(sys.executable, {[*SLEEP]}, {{}})"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {bare!r}])"
    for name, code in (("one", bare), ("with a child", parent)):
        server._spawn(name, [sys.executable, "-c", code], dict(os.environ))
    end = time.monotonic() + 20
    while len(found := server._own_processes()) < 3 or any("sleep" not in p.cmdline()[-1] for p in found):
        assert time.monotonic() < end
        time.sleep(0.05)
    server.stop()
    assert not any(process.is_running() for process in found if not server._ended(process))


def test_a_reused_process_id_is_left_alone(tmp_path):
    stranger = subprocess.Popen(SLEEP)
    try:
        server.STARTED.write_text(f"{stranger.pid} 1000000.0\n")
        server.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_part_that_ends_at_once_is_reported_with_its_log(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('Address already in use')"]
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=r"(?s)api ended with exit code 1 .*Address already in use"):
        server._spawn("api", command, dict(os.environ), lambda: False)
    assert time.monotonic() - begin < 30


def test_waiting_for_a_part_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(server, "READY", 0.3)
    variables = {**os.environ, server.MARK: str(tmp_path)}
    with pytest.raises(SystemExit, match="ray is not ready after"):
        server._spawn("ray", SLEEP, variables, lambda: False)
    server.stop()
    assert server.status().startswith("not running")


def test_the_server_gets_no_key_of_the_user(monkeypatch):
    for name in ("NDIF_API_KEY", "HF_TOKEN", "NNSIGHT_CONFIG", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "planted")
    ports = server._free_ports()
    assert "planted" not in server._variables(ports, "/tmp").values()
    assert len(set(ports.values())) == 8


def test_the_port_of_the_api_can_be_chosen(monkeypatch):
    monkeypatch.setenv("GNA_NDIF_PORT", "18001")
    assert server._free_ports()["api"] == 18001


def test_a_start_without_installation_says_what_to_do():
    with pytest.raises(SystemExit, match="not installed"):
        server.start()


def test_an_environment_for_other_versions_counts_as_not_installed(tmp_path):
    """After an upgrade of the client, server and client would no longer run the same libraries."""
    done = tmp_path / "installed.txt"
    done.write_text("\n".join(environment.requirements()) + "\n")
    assert environment.installed()
    done.write_text(done.read_text().replace("nnsight==", "nnsight==0."))
    assert not environment.installed()


def test_a_machine_without_a_fitting_python_gets_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_runs", lambda *_: False)
    with pytest.raises(SystemExit, match=r"needs Python 3\.12 or 3\.13 .*GNA_NDIF_PYTHON"):
        environment.find_python()


def test_a_user_without_redis_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="apt-get install redis-server"):
        environment.install()


def test_listening_is_told_from_closed():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert not server._listens(port)
        listener.listen()
        assert server._listens(port)
