"""`GET /metrics`: a coordinator's figures, or a run's, for Prometheus to scrape. The standard library's server in a thread."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl_mux.coordinator.prometheus_text import CONTENT_TYPE
from verl_mux.errors import Failure, UserError


class MetricsServer:
    """made -> `start()` gives the port -> serves -> `stop()`. Also a context manager, which gives the port.

    text: called at each scrape, in a thread of its own; its Failure (a coordinator that has stopped) becomes status 503.
    port: 0 takes a free one. host: the address to listen at.
    """

    def __init__(self, text: Callable[[], str], port: int, host: str) -> None:
        if not 0 <= port < 2**16:
            raise UserError(f"metrics port {port}: a number from 0 (any free one) to 65535 is allowed")
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(text))
        except OSError as error:
            raise UserError(f"cannot serve metrics at {host}:{port}: {error.strerror}; name a free port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="verl-mux-metrics", daemon=True)

    def start(self) -> int:
        self._thread.start()
        return self._server.server_port

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> int:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def metrics_at(text: Callable[[], str], port: int, host: str) -> Iterator[None]:
    """A MetricsServer meanwhile; stderr says where. Raises UserError for a port in use."""
    with MetricsServer(text, port, host) as at:
        name = socket.gethostname() if host == "0.0.0.0" else host
        print(f"verl-mux metrics at http://{name}:{at}/metrics", file=sys.stderr, flush=True)
        yield


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                return self._answer(404, "text/plain; charset=utf-8", "the metrics are at /metrics\n")
            try:
                told = text()
            except Failure as error:
                return self._answer(503, "text/plain; charset=utf-8", f"{error}\n")
            self._answer(200, CONTENT_TYPE, told)

        def _answer(self, status: int, kind: str, told: str) -> None:
            body = told.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass  # a scrape every few seconds is no news

    return Handler
