"""Lineage scenarios of one bucket, on a local disk and on a store of objects."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER, bucket_on, buffer_of, committed, first_pointer, state_at

from arrow_schemas import Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name, parse_file_name
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import BATCHES_RETAINED, CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError, StorageError
from spark_state_ext.files import sealed_file as sealed_module
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_file import seal
from spark_state_ext.restore.trace import Trace
from spark_state_ext.store import LocalStore
from spark_state_ext.store.transaction import Writer
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes, good_hash
from spark_state_ext.worker import memory
from spark_state_ext.worker.spill import SpillBuffer


class Replica:
    """A root, and machines that each have a local store."""

    def __init__(self, root: str, local: Path) -> None:
        self.files = Folder(root).child("3")
        self.local = local
        self.local.mkdir()
        self.machines: dict[str, LocalStore] = {}
        self.cadence = SnapshotCadence()

    def machine(self, name: str = "a") -> LocalStore:
        if name not in self.machines:
            self.machines[name] = LocalStore.at(self.local / name, SCHEMA, chunk_rows=4)
        return self.machines[name]

    def lose(self, name: str = "a") -> None:
        """Lose a machine with its local store."""
        self.machines.pop(name).close()
        shutil.rmtree(self.local / name)

    def commit(self, pointer: Pointer, changes: Changes, machine: str = "a") -> Pointer:
        return committed(self.machine(machine), self.files, pointer, changes, self.local, self.cadence)

    def state(self, pointer: Pointer, machine: str = "a") -> Model:
        return state_at(self.machine(machine), self.files, pointer, self.local)

    def history(self, count: int, machine: str = "a") -> tuple[list[Pointer], list[Model]]:
        pointers = [first_pointer()]
        models: list[Model] = [{}]
        for i in range(count):
            changes: Changes = {KEYS[i % 9]: Row(i), KEYS[(i + 4) % 9]: None if i % 4 == 3 else Row(-i, "n", i + 1)}
            pointers.append(self.commit(pointers[-1], changes, machine))
            models.append(apply_changes(models[-1], changes))
        return pointers, models

    def name(self, pointer: Pointer, kind: str) -> str:
        assert pointer.ref is not None
        return file_name(pointer.ref, kind)

    def remove(self, name: str) -> None:
        self.files._fs.rm_file(f"{self.files._path}/{name}")

    def damage(self, name: str) -> None:
        data = bytearray(self.files.get(name))
        data[len(data) // 3] ^= 0xFF
        self.files.put(name, bytes(data))

    def snapshots(self) -> list[str]:
        return [n for n in self.files.names() if (parse_file_name(n) or (None, ""))[1] == SNAPSHOT]


@pytest.fixture(params=["disk", "objects"])
def replica(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replica]:
    root = str(tmp_path / "root") if request.param == "disk" else f"memory://{uuid.uuid4().hex}"
    new_replica = Replica(root, tmp_path / "local")
    yield new_replica
    for store in new_replica.machines.values():
        store.close()


@pytest.fixture
def frequent_snapshots(replica: Replica) -> None:
    """Write a snapshot after every third delta."""
    replica.cadence = SnapshotCadence(3, 3)


def test_each_commit_adds_a_checkpoint_to_the_lineage(replica: Replica) -> None:
    pointers, models = replica.history(3)
    assert [p.version for p in pointers] == [0, 1, 2, 3]
    assert [replica.state(p) for p in pointers] == models
    assert [len(p.lineage) for p in pointers] == [0, 1, 2, 3]
    entry = pointers[3].lineage[-1]
    assert entry.size_bytes == replica.files.size(file_name(entry.ref, DELTA))


def test_a_call_without_changes_makes_no_checkpoint(replica: Replica) -> None:
    pointers, _ = replica.history(1)
    names = replica.files.names()
    after = replica.commit(pointers[1], {})
    assert after == replace(pointers[1], calls=2, heartbeats=2, retained_heartbeat=2)
    assert replica.files.names() == names


def test_an_unchanged_bucket_writes_a_new_file_after_a_number_of_heartbeats(replica: Replica) -> None:
    """Clean-up regards a file that is older than two renewals as part of an unused lineage."""
    pointers, models = replica.history(1)
    pointer, renewed = pointers[1], []
    for call in range(2, 3 * BATCHES_RETAINED):
        after = replica.commit(pointer, {})
        assert after.calls == after.heartbeats == call
        if after.ref != pointer.ref:
            renewed.append(call)
            writer = read_header(replica.files, after.lineage[-1].ref, DELTA).writer
            assert (writer.heartbeat, after.lineage[-1].heartbeat) == (call, call)
        pointer = after
    assert renewed == [BATCHES_RETAINED + 2, 2 * BATCHES_RETAINED + 3]
    assert replica.state(pointer) == models[1]


def test_a_call_for_timeouts_only_is_not_a_heartbeat(replica: Replica) -> None:
    pointers, _ = replica.history(1)
    bucket = Bucket(
        replica.machine(), sole_replica(replica.files, replica.local), pointers[1], WRITER, CommitContext(replica.local)
    )
    after = bucket.commit(buffer_of({KEYS[0]: Row(5)}, replica.local), heartbeat=False).pointer
    assert (after.calls, after.heartbeats, after.lineage[-1].heartbeat) == (2, 1, 1)


def test_a_store_one_version_behind_a_new_snapshot_fetches_only_the_delta(
    replica: Replica, frequent_snapshots: None
) -> None:
    pointers, models = replica.history(4)
    behind, fresh = pointers[3], pointers[4]
    assert (len(behind.lineage), len(fresh.lineage)) == (3, 1)
    assert replica.state(behind, "b") == models[3]
    bucket = bucket_on(replica.machine("b"), replica.files, fresh, replica.local)
    assert bucket.read(lambda view: len(view.runs)) == 4
    assert bucket.fetched_files == 1
    assert replica.state(fresh, "b") == models[4]
    # Without that delta the snapshot serves.
    replica.remove(replica.name(fresh, DELTA))
    assert replica.state(behind, "c") == models[3]
    assert replica.state(fresh, "c") == models[4]


def test_a_lost_local_store_is_restored(replica: Replica) -> None:
    pointers, models = replica.history(6)
    replica.lose()
    assert replica.state(pointers[6]) == models[6]
    assert replica.state(pointers[4], "other") == models[4]


def test_only_missing_versions_are_fetched(replica: Replica) -> None:
    pointers, models = replica.history(5)
    replica.state(pointers[3], "b")
    bucket = bucket_on(replica.machine("b"), replica.files, pointers[5], replica.local)
    assert bucket.read(lambda view: view.rows_max) > 0
    assert bucket.fetched_files == 2
    again = bucket_on(replica.machine("b"), replica.files, pointers[5], replica.local)
    again.read(lambda view: view.rows_max)
    assert again.fetched_files == 0
    assert replica.state(pointers[5], "b") == models[5]


def test_each_retry_makes_its_own_checkpoint_of_the_same_state(replica: Replica) -> None:
    pointers, models = replica.history(2)
    changes: Changes = {KEYS[0]: Row(7)}
    attempts = [replica.commit(pointers[2], changes, machine) for machine in ("a", "a", "b")]
    assert len({p.ref for p in attempts}) == 3, "each invocation makes its own checkpoint"
    for pointer in attempts:
        for machine in ("a", "b", "c"):
            assert replica.state(pointer, machine) == apply_changes(models[2], changes)


def test_two_jobs_can_continue_from_one_checkpoint(replica: Replica) -> None:
    pointers, models = replica.history(3)
    left, right, left_model, right_model = pointers[3], pointers[3], models[3], models[3]
    for i in range(4):
        left = replica.commit(left, {KEYS[i]: Row(100 + i)}, "left")
        right = replica.commit(right, {KEYS[i]: Row(200 + i)}, "right")
        left_model = apply_changes(left_model, {KEYS[i]: Row(100 + i)})
        right_model = apply_changes(right_model, {KEYS[i]: Row(200 + i)})
    for machine in ("left", "right", "a"):
        assert replica.state(left, machine) == left_model
        assert replica.state(right, machine) == right_model


@pytest.mark.usefixtures("frequent_snapshots")
def test_snapshots_shorten_the_lineage(replica: Replica) -> None:
    pointers, models = replica.history(12)
    assert max(len(p.lineage) for p in pointers) <= 4
    assert len(replica.snapshots()) >= 2
    # The local store has merged the runs before the last snapshot, so older pointers are loaded from files.
    for pointer, model in reversed(list(zip(pointers, models, strict=True))):
        assert replica.state(pointer) == model
    replica.lose()
    bucket = bucket_on(replica.machine(), replica.files, pointers[12], replica.local)
    bucket.read(lambda view: view.rows_max)
    assert bucket.fetched_files == len(pointers[12].lineage)


@pytest.mark.usefixtures("frequent_snapshots")
@pytest.mark.parametrize("harm", ["remove", "damage"])
@pytest.mark.parametrize("count", [1, 2, 99])
def test_a_load_without_snapshots_goes_further_back_in_the_lineage(replica: Replica, harm: str, count: int) -> None:
    pointers, models = replica.history(14)
    by_version = sorted(replica.snapshots(), key=lambda n: parse_file_name(n)[0], reverse=True)  # type: ignore[index]
    for name in by_version[:count]:
        getattr(replica, harm)(name)
    replica.lose()
    assert replica.state(pointers[14]) == models[14]
    after = replica.commit(pointers[14], {KEYS[0]: None})
    assert replica.state(after) == apply_changes(models[14], {KEYS[0]: None})


@pytest.mark.usefixtures("frequent_snapshots")
def test_a_checkpoint_whose_snapshot_and_delta_are_lost_is_an_error(replica: Replica) -> None:
    pointers, models = replica.history(9)
    ref = pointers[9].lineage[0].ref
    replica.remove(file_name(ref, SNAPSHOT))
    replica.remove(file_name(ref, DELTA))
    with pytest.raises(
        MissingCheckpointError, match=f"checkpoint {pointers[9].ref} of bucket 3 of operator 'counts'.*{ref}"
    ):
        replica.state(pointers[9], "fresh")
    # The local store still has the whole state, so it needs no file.
    assert replica.state(pointers[9]) == models[9]


@pytest.mark.parametrize("harm", ["remove", "damage"])
def test_a_missing_or_damaged_delta_is_an_error_that_names_the_checkpoint(replica: Replica, harm: str) -> None:
    pointers, models = replica.history(5)
    name = replica.name(pointers[3], DELTA)
    data = replica.files.get(name)
    getattr(replica, harm)(name)
    names = replica.files.names()
    expected = MissingCheckpointError if harm == "remove" else CorruptFileError
    with pytest.raises(expected, match=f"checkpoint {pointers[5].ref} of bucket 3.*{pointers[3].ref}"):
        replica.state(pointers[5], "fresh")
    with pytest.raises(expected):
        replica.commit(pointers[5], {KEYS[0]: Row(1)}, "fresh")
    # The other state is intact, and the missing state is back once the file is restored.
    assert replica.state(pointers[2], "fresh") == models[2]
    assert set(names) <= set(replica.files.names())
    replica.files.put(name, data)
    assert replica.state(pointers[5], "fresh") == models[5]


def test_a_snapshot_replaces_a_lost_delta(replica: Replica) -> None:
    """A snapshot by another attempt, or one whose pointer was never committed, has the same rows."""
    pointers, models = replica.history(4)
    bucket = bucket_on(replica.machine(), replica.files, pointers[3], replica.local)
    assert pointers[4].ref is not None
    view = replica.machine().view(pointers[4].ref)
    sealed = seal(bucket.header(pointers[4].ref, SNAPSHOT), SCHEMA, view.scan(), replica.local)
    bucket.committer.snapshots.send(pointers[4].ref, sealed, ["files"])
    replica.remove(replica.name(pointers[4], DELTA))
    assert replica.state(pointers[4], "fresh") == models[4]


def test_files_of_another_bucket_are_refused(replica: Replica) -> None:
    pointers, _ = replica.history(1)
    wrong = replace(pointers[1], bucket=4)
    with pytest.raises(LineageError, match="belongs to bucket 3 of operator 'counts'"):
        replica.state(wrong, "fresh")


def test_a_delta_of_a_failed_attempt_does_not_change_the_state(replica: Replica) -> None:
    pointers, models = replica.history(2)
    # An attempt writes its delta and dies; the restart commits another delta; the late file changes nothing.
    late = replica.commit(pointers[2], {KEYS[0]: Row(-1)}, "dying")
    new = replica.commit(pointers[2], {KEYS[0]: Row(1)}, "b")
    assert replica.files.exists(replica.name(late, DELTA))
    for machine in ("a", "b", "dying", "fresh"):
        assert replica.state(new, machine) == apply_changes(models[2], {KEYS[0]: Row(1)})


@pytest.mark.usefixtures("frequent_snapshots")
def test_a_bucket_whose_keys_are_all_deleted_can_be_restored(replica: Replica) -> None:
    """A snapshot may have no rows."""
    pointer = replica.commit(first_pointer(), {KEYS[0]: Row(1), KEYS[1]: Row(2)})
    model: Model = {}
    for changes in [{KEYS[0]: None, KEYS[1]: None}] * 5:
        pointer = replica.commit(pointer, changes)
        assert replica.state(pointer) == {}
    assert replica.snapshots()
    replica.lose()
    assert replica.state(pointer) == {}
    pointer = replica.commit(pointer, {KEYS[2]: Row(3)})
    assert replica.state(pointer) == apply_changes(model, {KEYS[2]: Row(3)})


@pytest.mark.usefixtures("frequent_snapshots")
def test_a_batch_is_committed_even_if_its_snapshot_cannot_be_written(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Snapshots are optional: the batch is committed by its delta, and a later commit writes another one."""

    def refuse(self: Folder, name: str, path: object) -> None:
        assert SNAPSHOT in name
        raise StorageError(f"writing {name}: no")

    pointers, models = replica.history(2)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "spark_state_ext"):
        patched.setattr(Folder, "put_file", refuse)
        for i in range(4):
            pointers.append(replica.commit(pointers[-1], {KEYS[i]: Row(i)}))
            models.append(apply_changes(models[-1], {KEYS[i]: Row(i)}))
    assert "snapshot.arrow: no" in caplog.text
    assert replica.snapshots() == []
    # Pointers name the snapshot as unconfirmed although it failed; a load goes further back in the lineage.
    assert [len(pointer.lineage) for pointer in pointers] == [0, 1, 2, 3, 1, 2, 3]
    for pointer, model in zip(pointers, models, strict=True):
        assert replica.state(pointer, "fresh") == model
    pointers.append(replica.commit(pointers[-1], {KEYS[0]: None}))
    models.append(apply_changes(models[-1], {KEYS[0]: None}))
    assert [pointer.snapshots_missed for pointer in pointers[-2:]] == [0, 1]
    assert len(replica.snapshots()) == 1
    for pointer, model in zip(pointers, models, strict=True):
        assert replica.state(pointer, "fresh") == model


def test_memory_is_released_once_after_a_large_batch(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    released_bytes: list[int] = []
    monkeypatch.setattr(memory, "release_memory", released_bytes.append)
    calls, pointer = memory.CallSizes(), first_pointer()
    backlog: Changes = {key: Row(i, "n" * 10_000) for i, key in enumerate(KEYS)}
    for changes in (backlog, *({KEYS[0]: Row(i)} for i in range(5))):
        replicas = sole_replica(replica.files, replica.local)
        bucket = Bucket(replica.machine(), replicas, pointer, WRITER, CommitContext(replica.local), memory=calls)
        pointer = bucket.commit(buffer_of(changes, replica.local)).pointer
    (after_bytes,) = released_bytes
    assert after_bytes > len(KEYS) * 10_000


def _spoil_chunks(txn: Writer) -> None:
    for key, value in [(key, bytes(value)) for key, value in txn.items(b"chunks")]:
        txn.put(b"chunks", key, value[:-1] + bytes([value[-1] ^ 0xFF]))


def test_a_damaged_local_store_is_restored_from_files(replica: Replica) -> None:
    """The local store is only a cache: if it is damaged, the checkpoint files are still intact."""
    pointers, models = replica.history(9)
    store = replica.machine()

    for step in ("read", "commit", "merge"):
        store._chunks.forget_all()
        store._environment.write(_spoil_chunks)
        if step == "read":
            assert replica.state(pointers[-1]) == models[-1]
        else:
            # A commit that only writes does not read the damaged chunks unless it compacts.
            changes: Changes = {KEYS[i]: Row(i) for i in range(5 if step == "merge" else 1)}
            pointers.append(replica.commit(pointers[-1], changes))
            models.append(apply_changes(models[-1], changes))
            assert replica.state(pointers[-1]) == models[-1]


@pytest.mark.usefixtures("frequent_snapshots")
def test_a_snapshot_of_a_damaged_local_store_has_the_right_rows(replica: Replica) -> None:
    pointers, models = replica.history(3)
    store = replica.machine()
    store._chunks.forget_all()

    store._environment.write(_spoil_chunks)
    pointer = replica.commit(pointers[3], {KEYS[0]: Row(3)})
    assert len(pointer.lineage) == 1, "the snapshot was written"
    assert replica.state(pointer, "fresh") == apply_changes(models[3], {KEYS[0]: Row(3)})
    assert replica.state(pointer) == apply_changes(models[3], {KEYS[0]: Row(3)})


@pytest.mark.usefixtures("frequent_snapshots")
def test_damage_that_only_a_snapshot_reads_is_repaired(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    """Calls that change other keys do not read runs that are too large to be merged."""
    store = replica.machines["a"] = LocalStore.at(replica.local / "a", SCHEMA, chunk_rows=4, compaction_bytes_max=1)
    pointers, models = replica.history(3)
    store._chunks.forget_all()
    store._environment.write(_spoil_chunks)
    pointer, model = pointers[3], models[3]
    for number in range(4):
        changes: Changes = {KEYS[0]: Row(number)}
        pointer, model = replica.commit(pointer, changes), apply_changes(model, changes)
    assert caplog.text.count("do not match the manifest") == 1, "the next snapshot was written"
    assert replica.state(pointer, "fresh") == replica.state(pointer) == model


def test_a_read_is_repeated_if_its_runs_are_pruned_meanwhile(replica: Replica) -> None:
    pointers, models = replica.history(8)
    replica.state(pointers[8], "fresh")
    store = replica.machine("fresh")
    bucket = bucket_on(store, replica.files, pointers[8], replica.local)
    rounds = 0

    def read(view: object) -> int:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            assert store.compact(pointers[8].ref) is not None
            store.prune(pointers[8].ref)
        return sum(batch.num_rows for batch in view.scan())  # type: ignore[attr-defined]

    assert bucket.read(read) == len(models[8])
    assert rounds == 2
    assert bucket.fetched_files == 0, "the merged run has everything"


def test_large_deltas_pass_through_a_temporary_local_file(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_module, "MEMORY_BYTES_MAX", 10)
    pointers, models = replica.history(3)
    assert replica.state(pointers[3], "fresh") == models[3]
    assert not [p for p in replica.local.iterdir() if p.is_file()]


def test_a_missing_scratch_folder_is_an_error_and_the_state_is_kept(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_module, "MEMORY_BYTES_MAX", 10)
    pointers, models = replica.history(1)
    bucket = bucket_on(replica.machine(), replica.files, pointers[1], replica.local / "gone")
    with pytest.raises(StorageError, match="gone"):
        bucket.commit(buffer_of({KEYS[0]: Row(5)}, replica.local))
    assert replica.state(pointers[1]) == models[1]


def test_spilled_rows_are_committed(replica: Replica) -> None:
    rows = SpillBuffer(replica.local, 1)
    model: Model = {}
    for i, key in enumerate(sorted(KEYS, key=good_hash)):
        for batch in buffer_of({key: Row(i)}, replica.local):
            rows.append(batch)
        model = apply_changes(model, {key: Row(i)})
    assert rows.spilled_bytes > 0
    pointer = bucket_on(replica.machine(), replica.files, first_pointer(), replica.local).commit(rows).pointer
    assert replica.state(pointer, "fresh") == model


def test_two_attempts_can_restore_one_local_store_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt restores the store while this attempt looks for a replacement of a missing snapshot."""
    replicas = sole_replica(Folder(str(tmp_path / "root")).child("3"), tmp_path)
    pointer = first_pointer()
    source = LocalStore.at(tmp_path / "source", SCHEMA)
    for n in range(3):
        buffer = buffer_of({KEYS[n]: Row(n)}, tmp_path)
        pointer = Bucket(source, replicas, pointer, WRITER, CommitContext(tmp_path)).commit(buffer).pointer
    # The lineage begins at a checkpoint whose snapshot has not arrived yet.
    pointer = replace(pointer, lineage=pointer.lineage[-1:])
    store = LocalStore.at(tmp_path / "store", SCHEMA)
    mine, other = (Bucket(store, replicas, pointer, WRITER, CommitContext(tmp_path)) for _ in range(2))
    trace_back = Trace.trace_back

    def trace_late(trace: Trace, chain: Any) -> Any:
        traced = trace_back(trace, chain)
        monkeypatch.setattr(Trace, "trace_back", trace_back)
        assert other.read(lambda view: view.rows_max) == 3
        return traced

    monkeypatch.setattr(Trace, "trace_back", trace_late)
    assert mine.read(lambda view: view.rows_max) == 3
