"""Requests to an NDIF server: which model they name, how long they wait, and one sentence when they fail."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import nnsight
import websocket
from nnsight.intervention.backends.display import StatusDisplay
from nnsight.intervention.backends.remote import RemoteBackend, RemoteError
from nnsight.modeling import huggingface
from nnsight.tracing.backend import Backend

from .errors import GnaError

ANSWER = 30.0  # seconds for a server to accept a connection and greet; nothing has been sent by then
PATIENCE = 1800.0  # seconds without any news of a request (queued behind others, or running)
# Where the classes of models come from that a server can build: its own libraries, or the model's repository.
KNOWN = ("transformers", "transformers_modules", "peft")


def ship_package() -> None:
    """Let this package's functions be used inside a remote block.

    A server gets the source of modules in the working directory and of registered packages, but never of
    other installed ones. :func:`backend` and ``load(..., remote=True)`` do this themselves.
    """
    nnsight.register("gna_utils")


def check(remote: bool | str) -> None:
    """Raise :class:`GnaError` unless `remote` is one of the values that :func:`backend` takes."""
    address = isinstance(remote, str) and remote.startswith(("http://", "https://"))
    if not (isinstance(remote, bool) or remote == "local" or address):
        raise GnaError(f"remote={remote!r} is not possible: give True, False, 'local' or 'http://host:port'.")


def backend(model: Any, remote: bool | str) -> Backend | None:
    """What ``model.trace(..., backend=...)`` needs so that the block runs where `remote` says.

    >>> with model.trace(prompt, backend=backend(model, remote)):
    ...     hidden = model.model.norm.output.save()

    `remote` is False (here: None is returned), True (the server of NDIF_HOST or nnsight's settings), the
    ``http://host:port`` of a server, or ``"local"`` (here, after packing the block as for a server). Unlike
    nnsight's own ``remote=`` it can also name a model that lies in a folder, when the server has the same
    folder, it waits for a bounded time, and every failure is a :class:`GnaError` without the API key in it.
    The server decides the dtype (an NDIF server's default is bfloat16), whatever the model's is here.
    """
    check(remote)
    if remote is False:
        return None
    if remote == "local":
        return model._remote_backend("local", True, None, False)
    ship_package()
    host = remote if isinstance(remote, str) else nnsight.CONFIG.API.HOST
    return _ServerBackend(_key(model), host=host.rstrip("/"), env=model._remoteable_get_env())


def _key(model: Any) -> str:
    """The model's name for the server; the hub is asked for the spelling of an id, never about a folder."""
    family, name = type(model._module), model.repo_id
    if family.__module__.partition(".")[0] not in KNOWN:
        raise GnaError(
            f"{family.__name__} is not one of transformers' models, so no server can build it: run it here."
        )
    if not name:
        raise GnaError("this model was built from a module and has no name that a server could load it by.")
    if Path(name).is_dir():
        huggingface._ID_CACHE[name] = name
    try:
        return model.to_model_key()
    except (OSError, httpx.HTTPError) as error:
        raise GnaError(
            f"the model hub could not be asked for '{name}' ({_short(error)}), which a remote request needs: "
            "check the name and the connection, or name a folder that the server has too."
        ) from None


class _Patient(StatusDisplay):
    """nnsight's status line, which is refreshed while a request waits, with an end to the waiting."""

    def __init__(self, place: str, **options: Any) -> None:
        super().__init__(**options)
        self.place, self.heard = place, time.monotonic()

    def update(self, response: Any) -> None:
        self.heard = time.monotonic()
        super().update(response)

    def refresh(self) -> None:
        if time.monotonic() - self.heard > PATIENCE:
            raise GnaError(
                f"the server at {self.place} has sent no news of the request for {PATIENCE:.0f} s."
            )
        super().refresh()


class _ServerBackend(RemoteBackend):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.place = _place(self.host)
        self.display = _Patient(self.place, enabled=self.display.enabled, verbose=self.verbose)

    def __call__(self, tracer: Any = None) -> Any:
        before = websocket.getdefaulttimeout()
        # nnsight opens its connection without a time limit: a server that never greets would hang the caller.
        websocket.setdefaulttimeout(ANSWER)
        try:
            return super().__call__(tracer)
        except RemoteError as error:
            raise self._refused(str(error)) from None
        except (TimeoutError, websocket.WebSocketTimeoutException):
            reason = f"accepted the connection but did not answer within {ANSWER:.0f} s"
        except websocket.WebSocketConnectionClosedException:
            reason = "closed the connection before the request was finished"
        except websocket.WebSocketBadStatusException as error:
            reason = f"is not an NDIF server (it answered with HTTP status {error.status_code})"
        except (OSError, websocket.WebSocketException, httpx.HTTPError) as error:
            reason = f"cannot be reached ({_short(error)})"
        finally:
            websocket.setdefaulttimeout(before)
        raise GnaError(
            f"the server at {self.place} {reason}: start it, or name another one by NDIF_HOST or remote='http://...'."
        ) from None

    def _refused(self, message: str) -> GnaError:
        message = message.replace(self.api_key, "(your key)") if self.api_key else message
        message = message.removeprefix("Failed to send request: ").strip()
        if "EndpointConnectionError" in message:
            return GnaError(
                f"the result is larger than the server at {self.place} sends directly, and it has no store "
                "for larger ones: ask for fewer prompts, heads or positions at a time."
            )
        if "API key" in message:
            return GnaError(
                f"the server at {self.place} refused the API key, or none was sent: set NDIF_API_KEY "
                "(https://login.ndif.us makes one)."
            )
        lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
        if "deploy this model" in lines[0]:
            name = self.model_key.partition(":")[2]
            error = GnaError(f"the server at {self.place} cannot serve the model {name}: {lines[0]}")
        else:
            # The server sends a traceback as text; its last line is the error, and the user's line is in it.
            error = GnaError(f"the request failed on the server at {self.place}: {lines[-1]}")
        if len(lines) > 1:
            error.add_note(f"The server's report:\n{message}")
        return error


def _place(host: str) -> str:
    """Host and port for a message: an address may hold a user name and a password."""
    parts = urlsplit(host)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def _short(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
