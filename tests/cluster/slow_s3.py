"""An S3 server over real HTTP behind a line whose bandwidth and delay can be set, and that can be cut."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import wait_until
from throttle import passed_file, write_json

from tests.helpers.object_store import S3, s3_server

__all__ = ["SlowS3", "slow_s3"]


class _Line:
    """The process of the line; it can be killed, and started again on its port."""

    def __init__(self, to: str, settings: Path) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("throttle.py")), "--to", to]
        self._command += ["--settings", str(settings)]
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, "--listen", str(self.port)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@dataclass(frozen=True)
class SlowS3(S3):
    """The server behind its line.

    Parameters
    ----------
    settings
        The file with the settings of the line.
    process
        The process of the line.
    """

    settings: Path = Path()
    process: _Line | None = None

    def line(self, bytes_s: float | None = None, request_s: float = 0.0, away: bool = False) -> None:
        """Set bandwidth and delay of the line, or cut it; by default it has no limits."""
        values = {"request_s": request_s, "away": away, **({} if bytes_s is None else {"bytes_s": bytes_s})}
        write_json(self.settings, values)

    def passed(self) -> dict[str, int]:
        """Return the bytes from the server and to it, and the number of requests."""
        counts: dict[str, int] = json.loads(passed_file(self.settings).read_text())
        return counts

    def kill(self) -> None:
        """Kill the proxy at the store's address: connections are reset, and new ones are refused.

        The server behind it has its objects in memory, so it continues; for clients there is no difference. A request
        that was in progress may have been executed.
        """
        assert self.process is not None
        self.process.kill()

    def revive(self) -> None:
        """Start the proxy again at the same address."""
        assert self.process is not None
        self.process.start()


@contextlib.contextmanager
def slow_s3(folder: Path) -> Iterator[SlowS3]:
    """Run a server and its line, each in a separate process, until the block ends."""
    settings = folder / "line.json"
    write_json(settings, {})
    with s3_server([str(Path(__file__).with_name("held_s3.py"))]) as server:
        line = _Line(server.endpoint.rpartition(":")[2], settings)
        try:
            line.start()
            wait_until(passed_file(settings).exists, "the line is open")
            yield SlowS3(f"http://127.0.0.1:{line.port}", settings, line)
        finally:
            line.kill()
