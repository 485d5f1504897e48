"""The command line answers at once, refuses in one sentence, and works from any folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from books import code, notebook, write

import gna_utils
from gna_utils import cli
from gna_utils.errors import GnaError
from gna_utils.runs import serve

HEAVY = ["altair", "nbformat", "nnsight", "numpy", "pandas", "papermill", "torch", "transformers", "yaml"]


@pytest.fixture
def book(tmp_path, monkeypatch):
    write(tmp_path, {"01_toy": notebook(code("print(seed)"))})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def test_help_and_version_import_nothing_heavy():
    """``gna --help`` has to answer in under a second: it may import only what it needs."""
    script = (
        "import sys\nfrom gna_utils import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print('IMPORTED', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED []"
    for command in ("run", "build", "serve", "doctor", "models"):
        assert f"    {command} " in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"gna {gna_utils.__version__}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("run", "01", "-p", "n_exmaples=10"), "01_toy.ipynb has no parameter 'n_exmaples': did you mean"),
        (
            ("run", "01", "-p", "n_examples=abc"),
            "parameter 'n_examples' of 01_toy.ipynb must be int, not 'abc'",
        ),
        (("run", "01", "-p", "seed=1", "-p", "seed=2"), "parameter 'seed' is given twice"),
        (("run", "01", "-p", "seed"), "'seed' is not a parameter: write name=value"),
        (("run", "99"), "unknown chapter '99'"),
        (("run", "01", "--out", "/dev/null/x"), "the folder /dev/null/x cannot be written"),
        (("run", "01", "--out", ""), "--out '' names no folder: give the name of one, or leave it out"),
        (("build", "--only", ","), "--only ',' names no chapter: give its number, topic or name"),
        (("build", "--only", "99"), "unknown chapter '99'"),
        (("serve",), "there is no site in"),
    ],
)
def test_refusals_are_one_sentence_and_status_2(book, capsys, arguments, message):
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"gna: {message}") and err.count("\n") == 1
    assert not list(book.glob("_build/runs/*/*/record.json"))


@pytest.mark.parametrize(
    "arguments", [(), ("dance",), ("run", "01", "--timeout", "0"), ("run", "01", "--timeout", "x")]
)
def test_wrong_usage_is_status_2(book, arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2


@pytest.mark.parametrize("seconds", ["abc", "0", "-3", "1.5", ""])
def test_timeout_that_is_no_time_is_explained(capsys, seconds):
    with pytest.raises(SystemExit):
        cli.main(["build", f"--timeout={seconds}"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"argument --timeout: '{seconds}' is not a whole number of seconds above 0")


def test_sigterm_ends_a_command_in_order(monkeypatch, capsys):
    """A second SIGTERM must not break off the tidying, and the handler of before is put back."""
    tidied = []

    def command(options):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            tidied.append(True)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "_models", command)
    assert call(capsys, "models") == (143, "", "gna: terminated; nothing was left half-written.\n")
    assert tidied == [True] and signal.getsignal(signal.SIGTERM) is before


def test_parameters_are_listed_with_type_default_and_help(book, capsys):
    status, out, _ = call(capsys, "run", "toy", "--parameters")
    assert status == 0
    assert "  n_pairs: list[int] = [2, 4]  list lengths" in out and "  limit: int | None = None" in out


def test_unexpected_errors_keep_their_traceback(book, monkeypatch):
    monkeypatch.setattr(cli, "_models", lambda options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["models"])


def test_models_are_listed(book, capsys):
    status, out, _ = call(capsys, "models")
    assert status == 0 and any(line.startswith("smollm2-135m ") for line in out.splitlines())


@pytest.mark.slow
def test_run_and_run_again(book, capsys, monkeypatch):
    """The whole way once: from the command line to the executed notebook; the second time from the cache."""
    monkeypatch.setattr("gna_utils.runs.fingerprint.PACKAGE", book / "no-package")
    monkeypatch.chdir(book / "book")
    status, out, err = call(capsys, "run", "toy", "-p", "seed=7", "--out", str(book / "results"))
    assert status == 0 and "01_toy: 2 cells in" in err
    path = out.splitlines()[0].removeprefix("executed notebook: ")
    assert path.startswith(str(book / "results" / "01_toy")) and '"7\\n"' in Path(path).read_text()
    status, out, err = call(capsys, "run", "toy", "-p", "seed=7", "--out", str(book / "results"))
    assert status == 0 and "this run is there already" in out and path in out and err == ""


def test_site_is_served_on_this_machine_only(tmp_path):
    (tmp_path / "index.html").write_text("<h1>the site</h1>")
    with serve.make_server(tmp_path, port=0) as server:
        host, port = server.server_address
        assert host == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/index.html") as answer:
            assert b"the site" in answer.read() and answer.headers["Cache-Control"] == "no-cache"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/../secret")
        with pytest.raises(GnaError, match=f"port {port} cannot be used .*--port"):
            serve.make_server(tmp_path, port=port)
        server.shutdown()


def test_command_is_installed():
    gna = Path(sys.executable).with_name("gna")
    done = subprocess.run([gna, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gna {gna_utils.__version__}\n"
