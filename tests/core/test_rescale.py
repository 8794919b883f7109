"""Rescaling from any number of buckets to any other, in the core and without Spark, compared with a dict."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import rescaled_query
from core_support import change_sets
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from reading_support import Job as OldJob
from reading_support import operator_file
from rescaled_query import Later, RescaledQuery, job_from
from small_root import savepoint_of

from arrow_schemas import BucketMap, Pointer
from arrow_schemas.erase import EraseDone, EraseRequest
from arrow_schemas.savepoint import CANONICAL, NATIVE
from spark_state_ext import Savepoint
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import is_complete
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import LiveRunError, StorageError, UsageError
from spark_state_ext.files.erase_requests import EraseFolder, EraseNumbers
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.rescale.origin import Origin, read_rows_of_parent
from spark_state_ext.rescale.parents import Parent, note_parent, parent_files
from spark_state_ext.rescale.parents_notes import FREE, NEEDED, ParentsNote, note_free, parse_notes
from spark_state_ext.rescale.removal import Finishing, may_remove
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.start_records import StartRecord, note_start
from spark_state_ext.store import View
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, find_expired, make_model
from tests.helpers.soak import examples

COUNTS = st.integers(1, 64)


def old_job(folder: Path, buckets: int, batches: list[dict[tuple[object, ...], Row | None]]) -> OldJob:
    job = OldJob(folder / "old", folder / "old-local", buckets=buckets)
    for changes in batches:
        job.batch(changes)
    return job


def rescaled(folder: Path, old: OldJob, bucket_map: BucketMap, form: str = NATIVE) -> RescaledQuery:
    savepoint_of(old, folder / "savepoint", form)
    job = job_from(folder / "new", old, bucket_map, Savepoint(str(folder / "savepoint")))
    return RescaledQuery(job, folder, old.models[-1] if old.models else {})


def expired_before(now_ms: int, view: View) -> Model:
    return make_model([view.expired(now_ms)])


def check_state(query: RescaledQuery) -> None:
    assert query.state() == query.model
    assert query.restored() == query.model
    for now_ms in (5, 18, 31):
        expired: Model = {}
        for bucket in range(query.bucket_map.buckets):
            expired |= query.called(bucket, partial(Bucket.read, work=partial(expired_before, now_ms)))
        assert expired == find_expired(query.model, now_ms)


@given(COUNTS, COUNTS, st.lists(change_sets(), max_size=4), st.lists(change_sets(), max_size=3), st.data())
@settings(max_examples=examples(5, 400), phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_a_query_can_be_rescaled_to_any_number_of_buckets(
    n: int, m: int, before: list[Any], after: list[Any], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old = old_job(folder, n, before)
        query = rescaled(folder, old, BucketMap(m), data.draw(st.sampled_from([NATIVE, CANONICAL])))
        for _ in range(data.draw(st.integers(1, 2))):
            query.start()
        old.close()
        shutil.rmtree(folder / "savepoint")
        shutil.rmtree(folder / "old")
        check_state(query)
        for changes in after:
            query.batch(changes, attempts=data.draw(st.integers(1, 2)))
            if data.draw(st.booleans()):
                query.runner.do()
            if data.draw(st.booleans()):
                query.lose_disks()
            check_state(query)


@pytest.fixture
def old(tmp_path: Path) -> OldJob:
    """A job of three buckets with all keys: some changed twice, some removed, some with a timeout."""
    return old_job(
        tmp_path,
        3,
        [
            {key: Row(at, "first", at) for at, key in enumerate(KEYS)},
            {key: None if at % 5 == 0 else Row(at, "again", 20) for at, key in enumerate(KEYS[:12])},
        ],
    )


def test_a_bucket_no_longer_needs_its_parents_after_its_own_snapshot(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(8))
    query.start()
    assert all(pointer.parents is not None for pointer in query.pointers)
    query.batch({key: Row(6) for key in KEYS})
    # Not in the background either, because that would take cores from the first batch.
    query.runner.do()
    assert not list((tmp_path / "new").rglob("*.snapshot.arrow")), "no row was rewritten"
    query.batch({key: Row(7) for key in KEYS})
    assert all(pointer.parents is not None for pointer in query.pointers), "no snapshot has arrived"
    query.lose_disks()
    check_state(query)
    # The first snapshot was lost with its process; the next one is written when it is due.
    for at in range(14):
        query.batch({key: Row(at) for key in KEYS})
        query.runner.do()
    assert [pointer.parents for pointer in query.pointers] == [None] * 8
    shutil.rmtree(Path(query.folder.child(PARENTS_FOLDER).root))
    query.lose_disks()
    check_state(query)


def test_clean_up_keeps_needed_files(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(2))
    query.cadence = SnapshotCadence(1, 3)
    query.start()
    deleted = 0
    for at in range(60):
        query.batch({KEYS[at % 7]: Row(at), KEYS[at % 11]: None if at % 3 else Row(-at)})
        if at % 2:
            query.runner.do()
        deleted += query.cleaned_up(now_s=4e9)
        if at % 5 == 0:
            query.lose_disks()
        assert query.state() == query.model
    assert deleted > 0


def test_a_single_bucket_can_be_split(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap.split(3, {1: 4}))
    query.start()
    check_state(query)
    assert query.bucket_map.buckets == 6


def test_buckets_of_empty_parents_begin_without_state(tmp_path: Path) -> None:
    job = old_job(tmp_path, 4, [{KEYS[0]: Row(1)}])
    query = rescaled(tmp_path, job, BucketMap(64))
    query.start()
    assert sum(pointer.ref is not None for pointer in query.pointers) == 16
    check_state(query)
    query.batch({key: Row(2) for key in KEYS})
    check_state(query)


def test_an_old_folder_that_cannot_be_removed_after_a_rescale_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The parents are in a backend that the query no longer has, so it is unknown when they are no longer needed."""
    operator_folder, own = Folder(str(tmp_path)), [f"query.r{number * 12}" for number in "12"]
    for name in ("query", *own, "theirs"):
        operator_folder.child(name, "0").put("1_a.delta.arrow", b"")
    pointer = Pointer("counts", 0, 1, 0, 90, None, query_folder=own[0], heartbeats=90)

    def list_reported(name: str, plan: str = "plan") -> list[str]:
        background, nothing, finishing = Later(), lambda *_: None, Finishing()
        caplog.clear()
        # A folder that could still be written to is checked twice.
        for _ in range(2):
            finishing.in_turn([operator_folder], name, plan, pointer, 2, nothing, lambda _: False, background)
            background.do()
        return sorted(record.getMessage().split(" remains after a rescaling")[0] for record in caplog.records)

    # The folder of this plan's rescaling is in use; folders of failed rescalings are removed.
    assert list_reported("query", f"{'1' * 12}{'0' * 20}") == []
    assert operator_folder.names() == ["query", own[0], "theirs"]
    assert list_reported(own[0]) == [operator_folder.child("query").root]
    assert list_reported("theirs") == []
    assert operator_folder.names() == ["query", own[0], "theirs"]


def test_a_second_attempt_must_read_the_same_state_as_the_first(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(5))
    query.start()
    first = query.pointers
    query.start()
    assert query.pointers == first
    old.batch({KEYS[1]: Row(99)})
    shutil.rmtree(tmp_path / "savepoint")
    other = rescaled(tmp_path, old, BucketMap(5))
    with pytest.raises(Exception, match="has another state of bucket 0 than this rescaling reads"):
        other.start()


def test_parents_are_removed_once_no_pointer_that_spark_may_hand_out_needs_them(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(5))
    query.start()
    parents = Path(query.folder.child(PARENTS_FOLDER).root)
    # An earlier attempt's folder in a second backend, and another query's folder.
    other = Folder(str(tmp_path / "other" / "counts"))
    before, theirs = (other.child(f"{name}.r{12 * '0'}", "0") for name in (query.name, "theirs"))
    for folder in (before, theirs):
        folder.put("1_a.delta.arrow", b"")

    def turn() -> bool:
        """Run the first bucket's part of the clean-up, and return whether the parents are gone."""
        background = Later()
        query.finishing.in_turn(
            [Folder(query.job.options.root).child("counts"), other],
            query.name,
            "plan",
            query.pointers[0],
            query.retained,
            lambda: None,
            lambda name: False,
            background,
        )
        background.do()
        return not parents.exists()

    changes = {key: Row(1) for key in KEYS}
    for _ in range(3 * query.retained + 9):
        query.batch(changes)
        assert not turn(), "no bucket has a snapshot of its own"
    query.runner.do()
    older = query.pointers
    query.batch(changes)
    query.batch(changes)
    assert [pointer.parents for pointer in query.pointers] == [None] * 5
    # Spark may still hand out older pointers, for a restart from an earlier batch.
    assert not turn()
    query.pointers = older
    query.lose_disks()
    assert query.restored() == query.model
    batches = 0
    while not turn():
        query.batch(changes)
        query.runner.do()
        batches += 1
    assert batches > 3 * query.retained + 3
    assert parents.exists() is False
    assert not before.names()
    assert theirs.names()
    query.lose_disks()
    check_state(query)


NOTES = st.builds(ParentsNote, st.integers(0, 3), st.sampled_from([FREE, NEEDED]), st.integers(0, 30))


@given(st.integers(0, 30), st.integers(0, 3), st.integers(1, 4), st.lists(NOTES, max_size=8))
def test_may_remove_needs_free_buckets(heartbeats: int, retained: int, buckets: int, notes: list[ParentsNote]) -> None:
    first_handed_out = heartbeats - (3 * (retained + 1) + 2)
    free = [any(note.bucket == bucket and note.kind == FREE for note in notes) for bucket in range(buckets)]
    recent = any(note.heartbeats >= first_handed_out for note in notes)
    assert may_remove(heartbeats, retained, buckets, notes) == (all(free) and not recent)
    assert parse_notes([*(note.name for note in notes), "0.parent.json", "0", "00.free-1", "0.free-"]) == notes


def test_a_new_backend_gets_the_whole_state_of_each_bucket(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(5))
    query.start()
    query.batch({key: Row(1) for key in KEYS})
    assert all(pointer.parents for pointer in query.pointers)
    # The plan has another backend than before, or that backend has lost files.
    query.pointers = [
        replace(pointer, replication={"gone": next(iter(pointer.replication.values()))}) for pointer in query.pointers
    ]
    query.batch({KEYS[0]: Row(2)})
    for pointer in query.pointers:
        assert [is_complete(status) for status in pointer.replication.values()] == [True]
    query.lose_disks()
    shutil.rmtree(Path(query.folder.child(PARENTS_FOLDER).root))
    query.pointers = [replace(pointer, parents=None) for pointer in query.pointers]
    check_state(query)


def test_a_parent_stays_the_same_after_its_snapshot_has_arrived(tmp_path: Path, old: OldJob) -> None:
    pointer = replace(old.pointers[-1][0], query_folder="query")
    assert pointer.ref is not None
    assert pointer.version > 1
    source, target = old.folder.child("0"), Folder(str(tmp_path / "new"))
    operator = operator_file("counts", "query", 3)

    def bring_parent() -> Parent:
        """Return the parent that a call would bring now."""
        files = parent_files(target, 0)
        saved = save_bucket(pointer, sole_replica(source, tmp_path, source.root), files, NATIVE, SCHEMA, tmp_path).saved
        return Parent(operator, saved)

    first = bring_parent()
    assert note_parent(target, first) == first
    whole = save_bucket(
        pointer, sole_replica(source, tmp_path, source.root), source, CANONICAL, SCHEMA, tmp_path
    ).saved.files
    pointer = replace(pointer, lineage=pointer.lineage[-1:])
    second = bring_parent()
    assert second.saved.files == whole != first.saved.files
    assert note_parent(target, second).encode() == first.encode()
    files = parent_files(target, 0)
    models = [
        make_model(read_rows_of_parent(files, parent, 0, 1 << 32, SCHEMA, tmp_path)) for parent in (first, second)
    ]
    assert models[0] == models[1]
    assert models[0]


def test_a_restart_from_an_earlier_batch_needs_its_parents_again(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(5))
    query.start()
    finishing = Finishing()

    def list_needed(committed: Pointer) -> list[int]:
        finishing.noted([query.folder], committed, committed, lambda: None)
        notes = parse_notes(query.folder.child(PARENTS_FOLDER).names())
        assert all(note.bucket == 0 for note in notes)
        return sorted(note.heartbeats for note in notes if note.kind == NEEDED)

    pointers = [replace(query.pointers[0], heartbeats=at) for at in range(10, 13)]
    # No note says that the bucket is free of its parents.
    assert list_needed(pointers[0]) == []
    # Another process of the query was further ahead, and the query restarts from an earlier batch.
    note_free(query.folder, 0, 15)
    assert list_needed(pointers[1]) == [11]
    assert list_needed(pointers[1]) == [11]
    assert list_needed(pointers[2]) == [11, 12]


def test_reading_parents_may_take_longer_than_the_commit_timeout(
    tmp_path: Path, old: OldJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = rescaled(tmp_path, old, BucketMap(2))
    query.start()
    options, rows_of = CommitOptions(journal=False, commit_timeout_ms=400), Origin._read_rows

    def read_slowly(origin: Origin, parents: list[Parent]) -> Iterator[pa.RecordBatch]:
        time.sleep(1)
        yield from rows_of(origin, parents)

    monkeypatch.setattr(Origin, "_read_rows", read_slowly)
    monkeypatch.setattr(rescaled_query, "CommitContext", partial(CommitContext, options=options))
    assert query.restored() == query.model


def test_a_bucket_keeps_its_parents_if_a_complete_backend_is_removed(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(5))
    query.start()
    begun = query.pointers[0]
    (status,) = begun.replication.values()
    lags, has_all = {"lags": status}, {"has all": replace(status, since=None)}
    whole = replace(begun, replication=has_all | lags)
    finishing, notes = Finishing(), query.folder.child(PARENTS_FOLDER)

    def accept() -> None:
        """This run still has the lease."""

    def refuse() -> None:
        raise LiveRunError("another run has taken the state over")

    with pytest.raises(LiveRunError):
        finishing.noted([query.folder], whole, whole, refuse)
    assert finishing.noted([query.folder], whole, replace(begun, replication=lags), accept).parents == begun.parents
    assert not [name for name in notes.names() if ".free-" in name]
    assert finishing.noted([query.folder], whole, whole, accept).parents is None
    assert notes.exists(f"0.free-{begun.heartbeats}")
    # The query now has other backends, and its parents are in the backend that was first at the time.
    other = replace(whole, bucket=1)
    assert finishing.noted([Folder(str(tmp_path / "other")), query.folder], other, other, accept).parents is None
    assert notes.exists(f"1.free-{begun.heartbeats}")
    # The query restarts from an earlier batch after all parents were removed: a note would never be removed.
    query.folder.remove_tree(PARENTS_FOLDER)
    assert finishing.noted([query.folder], whole, whole, accept).parents is None
    assert notes.names() == []


def test_a_rescale_with_erase_within_s_is_refused(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(5))
    options = query.job.options
    strict = replace(options, commit=replace(options.commit, erase_window_ms=600_000, journal=False))
    query.job = replace(query.job, options=strict)
    with pytest.raises(UsageError, match="cannot be combined with erase_within_s"):
        query.start()
    with pytest.raises(UsageError, match="rescale cannot be combined with erase_within_s"):
        replace(strict, start_from=None, rescale="/checkpoint")


def make_request() -> EraseRequest:
    keys = pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array([1.5])], schema=pa.schema(list(SCHEMA.keys)))
    return EraseRequest("ab" * 16, "counts", 1, keys, "0")


def make_finished(folder: Path, old: OldJob) -> tuple[RescaledQuery, Folder, Callable[[], None]]:
    """Return a query that no longer needs the folder it was rescaled from, its operator folder, and a turn of removal."""
    query = rescaled(folder, old, BucketMap(2))
    query.name = "query.r0123456789ab"
    query.start()
    operator = Folder(query.job.options.root).child("counts")
    source = operator.child("query").root
    note_start(query.folder, StartRecord("rescale", source, "", 50, "no_claim", "counts", heartbeats=20))
    for bucket in range(2):
        query.folder.child(PARENTS_FOLDER).create(f"{bucket}.free-1", b"")
    pointer = replace(query.pointers[0], heartbeats=100)

    def turn() -> None:
        background = Later()
        query.finishing.in_turn(
            [operator], query.name, "plan", pointer, query.retained, lambda: None, lambda name: False, background
        )
        background.do()

    return query, operator, turn


def test_an_old_folder_is_removed_after_its_erase_requests_are_copied(tmp_path: Path, old: OldJob) -> None:
    """A request was added during the rescaling. An interrupted removal is completed."""
    query, operator, turn = make_finished(tmp_path, old)
    requests = EraseFolder(operator.child("query"))
    requests.add(make_request())
    requests.files.put("00000002.keys.arrow", b"damaged")
    notes = query.folder.child(PARENTS_FOLDER)
    for _ in range(3):
        turn()
    assert "query" in operator.names(), "one of its requests cannot be read"
    assert len(notes.names()) > 2
    requests.files.remove("00000002.keys.arrow")
    turn()
    assert operator.names() == [query.name]
    assert EraseFolder(query.folder).request(1).id == "ab" * 16
    assert not EraseFolder(query.folder).numbers().requests - {1}
    assert notes.names() == []
    for bucket in range(2):
        notes.create(f"{bucket}.free-1", b"")
    query.finishing = Finishing()
    turn()
    assert notes.names() == []


def test_a_request_is_not_carried_out_again_if_the_removal_of_its_folder_stops(
    tmp_path: Path, old: OldJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, operator, turn = make_finished(tmp_path, old)
    requests, remove_tree = EraseFolder(operator.child("query")), Folder.remove_tree
    # The folder was claimed since, so its new owner's batches, from which the query was rescaled, have lower numbers.
    requests.note_done(requests.add(make_request()), EraseDone("ab" * 16, 1, 1, 2, 20, 900))

    def stop_half_way(self: Folder, *names: str) -> None:
        monkeypatch.setattr(Folder, "remove_tree", remove_tree)
        self.child(*names, "erase").remove("00000001.done.json")
        raise StorageError("the store is gone")

    monkeypatch.setattr(Folder, "remove_tree", stop_half_way)
    for _ in range(2):
        turn()
    assert "query" in operator.names()
    assert requests.numbers().done == frozenset(), "the removal has begun"
    for _ in range(3):
        turn()
    assert operator.names() == [query.name]
    assert EraseFolder(query.folder).numbers() == EraseNumbers()
