"""Several backends at once, added, left out and preferred; and the five steps of a migration to another pointer format."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from life import Life

from arrow_schemas import CheckpointRef, LineageHeader, Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT
from arrow_schemas.pointer import BOTH, V1, V2, ReplicationStatus
from spark_state_ext.backends import Markers
from spark_state_ext.backends.replication import is_complete
from spark_state_ext.commit import snapshot_writer
from spark_state_ext.commit import snapshots as snapshots_module
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.ledger import FAILED, RUNNING, UploadRecord, record_name
from spark_state_ext.commit.snapshots import check_name
from spark_state_ext.errors import (
    CorruptError,
    MissingCheckpointError,
    StateError,
    StorageError,
    StoreFullError,
)
from spark_state_ext.files import sealed_file
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA
from tests.helpers.waiting import WAIT_S

# -- several backends ------------------------------------------------------------------------------


def test_a_backend_that_is_added_catches_up(life: Life) -> None:
    for _ in range(4):
        life.batch()
    life.names = ("a", "b")
    pointer = life.batch()
    assert pointer.replication["b"] == ReplicationStatus(pointer.ref, since=pointer.ref)
    life.batch()
    life.settle()
    pointer = life.batch({})
    assert pointer.replication == {"a": ReplicationStatus(pointer.ref), "b": ReplicationStatus(pointer.ref)}
    assert (life.files("b", SNAPSHOT), life.files("b", DELTA)) == ([5], [6])
    for name in ("a", "b"):
        assert life.restored(pointer, name) == life.models[-1]


@pytest.mark.parametrize("failing", ["seal", "upload"])
def test_a_backend_catches_up_after_its_first_snapshot_failed(
    life: Life, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        life.batch()
    life.settle()
    life.names = ("a", "b")
    fails = [True]

    def seal(header: LineageHeader, *rest: Any) -> SealedFile:
        if header.kind == SNAPSHOT and fails:
            fails.clear()
            raise StoreFullError("the disk is full, once")
        return sealed_file.seal(header, *rest)

    def upload(ref: CheckpointRef, markers: Markers) -> Future[Markers]:
        monkeypatch.undo()
        raise StoreFullError("no thread for it, once")

    if failing == "seal":
        monkeypatch.setattr(snapshot_writer, "seal", seal)
    else:
        monkeypatch.setattr(life.manager("b"), "upload", upload)
    for _ in range(5):
        life.batch()
        life.settle()
    pointer = life.batch({})
    assert is_complete(pointer.replication["b"])
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_backend_catches_up_if_the_end_of_its_first_upload_was_not_recorded(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        life.batch()
    life.settle()
    life.names = ("a", "b")
    record, failed = life.store.record, []

    def full(records: Mapping[str, bytes], removed: Collection[str] = ()) -> None:
        if any(
            (decoded := UploadRecord.decode(value)) is not None and decoded.state == FAILED
            for value in records.values()
        ):
            failed.append(1)
            raise StoreFullError("the disk is full")
        record(records, removed)

    life.manager("b").fails_with = PermissionError("not yet")
    monkeypatch.setattr(life.store, "record", full)
    life.batch()
    life.settle()
    assert failed
    assert "is failed: the disk is full" in caplog.text
    life.manager("b").fails_with = None
    monkeypatch.setattr(life.store, "record", record)
    # The upload record says running, in a live process. It is trusted only for a while.
    snapshots = life.told.count("b snapshot 5")
    life.batch()
    life.settle()
    assert life.told.count("b snapshot 6") == snapshots == 1, "the delta"
    assert not is_complete(life.pointers[-1].replication["b"])
    monkeypatch.setattr(snapshots_module, "HUNG_S", 0.0)
    life.batch()
    life.settle()
    pointer = life.batch({})
    assert is_complete(pointer.replication["b"])
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_bootstrapping_backend_that_does_not_answer_blocks_no_commit(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The machine is not the one that sends the snapshot, and cannot know whether it arrived."""
    for _ in range(3):
        life.batch()
    life.settle()
    life.names = ("a", "b")
    life.manager("b").fails_with = ConnectionError("nobody is at home")
    life.batch()
    life.settle()
    life.store.record({}, [name for name in life.store.records() if name.startswith(record_name("b", ""))])

    def size(self: Folder, name: str) -> int:
        if self.root == life.folder("b").root:
            raise StorageError("asking b: nobody is at home")
        return real(self, name)

    real = Folder.size
    life.manager("b").fails_with = None
    monkeypatch.setattr(Folder, "size", size)
    life.batch()
    assert "could not check whether the backend b has caught up: asking b" in caplog.text
    monkeypatch.undo()
    for _ in range(12):
        life.batch()
        life.settle()
    pointer = life.batch({})
    assert is_complete(pointer.replication["b"])
    assert life.restored(pointer, "b") == life.models[-1]


def _sent_from_another_machine(life: Life) -> tuple[Pointer, str]:
    """Let backend b wait for a snapshot that another machine has written; return its name."""
    for _ in range(3):
        life.batch()
    life.settle()
    life.names = ("a", "b")
    pointer = life.batch()
    life.settle()
    assert pointer.replication["b"] == ReplicationStatus(pointer.ref, since=pointer.ref)
    life.store = LocalStore.at(life.local / "another machine", SCHEMA)
    life.stores.append(life.store)
    (name,) = (name for name in life.folder("b").names() if SNAPSHOT in name)
    return pointer, name


def _flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "cut to half": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "one byte": lambda content: content[:1],
    "a bit of its body": lambda content: _flipped(content, len(content) // 2),
    "other bytes": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=list(DAMAGED))
def test_a_snapshot_from_another_machine_that_is_damaged_is_replaced(
    life: Life, damaged: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    _, name = _sent_from_another_machine(life)
    life.folder("b").put(name, damaged(life.folder("b").get(name)))
    pointers = []
    for _ in range(4):
        pointers.append(life.batch())
        life.settle()
    assert [is_complete(pointer.replication["b"]) for pointer in pointers] == [False, False, True, True]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [name in record.getMessage() for record in errors] == [True]
    assert "the backend b did not catch up: " in caplog.text
    assert "It gets another full snapshot." in caplog.text
    for pointer, model in zip(life.pointers[-2:], life.models[-2:], strict=True):
        assert life.restored(pointer, "b") == model


def test_a_snapshot_from_another_machine_is_confirmed_by_reading_it(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once for all calls, in the background: no call waits for it."""
    _, name = _sent_from_another_machine(life)
    may_read, reads = threading.Event(), []

    def get(self: Folder, asked: str) -> bytes:
        if (self.root, asked) == (life.folder("b").root, name):
            reads.append(asked)
            assert may_read.wait(WAIT_S)
        return real(self, asked)

    real = Folder.get
    monkeypatch.setattr(Folder, "get", get)
    for _ in range(3):
        assert not is_complete(life.batch().replication["b"])
    may_read.set()
    life.settle()
    assert reads == [name]
    pointer = life.batch()
    assert is_complete(pointer.replication["b"])
    assert life.files("b", SNAPSHOT) == [4]
    life.settle()
    assert life.restored(pointer, "b") == life.models[-1]


def test_the_next_call_retries_a_failed_read_of_another_machines_snapshot(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, name = _sent_from_another_machine(life)

    def get(self: Folder, asked: str) -> bytes:
        if (self.root, asked) == (life.folder("b").root, name):
            raise StorageError("reading b: nobody is at home")
        return real(self, asked)

    real = Folder.get
    monkeypatch.setattr(Folder, "get", get)
    for _ in range(2):
        life.batch()
        life.settle()
    assert caplog.text.count("nobody is at home") == 2
    monkeypatch.undo()
    for _ in range(2):
        pointer = life.batch()
        life.settle()
    assert is_complete(pointer.replication["b"])
    assert life.files("b", SNAPSHOT) == [4]


def test_a_snapshot_is_read_again_if_the_reading_process_ended(life: Life) -> None:
    pointer, name = _sent_from_another_machine(life)
    ended = subprocess.run(
        [sys.executable, "-c", "from spark_state_ext.worker import process; print(process.get_process_token())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    life.store.record({check_name("b", name): UploadRecord(RUNNING, ended, time.monotonic()).encode()})
    for _ in range(2):
        pointer = life.batch()
        life.settle()
    assert is_complete(pointer.replication["b"])


def test_a_backend_that_does_not_answer_is_not_taken_for_one_without_files(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a were deleted; only those of b, which began with a snapshot, are left."""
    for _ in range(4):
        life.batch()
    life.names = ("a", "b")
    for _ in range(2):
        life.batch()
        life.settle()
    pointer = life.batch({})
    assert is_complete(pointer.replication["b"])
    for name in life.folder("a").names():
        life.folder("a").remove(name)

    def size(self: Folder, name: str) -> int:
        if self.root == life.folder("b").root and f".{SNAPSHOT}." in name:
            raise StorageError("reading b: nobody is at home")
        return real(self, name)

    real = Folder.size
    monkeypatch.setattr(Folder, "size", size)
    with pytest.raises(
        StorageError, match=r"cannot be loaded: reading b: nobody is at home; and the others do not have it: "
    ):
        life.restored(pointer)
    monkeypatch.undo()
    assert life.restored(pointer) == life.models[-1]


def test_a_bucket_without_changes_is_also_copied_to_a_new_backend(life: Life) -> None:
    life.batch()
    life.names = ("a", "b")
    for _ in range(2):
        life.batch({})
        life.settle()
    pointer = life.batch({})
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_removed_backend_is_forgotten_but_its_files_stay(life: Life) -> None:
    life.names = ("a", "b")
    for _ in range(3):
        life.batch()
    life.settle()
    life.batch({})
    before = life.folder("a").names()
    life.names = ("b",)
    for _ in range(30):
        life.batch()
    life.settle()
    assert life.folder("a").names() == before
    assert "a" not in life.pointers[-1].replication
    life.names = ("a", "b")
    pointer = life.batch()
    assert pointer.replication["a"].since == pointer.ref


def test_one_backend_can_replace_another_at_once(life: Life) -> None:
    """Both are never configured together: the call writes the whole state from the local store."""
    for _ in range(3):
        life.batch()
    life.settle()
    life.names = ("b",)
    pointer = life.batch()
    assert pointer.replication == {"b": ReplicationStatus(pointer.ref)}
    assert life.restored(pointer, "b") == life.models[-1]


def test_the_error_for_lost_files_says_what_to_do(life: Life) -> None:
    life.history(3)
    for name in life.folder("a").names():
        life.folder("a").remove(name)
    text = r"The \d+ files that could replace it do not exist either\. .*If the whole folder is gone: set root back"
    with pytest.raises(MissingCheckpointError, match=text):
        life.restored(life.pointers[-1], "a")


def test_the_error_names_the_backend_that_has_the_state(life: Life) -> None:
    life.history(3)
    with pytest.raises(MissingCheckpointError, match="The state lies in a, which is not among the job's backends"):
        life.restored(life.pointers[-1], "b")


def test_the_preferred_backend_is_read_first_and_the_next_one_if_it_fails(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    life.names, life.restore_from = ("a", "b"), "b"
    life.history(4)
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    name = life.folder("b").names()[-1]
    content = bytearray(life.folder("b").get(name))
    content[len(content) // 2] ^= 0xFF
    life.folder("b").put(name, bytes(content))
    assert life.restored(life.pointers[-1]) == life.models[-1]
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "cannot be restored from the backend b" in record.getMessage()
    # A preferred backend may also have no file at all.
    caplog.clear()
    life.restore_from = "c"
    life.names = ("a", "c")
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert "the backend c: it does not have the whole state at" in caplog.text


def test_a_restore_combines_two_backends_that_are_both_incomplete(life: Life) -> None:
    life.names = ("a", "b")
    life.history(4)
    for at, name in enumerate(life.folder("a").names()):
        life.folder("a" if at % 2 else "b").remove(name)
    assert life.restored(life.pointers[-1]) == life.models[-1]
    for name in ("a", "b"):
        with pytest.raises(StateError):
            life.restored(life.pointers[-1], name)


# -- the five steps of a migration -------------------------------------------------------------------


def _old_release(data: bytes) -> Pointer:
    """Decode a pointer as a release that knows only format 1: it ignores all other fields."""
    return Pointer.decode(data, V1)


def test_the_five_steps_of_the_reference(life: Life) -> None:
    """Write both formats, then read the new one, then stop writing the old one; go back at each step."""
    life.cadence = SnapshotCadence(3, 4)
    stages: list[tuple[str, Callable[[bytes], Pointer], int]] = [
        (V1, _old_release, 8),  # before the migration
        (BOTH, _old_release, 8),  # 1, 2: write both, read the old one
        (BOTH, Pointer.decode, 8),  # 3: read the new one
        (V1, _old_release, 5),  # go back: nothing new was needed
        (BOTH, Pointer.decode, 8),  # 4: is it stable?
        (V2, Pointer.decode, 8),  # 5: no longer write the old one
        (V1, Pointer.decode, 3),  # the configuration can still go back
        (V1, _old_release, 8),
        (V2, Pointer.decode, 3),
    ]
    for write, read, batches in stages:
        life.options = replace(life.options, pointer_write=write)
        for _ in range(batches):
            pointer = life.batch()
            data = pointer.encode(write)
            life.pointers[-1] = read(data)
            if write != V2:
                old = _old_release(data)
                life.settle()
                # Old releases need files at the root and a lineage that begins with an existing snapshot.
                first = old.lineage[0].ref
                assert first.version == 1 or first.version in life.files("a", SNAPSHOT)
                assert {entry.ref.version for entry in old.lineage[1:]} <= set(life.files("a", DELTA))
            assert life.restored(life.pointers[-1]) == life.models[-1]
    assert life.pointers[-1].version == sum(batches for *_, batches in stages)
    with pytest.raises(CorruptError):
        Pointer.decode(b"SSEP\x01\x00")


@pytest.mark.parametrize("write", [V1, BOTH])
def test_a_batch_without_changes_goes_back_to_the_first_format(life: Life, write: str) -> None:
    """Format 1 needs an existing snapshot, but the one that format 2 relied on was lost."""
    life.cadence = SnapshotCadence(3, 4)
    life.history(9)
    life.settle()
    for name in life.folder("a").names():
        if name.endswith(f".{SNAPSHOT}.arrow"):
            life.folder("a").remove(name)
    assert life.pointers[-1].lineage[0].ref.version > 1
    # On another machine there is no upload record of it.
    life.store = LocalStore.at(life.local / "another", SCHEMA)
    life.stores.append(life.store)
    life.options = replace(life.options, pointer_write=write)
    pointer = life.batch({})
    first = pointer.lineage[0].ref
    assert first.version in life.files("a", SNAPSHOT)
    assert Pointer.decode(pointer.encode(write), V1).lineage[0].ref == first
    assert life.restored(life.pointers[-1]) == life.models[-1]
