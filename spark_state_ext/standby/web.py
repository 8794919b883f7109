"""The HTTP endpoints of a standby service: ``/healthz`` for its supervisor, and ``/metrics`` for Prometheus."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from spark_state_ext.errors import StorageError, UsageError

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

__all__ = ["Web"]

_LOGGER = logging.getLogger("spark_state_ext")
# Each connection takes a thread and a file descriptor of the service. A probe needs one for a moment.
_CONNECTIONS_MAX, _CONNECTION_S_MAX = 32, 10.0
_Start = Callable[[str, list[tuple[str, str]]], object]


class _Silent(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Log no line for each request."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread of its own, for a bounded time.

    If there are too many, it closes the oldest. So a probe gets its answer, however many connections are idle.
    """

    daemon_threads = True
    request_queue_size = 4 * _CONNECTIONS_MAX

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lock = threading.Lock()
        # Open connections and since when, the oldest first.
        self._since_s: dict[Any, float] = {}
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._since_s[request] = time.monotonic()
            while len(self._since_s) > _CONNECTIONS_MAX:
                self._end_oldest()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are too old. `serve_forever` calls this twice a second."""
        with self._lock:
            while self._since_s and time.monotonic() - next(iter(self._since_s.values())) > _CONNECTION_S_MAX:
                self._end_oldest()

    def _end_oldest(self) -> None:
        oldest = next(iter(self._since_s))
        del self._since_s[oldest]
        # Its thread sees the end of the stream, and closes it.
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong with one connection."""
        _LOGGER.debug("a request to /healthz or /metrics from %s failed", client_address, exc_info=True)


class Web:
    """The HTTP server, running in a thread of its own until `close`."""

    def __init__(
        self,
        address: str,
        port: int,
        find_trouble: Callable[[], str],
        collector: Collector,
        warnings: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import make_wsgi_app
        except ImportError as error:
            raise UsageError(
                "--port needs prometheus_client: pip install 'spark_state_ext[standby]', or leave --port out"
            ) from error
        registry = CollectorRegistry()
        registry.register(collector)
        self._metrics = make_wsgi_app(registry)
        self._find_trouble, self._warnings = find_trouble, warnings
        try:
            self._server = make_server(address, port, self._answer, _Server, _Silent)
        except OSError as error:
            raise StorageError(
                f"the standby service cannot listen on {address}:{port}: {error}. Give another --port or --address."
            ) from error
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="spark_state_ext web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: Mapping[str, Any], start: _Start) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start)
            return answer
        if path == "/healthz":
            trouble = self._find_trouble()
            status = "503 Service Unavailable" if trouble else "200 OK"
            return _text(start, status, "\n".join([trouble or "ok", *self._warnings()]))
        return _text(start, "404 Not Found", "the paths are /healthz and /metrics")


def _text(start: _Start, status: str, text: str) -> Iterable[bytes]:
    body = f"{text}\n".encode()
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
    return [body]
