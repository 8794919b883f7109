"""The commit-order scenarios of Samza's asynchronous commit (TestTaskInstance, TestTaskStorageCommitManager,
TestBlobStoreBackupManager), as scenarios of a bucket: real local stores, real files, and backends that hang or fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from core_support import KEYS, SCHEMA, WRITER, Changes, Model, Row, buffer_of, changed, first_pointer, scanned

from arrow_schemas import CheckpointRef, Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name, parse_file_name
from arrow_schemas.pointer import BOTH, V1, V2, Standing
from spark_state_ext import lineage as lineage_module
from spark_state_ext.backends import BackendContext, Checkpoint, CleanUp, Markers
from spark_state_ext.backends.files import FilesBackup, FilesRestore
from spark_state_ext.background import Background
from spark_state_ext.bucket import Bucket
from spark_state_ext.commit import CommitOptions, Place
from spark_state_ext.errors import (
    CommitTimeoutError,
    CorruptError,
    LostFilesError,
    MissingCheckpointError,
    StateError,
    UploadFailedError,
)
from spark_state_ext.folder import Folder
from spark_state_ext.sealed import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.uploads import WorkerUploads

RETAINED = 2
WAIT_S = 30.0


class Watched(FilesBackup):
    """A backup manager that tells what it is asked, and hangs or fails when told to."""

    def __init__(self, name: str, folder: Folder, context: BackendContext, told: list[str]) -> None:
        super().__init__(folder, context)
        self.name = name
        self.told = told
        self.gate = threading.Event()
        self.gate.set()
        self.fails_with: Exception | None = None

    def init(self, checkpoint: Checkpoint | None) -> None:
        self.told.append(f"{self.name} init")
        super().init(checkpoint)

    def snapshot(self, ref: CheckpointRef, files: Mapping[str, SealedFile]) -> Markers:
        self.told.append(f"{self.name} snapshot {ref.version}")
        return super().snapshot(ref, files)

    def _put(self, file: SealedFile) -> None:
        assert self.gate.wait(WAIT_S)
        if self.fails_with is not None:
            raise self.fails_with
        super()._put(file)
        self.told.append(f"{self.name} has {file.name.split('_')[0]}.{file.name.split('.')[1]}")

    def clean_up(self, request: CleanUp) -> Future[int]:
        self.told.append(f"{self.name} clean-up at {request.head.version}")
        return super().clean_up(request)


@dataclass
class Life:
    """A bucket from batch to batch."""

    local: Path
    options: CommitOptions = field(default_factory=CommitOptions)
    names: tuple[str, ...] = ("a",)
    restore_from: str | None = None
    uploads: WorkerUploads = field(default_factory=WorkerUploads)
    background: Background = field(default_factory=Background)
    told: list[str] = field(default_factory=list)
    pointers: list[Pointer] = field(default_factory=lambda: [first_pointer()])
    models: list[Model] = field(default_factory=lambda: [{}])

    def __post_init__(self) -> None:
        self.store = LocalStore(self.local / "store", SCHEMA)
        self.managers: dict[str, Watched] = {}
        self.stores: list[LocalStore] = [self.store]

    def folder(self, name: str) -> Folder:
        return Folder(str(self.local / name)).child("3")

    def manager(self, name: str) -> Watched:
        if name not in self.managers:
            context = BackendContext(name, {}, "counts", "", 3, self.uploads.pool(name), self.local, 0.0)
            self.managers[name] = Watched(name, self.folder(name), context, self.told)
        return self.managers[name]

    def places(self, *names: str) -> list[Place]:
        return [
            Place(name, self.manager(name), FilesRestore(self.folder(name), 0.0), root=name == "a")
            for name in names or self.names
        ]

    def bucket(self, pointer: Pointer | None = None, store: LocalStore | None = None, *names: str) -> Bucket:
        return Bucket(
            store or self.store,
            self.places(*names),
            pointer or self.pointers[-1],
            WRITER,
            self.local,
            self.background,
            RETAINED,
            uploads=self.uploads,
            options=self.options,
            restore_from=self.restore_from,
        )

    def batch(self, changes: Changes | None = None, *, may_defer: bool = False) -> Pointer:
        at = len(self.pointers)
        changes = {KEYS[at % 9]: Row(at), KEYS[(at + 4) % 9]: Row(-at, "n")} if changes is None else changes
        bucket = self.bucket()
        pointer = bucket.commit(buffer_of(changes, self.local), may_defer=may_defer)
        self.left = bucket.committer.left
        self.pointers.append(pointer)
        self.models.append(changed(self.models[-1], changes))
        return pointer

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        deadline_s = time.monotonic() + WAIT_S
        while self.uploads._waiting:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert self.background.wait(WAIT_S)

    def restored(self, pointer: Pointer, *names: str) -> Model:
        """The state on an empty disk."""
        store = LocalStore(self.local / f"fresh-{len(self.stores)}", SCHEMA)
        self.stores.append(store)
        return self.bucket(pointer, store, *names).read(scanned)

    def files(self, name: str, kind: str) -> list[int]:
        found = [parsed for it in self.folder(name).names() if (parsed := parse_file_name(it))]
        return sorted(parsed[0].version for parsed in found if parsed[1] == kind)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    for manager in made.managers.values():
        manager.gate.set()
    made.settle()
    for store in made.stores:
        store.close()


# -- order -----------------------------------------------------------------------------------------


def test_the_phases_come_in_order(life: Life) -> None:
    life.names = ("a", "b")
    gate_of_b = life.manager("b").gate
    gate_of_b.clear()
    pointer = life.batch()
    # The call is over, and one backend has not even begun.
    assert [delta.ref for delta in pointer.inline] == [pointer.ref]
    assert pointer.standings == {"a": Standing(None), "b": Standing(None)}
    assert life.told[:4] == ["a init", "b init", "a snapshot 1", "b snapshot 1"]
    assert "b has 1.delta" not in life.told
    gate_of_b.set()
    life.settle()
    assert life.told.index("a snapshot 1") < life.told.index("a has 1.delta")
    assert {"a has 1.delta", "b has 1.delta"} <= set(life.told)
    # The next pointer says so, and drops what it held.
    after = life.batch({})
    assert after.standings == {"a": Standing(pointer.ref), "b": Standing(pointer.ref)}
    assert after.inline == ()
    assert pointer.ref is not None
    assert after.markers == {name: {"state": file_name(pointer.ref, DELTA)} for name in ("a", "b")}


def test_what_is_inline_is_enough(life: Life) -> None:
    """The process dies before anything was sent."""
    life.manager("a").gate.clear()
    for _ in range(3):
        life.batch()
    assert life.files("a", DELTA) == []
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert life.restored(life.pointers[-2]) == life.models[-2]


def test_uploads_of_a_process_that_died_are_begun_anew(life: Life) -> None:
    life.manager("a").gate.clear()
    for _ in range(2):
        life.batch()
    died, life.uploads = life.uploads, WorkerUploads()
    died.owner = life.uploads.owner = "1 0"  # a process that never was: nobody is at it any more
    life.uploads.owner = WorkerUploads().owner
    gate, life.managers = life.managers["a"].gate, {}
    life.batch()
    life.settle()
    assert life.files("a", DELTA) == [1, 2, 3]
    assert life.batch({}).inline == ()
    gate.set()


def test_another_process_that_lives_is_waited_for(life: Life) -> None:
    """Two workers of one machine take turns; what one has under way the other does not send again."""
    life.manager("a").gate.clear()
    life.batch()
    first, life.uploads = life.uploads, WorkerUploads()
    gate, life.managers = life.managers["a"].gate, {}
    # Both are this process, which lives; the second one does not know what the first one has.
    life.uploads.owner = f"{life.uploads.owner} again"
    life.batch()
    assert "a snapshot 2" in life.told
    assert life.told.count("a snapshot 1") == 1
    gate.set()
    life.options = replace(life.options, commit_delay_ms_max=0)
    assert life.batch({}).inline == ()
    assert first is not life.uploads


# -- skip, block, fail -----------------------------------------------------------------------------


def test_a_commit_goes_on_then_waits_then_fails(life: Life) -> None:
    life.names = ("a", "b")
    life.options = CommitOptions(commit_delay_ms_max=1_500, commit_timeout_ms=4_000)
    life.batch()
    life.settle()
    hung = life.manager("b")
    hung.gate.clear()
    began_s = time.monotonic()
    went_on = 0
    while True:
        started_s = time.monotonic()
        try:
            life.batch()
        except CommitTimeoutError as error:
            failed_s, waited_s, text = time.monotonic() - began_s, time.monotonic() - started_s, str(error)
            break
        assert time.monotonic() - started_s < 1.2, "goes on without waiting"
        went_on += 1
        time.sleep(0.2)
    assert went_on > 2
    assert "b: 2_" in text
    assert "commit_timeout_ms is 4000" in text
    # It went on for one and a half seconds, and gave up after four, counted from when the upload began.
    assert 4.0 <= failed_s < 4.5
    assert 1.5 < waited_s <= 2.6
    # Nothing is lost, and a retry goes on; what hung comes back.
    assert life.restored(life.pointers[-1]) == life.models[-1]
    hung.gate.set()
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    assert life.restored(life.pointers[-1], "b") == life.models[-1]


def test_a_commit_waits_no_longer_than_the_upload_takes(life: Life) -> None:
    life.options = CommitOptions(commit_delay_ms_max=100, commit_timeout_ms=20_000)
    life.manager("a").gate.clear()
    life.batch()
    time.sleep(0.15)
    threading.Timer(0.4, life.manager("a").gate.set).start()
    started_s = time.monotonic()
    pointer = life.batch()
    assert 0.2 < time.monotonic() - started_s < 5
    # What went before is confirmed, and only the new one is inline.
    assert [delta.ref for delta in pointer.inline] == [pointer.ref]


def test_a_job_that_was_down_for_long_is_not_late(life: Life) -> None:
    """Age counts from when an upload began here."""
    life.options = CommitOptions(commit_delay_ms_max=200, commit_timeout_ms=400)
    life.manager("a").gate.clear()
    pointer = life.batch()
    life.pointers[-1] = replace(pointer, inline=tuple(replace(it, made_ms=1) for it in pointer.inline))
    life.store.note({}, list(life.store.notes()))
    life.uploads, life.managers = WorkerUploads(), {}
    life.batch()


def test_over_the_bound_a_commit_waits(life: Life) -> None:
    life.manager("a").gate.clear()
    size = len(life.batch().inline[0].data)
    life.options = CommitOptions(inline_bytes_max=int(2.5 * size))
    assert len(life.batch().inline) == 2
    threading.Timer(0.3, life.manager("a").gate.set).start()
    started_s = time.monotonic()
    pointer = life.batch()
    assert time.monotonic() - started_s > 0.2
    assert pointer.inline == ()
    assert pointer.standings == {"a": Standing(pointer.ref)}
    assert life.restored(pointer, "a") == life.models[-1]


def test_the_last_call_of_a_task_waits_for_the_others(life: Life) -> None:
    life.options = CommitOptions(inline_bytes_max=10)
    life.manager("a").gate.clear()
    pointer = life.batch(may_defer=True)
    # It says that everything is there, which holds once what is left has been waited for.
    assert (pointer.inline, pointer.standings) == ((), {"a": Standing(pointer.ref)})
    assert [upload.file for upload in life.left] == [file_name(pointer.ref, DELTA)] if pointer.ref else []
    assert not any(upload.done.done() for upload in life.left)
    life.manager("a").gate.set()
    life.bucket().committer.await_all(life.left)
    assert life.restored(pointer) == life.models[-1]


def test_without_a_journal_the_call_waits(life: Life) -> None:
    life.options = CommitOptions(journal=False)
    threading.Timer(0.3, life.manager("a").gate.set).start()
    life.manager("a").gate.clear()
    started_s = time.monotonic()
    pointer = life.batch()
    assert time.monotonic() - started_s > 0.2
    assert (pointer.inline, pointer.standings) == ((), {"a": Standing(pointer.ref)})


def test_a_journal_that_is_left_out_is_emptied_first(life: Life) -> None:
    life.manager("a").gate.clear()
    assert len([life.batch() for _ in range(3)][-1].inline) == 3
    life.options = CommitOptions(journal=False)
    threading.Timer(0.2, life.manager("a").gate.set).start()
    assert life.batch({}).inline == ()
    assert life.files("a", DELTA) == [1, 2, 3]


# -- failures --------------------------------------------------------------------------------------


def test_a_failed_upload_surfaces_at_the_next_commit(life: Life) -> None:
    life.manager("a").fails_with = PermissionError("not yours")
    first = life.batch()
    life.settle()
    with pytest.raises(UploadFailedError, match=r"1_\w+\.delta\.arrow to the backend a failed: .*not yours.*not lost"):
        life.batch()
    # Told once; the state is as it was, and who tries again sends it again.
    assert life.restored(first) == life.models[-1]
    life.manager("a").fails_with = None
    life.batch()
    life.settle()
    assert life.batch({}).inline == ()
    assert life.files("a", DELTA) == [1, 2]


def test_a_failed_upload_that_is_waited_for_is_raised_as_it_is(life: Life) -> None:
    life.options = CommitOptions(journal=False)
    life.manager("a").fails_with = MissingCheckpointError("gone")
    with pytest.raises(MissingCheckpointError, match="gone"):
        life.batch()
    life.manager("a").fails_with = None
    life.batch()


def test_a_pointer_that_was_not_committed(life: Life) -> None:
    """Spark could not write it: the next attempt begins from the pointer before, and what was sent is swept away."""
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(3):
        life.batch()
    abandoned = life.batch()
    life.settle()
    life.pointers.pop()
    life.models.pop()
    for _ in range(3):
        life.batch()
    life.settle()
    life.batch({})
    assert abandoned.ref is not None
    assert abandoned.ref in [parsed[0] for it in life.folder("a").names() if (parsed := parse_file_name(it))]
    assert life.restored(life.pointers[-1], "a") == life.models[-1]


def test_files_that_somebody_deleted_are_answered_with_a_fresh_full_backup(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    life.names = ("a", "b")
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(5):
        life.batch()
    life.settle()
    life.batch({})
    for name in life.folder("b").names()[:3]:
        life.folder("b").remove(name)
    pointer = life.pointers[-1]
    head = pointer.standings["b"].through
    assert head is not None
    with pytest.raises(LostFilesError, match="deleted"):
        life.manager("b").clean_up(CleanUp(pointer, head, RETAINED, lambda: None)).result(WAIT_S)
    life.bucket().committer.lose("b", pointer.beats)
    after = life.batch()
    assert "somebody has deleted files from b: it gets a fresh full backup" in caplog.text
    assert after.standings["b"] == Standing(after.ref, since=after.ref)
    life.settle()
    after = life.batch()
    life.settle()
    after = life.batch({})
    assert after.standings["b"] == Standing(after.ref)
    assert life.restored(after, "b") == life.models[-1]
    assert len(life.files("b", SNAPSHOT)) == 1


def test_where_all_was_deleted_the_backup_comes_before_the_pointer(life: Life) -> None:
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(3):
        life.batch()
    life.settle()
    for name in life.folder("a").names():
        life.folder("a").remove(name)
    life.bucket().committer.lose("a", life.pointers[-1].beats)
    pointer = life.batch()
    assert pointer.standings == {"a": Standing(pointer.ref)}
    assert life.restored(pointer) == life.models[-1]


# -- several backends ------------------------------------------------------------------------------


def test_a_backend_that_is_added_catches_up(life: Life) -> None:
    for _ in range(4):
        life.batch()
    life.names = ("a", "b")
    pointer = life.batch()
    assert pointer.standings["b"] == Standing(pointer.ref, since=pointer.ref)
    life.batch()
    life.settle()
    pointer = life.batch({})
    assert pointer.standings == {"a": Standing(pointer.ref), "b": Standing(pointer.ref)}
    assert (life.files("b", SNAPSHOT), life.files("b", DELTA)) == ([5], [6])
    for name in ("a", "b"):
        assert life.restored(pointer, name) == life.models[-1]


def test_a_quiet_bucket_is_copied_too(life: Life) -> None:
    life.batch()
    life.names = ("a", "b")
    for _ in range(2):
        life.batch({})
        life.settle()
    pointer = life.batch({})
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_backend_that_is_left_out_is_forgotten_and_its_files_stay(life: Life) -> None:
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
    assert "a" not in life.pointers[-1].standings
    life.names = ("a", "b")
    pointer = life.batch()
    assert pointer.standings["a"].since == pointer.ref


def test_one_place_for_another_at_once(life: Life) -> None:
    """Without a time in which both are kept: the local store has the state, so it is written in full within the call."""
    for _ in range(3):
        life.batch()
    life.settle()
    life.names = ("b",)
    pointer = life.batch()
    assert pointer.standings == {"b": Standing(pointer.ref)}
    assert life.restored(pointer, "b") == life.models[-1]


def test_a_state_that_lies_elsewhere_says_where(life: Life) -> None:
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(3):
        life.batch()
    life.settle()
    life.batch({})
    with pytest.raises(MissingCheckpointError, match="The state lies in a, which the job does not name"):
        life.restored(life.pointers[-1], "b")


def test_the_preferred_backend_is_asked_first_and_the_next_one_where_it_fails(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    life.names, life.restore_from = ("a", "b"), "b"
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(4):
        life.batch()
    life.settle()
    life.batch({})
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    name = life.folder("b").names()[-1]
    content = bytearray(life.folder("b").get(name))
    content[len(content) // 2] ^= 0xFF
    life.folder("b").put(name, bytes(content))
    assert life.restored(life.pointers[-1]) == life.models[-1]
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "cannot be restored from the backend b" in record.getMessage()
    # And one that has no marker at all.
    caplog.clear()
    life.restore_from = "c"
    life.names = ("a", "c")
    assert life.restored(life.pointers[-1]) == life.models[-1]
    assert "the backend c: it has no marker" in caplog.text


def test_what_neither_backend_has_whole_is_put_together_from_both(life: Life) -> None:
    life.names = ("a", "b")
    life.options = replace(life.options, commit_delay_ms_max=0)
    for _ in range(4):
        life.batch()
    life.settle()
    life.batch({})
    for at, name in enumerate(life.folder("a").names()):
        life.folder("a" if at % 2 else "b").remove(name)
    assert life.restored(life.pointers[-1]) == life.models[-1]
    for name in ("a", "b"):
        with pytest.raises(StateError):
            life.restored(life.pointers[-1], name)


# -- the five steps of a migration -------------------------------------------------------------------


def _old_release(data: bytes) -> Pointer:
    """What a release that knows format 1 only makes of a pointer: it looks at none of the other fields."""
    return Pointer.decode(data, V1)


def test_the_five_steps_of_the_reference(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write both, read the old; read the new; stop writing the old. And back again, up to the last step."""
    monkeypatch.setattr(lineage_module, "DELTAS_MIN", 3)
    monkeypatch.setattr(lineage_module, "DELTAS_MAX", 4)
    stages: list[tuple[str, Callable[[bytes], Pointer], int]] = [
        (V1, _old_release, 8),  # as it always was
        (BOTH, _old_release, 8),  # 1, 2: both are written, the old one is read
        (BOTH, Pointer.decode, 8),  # 3: the new one is read
        (V1, _old_release, 5),  # and back, as nothing new was needed
        (BOTH, Pointer.decode, 8),  # 4: is it stable?
        (V2, Pointer.decode, 8),  # 5: the old one is written no more
        (V1, Pointer.decode, 3),  # by configuration there is a way back even so
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
                # What old releases rely on: files at the root, and a lineage that begins with a snapshot that is there.
                first = old.lineage[0].ref
                assert first.version == 1 or first.version in life.files("a", SNAPSHOT)
                assert {entry.ref.version for entry in old.lineage[1:]} <= set(life.files("a", DELTA))
            assert life.restored(life.pointers[-1]) == life.models[-1]
    assert life.pointers[-1].version == sum(batches for *_, batches in stages)
    with pytest.raises(CorruptError):
        Pointer.decode(b"SSEP\x01\x00")
