"""An S3 server over real HTTP at the end of a line that can be made thin, long, or cut."""

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
    """The process that is the line; it can be killed, and started again on its port."""

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
    """The server, at the near end of its line.

    Parameters
    ----------
    settings
        The file with the settings of the line.
    process
        The line.
    """

    settings: Path = Path()
    process: _Line | None = None

    def line(self, bytes_s: float | None = None, request_s: float = 0.0, away: bool = False) -> None:
        """Make the line of some kind; by default nothing holds anything up."""
        values = {"request_s": request_s, "away": away, **({} if bytes_s is None else {"bytes_s": bytes_s})}
        write_json(self.settings, values)

    def passed(self) -> dict[str, int]:
        """Bytes that have come from the server and that have gone to it, and requests."""
        found: dict[str, int] = json.loads(passed_file(self.settings).read_text())
        return found

    def kill(self) -> None:
        """Kill what listens where clients know the store: connections are reset, and new ones refused.

        The server behind it holds its objects in memory, so it stays; clients cannot tell one from the other. A request
        that was under way may have done its work.
        """
        assert self.process is not None
        self.process.kill()

    def revive(self) -> None:
        """Have it listen there again."""
        assert self.process is not None
        self.process.start()


@contextlib.contextmanager
def slow_s3(folder: Path) -> Iterator[SlowS3]:
    """A server and its line, each in a process of its own, until the block ends."""
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
