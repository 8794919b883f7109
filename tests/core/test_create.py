"""Creating a file only if no file of its name exists."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from shares import ByNameNode, Share

from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from tests.helpers.object_store import S3, Azure

ROUNDS, CALLERS = 10, 8
EXCLUSIVE = ["path", "memory", "s3", "azure", "smb", "webhdfs"]


class Replacing(DirFileSystem):  # type: ignore[misc]
    """A file system whose rename may or may not replace an existing file."""

    protocol = "replacing"
    cachable = False

    def __init__(self) -> None:
        super().__init__(path="/", fs=LocalFileSystem())


def folder_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    if kind in ("s3", "azure", "obstore"):
        server: S3 | Azure = request.getfixturevalue("azure" if kind == "azure" else "s3")
        options = server.obstore_options if isinstance(server, S3) and kind == "obstore" else server.options
        return Folder(server.root(f"{tmp_path.name}/root"), options)
    classes = {"smb": Share, "webhdfs": ByNameNode, "replacing": Replacing}
    if kind in classes:
        implementation = f"{classes[kind].__module__}.{classes[kind].__name__}"
        return Folder(str(tmp_path / "root"), {"implementation": implementation})
    return Folder({"path": str(tmp_path / "root"), "memory": f"memory://{tmp_path.name}/root"}[kind])


@pytest.fixture(params=[*EXCLUSIVE, "obstore", "replacing"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return folder_of(request.param, request, tmp_path)


@pytest.fixture(params=EXCLUSIVE)
def exclusive(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return folder_of(request.param, request, tmp_path)


def test_a_file_is_created_only_if_none_exists(files: Folder) -> None:
    folder = files.child("operator")
    assert folder.create("lease", b"first")
    assert not folder.create("lease", b"other")
    # A request that is repeated after its response was lost succeeds.
    assert folder.create("lease", b"first")
    assert folder.get("lease") == b"first"
    folder.remove("lease")
    assert folder.create("lease", b"other")
    assert folder.get("lease") == b"other"
    assert [entry.name for entry in folder.entries()] == ["lease"]


def test_a_file_is_not_created_over_a_file_that_was_put(files: Folder) -> None:
    files.put("lease", b"first")
    assert not files.create("lease", b"other")
    assert files.get("lease") == b"first"


def test_only_one_of_several_callers_creates_a_file(exclusive: Folder) -> None:
    assert exclusive.creates_exclusively
    exclusive.put("there", b"")
    begin = threading.Barrier(CALLERS)

    def call(caller: int) -> list[bool]:
        results = []
        for at in range(ROUNDS):
            begin.wait()
            results.append(exclusive.create(f"lease-{at}", b"caller %d" % caller))
        return results

    with ThreadPoolExecutor(CALLERS) as pool:
        created = list(pool.map(call, range(CALLERS)))
    for at in range(ROUNDS):
        (winner,) = [caller for caller in range(CALLERS) if created[caller][at]]
        assert exclusive.get(f"lease-{at}") == b"caller %d" % winner
    assert len(exclusive.entries()) == ROUNDS + 1


def test_only_one_of_several_processes_creates_a_file(tmp_path: Path) -> None:
    program = (
        "import sys; from spark_state_ext.files.folder import Folder; files = Folder(sys.argv[1]);"
        "print('ready', flush=True); sys.stdin.read();"
        "print([at for at in range(200) if files.create(str(at), sys.argv[2].encode())])"
    )
    root = str(tmp_path / "root")
    commands = [[sys.executable, "-c", program, root, name] for name in ("a", "b")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    begins, answers = zip(
        *((cast(Any, process.stdin), cast(Any, process.stdout)) for process in processes), strict=True
    )
    assert [answer.readline() for answer in answers] == ["ready\n"] * 2
    for begin in begins:
        begin.close()
    created = [json.loads(answer.read()) for answer in answers]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(created[0] + created[1]) == list(range(200))
    for name, names in zip(b"ab", created, strict=True):
        assert {Folder(root).get(str(at)) for at in names} <= {bytes([name])}


@pytest.mark.parametrize("kind", ["obstore", "replacing"])
def test_a_file_system_of_unknown_behaviour_is_not_exclusive(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """obstore's file system accepts a mode but ignores it."""
    assert not folder_of(kind, request, tmp_path).creates_exclusively


def test_an_older_botocore_is_not_exclusive(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Folder(s3.root("older"), s3.options)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"botocore": "1.35.19"}[name])
    assert not files.creates_exclusively
    assert files.create("lease", b"first")
    assert not files.create("lease", b"other")


def test_creation_is_exclusive_on_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    test_only_one_of_several_callers_creates_a_file(Folder(str(tmp_path / "root")))
    assert os.path.getsize(tmp_path / "root" / "lease-0") == len("caller 0")


class Forgetful(Share):
    """A server whose response to the first rename is lost."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        super().mv(path1, path2)
        if path2.endswith("lease"):
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


class Unreachable(Share):
    """A server that is unreachable when a file is renamed."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def test_a_creation_whose_response_is_lost_succeeds(tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"), {"implementation": f"{__name__}.Forgetful"})
    assert files.create("lease", b"mine")
    assert not files.create("lease", b"other")
    assert os.listdir(tmp_path / "root") == ["lease"]


def test_an_unreachable_server_is_an_error(tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"), {"implementation": f"{__name__}.Unreachable"})
    with pytest.raises(StorageError, match="Connection reset"):
        files.create("lease", b"mine")
    assert os.listdir(tmp_path / "root") == []
