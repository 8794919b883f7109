"""Folders on each kind of file system: reads, writes, listings, and the advice in their errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError
from botocore.exceptions import CredentialRetrievalError  # type: ignore[import-untyped]
from core_support import small_disk
from fsspec.implementations.local import LocalFileSystem

from spark_state_ext.errors import MissingCheckpointError, StorageError, StoreFullError, UsageError
from spark_state_ext.files.advice import advice_on
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.retry import is_retriable
from tests.helpers.object_store import S3


@pytest.fixture(params=["path", "file", "memory", "s3"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        return Folder(s3.root(f"{tmp_path.name}/root"), s3.options)
    roots = {
        "path": str(tmp_path / "root"),
        "file": f"file://{tmp_path}/root",
        "memory": f"memory://{tmp_path.name}/root",
    }
    return Folder(roots[request.param])


def test_files_are_written_read_listed_and_removed(files: Folder, tmp_path: Path) -> None:
    folder = files.child("operator", "query")
    assert folder.names() == files.names() == []
    assert not folder.exists("a")
    folder.put("a", b"0123456789")
    (tmp_path / "local").write_bytes(b"large")
    folder.put_file("sub/b", tmp_path / "local")
    assert folder.names() == ["a", "sub"]
    assert files.names() == ["operator"]
    assert folder.get("a") == b"0123456789"
    assert folder.get_range("a", 2, 5) == b"234"
    assert folder.get_range("a", 8, 50) == b"89"
    assert folder.size("sub/b") == 5
    assert folder.exists("a")
    folder.get_file("sub/b", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"large"
    folder.put("a", b"0123456789")
    folder.remove_tree("sub")
    folder.remove_tree("sub")
    assert folder.names() == ["a"]
    assert folder.where("a").startswith(files.root)


def test_reads_of_a_missing_file_raise_an_error_that_names_it(files: Folder, tmp_path: Path) -> None:
    for read in (
        lambda: files.get("none"),
        lambda: files.get_range("none", 0, 4),
        lambda: files.size("none"),
        lambda: files.get_file("none", tmp_path / "copy"),
    ):
        with pytest.raises(MissingCheckpointError, match="root/none"):
            read()


@pytest.mark.parametrize("caches", [False, True])
def test_changes_by_another_process_after_a_listing_are_seen(s3: S3, tmp_path: Path, caches: bool) -> None:
    """s3fs can cache listings for the life of the process; `Folder` avoids that, even if an option requests it."""
    options = {**s3.options, "use_listings_cache": True} if caches else s3.options
    files = Folder(s3.root(f"{tmp_path.name}/root"), options)
    files.put("a", b"1")
    assert files.names() == ["a"]
    program = (
        "import sys; from spark_state_ext.files.folder import Folder; "
        f"files = Folder({files.root!r}, {s3.options!r}); files.put('b', b'22'); files.remove('a')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert files.exists("b")
    assert not files.exists("a")
    assert files.names() == ["b"]
    assert [(entry.name, entry.size_bytes) for entry in files.entries()] == [("b", 2)]
    assert files.get("b") == b"22"
    assert files.get_range("b", 1, 9) == b"2"
    assert files.size("b") == 2
    files.get_file("b", tmp_path / "copy")
    with pytest.raises(MissingCheckpointError):
        files.size("a")


def test_an_unknown_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nonsense://"):
        Folder("nonsense://bucket/root")


def test_a_write_below_a_root_that_cannot_be_a_folder_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (str(tmp_path / "file"), "/proc/nowhere"):
        with pytest.raises(
            StorageError, match=r"writing .*/a: .*A root must be a folder that every executor can create"
        ):
            Folder(root).put("a", b"1")


def test_an_unknown_storage_option_is_an_error_that_names_storage_options() -> None:
    """s3fs passes options on, and botocore rejects them at the first request."""
    for options in ({"kee": "1"}, {"client_kwargs": {"endpont_url": "http://localhost:1"}}):
        with pytest.raises(StorageError, match="Most likely storage_options has an option") as raised:
            Folder("s3://bucket/x", {"anon": True, **options}).names()
        assert not is_retriable(raised.value)


def test_readers_never_see_a_partly_written_file(tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"))
    files.put("file", b"a" * 1_000_000)
    stop = threading.Event()
    sizes: set[int] = set()
    names: set[str] = set()

    def read_repeatedly() -> None:
        while not stop.is_set():
            sizes.add(len(files.get("file")))
            names.update(files.names())

    thread = threading.Thread(target=read_repeatedly)
    thread.start()
    for content in range(20):
        files.put("file", bytes([content]) * 1_000_000)
    stop.set()
    thread.join()
    assert (sizes, names) == ({1_000_000}, {"file"})


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = Folder(str(root))
    with pytest.raises(StorageError):
        files.put_file("file", tmp_path / "absent")
    assert list(root.iterdir()) == []


def test_a_full_disk_is_a_store_full_error_and_leaves_no_partial_file(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        files = Folder(str(disk / "root"))
        files.put("first", b"1")
        with pytest.raises(StoreFullError, match="Make room"):
            files.put("second", b"2" * (20 << 20))
        assert [path.name for path in (disk / "root").iterdir()] == ["first"]


def test_a_full_local_disk_is_not_reported_as_an_error_of_the_root(tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"))
    files.put("file", b"2" * (20 << 20))
    with small_disk(tmp_path) as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            files.get_file("file", disk / "copy")
        assert not isinstance(caught.value, StorageError)
        with pytest.raises(FileNotFoundError):
            files.get_file("file", disk / "none" / "copy")


@pytest.mark.parametrize("kind", ["Share", "ByNameNode"])
def test_a_small_file_is_replaced_even_if_the_file_system_cannot_replace_files(kind: str, tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"), {"implementation": f"shares.{kind}"})
    assert not files.replaces
    for content in (b"first", b"second", b"third"):
        files.put("lease.json", content)
        assert files.get("lease.json") == content
    assert [entry.name for entry in files.entries()] == ["lease.json"]


@pytest.mark.parametrize("kind", ["Share", "ByNameNode"])
def test_a_large_file_is_not_replaced_if_the_file_system_cannot_replace_files(kind: str, tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"), {"implementation": f"shares.{kind}"})
    (tmp_path / "mine").write_bytes(b"12" * 5_000_000)
    (tmp_path / "other").write_bytes(b"12" * 4_999_999 + b"13")
    files.put_file("file", tmp_path / "mine")
    inode = os.stat(tmp_path / "root" / "file").st_ino
    files.put_file("file", tmp_path / "mine")
    with pytest.raises(
        StorageError, match=r"root/file exists with other bytes .* delete it, and start again"
    ) as caught:
        files.put_file("file", tmp_path / "other")
    assert not is_retriable(caught.value)
    assert os.stat(tmp_path / "root" / "file").st_ino == inode
    assert os.listdir(tmp_path / "root") == ["file"]


def test_new_folders_are_synced_to_survive_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new folder's entry is synced to the disk before the write of the file returns."""
    synced, fsync = [], os.fsync

    def note_and_sync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    (tmp_path / "local").write_bytes(b"1")
    root = tmp_path / "new" / "root"
    writes: list[Callable[[Folder], object]] = [
        lambda files: files.put("file", b"1"),
        lambda files: files.put_file("file", tmp_path / "local"),
        lambda files: files.create("file", b"1"),
    ]
    for bucket, write in enumerate(writes):
        synced.clear()
        # Another process may just have made the folders and not have synced them yet.
        files = Folder(str(root)).child("operator", str(bucket))
        write(files)
        wanted = [root / "operator" / str(bucket), root / "operator", root, *([] if bucket else [tmp_path / "new"])]
        assert {str(path) for path in (*wanted, tmp_path / "new", *([] if bucket else [tmp_path]))} <= set(synced)
        synced.clear()
        write(files)
        assert str(root) not in synced, "the root is synced only once"


class Unreachable(LocalFileSystem):  # type: ignore[misc]
    """A file system that does not answer, like a mount whose server restarts."""

    cachable = False

    def info(self, path: str, **kwargs: object) -> dict[str, object]:
        raise ConnectionResetError(104, "Connection reset by peer")


def test_exists_raises_if_the_file_system_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Connection reset"):
        Folder(str(tmp_path), {"implementation": f"{__name__}.Unreachable"}).exists("file")


class Answer(Exception):  # noqa: N818  # clients of stores name their errors like this
    """An error of a store's client, with the status of the server's answer."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


EXPIRED = "The credentials have expired: renew the credentials and start again"
ADVICE: list[tuple[Exception, bool, str]] = [
    (PermissionError(errno.EACCES, "denied"), True, "A root must be a folder that every executor can create"),
    (OSError(errno.EIO, "i/o error"), True, "Make sure that each executor can reach and use the root"),
    (PermissionError(errno.EACCES, "denied"), False, "Grant the rights to list, read, write and delete there"),
    (Answer(403), False, "Grant the rights to list"),
    (ClientAuthenticationError("Signature not valid in the specified time frame: Expiry [Fri]"), False, EXPIRED),
    (ClientAuthenticationError("no such account"), False, "Grant the rights to list"),
    (CredentialRetrievalError(provider="sso", error_msg="the SSO session has expired"), False, EXPIRED),
    (FileNotFoundError("The specified bucket does not exist"), False, "The bucket or container of a root must exist"),
    (ConnectionError("refused"), False, "The store did not answer: check the network, and the endpoint"),
    (Answer(503), False, "The store did not answer"),
    (Answer(400), False, "Make sure that each executor can reach and use the root"),
]


@pytest.mark.parametrize(("error", "local", "advice"), ADVICE, ids=[f"{case[0]!r} {case[1]}" for case in ADVICE])
def test_each_failure_of_a_root_comes_with_advice(error: Exception, local: bool, advice: str) -> None:
    """Refused connections, missing rights on an object store and other failures come with advice."""
    assert advice_on(error, local).startswith(advice)


class _Expired(BaseHTTPRequestHandler):
    """Answer like S3 if a session token has expired; the answer to a HEAD request has no body."""

    def do_GET(self) -> None:
        body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # http.server prescribes this name

    def log_message(self, *args: Any) -> None:
        """Write nothing to stderr."""


def test_the_error_of_an_expired_token_says_to_renew_the_credentials() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Expired)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        options = {"key": "k", "secret": "s", "token": "t", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        files = Folder("s3://bucket/root", options)
        with pytest.raises(StorageError, match=rf"The provided token has expired\.\. {EXPIRED}"):
            files.names()
        with pytest.raises(StorageError, match="if temporary credentials have expired: if so, renew the cred"):
            files.exists("file")
    finally:
        server.shutdown()
        server.server_close()


def test_the_error_of_an_unreachable_store_says_to_check_network_and_endpoint() -> None:
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": "http://localhost:1",
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    files = Folder("s3://bucket/root", options)
    with pytest.raises(StorageError, match="The store did not answer: check the network, and the endpoint"):
        files.names()


def test_a_tree_lists_all_files_below_a_folder(files: Folder) -> None:
    assert files.tree() == []
    for name in ("a", "sub/b", "sub/deep/c"):
        files.put(name, b"1")
    assert [(entry.name, entry.size_bytes) for entry in files.tree()] == [("a", 1), ("sub/b", 1), ("sub/deep/c", 1)]
    assert [entry.name for entry in files.child("sub").tree()] == ["b", "deep/c"]


def test_a_tree_raises_if_a_folder_below_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(str(tmp_path))
    folder.put("sub/deep/c", b"1")
    list_real = LocalFileSystem.ls

    def fail_or_list(self: LocalFileSystem, path: str, **kwargs: object) -> object:
        if path.endswith("deep"):
            raise OSError(errno.EIO, "Input/output error", path)
        return list_real(self, path, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "ls", fail_or_list)
    with pytest.raises(StorageError, match=r"listing .*Input/output error"):
        folder.tree()
