"""Giving pieces to who asks over Arrow Flight. Imports `pyarrow.flight`: only who serves imports this module."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from arrow_schemas.blocks import PIECE_BYTES
from arrow_schemas.peers import (
    BUSY,
    DELTA_ACTION,
    DELTA_BYTES_MAX,
    GIVEN,
    GONE,
    PIECES_ACTION,
    QUESTION_BYTES_MAX,
    PeerAnswer,
    PeerDelta,
    PeerQuestion,
    PeerSecret,
)
from spark_state_ext.errors import StateError, StorageError, UsageError
from spark_state_ext.peers.serving import PeerWork, Shelf, TakeDelta, Tls

__all__ = ["PeerServer"]

_LOGGER = logging.getLogger("spark_state_ext")
_SIZES_MAX = {PIECES_ACTION: QUESTION_BYTES_MAX, DELTA_ACTION: DELTA_BYTES_MAX + QUESTION_BYTES_MAX}
# Questions that are answered at once. Each has a thread, and an answer in memory.
_SLOTS = 8
_REFUSED = "refused: this needs the secret of its peers"


class PeerServer:
    """The server, in threads of Arrow Flight from the beginning to `close`.

    Parameters
    ----------
    host, port
        Where it listens; port 0: any that is free.
    secret
        Who does not have it gets nothing.
    shelf
        What there is to give.
    tls
        None: bytes go over the line as they are.
    take
        What becomes of deltas that tasks send; by default nothing.

    Raises
    ------
    StorageError
        When it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: PeerSecret,
        shelf: Shelf,
        tls: Tls | None = None,
        take: TakeDelta = lambda _: False,
    ) -> None:
        self.work = PeerWork()
        self.scheme = "grpc" if tls is None else "grpc+tls"
        given = {} if tls is None else {"tls_certificates": [(tls.certificate, tls.key)]}
        try:
            _raise_if_taken(host, port)
            self._server = _Server(f"{self.scheme}://{host}:{port}", secret, shelf, self.work, take, **given)
        except (pa.ArrowException, OSError) as error:
            raise StorageError(
                f"peers cannot be answered on {host}:{port}: {str(error).splitlines()[0]}. Give another --peer-listen, "
                "or look at the certificate and its key."
            ) from error
        self.port = int(self._server.port)

    def close(self) -> None:
        """Stop listening, and wait for the answers that are under way."""
        self._server.shutdown()


def _raise_if_taken(host: str, port: int) -> None:
    """Raise an OSError where nothing can listen: gRPC would write lines of its own on stderr first."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(address)


class _OnlyActions(flight.ServerMiddlewareFactory):  # type: ignore[misc] # PyArrow has no types
    """Refuses, before they are read, the calls that no peer makes. What Arrow says by itself has a traceback."""

    def __init__(self, work: PeerWork) -> None:
        self._work = work
        super().__init__()

    def start_call(self, info: Any, headers: Any) -> None:
        """Raise an error for any call but one."""
        if info.method != flight.FlightMethod.DO_ACTION:
            self._work.count("refused")
            _LOGGER.debug("a call of %s is refused", info.method)
            raise flight.FlightUnauthenticatedError(_REFUSED)


class _Server(flight.FlightServerBase):  # type: ignore[misc] # PyArrow has no types
    """Answers two kinds of action. (`_OnlyActions` refuses all other calls.)"""

    def __init__(
        self, location: str, secret: PeerSecret, shelf: Shelf, work: PeerWork, take: TakeDelta, **given: Any
    ) -> None:
        self._secret, self._shelf, self._work, self._take = secret, shelf, work, take
        self._slots = threading.BoundedSemaphore(_SLOTS)
        super().__init__(location, middleware={"only_actions": _OnlyActions(work)}, **given)

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """The answers to a question, or to a delta."""
        try:
            if action.body.size > _SIZES_MAX.get(action.type, -1):
                raise UsageError(f"{action.body.size} bytes of {action.type[:40]!r} are nothing that a peer is asked")
            data = action.body.to_pybytes()
            if action.type == DELTA_ACTION:
                return self._taken(PeerDelta.decode(data, self._secret))
            return self._answers(PeerQuestion.decode(data, self._secret))
        except StateError as error:
            self._work.count("refused")
            _LOGGER.debug("a question from %s is refused: %s", context.peer(), error)
            # Why is nobody's business who does not have the secret.
            raise flight.FlightUnauthenticatedError(_REFUSED) from None

    def _taken(self, delta: PeerDelta) -> Iterator[bytes]:
        taken = self._take(delta)
        if taken:
            self._work.take(len(delta.data))
        return iter([PeerAnswer(GIVEN if taken else GONE).encode(self._secret, delta.nonce, 0)])

    def _answers(self, question: PeerQuestion) -> Iterator[bytes]:
        if not self._slots.acquire(blocking=False):
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
                _LOGGER.warning("a peer is not given %s of %s: %s", question.ref, question.key, error)
            yield PeerAnswer(GONE).encode(self._secret, question.nonce, number)
        finally:
            self._work.count(outcome)
            self._slots.release()

    def _pieces(self, question: PeerQuestion) -> Iterator[bytes]:
        """The bytes of each range. Once the file is open, nobody takes it away: it may be dropped meanwhile."""
        found = self._shelf.find(question.key, question.ref, question.body_digest)
        if found is None:
            raise FileNotFoundError("it is not here")
        with found.path.open("rb") as file:
            for first, end in question.ranges:
                start, stop = first * PIECE_BYTES, min(end * PIECE_BYTES, found.body_bytes)
                data = b""
                if start < stop:
                    file.seek(start)
                    data = file.read(stop - start)
                if len(data) != stop - start:
                    raise FileNotFoundError("that many pieces are not here")
                yield data
