"""Files that are sent a second time, and the comparison before a file counts as confirmed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER, buffer_of, first_pointer
from shares import ByNameNode, Share

from arrow_schemas import Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, file_name, new_checkpoint_id
from spark_state_ext.backends import STATE, BackendContext
from spark_state_ext.backends.files import FilesBackup, FilesRestore
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_file import SealedFile, seal
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Row, scan
from spark_state_ext.worker.threads import CallerExecutor
from tests.helpers.object_store import S3
from tests.helpers.waiting import WAIT_S

LARGE_BYTES = 20 << 20
Publish = Callable[[Folder, SealedFile], None]


def backup_of(folder: Folder, scratch: Path, timeout_s: float = 0.0) -> FilesBackup:
    return FilesBackup(folder, BackendContext("a", {}, "counts", "", 3, CallerExecutor(), scratch, timeout_s))


def send(backup: FilesBackup, file: SealedFile, ref: CheckpointRef | None = None) -> None:
    ref = ref or CheckpointRef(1, new_checkpoint_id())
    backup.upload(ref, backup.snapshot(ref, {STATE: file})).result()


@pytest.fixture(params=["small", "large"])
def sealed(request: pytest.FixtureRequest, tmp_path: Path) -> SealedFile:
    name = file_name(CheckpointRef(1, new_checkpoint_id()), DELTA)
    if request.param == "small":
        return SealedFile.of(name, b"state" * 100)
    path = tmp_path / "sealed"
    path.write_bytes(os.urandom(1 << 20) * (LARGE_BYTES >> 20) + b"tail")
    return SealedFile(name, LARGE_BYTES + 4, None, path)


@pytest.fixture(params=["Share", "ByNameNode"])
def share(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "root"), {"implementation": f"shares.{request.param}"})


class Failing(ByNameNode):
    """A name node that can become unreachable."""

    is_down = False

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if not os.path.exists(path2) and type(self).is_down:
            raise ConnectionError("the name node does not answer")
        super().mv(path1, path2, **kwargs)


def test_a_confirmed_delta_outlives_an_attempt_that_sends_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark commits the attempt that has seen the confirmation; the other one fails while it sends the delta again."""
    root = str(tmp_path / "root")

    def make_host(name: str) -> Callable[[Pointer], Bucket]:
        uploads = WorkerUploads()
        uploads.owner = f"{os.getpid()} {name}"
        folder = Folder(root, {"implementation": f"{__name__}.Failing"}).child("3")
        context = BackendContext("a", {}, "counts", "", 3, CallerExecutor(), tmp_path, 0.2)
        replicas = [Replica("a", FilesBackup(folder, context), FilesRestore(folder, 0.0), root=True)]
        store = LocalStore.at(tmp_path / name, SCHEMA)
        return lambda pointer: Bucket(
            store, replicas, pointer, WRITER, CommitContext(tmp_path, options=CommitOptions(), uploads=uploads)
        )

    here, there = make_host("here"), make_host("there")
    first = here(first_pointer()).commit(buffer_of({KEYS[0]: Row(1)}, tmp_path)).pointer
    assert len(first.inline) == 1
    second = here(first).commit(buffer_of({KEYS[1]: Row(2)}, tmp_path)).pointer
    assert first.inline[0].name not in [delta.name for delta in second.inline], (
        "the first delta is confirmed, so it must be in the backend only"
    )
    monkeypatch.setattr(Failing, "is_down", True)
    there(first).commit(buffer_of({KEYS[1]: Row(2)}, tmp_path))
    monkeypatch.setattr(Failing, "is_down", False)
    assert make_host("fresh")(second).read(scan) == {KEYS[0]: Row(1), KEYS[1]: Row(2)}


def test_a_file_that_exists_with_the_same_bytes_is_not_written_again(
    share: Folder, sealed: SealedFile, tmp_path: Path
) -> None:
    send(backup_of(share, tmp_path), sealed)
    before = os.stat(tmp_path / "root" / sealed.name)
    send(backup_of(share, tmp_path), sealed)
    after = os.stat(tmp_path / "root" / sealed.name)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert os.listdir(tmp_path / "root") == [sealed.name]


def damage_file(path: Path) -> bytes:
    """Change the byte in the middle of a file, and return the new content."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    return bytes(data)


def test_a_damaged_file_is_replaced_if_the_store_replaces_files_atomically(sealed: SealedFile, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "root"))
    send(backup_of(folder, tmp_path), sealed)
    damage_file(tmp_path / "root" / sealed.name)
    send(backup_of(folder, tmp_path), sealed)
    assert folder.get(sealed.name) == sealed.get_range(0, sealed.size_bytes)


def test_a_damaged_file_is_an_error_if_the_store_does_not_replace_files_atomically(
    share: Folder, sealed: SealedFile, tmp_path: Path
) -> None:
    """The error comes at once, because a retry would not help."""
    send(backup_of(share, tmp_path), sealed)
    content = damage_file(tmp_path / "root" / sealed.name)
    began_s = time.monotonic()
    with pytest.raises(StorageError, match=r"exists with other bytes .* delete it, and start again"):
        send(backup_of(share, tmp_path, timeout_s=10 * WAIT_S), sealed)
    assert time.monotonic() - began_s < WAIT_S
    assert share.get(sealed.name) == content


def test_an_intact_snapshot_of_another_writer_is_accepted(share: Folder, tmp_path: Path) -> None:
    """Its layout may differ; its header and its checksum show that it is complete."""
    ref = CheckpointRef(1, new_checkpoint_id())
    files = []
    for version in ("1", "2"):
        header = LineageHeader(SNAPSHOT, "counts", 3, ref, None, (), 0, WRITER, version)
        files.append(seal(header, SCHEMA, buffer_of({KEYS[0]: Row(1)}, tmp_path), tmp_path))
    send(backup_of(share, tmp_path), files[0], ref)
    send(backup_of(share, tmp_path), files[1], ref)
    assert share.get(files[0].name) == files[0].get_range(0, files[0].size_bytes)
    damage_file(tmp_path / "root" / files[0].name)
    with pytest.raises(StorageError, match="exists with other bytes"):
        send(backup_of(share, tmp_path), files[1], ref)


class Damaging(Folder):
    """A folder that changes one byte of each file on its way."""

    at = 0.5

    def put(self, name: str, data: bytes | memoryview) -> None:
        changed = bytearray(data)
        changed[int(len(changed) * self.at)] ^= 0xFF
        super().put(name, bytes(changed))

    def put_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        self.put(name, Path(local_path).read_bytes())


@pytest.mark.parametrize("at", [0.0, 0.3, 0.5, 0.999999])
@pytest.mark.parametrize("store", ["disk", "s3"])
def test_a_byte_that_is_damaged_on_its_way_is_detected_wherever_it_is(
    at: float, store: str, sealed: SealedFile, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if store == "disk":
        folder = Damaging(str(tmp_path / "root"))
    else:
        s3: S3 = request.getfixturevalue("s3")
        folder = Damaging(s3.root(tmp_path.name), s3.options)
    folder.at = at
    with pytest.raises(StorageError, match="reads differently: the upload was torn or damaged on its way"):
        send(backup_of(folder, tmp_path), sealed)


def test_a_large_file_is_compared_in_pieces(tmp_path: Path) -> None:
    """Uploads of several buckets must not need the memory of their files."""
    sizes = []

    class Sized(Folder):
        def get(self, name: str) -> bytes:
            sizes.append(self.size(name))
            return super().get(name)

        def get_range(self, name: str, start: int, end: int) -> bytes:
            sizes.append(end - start)
            return super().get_range(name, start, end)

    path = tmp_path / "sealed"
    path.write_bytes(bytes(LARGE_BYTES))
    send(backup_of(Sized(str(tmp_path / "root")), tmp_path), SealedFile("file", LARGE_BYTES, None, path))
    assert sum(sizes) == LARGE_BYTES
    assert max(sizes) <= 8 << 20


def test_only_local_disks_and_memory_replace_files_atomically() -> None:
    assert not Folder("/root", {"implementation": f"{Share.__module__}.Share"}).replaces
    assert Folder("/root").replaces
    assert Folder("memory://root").replaces
