"""The server that sends pieces of snapshots to peers over Arrow Flight. Import it only in a process that serves.

The server is gRPC's own, with the one Flight method that peers use. PyArrow's Flight server reads a request of any
size into memory before it can refuse it; gRPC checks the length at the beginning of a request.
"""

from __future__ import annotations

import logging
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from arrow_schemas.blocks import PIECE_BYTES
from arrow_schemas.peers import (
    BUSY,
    GIVEN,
    GONE,
    PIECES_ACTION,
    QUESTION_BYTES_MAX,
    PeerAnswer,
    PeerQuestion,
    PeerSecret,
)
from spark_state_ext.errors import StateError, StorageError, UsageError
from spark_state_ext.peers.action import decode_action, encode_result
from spark_state_ext.peers.served_snapshots import PeerWork, Shelf, Tls

__all__ = ["PeerServer"]

_LOGGER = logging.getLogger("spark_state_ext")
# Questions that are answered at the same time. Each has a thread, and an answer in memory.
_SLOTS = 8
# Calls at the same time, including those that still send their request and those that are answered with "busy".
_CALLS_MAX = 4 * _SLOTS
# Each process of an executor has a connection. Most of the files that this process may open stay for the service.
_CONNECTIONS_MAX = 1_000
_CONNECTIONS_OF_FILES = 1 / 4
# Larger requests are refused unread, because the sender is not authenticated yet.
_REQUEST_BYTES_MAX = 2 * QUESTION_BYTES_MAX
_SERVICE, _METHOD = "arrow.flight.protocol.FlightService", "DoAction"
# How long running answers may take when the service ends.
_END_S_MAX = 5.0


def _make_options() -> list[tuple[str, int]]:
    """Options of gRPC that bound what a client without the secret can take from the service."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_max = _CONNECTIONS_MAX * 4 if files_max == resource.RLIM_INFINITY else files_max
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", _REQUEST_BYTES_MAX),
        # A small compressed request could expand to a large one. Peers never compress.
        ("grpc.per_message_decompression", 0),
        ("grpc.max_concurrent_streams", _SLOTS),
        ("grpc.max_allowed_incoming_connections", int(min(_CONNECTIONS_MAX, files_max * _CONNECTIONS_OF_FILES))),
        # Clients connect again when they next ask. A connection that does not speak HTTP/2 is closed soon.
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_connection_idle_ms", 60_000),
        # A client that does not finish its request, or does not read its answer, holds a thread no longer than this.
        ("grpc.max_connection_age_ms", 600_000),
        ("grpc.max_connection_age_grace_ms", 60_000),
    ]


class PeerServer:
    """The server, running in threads of gRPC until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: PeerSecret,
        shelf: Shelf,
        tls: Tls | None = None,
    ) -> None:
        self.work = PeerWork()
        self.scheme = "grpc" if tls is None else "grpc+tls"
        self._actions = _Actions(secret, shelf, self.work)
        # gRPC answers "unimplemented" to all other methods, without reading their requests.
        methods = {_METHOD: grpc.unary_stream_rpc_method_handler(self._actions.answer)}
        self._server = grpc.server(
            ThreadPoolExecutor(_CALLS_MAX, "spark_state_ext peers"),
            handlers=[grpc.method_handlers_generic_handler(_SERVICE, methods)],
            options=_make_options(),
            maximum_concurrent_rpcs=_CALLS_MAX,
        )
        try:
            _raise_if_taken(host, port)
            if tls is None:
                self.port = self._server.add_insecure_port(f"{host}:{port}")
            else:
                credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)])
                self.port = self._server.add_secure_port(f"{host}:{port}", credentials)
        except (RuntimeError, ValueError, OSError) as error:
            raise StorageError(
                f"peers cannot be answered on {host}:{port}: {str(error).splitlines()[0]}. Give another --peer-listen, "
                "or check the certificate and its key."
            ) from error
        self._server.start()

    def close(self) -> None:
        """Stop listening, and wait for running answers."""
        self._server.stop(_END_S_MAX).wait()


def _raise_if_taken(host: str, port: int) -> None:
    """Raise an OSError if the server cannot listen there. Otherwise gRPC would write its own lines to stderr first."""
    addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


class _Actions:
    """Answers questions for pieces, and refuses all other actions."""

    def __init__(self, secret: PeerSecret, shelf: Shelf, work: PeerWork) -> None:
        self._secret, self._shelf, self._work = secret, shelf, work
        self.slots = threading.BoundedSemaphore(_SLOTS)

    def answer(self, request: bytes, context: Any) -> Iterator[bytes]:
        """Yield the answers to a question."""
        try:
            kind, body = decode_action(request)
            if kind != PIECES_ACTION or len(body) > QUESTION_BYTES_MAX:
                raise UsageError(f"{len(body)} bytes of {kind[:40]!r} are not a question of a peer")
            answers = self._answers(PeerQuestion.decode(body, self._secret))
        except StateError as error:
            self._work.count("refused")
            _LOGGER.debug("refused a question from %s: %s", context.peer(), error)
            # A client without the secret must not learn the reason.
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "refused: the server needs the secret of its peers")
        return map(encode_result, answers)

    def _answers(self, question: PeerQuestion) -> Iterator[bytes]:
        if not self.slots.acquire(blocking=False):
            self._work.count("busy")
            yield PeerAnswer(BUSY).encode(self._secret, question.nonce, 0)
            return
        number, outcome = 0, "failed"
        try:
            for data in self._pieces(question):
                self._work.give(len(data))
                yield PeerAnswer(GIVEN, data).encode(self._secret, question.nonce, number)
                number += 1
            outcome = "given"
        except GeneratorExit:
            outcome = "left"
            raise
        except (StateError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                outcome = "gone"
            else:
                _LOGGER.warning("cannot send %s of %s to a peer: %s", question.ref, question.key, error)
            yield PeerAnswer(GONE).encode(self._secret, question.nonce, number)
        finally:
            self._work.count(outcome)
            self.slots.release()

    def _pieces(self, question: PeerQuestion) -> Iterator[bytes]:
        """Yield the bytes of each range. Once the file is open it can be read to its end, even if it is deleted."""
        snapshot = self._shelf.find(question.key, question.ref, question.body_digest)
        if snapshot is None:
            raise FileNotFoundError("the snapshot is not here")
        with snapshot.path.open("rb") as file:
            for first, end in question.ranges:
                start, stop = first * PIECE_BYTES, min(end * PIECE_BYTES, snapshot.body_bytes)
                data = b""
                if start < stop:
                    file.seek(start)
                    data = file.read(stop - start)
                if len(data) != stop - start:
                    raise FileNotFoundError("the file does not have that many pieces")
                yield data
