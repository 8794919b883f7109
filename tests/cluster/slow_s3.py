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


@dataclass(frozen=True)
class SlowS3(S3):
    """The server, at the near end of its line.

    Parameters
    ----------
    settings
        The file with the settings of the line.
    """

    settings: Path = Path()

    def line(self, bytes_s: float | None = None, request_s: float = 0.0, away: bool = False) -> None:
        """Make the line of some kind; by default nothing holds anything up."""
        values = {"request_s": request_s, "away": away, **({} if bytes_s is None else {"bytes_s": bytes_s})}
        write_json(self.settings, values)

    def passed(self) -> dict[str, int]:
        """Bytes that have come from the server and that have gone to it, and requests."""
        found: dict[str, int] = json.loads(passed_file(self.settings).read_text())
        return found


@contextlib.contextmanager
def slow_s3(folder: Path) -> Iterator[SlowS3]:
    """A server and its line, each in a process of its own, until the block ends."""
    settings = folder / "line.json"
    write_json(settings, {})
    with s3_server() as server:
        port = server.endpoint.rpartition(":")[2]
        command = [sys.executable, str(Path(__file__).with_name("throttle.py")), "--to", port]
        line = subprocess.Popen([*command, "--settings", str(settings)], stdout=subprocess.PIPE, text=True)
        try:
            assert line.stdout is not None
            near = int(line.stdout.readline())
            wait_until(passed_file(settings).exists, "the line is open")
            yield SlowS3(f"http://127.0.0.1:{near}", settings)
        finally:
            line.kill()
            line.wait()
