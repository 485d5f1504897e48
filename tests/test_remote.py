"""How a remote request fails: soon, in one sentence, and without the API key. Needs no NDIF server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import nnsight
import pytest
import tiny
import tiny_llamba
from cloudpickle.cloudpickle import list_registry_pickle_by_value
from nnsight.modeling.transformers import TransformersModel

from gna_utils import GnaError, remote

KEY = "11111111-2222-3333-4444-planted-key-5"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> TransformersModel:
    """A model that is only a structure here, as `load(..., remote=True)` gives."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.build_hf("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return TransformersModel(str(folder), task="text-generation", tokenizer=tiny.tokenizer())


@pytest.fixture(autouse=True)
def planted(monkeypatch) -> None:
    monkeypatch.setattr(nnsight.CONFIG.API, "APIKEY", KEY)
    monkeypatch.setattr(nnsight.CONFIG.APP, "REMOTE_LOGGING", False)


def request(model, host: str | bool = True) -> None:
    with model.trace("w1 w2 w3", backend=remote.backend(model, host)):
        model.lm_head.output.save()


def failure(model, host: str | bool = True) -> str:
    """The message of the failure and everything that a notebook would print with it."""
    with pytest.raises(GnaError) as caught:
        request(model, host)
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert KEY not in text
    return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def silent() -> Iterator[str]:
    """A service that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def web(status: int) -> Iterator[str]:
    """A web server that is no NDIF server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{site.server_address[1]}"
        site.shutdown()


def test_a_server_that_is_down_is_named(model, monkeypatch):
    host = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(nnsight.CONFIG.API, "HOST", host)
    text = failure(model)
    assert host in text and "cannot be reached" in text and "NDIF_HOST" in text


def test_a_silent_server_does_not_hang_the_caller(model, monkeypatch):
    """nnsight waits without limit for a server that accepts the connection and never answers."""
    monkeypatch.setattr(remote, "ANSWER", 0.5)
    begin = time.monotonic()
    with silent() as host:
        text = failure(model, host)
    assert "did not answer" in text and time.monotonic() - begin < 10


def test_another_web_service_is_recognised(model):
    with web(404) as host:
        assert "is not an NDIF server (it answered with HTTP status 404)" in failure(model, host)


def test_a_password_in_the_address_stays_out_of_the_message(model):
    text = failure(model, f"http://user:secret@127.0.0.1:{free_port()}")
    assert "secret" not in text and "user" not in text


def test_a_host_that_cannot_be_resolved(model):
    assert "cannot be reached" in failure(model, "http://no-such-host.invalid:8001")


@pytest.mark.parametrize("value", ["127.0.0.1:8001", "yes", "Local"])
def test_other_words_for_remote_are_refused(model, value):
    assert "'http://host:port'" in failure(model, value)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (f"Failed to send request: Invalid API key format: '{KEY}'. Keys are UUIDs.", "set NDIF_API_KEY"),
        ("Failed to send request: Missing or invalid API key.", "set NDIF_API_KEY"),
        (
            "Could not deploy this model. CANT_ACCOMMODATE: placed 0 of 1 new replicas.",
            "cannot serve the model",
        ),
        (
            "Traceback ...\n  File 'mine.py', line 3\nIndexError: index 9 is out of bounds",
            "IndexError: index 9",
        ),
        (f"Failed to send request: the header {KEY} is too long", "(your key)"),
        (
            "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint",
            "result is larger",
        ),
        ("", "no reason given"),
    ],
)
def test_what_a_server_reports_becomes_one_sentence_without_the_key(model, monkeypatch, report, expected):
    """NDIF echoes a key that it does not understand."""

    def refuse(*_):
        raise remote.RemoteError(report)

    monkeypatch.setattr(remote.RemoteBackend, "__call__", refuse)
    assert expected in failure(model, "http://127.0.0.1:1")


def test_the_servers_traceback_is_kept_as_a_note(model, monkeypatch):
    def refuse(*_):
        raise remote.RemoteError(
            "Traceback ...\n  File 'mine.py', line 3\nIndexError: index 9 is out of bounds"
        )

    monkeypatch.setattr(remote.RemoteBackend, "__call__", refuse)
    with pytest.raises(GnaError) as caught:
        request(model, "http://127.0.0.1:1")
    assert "mine.py" not in str(caught.value) and "mine.py" in caught.value.__notes__[0]


def test_no_news_for_too_long_ends_the_waiting(monkeypatch):
    """A request that waits behind others for ever must not hang the caller."""
    monkeypatch.setattr(remote, "PATIENCE", 0.0)
    display = remote._Patient("http://127.0.0.1:1", enabled=False)
    time.sleep(0.01)
    with pytest.raises(GnaError, match="no news"):
        display.refresh()


def test_a_folder_is_named_without_asking_the_hub(model, monkeypatch):
    """nnsight asks the model hub about every name, which fails for folders and without internet."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert model.repo_id in remote._key(model)


def test_a_hub_that_cannot_be_asked_is_said(monkeypatch, model):
    monkeypatch.setattr(model, "repo_id", "someone/some-model")
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info", lambda *_: (_ for _ in ()).throw(ConnectionError("no network"))
    )
    assert "the model hub could not be asked for 'someone/some-model' (no network)" in failure(model)


def test_a_model_without_a_name_is_refused():
    built, _, _ = tiny.build("llama")
    with pytest.raises(GnaError, match="no name that a server could load it by"):
        remote.backend(built, True)


def test_local_needs_no_server(model):
    assert remote.backend(model, False) is None
    assert type(remote.backend(model, "local")).__name__ == "LocalSimulationBackend"


def test_a_model_class_of_our_own_is_refused_before_anything_is_sent():
    """A server builds models from its own libraries, and ours is not among them."""
    llamba = TransformersModel(tiny_llamba.build(), task="text-generation", tokenizer=tiny.tokenizer())
    assert "LlambaForCausalLM is not one of transformers' models" in failure(llamba, "http://127.0.0.1:1")


def test_the_package_travels_with_a_request(model):
    """A server gets the source of modules in the working directory, and of installed ones that say so."""
    remote.backend(model, "http://127.0.0.1:1")
    assert "gna_utils" in list_registry_pickle_by_value()


def test_the_default_time_limit_of_websockets_is_put_back(model):
    import websocket

    before = websocket.getdefaulttimeout()
    failure(model, f"http://127.0.0.1:{free_port()}")
    assert websocket.getdefaulttimeout() == before
