"""The contract of a state backend, as tests.

A package with a backend subclasses `BackendContract`, defines the fixtures for its factory and options, and runs
pytest::

    class TestMine(BackendContract):
        @pytest.fixture
        def factory(self):
            return MyBackend()

        @pytest.fixture
        def options(self):
            return {"url": "…"}

Each test uses a query folder of its own, so it does not see the files of other tests.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from arrow_schemas import Pointer, RowSchema, Writer
from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, file_name, new_checkpoint_id
from arrow_schemas.pointer import ReplicationStatus
from arrow_schemas.savepoint import CANONICAL, NATIVE
from spark_state_ext.backends import STATE, BackendContext, BackendFactory, Checkpoint, CleanUp
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import InterruptedRestoreError, MissingCheckpointError, StateError
from spark_state_ext.files.folder import Duplicable, Folder, Readable
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.savepoints.bucket_copy import ReadOptions, save_bucket
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.testing import WAIT_S
from spark_state_ext.worker.spill import SpillBuffer
from spark_state_ext.worker.threads import DaemonPool

__all__ = ["BackendContract"]

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))
_LARGE_BYTES = 20 << 20
_RETAINED = 2
_REPEATED_UPLOADS = 10


class BackendContract:
    """Tests of one backend."""

    @pytest.fixture
    def factory(self) -> BackendFactory:
        """The factory under test."""
        raise NotImplementedError("the subclass must define the fixture factory")

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """The options of the factory."""
        raise NotImplementedError("the subclass must define the fixture options")

    @pytest.fixture
    def context(self, options: Mapping[str, Any], tmp_path: Path) -> BackendContext:
        """The context of an unused bucket."""
        executor = DaemonPool("contract")
        executor.threads_max = 4
        return BackendContext("mine", options, "counts", uuid.uuid4().hex, 3, executor, tmp_path, WAIT_S)

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> Folder:
        """A folder to duplicate files to. A backend that can duplicate overrides it if it needs another file system."""
        return Folder(str(tmp_path / "elsewhere"))

    # -- files ---------------------------------------------------------------------------------------

    def test_an_uploaded_file_is_read_back(self, factory: BackendFactory, context: BackendContext) -> None:
        ref, content = _new_ref(1), b"Arrow \x00\xff" * 1_000
        markers = _upload(factory, context, ref, content)
        assert set(markers) == {STATE}
        assert all(isinstance(marker, str) for marker in markers.values())
        # Read with a new manager that knows only the markers, as on another machine.
        files, name = _open_files(factory, context, ref, markers), file_name(ref, DELTA)
        assert files.size(name) == len(content)
        assert files.get(name) == content
        assert files.get_range(name, 5, 500) == content[5:500]
        assert files.get_range(name, len(content) - 3, len(content) + 9) == content[-3:]
        target = context.scratch / "copy"
        files.get_file(name, target)
        assert target.read_bytes() == content
        assert name in files.where(name)

    def test_a_large_file(self, factory: BackendFactory, context: BackendContext) -> None:
        """Upload a file larger than one request."""
        ref = _new_ref(1)
        path = context.scratch / "large"
        content = bytes(range(256)) * (_LARGE_BYTES // 256)
        path.write_bytes(content)
        backup = factory.backup_manager(context)
        backup.init(None)
        sealed = SealedFile(file_name(ref, DELTA), len(content), None, path)
        markers = backup.upload(ref, backup.snapshot(ref, {STATE: sealed})).result(WAIT_S)
        target = context.scratch / "copy"
        _open_files(factory, context, ref, markers).get_file(file_name(ref, DELTA), target)
        assert target.read_bytes() == content
        backup.close()

    def test_a_missing_file_raises(self, factory: BackendFactory, context: BackendContext) -> None:
        ref = _new_ref(1)
        files = _open_files(factory, context, ref, _upload(factory, context, ref, b"x"))
        other = file_name(_new_ref(2), DELTA)
        for read in (files.size, files.get, lambda name: files.get_range(name, 0, 5)):
            with pytest.raises(MissingCheckpointError):
                read(other)
        with pytest.raises(MissingCheckpointError):
            files.get_file(other, context.scratch / "copy")

    def test_a_file_can_be_probed_without_a_restore(self, factory: BackendFactory, context: BackendContext) -> None:
        """A file's size and content can be read without a restore, to check an awaited snapshot or a confirmed file."""
        ref = _new_ref(1)
        _upload(factory, context, ref, b"four")
        files = factory.restore_manager(context).restore()
        assert files.size(file_name(ref, DELTA)) == 4
        assert files.get(file_name(ref, DELTA)) == b"four"
        with pytest.raises(MissingCheckpointError):
            files.size(file_name(ref, SNAPSHOT))

    def test_the_same_file_twice(self, factory: BackendFactory, context: BackendContext) -> None:
        """A process dies after an upload and before it records the upload; the next process uploads again."""
        ref = _new_ref(1)
        first, second = (_upload(factory, context, ref, b"same") for _ in range(2))
        for markers in (first, second):
            assert _open_files(factory, context, ref, markers).get(file_name(ref, DELTA)) == b"same"

    def test_a_confirmed_file_is_intact_while_it_is_sent_again(
        self, factory: BackendFactory, context: BackendContext
    ) -> None:
        """Another attempt does not know that the file was confirmed. A concurrent reader must always find it whole."""
        ref, content = _new_ref(1), bytes(range(256)) * 4_096
        markers = _upload(factory, context, ref, content)
        files, name = _open_files(factory, context, ref, markers), file_name(ref, DELTA)
        stopped = threading.Event()
        reads_intact: list[bool] = []

        def read() -> None:
            while not stopped.is_set():
                try:
                    reads_intact.append(files.size(name) == len(content) and files.get(name) == content)
                except StateError:
                    reads_intact.append(False)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(_REPEATED_UPLOADS):
            assert _upload(factory, context, ref, content) == markers
        stopped.set()
        thread.join(WAIT_S)
        assert reads_intact
        assert all(reads_intact)
        assert files.get(name) == content

    def test_buckets_and_query_folders_are_separate(self, factory: BackendFactory, context: BackendContext) -> None:
        ref = _new_ref(1)
        contexts = [context, replace(context, bucket=4), replace(context, query_folder=uuid.uuid4().hex)]
        contexts += [replace(context, operator="others")]
        markers = [_upload(factory, one_context, ref, b"%d" % index) for index, one_context in enumerate(contexts)]
        for index, (one_context, marker) in enumerate(zip(contexts, markers, strict=True)):
            assert _open_files(factory, one_context, ref, marker).get(file_name(ref, DELTA)) == b"%d" % index

    def test_checkpoints_side_by_side(self, factory: BackendFactory, context: BackendContext) -> None:
        """Upload several buckets at the same time, and read from several threads."""
        refs = [_new_ref(version) for version in range(1, 9)]
        managers = [factory.backup_manager(replace(context, bucket=bucket)) for bucket in range(8)]
        futures = []
        for ref, manager in zip(refs, managers, strict=True):
            manager.init(None)
            sealed = SealedFile.of(file_name(ref, DELTA), ref.id.encode() * 5_000)
            futures.append(manager.upload(ref, manager.snapshot(ref, {STATE: sealed})))
        markers = [future.result(WAIT_S) for future in futures]
        contents: dict[int, bytes] = {}

        def read(bucket: int) -> None:
            files = _open_files(factory, replace(context, bucket=bucket), refs[bucket], markers[bucket])
            contents[bucket] = files.get(file_name(refs[bucket], DELTA))

        threads = [threading.Thread(target=read, args=(bucket,)) for bucket in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert contents == {bucket: ref.id.encode() * 5_000 for bucket, ref in enumerate(refs)}

    def test_a_closed_restore_stops(self, factory: BackendFactory, context: BackendContext) -> None:
        ref = _new_ref(1)
        markers = _upload(factory, context, ref, b"x")
        restore = factory.restore_manager(context)
        restore.init(Checkpoint(ref, {context.name: markers}))
        files = restore.restore()
        assert files.get(file_name(ref, DELTA)) == b"x"
        restore.close()
        with pytest.raises(InterruptedRestoreError):
            files.get(file_name(ref, DELTA))

    def test_a_file_is_duplicated_whole_or_not_at_all(
        self, factory: BackendFactory, context: BackendContext, elsewhere: Folder
    ) -> None:
        """`Duplicable` is an optional capability: without it the executor copies files itself."""
        ref, content = _new_ref(1), b"Arrow \x00\xff" * 1_000
        files, name = _open_files(factory, context, ref, _upload(factory, context, ref, content)), file_name(ref, DELTA)
        target = elsewhere.child(uuid.uuid4().hex)
        if not isinstance(files, Duplicable):
            assert not hasattr(files, "duplicate_to"), "duplicate_to has another signature"
            return
        is_duplicated = files.duplicate_to(target, name)
        assert target.names() == [name] * is_duplicated
        if not is_duplicated:
            return
        assert target.get(name) == content
        assert files.duplicate_to(target, name), "a repeated task"
        with pytest.raises(MissingCheckpointError):
            files.duplicate_to(target, file_name(_new_ref(2), DELTA))
        target.remove(name)
        assert files.get(name) == content, "each copy is a file of its own"

    # -- resources -----------------------------------------------------------------------------------

    def test_resources_are_made_once_and_seen(self, factory: BackendFactory, context: BackendContext) -> None:
        admin = factory.admin(replace(context, bucket=None, resources={"operator_0.json": b"{}"}))
        with pytest.raises(StateError):
            admin.validate_resources()
        for _ in range(2):
            admin.create_resources()
            admin.validate_resources()

    # -- a bucket's life -----------------------------------------------------------------------------

    def test_a_history_is_restored_at_every_checkpoint(self, factory: BackendFactory, context: BackendContext) -> None:
        with _Life(factory, context) as life:
            for batch in range(12):
                life.run_batch({batch % 5: batch, (batch + 2) % 5: None if batch % 4 == 3 else -batch})
            life.check(range(len(life.pointers)))

    def test_clean_up_leaves_what_is_needed(self, factory: BackendFactory, context: BackendContext) -> None:
        """Clean-up may delete files or not, but files that a retained pointer needs must stay, also when repeated."""
        with _Life(factory, context) as life:
            for batch in range(60):
                life.run_batch({batch % 5: batch})
            deleted = [life.clean_up() for _ in range(2)]
            assert deleted[1] == 0, "the second clean-up finds nothing to delete"
            life.check(range(len(life.pointers) - 1 - _RETAINED, len(life.pointers)))
            for batch in range(20):
                life.run_batch({batch % 5: batch})
            life.check(range(len(life.pointers) - 1 - _RETAINED, len(life.pointers)))

    def test_clean_up_deletes_nothing_while_the_folder_is_held(
        self, factory: BackendFactory, context: BackendContext
    ) -> None:
        """The holder of the query folder may be about to copy files that any of the pointers needs."""
        with _Life(factory, context) as life:
            for batch in range(60):
                life.run_batch({batch % 5: batch})
            before = life.list_restorable()
            assert life.clean_up(held=lambda: True) == 0
            assert life.list_restorable() == before
            life.clean_up()
            life.check(range(len(life.pointers) - 1 - _RETAINED, len(life.pointers)))

    @pytest.mark.parametrize("form", [NATIVE, CANONICAL])
    def test_a_savepoint_needs_nothing_of_the_backend(
        self, factory: BackendFactory, context: BackendContext, elsewhere: Folder, form: str
    ) -> None:
        with _Life(factory, context) as life:
            for batch in range(8):
                life.run_batch({batch % 5: batch, (batch + 2) % 5: None if batch % 4 == 3 else -batch})
            target = elsewhere.child(uuid.uuid4().hex)
            assert life.save(target, form) == life.models[-1]
            life.check(range(len(life.pointers)))


def _new_ref(version: int) -> CheckpointRef:
    return CheckpointRef(version, new_checkpoint_id())


def _upload(factory: BackendFactory, context: BackendContext, ref: CheckpointRef, content: bytes) -> dict[str, str]:
    manager = factory.backup_manager(context)
    manager.init(None)
    prepared = manager.snapshot(ref, {STATE: SealedFile.of(file_name(ref, DELTA), content)})
    markers = manager.upload(ref, prepared).result(WAIT_S)
    manager.close()
    return dict(markers)


def _open_files(
    factory: BackendFactory, context: BackendContext, ref: CheckpointRef, markers: Mapping[str, str]
) -> Readable:
    restore = factory.restore_manager(context)
    restore.init(Checkpoint(ref, {context.name: markers}))
    return restore.restore()


class _Life:
    """The life of a bucket in a backend, with the changelog backend for inline deltas."""

    def __init__(self, factory: BackendFactory, context: BackendContext) -> None:
        self._factory = factory
        self._context = context
        self._uploads = WorkerUploads()
        self._store = LocalStore.at(context.scratch / "store", SCHEMA)
        self._stores = 0
        self.pointers = [Pointer("counts", 3, 8, 0, -1, None, query_folder=context.query_folder)]
        self.models: list[dict[int, int]] = [{}]

    def __enter__(self) -> _Life:
        return self

    def __exit__(self, *exc: object) -> None:
        self._store.close()

    def _make_replicas(self) -> list[Replica]:
        backup, restore = self._factory.backup_manager(self._context), self._factory.restore_manager(self._context)
        return [Replica(self._context.name, backup, restore)]

    def _open_bucket(self, store: LocalStore, pointer: Pointer, replicas: list[Replica] | None = None) -> Bucket:
        writer = Writer("query", "run", len(self.pointers), "host")
        options = CommitOptions(inline_bytes_max=6_000)
        context = CommitContext(self._context.scratch, options, batches_retained=_RETAINED, uploads=self._uploads)
        return Bucket(store, replicas or self._make_replicas(), pointer, writer, context)

    def run_batch(self, changes: Mapping[int, int | None]) -> None:
        rows = SpillBuffer(self._context.scratch, 1 << 20)
        keys, values = list(changes), list(changes.values())
        removed = [value is None for value in values]
        columns = [
            pa.array([key * 0x9E3779B97F4A7C15 % 2**64 for key in keys], pa.uint64()),
            pa.array(keys, pa.int64()),
            pa.array(values, pa.int64()),
            pa.nulls(len(keys), pa.int64()),
            pa.array([not is_removed for is_removed in removed]),
            pa.array(removed),
        ]
        rows.append(sort_by_hash(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)))
        self.pointers.append(self._open_bucket(self._store, self.pointers[-1]).commit(rows).pointer)
        after = {**self.models[-1], **{key: value for key, value in changes.items() if value is not None}}
        self.models.append({key: value for key, value in after.items() if changes.get(key, value) is not None})

    def clean_up(self, held: Callable[[], bool] = lambda: False) -> int:
        """Clean up as of the last pointer but one, which is committed."""
        pointer = self.pointers[-2]
        head = pointer.replication[self._context.name].through
        assert head is not None, "a backend has confirmed something by now"
        (replica,) = self._make_replicas()
        return replica.backup.clean_up(CleanUp(pointer, head, _RETAINED, lambda: None, held=held)).result(WAIT_S)

    def check(self, indices: range) -> None:
        """Check that pointers give the state of their time, each on an empty disk."""
        for index in indices:
            if self.pointers[index].ref is not None:
                assert self._restore(self.pointers[index], self._make_replicas()) == self.models[index]

    def list_restorable(self) -> list[int]:
        """Return which of every fourth pointer can still be restored: not all, if a snapshot has replaced deltas."""
        restorable = []
        for index in range(0, len(self.pointers), 4):
            pointer = self.pointers[index]
            try:
                if pointer.ref is not None and self._restore(pointer, self._make_replicas()) == self.models[index]:
                    restorable.append(index)
            except MissingCheckpointError:
                continue
        return restorable

    def save(self, target: Folder, form: str) -> dict[int, int]:
        """Return the state that a savepoint of the last pointer contains, read from the savepoint alone."""
        scratch = self._context.scratch
        saved_bucket = save_bucket(
            self.pointers[-1], self._make_replicas(), target, form, SCHEMA, scratch, reading=ReadOptions(verify=True)
        ).saved
        pointer = replace(saved_bucket.pointer, replication={"savepoint": ReplicationStatus(saved_bucket.pointer.ref)})
        return self._restore(pointer, sole_replica(target, scratch, "savepoint"))

    def _restore(self, pointer: Pointer, replicas: list[Replica]) -> dict[int, int]:
        """Return the state at a pointer, restored to an empty disk."""
        self._stores += 1
        store = LocalStore.at(self._context.scratch / f"fresh-{self._stores}", SCHEMA)
        try:
            return self._open_bucket(store, pointer, replicas).read(_scan)
        finally:
            store.close()


def _scan(view: View) -> dict[int, int]:
    return {
        key: value
        for batch in view.scan()
        for key, value in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }
