"""Making a file only where none of its name is."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
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

Named = Callable[[str], Folder]
ROUNDS, CALLERS = 10, 8
EXCLUSIVE = ["path", "memory", "s3", "azure", "smb", "webhdfs"]


class Replacing(DirFileSystem):  # type: ignore[misc]
    """A file system of which nobody has said what its rename does."""

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
        made = classes[kind]
        return Folder(str(tmp_path / "root"), {"implementation": f"{made.__module__}.{made.__name__}"})
    return Folder({"path": str(tmp_path / "root"), "memory": f"memory://{tmp_path.name}/root"}[kind])


@pytest.fixture(params=[*EXCLUSIVE, "obstore", "replacing"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return folder_of(request.param, request, tmp_path)


@pytest.fixture(params=EXCLUSIVE)
def exclusive(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return folder_of(request.param, request, tmp_path)


def test_a_file_is_made_only_where_none_is(files: Folder) -> None:
    folder = files.child("operator")
    assert folder.create("lease", b"first")
    assert not folder.create("lease", b"other")
    # Sent again after an answer that was lost.
    assert folder.create("lease", b"first")
    assert folder.get("lease") == b"first"
    folder.remove("lease")
    assert folder.create("lease", b"other")
    assert folder.get("lease") == b"other"
    assert [entry.name for entry in folder.entries()] == ["lease"]


def test_a_file_that_was_put_is_in_the_way(files: Folder) -> None:
    files.put("lease", b"first")
    assert not files.create("lease", b"other")
    assert files.get("lease") == b"first"


def test_one_of_several_callers_makes_it(exclusive: Folder) -> None:
    assert exclusive.creates_exclusively
    exclusive.put("there", b"")
    begin = threading.Barrier(CALLERS)

    def call(caller: int) -> list[bool]:
        said = []
        for at in range(ROUNDS):
            begin.wait()
            said.append(exclusive.create(f"lease-{at}", b"caller %d" % caller))
        return said

    with ThreadPoolExecutor(CALLERS) as pool:
        said = list(pool.map(call, range(CALLERS)))
    for at in range(ROUNDS):
        (winner,) = [caller for caller in range(CALLERS) if said[caller][at]]
        assert exclusive.get(f"lease-{at}") == b"caller %d" % winner
    assert len(exclusive.entries()) == ROUNDS + 1


def test_one_of_several_processes_makes_it(tmp_path: Path) -> None:
    program = (
        "import sys; from spark_state_ext.files.folder import Folder; files = Folder(sys.argv[1]);"
        "print('ready', flush=True); sys.stdin.read();"
        "print([at for at in range(200) if files.create(str(at), sys.argv[2].encode())])"
    )
    root = str(tmp_path / "root")
    commands = [[sys.executable, "-c", program, root, name] for name in ("a", "b")]
    processes = [subprocess.Popen(it, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for it in commands]
    begins, answers = zip(*((cast(Any, it.stdin), cast(Any, it.stdout)) for it in processes), strict=True)
    assert [answer.readline() for answer in answers] == ["ready\n"] * 2
    for begin in begins:
        begin.close()
    made = [json.loads(answer.read()) for answer in answers]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(made[0] + made[1]) == list(range(200))
    for name, names in zip(b"ab", made, strict=True):
        assert {Folder(root).get(str(at)) for at in names} <= {bytes([name])}


@pytest.mark.parametrize("kind", ["obstore", "replacing"])
def test_what_nobody_vouches_for_is_not_exclusive(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """obstore's file system takes a mode, and ignores it."""
    assert not folder_of(kind, request, tmp_path).creates_exclusively


def test_an_older_botocore_knows_no_conditions(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Folder(s3.root("older"), s3.options)
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"botocore": "1.35.19"}[name])
    assert not files.creates_exclusively
    assert files.create("lease", b"first")
    assert not files.create("lease", b"other")


def test_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    test_one_of_several_callers_makes_it(Folder(str(tmp_path / "root")))
    assert os.path.getsize(tmp_path / "root" / "lease-0") == len("caller 0")


class Forgetful(Share):
    """A server whose answer to the first renaming is lost."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        super().mv(path1, path2)
        if path2.endswith("lease"):
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


class Unreachable(Share):
    """A server that has gone when a file is renamed."""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def test_an_answer_that_is_lost(tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"), {"implementation": f"{__name__}.Forgetful"})
    assert files.create("lease", b"mine")
    assert not files.create("lease", b"other")
    assert os.listdir(tmp_path / "root") == ["lease"]


def test_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    files = Folder(str(tmp_path / "root"), {"implementation": f"{__name__}.Unreachable"})
    with pytest.raises(StorageError, match="Connection reset"):
        files.create("lease", b"mine")
    assert os.listdir(tmp_path / "root") == []
