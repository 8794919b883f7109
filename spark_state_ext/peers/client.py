"""The client that asks a peer over Arrow Flight. It imports `pyarrow.flight`, so import it only to ask a peer."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Generator
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import flight

from arrow_schemas.blocks import BLOCK_BYTES
from arrow_schemas.peers import PIECES_ACTION
from spark_state_ext.errors import PeerError

__all__ = ["PeerClient"]

_ADDRESS = re.compile(r"grpc(\+tls)?://[^\s/@]{1,255}:[0-9]{1,5}")
_OPTIONS = [
    # A proxy is for addresses outside a cluster.
    ("grpc.enable_http_proxy", 0),
    # A peer cannot send a longer message than one answer may be.
    ("grpc.max_receive_message_length", BLOCK_BYTES + (64 << 10)),
]


class PeerClient:
    """A connection to one peer, opened by the first question."""

    def __init__(self, address: str, ca: bytes | None) -> None:
        self.address = address
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise PeerError(f"{address!r} is not a peer's address: grpc://HOST:PORT or grpc+tls://HOST:PORT")
        options = {"tls_root_certs": ca} if match[1] and ca is not None else {}
        try:
            self._client = flight.FlightClient(address, generic_options=_OPTIONS, **options)
        except (pa.ArrowException, OSError) as error:
            raise self._make_error(error) from error
        os.register_at_fork(after_in_child=partial(_keep_forever, weakref.ref(self._client)))

    def ask(self, question: bytes, timeout_s: float) -> Generator[memoryview, None, None]:
        """Yield the answers to a question."""
        options = flight.FlightCallOptions(timeout=timeout_s)
        try:
            for result in self._client.do_action(flight.Action(PIECES_ACTION, question), options):
                yield memoryview(result.body)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise self._make_error(error) from error

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _make_error(self, error: Exception) -> PeerError:
        # Only the first line of a Python server's error is useful.
        why = (str(error).splitlines() or [repr(error)])[0]
        return PeerError(f"the peer {self.address} sends no pieces: {why}")


def _keep_forever(client: weakref.ref[Any]) -> None:
    """Keep a forked child process from freeing its parent's connection.

    gRPC waits for its threads when a connection is freed. A forked child has no such threads, so it would never end.
    """
    connection = client()
    if connection is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
