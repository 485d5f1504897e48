"""``gna serve``: show the built site on this machine only."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ..errors import GnaError
from .project import find_project

PORT = 8000


def make_server(html: Path | None = None, port: int = PORT) -> ThreadingHTTPServer:
    """A server of the built site on the loopback interface; ``port`` 0 takes a free one.

    Raises :class:`GnaError` when the site has not been built and when the port is taken.
    """
    html = html or find_project().html_dir
    if not (html / "index.html").is_file():
        raise GnaError(f"there is no site in {html} yet: build it with `make book` or `gna build`.")
    handler = partial(_Handler, directory=str(html))
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GnaError(f"port {port} cannot be used ({reason}): give another with --port.") from None


def serve(port: int = PORT) -> None:
    """Show the site until Ctrl-C."""
    with make_server(port=port) as server:
        print(f"the site is on http://127.0.0.1:{server.server_port}/ (Ctrl-C ends)", flush=True)
        server.serve_forever()


class _Handler(SimpleHTTPRequestHandler):
    """Quiet, and never cached by the browser: the next build shall be seen."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass
