"""A proxy that limits the line to a store: ``throttle.py --to PORT --settings FILE``.

It forwards the traffic between clients and a server on this machine. It reads its settings again whenever their file has
changed: ``bytes_s`` is the bandwidth in each direction of all connections together, ``request_s`` the delay of each request,
and with ``away`` all connections are reset. It prints the port on which it listens, and writes its counters to
``FILE.passed``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Line", "Settings", "passed_file", "write_json"]

_PIECE_BYTES = 1 << 16
# Unused bandwidth of at most this many seconds is saved; the rest is lost.
_SAVED_S = 0.02
_LOOK_S = 0.05


def passed_file(settings: Path) -> Path:
    """Return the path of the file with the counters."""
    return settings.with_name(f"{settings.name}.passed")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file atomically."""
    hidden = path.with_name(f".{path.name}-{os.getpid()}")
    hidden.write_text(json.dumps(dict(values)))
    hidden.rename(path)


@dataclass
class Settings:
    """The current settings of the line, read from a file.

    Parameters
    ----------
    path
        The file: a JSON object.
    """

    path: Path
    bytes_s: float = float("inf")
    request_s: float = 0.0
    away: bool = False
    _changed_ns: int = field(default=-1, repr=False)

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        changed_ns = self.path.stat().st_mtime_ns
        if changed_ns != self._changed_ns:
            values = json.loads(self.path.read_text())
            self.bytes_s = float(values.get("bytes_s", "inf"))
            self.request_s = float(values.get("request_s", 0.0))
            self.away = bool(values.get("away", False))
            self._changed_ns = changed_ns


class Line:
    """One direction of the line, which all connections share.

    Parameters
    ----------
    settings
        Settings of the line.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free_s = 0.0
        self.passed_bytes = 0

    async def take(self, size_bytes: int) -> None:
        """Wait until the line has forwarded that many bytes."""
        self.passed_bytes += size_bytes
        if self._settings.bytes_s == float("inf"):
            return
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s - _SAVED_S) + size_bytes / self._settings.bytes_s
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)


class _Proxy:
    def __init__(self, port: int, settings: Settings) -> None:
        self._port, self._settings = port, settings
        self._down, self._up = Line(settings), Line(settings)
        self._open: set[asyncio.StreamWriter] = set()
        self._requests = 0

    async def serve(self, listen: int) -> None:
        server = await asyncio.start_server(
            self._handle_connection, "127.0.0.1", listen, limit=_PIECE_BYTES, backlog=256
        )
        print(server.sockets[0].getsockname()[1], flush=True)
        last_written = None
        while True:
            self._settings.refresh()
            passed = {
                "down_bytes": self._down.passed_bytes,
                "up_bytes": self._up.passed_bytes,
                "requests": self._requests,
            }
            if passed != last_written:
                write_json(passed_file(self._settings.path), passed)
                last_written = passed
            if self._settings.away:
                for writer in list(self._open):
                    writer.transport.abort()
            await asyncio.sleep(_LOOK_S)

    async def _handle_connection(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self._settings.away:
            to_client.transport.abort()
            return
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._port, limit=_PIECE_BYTES)
        except OSError:
            # The server was killed. Reset the connection, as the server itself would.
            to_client.transport.abort()
            return
        # A request begins with the first bytes from the client after some from the server.
        is_request_open = [False]
        self._open |= {to_client, to_server}
        try:
            await asyncio.gather(
                self._forward(client, to_server, self._up, is_request_open, True),
                self._forward(server, to_client, self._down, is_request_open, False),
            )
        finally:
            self._open -= {to_client, to_server}
            for writer in (to_client, to_server):
                with contextlib.suppress(OSError):
                    writer.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: Line,
        is_request_open: list[bool],
        is_client: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                if is_client and not is_request_open[0]:
                    self._requests += 1
                    await asyncio.sleep(self._settings.request_s)
                is_request_open[0] = is_client
                await line.take(len(piece))
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=int, required=True, metavar="PORT", help="port of the server on 127.0.0.1")
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--listen", type=int, default=0, metavar="PORT", help="port to listen on; by default a free one"
    )
    arguments = parser.parse_args()
    settings = Settings(arguments.settings)
    settings.refresh()
    asyncio.run(_Proxy(arguments.to, settings).serve(arguments.listen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
