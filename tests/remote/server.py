"""A real NDIF server on this machine's loopback addresses, without a GPU, for `make test-remote`.

    python tests/remote/server.py install | start | stop | status

`start` serves two tiny random models (Llama, Mamba-2) in float32 and prints the address for NDIF_HOST. All
ports are free ones chosen at start, except the API's when GNA_NDIF_PORT names it. Everything lies in the
`ndif` folder of the user's cache. `stop` ends the processes that `start` began, and no others.
"""

from __future__ import annotations

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

sys.path.insert(0, str(Path(__file__).parents[1]))

RUN = environment.ROOT / "run"
STATE = RUN / "state.json"
MODELS = {name: environment.ROOT / "models" / f"tiny-{name}" for name in ("llama", "mamba2")}
MARK = "GNA_NDIF_RUN"  # every process of a run inherits it: how `stop` tells its own from all others
READY = 180.0  # seconds for the whole server to come up
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
    ports = _free_ports(8)
    ports[0] = int(os.environ.get("GNA_NDIF_PORT") or ports[0])
    # Ray's sockets lie below this folder and their paths may have 107 characters: not in the cache folder.
    sockets = tempfile.mkdtemp(prefix="gna-ndif-")
    address = f"http://127.0.0.1:{ports[0]}"
    STATE.write_text(json.dumps({"address": address, "sockets": sockets}))
    variables = _variables(ports, sockets)
    try:
        _launch(variables, ports, sockets)
        for name in MODELS:
            _wait(f"the tiny {name} model", lambda name=name: _answers(address, name), "deploy")
    except BaseException:
        stop()
        raise
    return address


def stop() -> None:
    """End the processes of the last `start`: politely, then by force after five seconds."""
    for process in _own_processes():
        _signal(process.terminate)
    psutil.wait_procs(_own_processes(), timeout=5)
    for process in (left := _own_processes()):
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


def _variables(ports: list[int], sockets: str) -> dict[str, str]:
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
        "RAY_ADDRESS": f"127.0.0.1:{ports[2]}",
        # Some of Ray's own ports listen on every interface and run what they are sent: ask for a secret.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # otherwise Ray's client server dies now and then at its first fork
        "NDIF_HOME": str(RUN / "home"),
        "NDIF_REDIS_URL": f"redis://127.0.0.1:{ports[1]}",
        "NDIF_RAY_ADDRESS": f"ray://127.0.0.1:{ports[3]}",
        "NDIF_RAY_TEMP_DIR": sockets,
        "NDIF_MODEL_IMPORT_PATH": "cpu_actor.CpuModelActor",
        "NDIF_DEFAULT_DTYPE": "float32",  # ndif's default is bfloat16, which no float32 number agrees with
        "NDIF_CONTROLLER_SYNC_INTERVAL_S": "5",
    }


def _launch(variables: dict[str, str], ports: list[int], sockets: str) -> None:
    """Start the services one after the other; each listens on a loopback address only.

    This is what `ndif start` runs, with two differences: it has no setting for the address to listen on, and
    `ndif stop` would end every Ray process of the machine.
    """
    _, redis, gcs, client, objects, dashboard, agent, metrics = ports
    resources = {"head": 10, "cuda_memory_bytes": 4_000_000_000, "cpu_memory_bytes": 4_000_000_000}
    ray = ["ray", "start", "--head", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    ray += [f"--port={gcs}", f"--ray-client-server-port={client}", f"--object-manager-port={objects}"]
    ray += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    ray += [
        f"--dashboard-agent-grpc-port={agent}",
        f"--metrics-export-port={metrics}",
        f"--temp-dir={sockets}",
    ]
    # The controller places models on GPUs only: Ray is told that there is one.
    ray += [
        "--num-cpus=4",
        "--num-gpus=1",
        f"--resources={json.dumps(resources)}",
        "--object-store-memory=100000000",
    ]
    _spawn(
        "redis",
        ["redis-server", "--bind", "127.0.0.1", "--port", redis, "--save", "", "--dir", RUN],
        variables,
    )
    _wait("redis", lambda: _listens(redis), "redis")
    _spawn("ray", ray, {name: value for name, value in variables.items() if name != "RAY_ADDRESS"})
    _wait("Ray", lambda: _listens(gcs) and _listens(client), "ray")
    module = "ndif.services.ray.deployments.controller.controller"
    _spawn("controller", ["python", "-m", module], variables)
    api = [
        "gunicorn",
        "--config",
        "python:ndif.services.api.gunicorn_conf",
        "--bind",
        f"127.0.0.1:{ports[0]}",
    ]
    _spawn("api", [*api, "ndif.services.api.app:app"], variables)
    _wait("the API", lambda: _connected(ports[0]), "api")
    specification = RUN / "models.json"
    specification.write_text(json.dumps({"models": [_deployment(path) for path in MODELS.values()]}))
    _spawn("deploy", ["ndif", "deploy", "-f", specification], variables)


def _deployment(folder: Path) -> dict:
    """One model of `ndif deploy -f`: with its size and key given, nothing is looked up on the hub."""
    name = {"repo_id": str(folder), "revision": None, "task": "text-generation"}
    sizes = {"size_bytes": 1 << 20, "padding_bias": 1 << 20}
    return {"checkpoint": str(folder), "dtype": "float32", "model_key": KEY + json.dumps(name), **sizes}


def _make_models() -> None:
    """Write the tiny models as folders; seeded, so the tests compare with the same weights."""
    import tiny

    for name, folder in MODELS.items():
        if not (folder / "tokenizer.json").is_file():
            tiny.build_hf(name, num_hidden_layers=4).save_pretrained(folder)
            tiny.tokenizer().save_pretrained(folder)


def _spawn(name: str, command: list, variables: dict[str, str]) -> None:
    with (RUN / f"{name}.log").open("w") as log:
        subprocess.Popen(
            [str(part) for part in command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=RUN,
            start_new_session=True,  # Ctrl-C in the terminal is for the caller, who then calls stop()
        )


def _wait(what: str, ready: Callable[[], bool], log: str) -> None:
    end = time.monotonic() + READY
    while not ready():
        if time.monotonic() > end:
            text = environment.tail(RUN / f"{log}.log")
            raise SystemExit(
                f"{what} did not come up within {READY:.0f} s; end of {RUN / f'{log}.log'}:\n{text}"
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


def _answers(address: str, name: str) -> bool:
    """Whether `ndif deploy` has reported the model as ready, or failed."""
    text = (RUN / "deploy.log").read_text()
    if "✗" in text or "Error" in text:
        raise SystemExit(
            f"'ndif deploy' failed; end of {RUN / 'deploy.log'}:\n{environment.tail(RUN / 'deploy.log')}"
        )
    return any("ready" in line and "✓" in line and str(MODELS[name]) in line for line in text.splitlines())


def _free_ports(n: int) -> list[int]:
    """Ports that nobody listens on now; all are held until the last is found, so they differ."""
    held = [socket.socket() for _ in range(n)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _own_processes() -> list[psutil.Process]:
    own = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(RUN) and process.status() != psutil.STATUS_ZOMBIE:
                own.append(process)
        except (psutil.Error, OSError):  # another user's, or gone meanwhile
            continue
    return own


def _signal(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return


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
