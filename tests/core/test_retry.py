"""Which errors are retried, with errors as real clients of object stores raise them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import ClientPayloadError, ServerDisconnectedError
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError, ServiceResponseError
from botocore.exceptions import (  # type: ignore[import-untyped]
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
)

from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, StorageError, StoreFullError
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.retry import is_retriable


@contextmanager
def serve_and_hang_up() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65_536)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def find_closed_port() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


@contextmanager
def use_unknown_host() -> Iterator[str]:
    yield "http://no-such-host.invalid:9000"


def open_s3(url: str) -> Folder:
    options = {"key": "k", "secret": "s", "endpoint_url": url, "config_kwargs": {"retries": {"max_attempts": 1}}}
    folder = Folder("s3://states/jobs", {**options, "skip_instance_cache": True})
    folder._fs.retries = 1  # s3fs retries by itself
    return folder


def open_azure(url: str) -> Folder:
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    connection = f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey={key};BlobEndpoint={url}/a;"
    folder = Folder("abfs://states/jobs", {"connection_string": connection, "skip_instance_cache": True})
    # The client retries by itself for a minute and more, and adlfs has no option for it.
    for policy in folder._fs.service_client._pipeline._impl_policies:
        if hasattr(policy, "total_retries"):
            policy.total_retries = 0
    return folder


@pytest.mark.parametrize("outage", [use_unknown_host, serve_and_hang_up, find_closed_port])
@pytest.mark.parametrize("store", [open_s3, open_azure])
def test_network_failures_are_retriable(store: Callable[[str], Folder], outage: Callable[[], object]) -> None:
    with outage() as url:  # type: ignore[attr-defined]
        folder = store(url)
        for work in (lambda: folder.put("a", b"x"), lambda: folder.get("a"), lambda: folder.names()):
            with pytest.raises(StorageError) as caught:
                work()
            assert is_retriable(caught.value), repr(caught.value.__cause__)


@pytest.mark.parametrize(
    "error",
    [
        ServerDisconnectedError(),
        ClientPayloadError("Response payload is not completed"),
        EndpointConnectionError(endpoint_url="http://s3"),
        ReadTimeoutError(endpoint_url="http://s3"),
        IncompleteReadError(actual_bytes=3, expected_bytes=4),
        ServiceRequestError("cannot connect"),
        ServiceResponseError("connection aborted"),
        asyncio.TimeoutError(),
        ConnectionResetError(104, "reset"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_connection_errors_are_retriable(error: Exception) -> None:
    assert is_retriable(error)


@pytest.mark.parametrize(
    "error",
    [
        NoCredentialsError(),
        ClientAuthenticationError("no token"),
        PermissionError(13, "denied"),
        FileNotFoundError(2, "none"),
        OSError(28, "No space left on device"),
        ValueError("what is this?"),
        MissingCheckpointError("gone"),
        StoreFullError("full"),
        CorruptFileError("damaged"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_permanent_errors_are_not_retriable(error: Exception) -> None:
    assert not is_retriable(error)


def test_the_servers_answer_counts_more_than_a_connection_error_behind_it() -> None:
    denied = PermissionError(13, "403")
    denied.__cause__ = ConnectionError("the connection was closed after that")
    assert not is_retriable(denied)
