"""Asking a peer over Arrow Flight. Imports `pyarrow.flight`: only who asks one imports this module."""

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
    # A proxy is for what is outside of a cluster.
    ("grpc.enable_http_proxy", 0),
    # No more is taken in than one answer may have.
    ("grpc.max_receive_message_length", BLOCK_BYTES + (64 << 10)),
]


class PeerClient:
    """A connection to one peer, which is made when it is first asked."""

    def __init__(self, address: str, ca: bytes | None) -> None:
        self.address = address
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise PeerError(f"{address!r} is no address of a peer: grpc://HOST:PORT or grpc+tls://HOST:PORT")
        given = {"tls_root_certs": ca} if match[1] and ca is not None else {}
        try:
            self._client = flight.FlightClient(address, generic_options=_OPTIONS, **given)
        except (pa.ArrowException, OSError) as error:
            raise self._failed(error) from error
        os.register_at_fork(after_in_child=partial(_never_free, weakref.ref(self._client)))

    def ask(self, question: bytes, timeout_s: float) -> Generator[memoryview, None, None]:
        """The answers to a question, one after the other."""
        options = flight.FlightCallOptions(timeout=timeout_s)
        try:
            for result in self._client.do_action(flight.Action(PIECES_ACTION, question), options):
                yield memoryview(result.body)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def _failed(self, error: Exception) -> PeerError:
        # Of a server's Python only the first line is of use.
        why = (str(error).splitlines() or [repr(error)])[0]
        return PeerError(f"the peer {self.address} does not give: {why}")


def _never_free(client: weakref.ref[Any]) -> None:
    """Leave a connection to the parent of this process, which was forked.

    gRPC's threads did not come along, and it waits for them where a connection is freed: the child would never end.
    """
    found = client()
    if found is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
