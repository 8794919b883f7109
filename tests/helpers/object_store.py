"""Object stores over real HTTP: S3 by the moto server, and Azure Blob Storage by Azurite."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.helpers.waiting import WAIT_S

__all__ = ["Azure", "S3", "azure_server", "s3_server"]

_BUCKET = "states"
# The public account of Azurite, the same in every installation.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class Server:
    """A server of an object store.

    Parameters
    ----------
    endpoint
        Its URL.
    """

    endpoint: str
    protocol: ClassVar[str]

    def root(self, name: str) -> str:
        """Return the URL of a folder in its bucket or container."""
        return f"{self.protocol}://{_BUCKET}/{name}"


class S3(Server):
    """An S3 server."""

    protocol = "s3"

    @property
    def options(self) -> dict[str, Any]:
        """Options for s3fs."""
        return {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"}}

    @property
    def obstore_options(self) -> dict[str, Any]:
        """Options for obstore's implementation of fsspec."""
        return {
            "implementation": "obstore.fsspec.FsspecStore",
            "protocol": "s3",
            "config": {
                "endpoint": self.endpoint,
                "access_key_id": "k",
                "secret_access_key": "s",
                "region": "us-east-1",
                "virtual_hosted_style_request": False,
            },
            "client_options": {"allow_http": True},
        }


class Azure(Server):
    """A server of Azure Blob Storage."""

    protocol = "az"

    @property
    def options(self) -> dict[str, Any]:
        """Options for adlfs."""
        return {"connection_string": self._connection}

    @property
    def _connection(self) -> str:
        return (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
            f"BlobEndpoint={self.endpoint}/{_ACCOUNT};"
        )

    def create_container(self) -> None:
        """Make the container."""
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(self._connection) as client:
            client.create_container(_BUCKET)


@contextlib.contextmanager
def s3_server(program: Sequence[str] = ("-m", "moto.server")) -> Iterator[S3]:
    """Start a server in a separate process, and create a bucket; Python runs the program."""
    port = find_free_port()
    with run_server([sys.executable, "-W", "ignore", *program, "-H", "127.0.0.1", "-p", str(port)]) as server:
        s3 = S3(f"http://127.0.0.1:{port}")
        request = urllib.request.Request(f"{s3.endpoint}/{_BUCKET}", method="PUT")
        wait_for_answer(server, lambda: urllib.request.urlopen(request, timeout=WAIT_S).close())
        yield s3


def azurite() -> str | None:
    """Return the path of the program, which npm installs; None if it is not installed."""
    in_environment = Path(sys.prefix) / "node_modules" / ".bin" / "azurite-blob"
    return str(in_environment) if in_environment.exists() else shutil.which("azurite-blob")


@contextlib.contextmanager
def azure_server(folder: Path) -> Iterator[Azure]:
    """Start a server in a separate process, with its data in a folder, and create a container."""
    program, port = azurite(), find_free_port()
    assert program is not None, "azurite-blob is not installed: npm install azurite"
    # The newest adlfs may use a newer version of the protocol than Azurite knows.
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with run_server([*command, "--blobPort", str(port), "--location", str(folder)]) as server:
        azure = Azure(f"http://127.0.0.1:{port}")
        wait_for_answer(server, lambda: request_endpoint(azure.endpoint))
        azure.create_container()
        yield azure


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def run_server(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    node = Path(sys.prefix) / "bin"
    environment = {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), str(node)])}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield server
    finally:
        server.kill()
        server.wait()


def request_endpoint(endpoint: str) -> None:
    """Request the endpoint; accept any HTTP status, because only a running server sends one."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(endpoint, timeout=WAIT_S).close()


def wait_for_answer(server: subprocess.Popen[bytes], ask: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            ask()
            return
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
