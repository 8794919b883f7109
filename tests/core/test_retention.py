"""Clean-up: which files it chooses, given as values, and what it deletes in real folders."""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import buffer_of, clean_up_at, first_pointer, state_at
from fsspec.implementations.local import LocalFileSystem
from life import Life

from arrow_schemas import CheckpointRef, LineageEntry, LineageHeader, Pointer, Writer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name, parse_file_name
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptFileError, LiveRunError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.retention import (
    Decision,
    FileHeaders,
    KnownFiles,
    Origin,
    classify,
    clean_up,
    clean_up_due,
    is_crowded,
)
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, apply_changes
from tests.helpers.object_store import S3
from tests.helpers.soak import whole

RETAINED = 3
# Number of heartbeats until no pointer that Spark may hand out needs a file.
RECENT = 3 * RETAINED + 2
NOW_S = 1e9
DAY_S = 86_400.0


def ref(version: int, sibling: str = "a") -> CheckpointRef:
    return CheckpointRef(version, sibling * 32)


def pointer_at(version: int, first: int, calls: int | None = None, heartbeats: int | None = None) -> Pointer:
    """Return a pointer of a bucket that wrote version *v* in its call *v*."""
    return replace(
        first_pointer(),
        lineage=tuple(LineageEntry(ref(v), 1, v) for v in range(first, version + 1)),
        calls=version if calls is None else calls,
        heartbeats=version if heartbeats is None else heartbeats,
    )


def make_entries(names: Sequence[str], age_s: float = 10 * DAY_S) -> list[Entry]:
    return [Entry(name, 1, NOW_S - age_s, False) for name in names]


def deltas(*versions: int, sibling: str = "a") -> list[str]:
    return [file_name(ref(v, sibling), DELTA) for v in versions]


def snapshots(*versions: int, sibling: str = "a") -> list[str]:
    return [file_name(ref(v, sibling), SNAPSHOT) for v in versions]


def versions_of(names: Iterable[str]) -> list[int]:
    return [(parse_file_name(name) or (ref(1), ""))[0].version for name in names]


class Known(dict[CheckpointRef, LineageHeader]):
    """Headers by checkpoint."""

    def of(self, refs: CheckpointRef) -> LineageHeader:
        return self[refs]

    def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
        return [Origin(self[known].writer.heartbeat, self[known].parent) for known in refs]

    def with_headers(self, *headers: LineageHeader) -> Known:
        return Known({**self, **{h.ref: h for h in headers}})


def make_headers(first: int, last: int, unconfirmed: Sequence[int], sibling: str = "a") -> Known:
    """Return headers of consecutive versions, each written at the heartbeat with its number."""
    known = Known()
    for v in range(first, last + 1):
        start = max([1, *(p for p in unconfirmed if p < v)])
        lineage = tuple(ref(at, sibling if at >= first else "a") for at in range(start, v))
        known[ref(v, sibling)] = make_header(ref(v, sibling), lineage, v)
    return known


def make_header(of: CheckpointRef, lineage: tuple[CheckpointRef, ...], heartbeat: int) -> LineageHeader:
    writer = Writer("q", "r", 0, "h", heartbeat)
    return LineageHeader(DELTA, "counts", 3, of, lineage[-1] if lineage else None, lineage, 0, writer, "0")


PRESUMED = [10, 20, 30, 35]
# With the pointer of version 42 and heartbeat 42, two snapshots are older than any that a pointer may still name.
POINTER = pointer_at(42, 35)
HEADERS = make_headers(1, 42, PRESUMED)
LINEAR = [*deltas(*range(1, 43)), *snapshots(10, 20, 30, 35)]


def decide(names: Sequence[str], headers: Known = HEADERS, pointer: Pointer = POINTER, **more: Any) -> Decision:
    return classify(make_entries(names), pointer, RETAINED, NOW_S, headers, **more)


def test_files_older_than_two_settled_snapshots_are_deleted() -> None:
    decision = decide(LINEAR)
    # Executors that continue from memory may be at a version before 35.
    assert decision.lean_on == (ref(30), ref(20))
    assert sorted(decision.delete) == sorted([*deltas(*range(1, 20)), *snapshots(10)])
    versions = versions_of(decision.delete)
    assert versions == sorted(versions), "the oldest files are deleted first"
    assert not decision.doubt


def test_missing_snapshots_are_ignored() -> None:
    """The listing and the headers' lineages determine the snapshots; those that the pointer presumes do not count."""
    decision = decide([*deltas(*range(1, 43)), *snapshots(10, 20)])
    assert decision.lean_on == (ref(20), ref(10))
    assert sorted(decision.delete) == sorted(deltas(*range(1, 10)))


@pytest.mark.parametrize(("heartbeats", "expected"), [(30 + RECENT, [20, 10]), (31 + RECENT, [30, 20])])
def test_a_snapshot_newer_than_an_executor_may_be_is_not_relied_on(heartbeats: int, expected: list[int]) -> None:
    """Rule 15: files are needed for a number of batches after the one that replaced them."""
    decision = decide(LINEAR, pointer=pointer_at(42, 35, heartbeats=heartbeats))
    assert [snapshot.version for snapshot in decision.lean_on] == expected


def test_heartbeats_count_in_a_bucket_without_new_versions() -> None:
    """Files are deleted by the number of heartbeats since their replacement, not by their versions."""
    names = [*deltas(*range(1, 32)), *snapshots(10, 20, 30)]
    decision = decide(names, pointer=pointer_at(31, 30, heartbeats=100_000))
    assert decision.lean_on == (ref(30), ref(20))


def test_calls_without_a_heartbeat_do_not_count() -> None:
    """A parallel lineage may get none of these calls, and still be at its old version."""
    decision = decide(LINEAR, pointer=pointer_at(42, 35, calls=100_000, heartbeats=31))
    assert decision.delete == ()


def test_files_without_a_heartbeat_are_deleted_after_enough_heartbeats() -> None:
    """Library versions that did not count heartbeats wrote them, so they are old after enough heartbeats."""
    without_heartbeat = Known(
        {known: replace(h, writer=replace(h.writer, heartbeat=0)) for known, h in HEADERS.items()}
    )
    for heartbeats, expected in ((RECENT, ()), (RECENT + 1, (ref(35), ref(30)))):
        assert decide(LINEAR, without_heartbeat, pointer_at(42, 35, heartbeats, heartbeats)).lean_on == expected


def test_a_recently_higher_number_of_retained_batches_counts() -> None:
    """Pointers from that time are still in use."""
    pointer = replace(POINTER, retained=5, retained_heartbeat=40)
    assert decide(LINEAR, pointer=pointer).lean_on == (ref(20), ref(10))


@pytest.mark.parametrize("present", [[], [30], [35]])
def test_nothing_is_deleted_without_two_snapshots(present: list[int]) -> None:
    assert decide([*deltas(*range(1, 43)), *snapshots(*present)]) == Decision()


def test_nothing_is_deleted_below_a_gap_in_the_lineage() -> None:
    assert decide([*(name for name in LINEAR if name not in (*deltas(32), *snapshots(35)))]) == Decision(lost=True)


def test_a_damaged_snapshot_is_not_relied_on() -> None:
    decision = decide(LINEAR, damaged=frozenset([ref(30)]))
    assert decision.lean_on == (ref(20), ref(10))
    assert sorted(decision.delete) == sorted(deltas(*range(1, 10)))


@pytest.mark.parametrize("name", ["notes.txt", "1_abc.delta.arrow", "40_" + "a" * 32 + ".delta.arrow.bak"])
def test_an_unknown_file_stops_the_clean_up(name: str) -> None:
    decision = decide([*LINEAR, name])
    assert decision.delete == ()
    assert name in decision.doubt


def test_a_folder_without_the_pointers_checkpoint_stops_the_clean_up() -> None:
    decision = decide(deltas(1, 2, 3))
    assert decision.delete == ()
    assert str(ref(42)) in decision.doubt


def test_temporary_files_are_deleted_by_age() -> None:
    old, young = make_entries([".tmp-1-x"]), make_entries([".tmp-2-x"], age_s=60)
    unknown = [Entry(".tmp-3-x", 1, None, False)]
    decision = classify([*old, *young, *unknown], first_pointer(), RETAINED, NOW_S, HEADERS)
    assert decision.delete == (".tmp-1-x",)


def add_sibling(heartbeat: int, version: int = 15) -> tuple[list[str], Known]:
    """Add a second file of a version, written at a given heartbeat."""
    lineage = tuple(ref(v) for v in range(10 * ((version - 1) // 10), version))
    sibling = make_header(ref(version, "b"), lineage, heartbeat)
    return [*LINEAR, file_name(sibling.ref, DELTA)], HEADERS.with_headers(sibling)


LONG_OVER = 42 - RECENT - 1


@pytest.mark.parametrize("heartbeat", [15, LONG_OVER])
@pytest.mark.parametrize("version", [15, 41])
def test_a_sibling_with_an_old_heartbeat_is_deleted(heartbeat: int, version: int) -> None:
    """The version does not matter: a lineage that has ended may have had more versions."""
    names, headers = add_sibling(heartbeat, version)
    decision = decide(names, headers)
    assert file_name(ref(version, "b"), DELTA) in decision.delete
    assert len(decision.delete) == 21


def test_an_old_sibling_is_deleted_even_without_snapshots() -> None:
    names = [*deltas(*range(1, 43)), *deltas(15, sibling="b")]
    decision = decide(names, add_sibling(15)[1])
    assert decision == Decision(tuple(deltas(15, sibling="b")))


def test_a_young_sibling_is_kept_with_the_files_that_it_needs() -> None:
    _, headers = add_sibling(15)
    young = make_entries(deltas(15, sibling="b"), age_s=60)
    decision = classify([*make_entries([*LINEAR, *snapshots(5)]), *young], POINTER, RETAINED, NOW_S, headers)
    assert set(decision.delete) == {*deltas(1, 2, 3, 4), *deltas(*range(15, 20))}
    # The sibling may be useless, so no file is verified for it, and missing ancestors of it are not an error.
    assert decision.lean_on == (ref(30), ref(20))
    names = [name for name in LINEAR if name not in deltas(13)]
    assert len(classify([*make_entries(names), *young], POINTER, RETAINED, NOW_S, headers).delete) == 18


def test_a_sibling_between_the_two_snapshots_keeps_an_older_one() -> None:
    """The sibling's lineage has only the older one of the two snapshots."""
    names, headers = add_sibling(38, 25)
    decision = decide(names, headers)
    assert decision.lean_on == (ref(30), ref(20), ref(10))
    assert set(decision.delete) == set(deltas(*range(1, 10)))


@pytest.mark.parametrize("heartbeat", [38, LONG_OVER + 1])
def test_old_files_that_a_sibling_needs_are_kept(heartbeat: int) -> None:
    """A sibling with possible successors keeps all that it needs, down to its second snapshot."""
    names, headers = add_sibling(heartbeat)
    names += snapshots(5)
    decision = classify(make_entries(names, age_s=1_000 * DAY_S), POINTER, RETAINED, NOW_S, headers)
    needed = {file_name(ref(15, "b"), DELTA), *deltas(*range(5, 15)), *snapshots(5, 10)}
    assert needed.isdisjoint(decision.delete)
    assert set(decision.delete) == {*deltas(1, 2, 3, 4), *deltas(*range(15, 20))}
    assert decision.lean_on == (ref(30), ref(20), ref(10), ref(5))


def test_a_recent_sibling_needs_no_further_snapshots() -> None:
    """It relies on the same snapshots as the lineage, so no other snapshot has to be verified."""
    names, headers = add_sibling(41, 41)
    decision = decide(names, headers)
    assert decision.lean_on == (ref(30), ref(20))
    assert len(decision.delete) == 20


def test_a_sibling_does_not_rely_on_a_damaged_snapshot() -> None:
    names, headers = add_sibling(38)
    decision = decide(names, headers, damaged=frozenset([ref(10)]))
    assert set(decision.delete) == {*deltas(*range(15, 20))}, "its lineage goes back to the first delta"
    assert decision.lean_on == (ref(30), ref(20))


def test_a_recent_sibling_without_its_ancestors_stops_the_clean_up() -> None:
    names, headers = add_sibling(38)
    decision = decide([n for n in names if n not in deltas(13)], headers)
    assert decision.delete == ()
    assert str(ref(13)) in decision.doubt


def test_an_unreadable_header_stops_the_clean_up() -> None:
    class Unreadable(Known):
        def origins(self, refs: Sequence[CheckpointRef]) -> list[Origin]:
            raise CorruptFileError(f"the header of {refs} cannot be read")

    with pytest.raises(CorruptFileError):
        decide(add_sibling(38)[0], Unreadable(HEADERS))


def test_buckets_take_turns_with_their_clean_up() -> None:
    due = [[bucket for bucket in range(100) if clean_up_due(call, bucket, 100)] for call in range(50)]
    assert max(map(len, due)) == 4
    assert all(sum(clean_up_due(call, bucket, 100) for call in range(100)) == 4 for bucket in range(100))


def test_a_crowded_folder_is_detected() -> None:
    assert not is_crowded(make_entries(deltas(*range(1, 1_000))), 100)
    assert is_crowded(make_entries(deltas(*range(1, 2_000))), 100)
    # If a clean-up has not helped, reading all these headers must not slow every batch.
    assert not is_crowded(make_entries(deltas(*range(1, 9_000))), 100)


# -- on folders --------------------------------------------------------------------------------------


class Counting:
    """Records the calls to a file system."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._real, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return attribute(*args, **kwargs)

        return call


class Scene:
    """A bucket with a history of many batches."""

    def __init__(self, files: Folder, local: Path) -> None:
        self.files = files.child("3")
        self.local = local
        self.store = LocalStore.at(local / "store", SCHEMA)
        self.known = KnownFiles()
        self.pointers = [first_pointer()]
        self.models: list[Model] = [{}]
        for batch in range(40):
            self.batch(batch)

    def batch(self, batch: int) -> None:
        replicas = sole_replica(self.files, self.local)
        writer = Writer("q", "r", batch, "h")
        context = CommitContext(self.local, batches_retained=RETAINED, cadence=SnapshotCadence(3, 3))
        bucket = Bucket(self.store, replicas, self.pointers[-1], writer, context)
        changes = {KEYS[batch % 9]: Row(batch), KEYS[(batch + 4) % 9]: None if batch % 4 == 3 else Row(-batch, "n")}
        self.pointers.append(replace(bucket.commit(buffer_of(changes, self.local)).pointer, batch=batch))
        self.models.append(apply_changes(self.models[-1], changes))

    def clean(self, pointer: Pointer | None = None, still_ours: Any = lambda: None) -> int:
        return clean_up(
            self.files, clean_up_at(pointer or self.pointers[-1], RETAINED, still_ours), self.local, known=self.known
        )

    def decision(self) -> Decision:
        entries = self.files.entries()
        headers = FileHeaders(self.files, {entry.name for entry in entries}, self.known)
        return classify(entries, self.pointers[-1], RETAINED, time.time(), headers)

    def check(self) -> None:
        """Check that each retained pointer can be restored on an empty disk."""
        for pointer, model in list(zip(self.pointers, self.models, strict=True))[-RETAINED - 1 :]:
            fresh = LocalStore.at(self.local / uuid.uuid4().hex, SCHEMA)
            assert state_at(fresh, self.files, pointer, self.local) == model
            fresh.close()


@pytest.fixture(params=whole(["disk", "objects"], ["s3"]))
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        files = Folder(s3.root(uuid.uuid4().hex), s3.options)
    else:
        files = Folder(str(tmp_path / "root") if request.param == "disk" else f"memory://{uuid.uuid4().hex}")
    new_scene = Scene(files, tmp_path)
    yield new_scene
    new_scene.store.close()


def test_clean_up_keeps_few_files_and_all_retained_state(scene: Scene) -> None:
    before = len(scene.files.names())
    deleted = scene.clean()
    assert deleted > 15
    assert len(scene.files.names()) == before - deleted
    scene.check()
    assert scene.clean() == 0, "a second clean-up deletes nothing"
    for batch in range(40, 70):
        scene.batch(batch)
        scene.clean()
        assert len(scene.files.names()) <= 2 * 4 * 2 + 6 * RETAINED
    scene.check()


def test_a_clean_up_needs_only_one_listing_without_siblings(scene: Scene) -> None:
    # Later clean-ups do not repeat a verification.
    scene.clean()
    counting = Counting(scene.files._fs)
    scene.files._fs = counting
    assert scene.clean() == 0
    assert [call for call in counting.calls if call != "invalidate_cache"] == ["ls"]


def test_an_interrupted_clean_up_continues_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Folder.remove
    total = 0
    while True:
        remaining = 2

        def remove(self: Folder, name: str) -> None:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise KeyboardInterrupt("the process dies here")
            real(self, name)

        with monkeypatch.context() as patched:
            patched.setattr(Folder, "remove", remove)
            try:
                total += scene.clean()
                break
            except KeyboardInterrupt:
                total += 2
        scene.check()
    assert total > 15
    scene.check()


def test_a_late_clean_up_of_an_earlier_batch_deletes_nothing_more(scene: Scene) -> None:
    earlier = scene.clean(scene.pointers[30])
    later = scene.clean()
    assert earlier > 0
    assert later > 0
    assert scene.clean(scene.pointers[30]) == 0
    scene.check()


def test_the_deltas_of_a_damaged_snapshot_are_kept(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    newest = scene.decision().lean_on[0]
    name = file_name(newest, SNAPSHOT)
    data = bytearray(scene.files.get(name))
    data[len(data) // 2] ^= 1
    scene.files.put(name, bytes(data))
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        scene.clean()
    assert f"{name} fails its checksum; older files are kept" in caplog.text
    scene.check()
    # The snapshot's deltas are still there.
    assert file_name(newest, DELTA) in scene.files.names()


@pytest.mark.parametrize("deleted", [0, 3])
def test_a_replaced_run_stops_its_clean_up(scene: Scene, deleted: int) -> None:
    """This includes a run that is replaced during its clean-up."""
    before = scene.files.names()
    checks = iter(range(deleted))

    def check_run() -> None:
        if next(checks, None) is None:
            raise LiveRunError("another run has the state")

    with pytest.raises(LiveRunError):
        scene.clean(still_ours=check_run)
    assert len(scene.files.names()) == len(before) - deleted


def test_a_clean_up_deletes_at_most_deletes_max_files(scene: Scene) -> None:
    assert (
        clean_up(scene.files, clean_up_at(scene.pointers[-1], RETAINED, deletes_max=4), scene.local, known=scene.known)
        == 4
    )
    assert scene.clean() > 4
    scene.check()


def test_a_clean_up_in_doubt_logs_a_warning_and_deletes_nothing(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.files.put("somebody's notes", b"x")
    before = scene.files.names()
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        assert scene.clean() == 0
    assert "somebody's notes is not a file of spark_state_ext" in caplog.text
    assert scene.files.names() == before


def test_file_systems_report_the_time_of_the_last_write(scene: Scene) -> None:
    now_s = time.time()
    for entry in scene.files.entries():
        assert entry.modified_s is not None
        assert abs(entry.modified_s - now_s) < 300
        assert entry.size_bytes > 0
        assert not entry.folder


def test_a_verified_snapshot_of_one_store_is_not_trusted_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two endpoints have a bucket of the same name: a snapshot may be valid in one and damaged in the other."""
    life = Life(tmp_path / "life")
    for _ in range(40):
        life.batch()
        life.settle()
    east, west = (tmp_path / name for name in ("east", "west"))
    for endpoint in (east, west):
        shutil.copytree(tmp_path / "life" / "a" / "3", endpoint / "bucket" / "3")
    for path in (west / "bucket" / "3").glob("*.snapshot.*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def open_folder(endpoint: Path) -> Folder:
        options = {"implementation": "fsspec.implementations.dirfs.DirFileSystem", "fs": LocalFileSystem()}
        return Folder("store://bucket/3", {**options, "path": str(endpoint)})

    old = time.time() + 10_000
    known = KnownFiles()
    deleted = [
        clean_up(open_folder(endpoint), clean_up_at(life.pointers[-1], RETAINED), tmp_path, old, known=known)
        for endpoint in (east, west)
    ]
    assert deleted[0] > 0
    assert deleted[1] == 0, "only the deltas can restore the state there"


class _Growing(dict[CheckpointRef, Origin]):
    """Origins to which another thread adds during an iteration."""

    def items(self) -> Any:
        for item in super().items():
            self[ref(100)] = Origin(0, None)
            yield item


def test_a_clean_up_works_while_threads_of_a_failed_one_still_run(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    growing = _Growing({ref(1): Origin(1, None)})
    known = KnownFiles()
    known._origins[files.identity] = growing
    assert FileHeaders(files, deltas(1), known).origins([ref(1)]) == [Origin(1, None)]
    assert list(growing) == [ref(1)]
