"""A real NDIF server on this machine's loopback addresses, without a GPU, for `make test-remote`.

    python tests/remote/server.py install | start | stop | status

`start` serves two tiny random models (Llama, Mamba-2) in float32 and prints the address for NDIF_HOST. All
ports are free ones chosen at start, except the API's when GNA_NDIF_PORT names it. Everything lies in the
`ndif` folder of the user's cache. `stop` ends the processes that `start` began, and no others.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import environment
import httpx
import psutil

REPOSITORY = Path(__file__).parents[2]
RUN = environment.ROOT / "run"
STATE = RUN / "state.json"
STARTED = RUN / "started.txt"  # one line for each process that `start` began: its id and its time of birth
MODELS = {name: environment.ROOT / "models" / f"tiny-{name}" for name in ("llama", "mamba2")}
MARK = "GNA_NDIF_RUN"  # every process of a run inherits it
READY = 300.0  # seconds that each part of the server may need on a busy machine
KEY = "nnsight.modeling.transformers.TransformersModel:"


def start() -> str:
    """Start redis, Ray, ndif's controller and its API, serve the tiny models; returns the address."""
    if not environment.installed():
        raise SystemExit(f"The server is not installed: python {Path(__file__).name} install")
    if _own_processes():
        stop()
    shutil.rmtree(RUN, ignore_errors=True)
    (RUN / "home").mkdir(parents=True)
    _make_models()
    ports = _free_ports()
    # Ray's sockets lie below this folder and their paths may have 107 characters: not in the cache folder.
    sockets = tempfile.mkdtemp(prefix="gna-ndif-")
    address = f"http://127.0.0.1:{ports['api']}"
    STATE.write_text(json.dumps({"address": address, "sockets": sockets}))
    variables = _variables(ports, sockets)
    try:
        _launch(variables, ports, sockets)
        _deploy(variables)
    except BaseException:
        stop()
        raise
    return address


def stop() -> None:
    """End the processes of the last `start`: politely, then by force after five seconds."""
    own = _own_processes()
    for process in own:
        _signal(process.terminate)
    psutil.wait_procs(own, timeout=5)
    # Also those that were born meanwhile; an ended one is no longer running under its id.
    left = [process for process in {*own, *_own_processes()} if process.is_running()]
    for process in left:
        _signal(process.kill)
    psutil.wait_procs(left, timeout=5)
    if STATE.is_file():
        shutil.rmtree(json.loads(STATE.read_text())["sockets"], ignore_errors=True)
        STATE.unlink()


def status() -> str:
    """One line: the address, or that no server runs."""
    processes = _own_processes()
    if not processes or not STATE.is_file():
        return "not running" + ("" if environment.installed() else " (and not installed)")
    memory = sum(_memory(process) for process in processes) / 1e9
    return f"{json.loads(STATE.read_text())['address']}: {len(processes)} processes, {memory:.1f} GB"


def _variables(ports: dict[str, int], sockets: str) -> dict[str, str]:
    """The server's environment: none of the user's settings of ndif, Ray or the hub, and no API key."""
    foreign = ("NDIF_", "RAY_", "HF_", "PYTHON", "NNSIGHT_", "GNA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {
        MARK: str(RUN),
        "PATH": f"{environment.BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent / "actor"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(RUN / "home" / "hub"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": f"127.0.0.1:{ports['gcs']}",
        # Some of Ray's own ports listen on every interface and run what they are sent: ask for a secret.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # otherwise Ray's client server dies now and then at its first fork
        "NDIF_HOME": str(RUN / "home"),
        "NDIF_REDIS_URL": f"redis://127.0.0.1:{ports['redis']}",
        "NDIF_RAY_ADDRESS": f"ray://127.0.0.1:{ports['client']}",
        "NDIF_RAY_TEMP_DIR": sockets,
        "NDIF_OBJECT_STORE_URL": "http://127.0.0.1:9",  # none: ndif's default may be another service here
        "NDIF_MODEL_IMPORT_PATH": "cpu_actor.CpuModelActor",
        "NDIF_DEFAULT_DTYPE": "float32",  # ndif's default is bfloat16, which no float32 number agrees with
        "NDIF_CONTROLLER_SYNC_INTERVAL_S": "5",
    }


def _launch(variables: dict[str, str], ports: dict[str, int], sockets: str) -> None:
    """Start the services one after the other.

    This is what `ndif start` runs, but for two things: redis and the API listen on a loopback address, for
    which ndif has no setting, and `ndif stop`, which would end every Ray process here, is not needed.
    """
    cache = ["redis-server", "--bind", "127.0.0.1", "--port", ports["redis"], "--save", "", "--dir", RUN]
    _spawn("redis", cache, variables, lambda: _listens(ports["redis"]))
    # The controller places models on GPUs only: Ray is told that there is one.
    resources = {"head": 10, "cuda_memory_bytes": 4_000_000_000, "cpu_memory_bytes": 4_000_000_000}
    options = {
        "node-ip-address": "127.0.0.1",
        "port": ports["gcs"],
        "ray-client-server-port": ports["client"],
        "object-manager-port": ports["objects"],
        "include-dashboard": "true",  # the controller asks it which actors there are
        "dashboard-host": "127.0.0.1",
        "dashboard-port": ports["dashboard"],
        "dashboard-agent-grpc-port": ports["agent"],
        "metrics-export-port": ports["metrics"],
        "temp-dir": sockets,
        "num-cpus": 4,
        "num-gpus": 1,
        "resources": json.dumps(resources),
        "object-store-memory": 100_000_000,
    }
    ray = ["ray", "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items())]
    alone = {name: value for name, value in variables.items() if name != "RAY_ADDRESS"}
    _spawn("ray", ray, alone, lambda: _listens(ports["gcs"]) and _listens(ports["client"]))
    _spawn("controller", ["python", "-m", "ndif.services.ray.deployments.controller.controller"], variables)
    web = ["gunicorn", "--config", "python:ndif.services.api.gunicorn_conf", "--bind"]
    web += [f"127.0.0.1:{ports['api']}", "ndif.services.api.app:app"]
    _spawn("api", web, variables, lambda: _connected(ports["api"]))


def _deploy(variables: dict[str, str]) -> None:
    """Serve the models; ndif's command ends when they are ready, or have failed."""
    specification, log = RUN / "models.json", RUN / "deploy.log"
    specification.write_text(json.dumps({"models": [_deployment(folder) for folder in MODELS.values()]}))

    def ready() -> bool:
        return sum("✓" in line and "ready" in line for line in log.read_text().splitlines()) == len(MODELS)

    _spawn("deploy", ["ndif", "deploy", "-f", specification], variables, ready)


def _deployment(folder: Path) -> dict:
    """One model of `ndif deploy -f`: with its size and key given, nothing is looked up on the hub."""
    name = {"repo_id": str(folder), "revision": None, "task": "text-generation"}
    sizes = {"size_bytes": 1 << 20, "padding_bias": 1 << 20}
    return {"checkpoint": str(folder), "dtype": "float32", "model_key": KEY + json.dumps(name), **sizes}


def _make_models() -> None:
    """Write the tiny models as folders, once: both sides load their weights from there."""
    missing = {name: folder for name, folder in MODELS.items() if not (folder / "tokenizer.json").is_file()}
    if not missing:
        return
    sys.path.insert(0, str(REPOSITORY / "tests"))
    import tiny  # brings torch and transformers along, which a start does not need otherwise

    for name, folder in missing.items():
        tiny.build_hf(name, num_hidden_layers=4).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)


def _spawn(
    name: str, command: list, variables: dict[str, str], ready: Callable[[], bool] = lambda: True
) -> None:
    """Start a process with a log of its own, and wait until it is ready."""
    log = RUN / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=RUN,
            start_new_session=True,  # Ctrl-C in the terminal is for the caller, who then calls stop()
        )
    with STARTED.open("a") as started:
        started.write(f"{process.pid} {psutil.Process(process.pid).create_time()}\n")
    begin = time.monotonic()
    while not ready():
        ended, seconds = process.poll() is not None, time.monotonic() - begin
        # A process that has just ended may have become ready before: deploying ends that way.
        if seconds > READY or (ended and not ready()):
            what = f"ended with exit code {process.returncode}" if ended else "is not ready"
            raise SystemExit(
                f"The server's {name} {what} after {seconds:.0f} s; end of {log}:\n{environment.tail(log)}"
            )
        time.sleep(0.2)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _connected(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/connected", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _free_ports() -> dict[str, int]:
    """Ports that nobody listens on now; all are held until the last is found, so they differ."""
    names = ("api", "redis", "gcs", "client", "objects", "dashboard", "agent", "metrics")
    with contextlib.ExitStack() as stack:
        held = {name: stack.enter_context(socket.socket()) for name in names}
        for one in held.values():
            one.bind(("127.0.0.1", 0))
        found = {name: one.getsockname()[1] for name, one in held.items()}
    return found | {"api": int(os.environ.get("GNA_NDIF_PORT") or found["api"])}


def _own_processes() -> list[psutil.Process]:
    """The processes that `start` began, what came from them, and all others that carry the mark.

    None of this is enough alone: redis and Ray's workers overwrite their environment with a title, and a
    process whose parent has ended is nobody's child.
    """
    own = set()
    for line in STARTED.read_text().splitlines() if STARTED.is_file() else []:
        number, birth = line.split()
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(number))
            if abs(process.create_time() - float(birth)) < 1:  # otherwise the id has gone to another process
                own |= {process, *process.children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # another user's, or gone meanwhile
            if process.environ().get(MARK) == str(RUN):
                own.add(process)
    return [process for process in own if not _ended(process)]


def _ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _signal(action: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        action()


def _memory(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().uss
    except psutil.Error:
        return 0


def main(arguments: list[str]) -> None:
    actions = {"install": environment.install, "start": start, "stop": stop, "status": status}
    if len(arguments) != 1 or arguments[0] not in actions:
        raise SystemExit(__doc__)
    print(actions[arguments[0]]() or f"{arguments[0]}: done")


if __name__ == "__main__":
    main(sys.argv[1:])
