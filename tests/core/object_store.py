"""An object store over real HTTP: S3, as the moto server speaks it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["S3", "s3_server"]

_STARTS_WITHIN_S = 60
_BUCKET = "states"


@dataclass(frozen=True)
class S3:
    """Where a server is.

    Parameters
    ----------
    endpoint
        Its URL.
    """

    endpoint: str

    def root(self, name: str) -> str:
        """URL of a folder in its bucket."""
        return f"s3://{_BUCKET}/{name}"

    @property
    def options(self) -> dict[str, Any]:
        """Options for fsspec."""
        return {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"}}


@contextlib.contextmanager
def s3_server() -> Iterator[S3]:
    """A server in a process of its own, with a bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        s3 = S3(f"http://127.0.0.1:{port}")
        _create_bucket(s3, server)
        yield s3
    finally:
        server.kill()
        server.wait()


def _create_bucket(s3: S3, server: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"{s3.endpoint}/{_BUCKET}", method="PUT")
    deadline_s = time.monotonic() + _STARTS_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=_STARTS_WITHIN_S):
                return
        except urllib.error.URLError:
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
