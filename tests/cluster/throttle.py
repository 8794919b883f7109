"""A store's line, made as thin and as long as one wishes: ``throttle.py --to PORT --settings FILE``.

It passes on what clients and a server on this machine say to each other. The settings are read again whenever their file has
changed: ``bytes_s``, how many bytes a second come from the server, and how many go to it, all connections together;
``request_s``, how much longer each request takes; ``away``, nobody gets through. It prints the port that it listens on, and
writes what went through into ``FILE.passed``.
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
# What nobody used of the line is lost, but for this long.
_SAVED_S = 0.02
_LOOK_S = 0.05


def passed_file(settings: Path) -> Path:
    """Where it is told what went through."""
    return settings.with_name(f"{settings.name}.passed")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file, whole at once."""
    hidden = path.with_name(f".{path.name}-{os.getpid()}")
    hidden.write_text(json.dumps(dict(values)))
    hidden.rename(path)


@dataclass
class Settings:
    """What the line is like now, from a file.

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
        """Read the file again where it has changed."""
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
        Of the line.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._free_s = 0.0
        self.passed_bytes = 0

    async def take(self, size_bytes: int) -> None:
        """Wait until so many bytes have gone through."""
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
        server = await asyncio.start_server(self._connected, "127.0.0.1", listen, limit=_PIECE_BYTES, backlog=256)
        print(server.sockets[0].getsockname()[1], flush=True)
        told = None
        while True:
            self._settings.refresh()
            passed = {
                "down_bytes": self._down.passed_bytes,
                "up_bytes": self._up.passed_bytes,
                "requests": self._requests,
            }
            if passed != told:
                write_json(passed_file(self._settings.path), passed)
                told = passed
            if self._settings.away:
                for writer in list(self._open):
                    writer.transport.abort()
            await asyncio.sleep(_LOOK_S)

    async def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self._settings.away:
            to_client.transport.abort()
            return
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._port, limit=_PIECE_BYTES)
        except OSError:
            # The server was killed: the client learns it as it would from the server.
            to_client.transport.abort()
            return
        # A request begins with the first bytes from the client after some from the server.
        asked = [False]
        self._open |= {to_client, to_server}
        try:
            await asyncio.gather(
                self._pass_on(client, to_server, self._up, asked, True),
                self._pass_on(server, to_client, self._down, asked, False),
            )
        finally:
            self._open -= {to_client, to_server}
            for writer in (to_client, to_server):
                with contextlib.suppress(OSError):
                    writer.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line, asked: list[bool], is_client: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                if is_client and not asked[0]:
                    self._requests += 1
                    await asyncio.sleep(self._settings.request_s)
                asked[0] = is_client
                await line.take(len(piece))
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=int, required=True, metavar="PORT", help="of the server, on 127.0.0.1")
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE")
    parser.add_argument("--listen", type=int, default=0, metavar="PORT", help="where; by default on a free one")
    given = parser.parse_args()
    settings = Settings(given.settings)
    settings.refresh()
    asyncio.run(_Proxy(given.to, settings).serve(given.listen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
