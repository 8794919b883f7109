"""Clean-up: what it decides, over values; and what it deletes, on real folders."""

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
from spark_state_ext.commit import cadence
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

RETAINED = 3
# Beats until nothing that Spark may hand out needs a file.
RECENT = 3 * RETAINED + 2
NOW_S = 1e9
DAY_S = 86_400.0


def ref(version: int, sibling: str = "a") -> CheckpointRef:
    return CheckpointRef(version, sibling * 32)


def pointer_at(version: int, first: int, calls: int | None = None, heartbeats: int | None = None) -> Pointer:
    """A pointer of a bucket whose version *v* was written in its call *v*."""
    return replace(
        first_pointer(),
        lineage=tuple(LineageEntry(ref(v), 1, v) for v in range(first, version + 1)),
        calls=version if calls is None else calls,
        heartbeats=version if heartbeats is None else heartbeats,
    )


def listed(names: Sequence[str], age_s: float = 10 * DAY_S) -> list[Entry]:
    return [Entry(name, 1, NOW_S - age_s, False) for name in names]


def deltas(*versions: int, sibling: str = "a") -> list[str]:
    return [file_name(ref(v, sibling), DELTA) for v in versions]


def snapshots(*versions: int, sibling: str = "a") -> list[str]:
    return [file_name(ref(v, sibling), SNAPSHOT) for v in versions]


def versions_of(names: Iterable[str]) -> list[int]:
    return [(parse_file_name(name) or (ref(1), ""))[0].version for name in names]


class Known(dict[CheckpointRef, LineageHeader]):
    """Headers that are known."""

    def of(self, asked: CheckpointRef) -> LineageHeader:
        return self[asked]

    def origins(self, asked: Sequence[CheckpointRef]) -> list[Origin]:
        return [Origin(self[found].writer.heartbeat, self[found].parent) for found in asked]

    def with_(self, *headers: LineageHeader) -> Known:
        return Known({**self, **{h.ref: h for h in headers}})


def line(first: int, last: int, unconfirmed: Sequence[int], sibling: str = "a") -> Known:
    """Headers of consecutive versions, written at heartbeats of the same number."""
    made = Known()
    for v in range(first, last + 1):
        start = max([1, *(p for p in unconfirmed if p < v)])
        lineage = tuple(ref(at, sibling if at >= first else "a") for at in range(start, v))
        made[ref(v, sibling)] = header(ref(v, sibling), lineage, v)
    return made


def header(of: CheckpointRef, lineage: tuple[CheckpointRef, ...], heartbeat: int) -> LineageHeader:
    writer = Writer("q", "r", 0, "h", heartbeat)
    return LineageHeader(DELTA, "counts", 3, of, lineage[-1] if lineage else None, lineage, 0, writer, "0")


PRESUMED = [10, 20, 30, 35]
# Two snapshots are older than what may be named still, for the pointer of version 42 and heartbeat 42.
POINTER = pointer_at(42, 35)
HEADERS = line(1, 42, PRESUMED)
LINEAR = [*deltas(*range(1, 43)), *snapshots(10, 20, 30, 35)]


def decided(names: Sequence[str], headers: Known = HEADERS, pointer: Pointer = POINTER, **more: Any) -> Decision:
    return classify(listed(names), pointer, RETAINED, NOW_S, headers, **more)


def test_what_is_older_than_two_settled_snapshots_goes() -> None:
    decision = decided(LINEAR)
    # 35 may be newer than what executors that go on from memory are at.
    assert decision.lean_on == (ref(30), ref(20))
    assert sorted(decision.delete) == sorted([*deltas(*range(1, 20)), *snapshots(10)])
    versions = versions_of(decision.delete)
    assert versions == sorted(versions), "the oldest first"
    assert not decision.doubt


def test_snapshots_are_found_however_many_never_arrived() -> None:
    """In the listing, by the headers' lineages: what the pointer presumes plays no part."""
    decision = decided([*deltas(*range(1, 43)), *snapshots(10, 20)])
    assert decision.lean_on == (ref(20), ref(10))
    assert sorted(decision.delete) == sorted(deltas(*range(1, 10)))


@pytest.mark.parametrize(("heartbeats", "expected"), [(30 + RECENT, [20, 10]), (31 + RECENT, [30, 20])])
def test_a_snapshot_that_executors_may_be_before_is_not_leaned_on(heartbeats: int, expected: list[int]) -> None:
    """Rule 15: needed until so many batches after the one that replaced it."""
    decision = decided(LINEAR, pointer=pointer_at(42, 35, heartbeats=heartbeats))
    assert [found.version for found in decision.lean_on] == expected


def test_a_quiet_bucket_counts_beats_and_not_versions() -> None:
    """Its pointer is old but live: what counts is when it was replaced, not how many versions there are."""
    names = [*deltas(*range(1, 32)), *snapshots(10, 20, 30)]
    decision = decided(names, pointer=pointer_at(31, 30, heartbeats=100_000))
    assert decision.lean_on == (ref(30), ref(20))


def test_calls_without_a_beat_do_not_count() -> None:
    """A lineage in parallel may get none of them, and be where it was."""
    decision = decided(LINEAR, pointer=pointer_at(42, 35, calls=100_000, heartbeats=31))
    assert decision.delete == ()


def test_files_from_before_beats_were_counted_go_too() -> None:
    """They tell none, which is long ago once those that are counted are many."""
    untold = Known({found: replace(h, writer=replace(h.writer, heartbeat=0)) for found, h in HEADERS.items()})
    for heartbeats, expected in ((RECENT, ()), (RECENT + 1, (ref(35), ref(30)))):
        assert decided(LINEAR, untold, pointer_at(42, 35, heartbeats, heartbeats)).lean_on == expected


def test_while_more_batches_were_retained_lately_that_counts() -> None:
    """Pointers and renewals are of that time still."""
    pointer = replace(POINTER, retained=5, retained_heartbeat=40)
    assert decided(LINEAR, pointer=pointer).lean_on == (ref(20), ref(10))


@pytest.mark.parametrize("present", [[], [30], [35]])
def test_two_snapshots_must_be_there(present: list[int]) -> None:
    assert decided([*deltas(*range(1, 43)), *snapshots(*present)]) == Decision()


def test_where_a_part_of_the_line_is_gone_all_below_stays() -> None:
    assert decided([*(name for name in LINEAR if name not in (*deltas(32), *snapshots(35)))]) == Decision(lost=True)


def test_a_damaged_snapshot_is_not_leaned_on() -> None:
    decision = decided(LINEAR, damaged=frozenset([ref(30)]))
    assert decision.lean_on == (ref(20), ref(10))
    assert sorted(decision.delete) == sorted(deltas(*range(1, 10)))


@pytest.mark.parametrize("name", ["notes.txt", "1_abc.delta.arrow", "40_" + "a" * 32 + ".delta.arrow.bak"])
def test_an_unknown_file_stops_it(name: str) -> None:
    decision = decided([*LINEAR, name])
    assert decision.delete == ()
    assert name in decision.doubt


def test_the_wrong_folder_stops_it() -> None:
    decision = decided(deltas(1, 2, 3))
    assert decision.delete == ()
    assert str(ref(42)) in decision.doubt


def test_temporary_files_go_by_age_only() -> None:
    old, young = listed([".tmp-1-x"]), listed([".tmp-2-x"], age_s=60)
    unknown = [Entry(".tmp-3-x", 1, None, False)]
    decision = classify([*old, *young, *unknown], first_pointer(), RETAINED, NOW_S, HEADERS)
    assert decision.delete == (".tmp-1-x",)


def _with_sibling(heartbeat: int, version: int = 15) -> tuple[list[str], Known]:
    """A version was written twice; the other one's heartbeat is given."""
    lineage = tuple(ref(v) for v in range(10 * ((version - 1) // 10), version))
    sibling = header(ref(version, "b"), lineage, heartbeat)
    return [*LINEAR, file_name(sibling.ref, DELTA)], HEADERS.with_(sibling)


LONG_OVER = 42 - RECENT - 1


@pytest.mark.parametrize("heartbeat", [15, LONG_OVER])
@pytest.mark.parametrize("version", [15, 41])
def test_a_sibling_goes_when_its_beat_is_long_over(heartbeat: int, version: int) -> None:
    """Whatever its version: a lineage that is over may have had more of them."""
    names, headers = _with_sibling(heartbeat, version)
    decision = decided(names, headers)
    assert file_name(ref(version, "b"), DELTA) in decision.delete
    assert len(decision.delete) == 21


def test_a_sibling_goes_before_there_are_snapshots() -> None:
    names = [*deltas(*range(1, 43)), *deltas(15, sibling="b")]
    decision = decided(names, _with_sibling(15)[1])
    assert decision == Decision(tuple(deltas(15, sibling="b")))


def test_a_young_sibling_stays_whatever_its_beat_with_what_it_leans_on() -> None:
    _, headers = _with_sibling(15)
    young = listed(deltas(15, sibling="b"), age_s=60)
    decision = classify([*listed([*LINEAR, *snapshots(5)]), *young], POINTER, RETAINED, NOW_S, headers)
    assert set(decision.delete) == {*deltas(1, 2, 3, 4), *deltas(*range(15, 20))}
    # It is not known to be of use, so nothing is read for it; and nothing is wrong where its ancestors are gone.
    assert decision.lean_on == (ref(30), ref(20))
    less = [name for name in LINEAR if name not in deltas(13)]
    assert len(classify([*listed(less), *young], POINTER, RETAINED, NOW_S, headers).delete) == 18


def test_a_sibling_from_between_the_two_snapshots_keeps_one_more() -> None:
    """Of the two that the lineage leans on it has the older one only."""
    names, headers = _with_sibling(38, 25)
    decision = decided(names, headers)
    assert decision.lean_on == (ref(30), ref(20), ref(10))
    assert set(decision.delete) == set(deltas(*range(1, 10)))


@pytest.mark.parametrize("heartbeat", [38, LONG_OVER + 1])
def test_age_alone_never_suffices(heartbeat: int) -> None:
    """A sibling that may be followed still keeps all that it leans on, down to the second snapshot."""
    names, headers = _with_sibling(heartbeat)
    names += snapshots(5)
    decision = classify(listed(names, age_s=1_000 * DAY_S), POINTER, RETAINED, NOW_S, headers)
    kept = {file_name(ref(15, "b"), DELTA), *deltas(*range(5, 15)), *snapshots(5, 10)}
    assert kept.isdisjoint(decision.delete)
    assert set(decision.delete) == {*deltas(1, 2, 3, 4), *deltas(*range(15, 20))}
    assert decision.lean_on == (ref(30), ref(20), ref(10), ref(5))


def test_a_sibling_of_late_costs_nothing_more() -> None:
    """It leans on what its lineage leans on: no other snapshot has to be read."""
    names, headers = _with_sibling(41, 41)
    decision = decided(names, headers)
    assert decision.lean_on == (ref(30), ref(20))
    assert len(decision.delete) == 20


def test_a_sibling_does_not_lean_on_a_damaged_snapshot() -> None:
    names, headers = _with_sibling(38)
    decision = decided(names, headers, damaged=frozenset([ref(10)]))
    assert set(decision.delete) == {*deltas(*range(15, 20))}, "its first delta is as good as a snapshot"
    assert decision.lean_on == (ref(30), ref(20))


def test_a_recent_sibling_without_its_ancestors_stops_it() -> None:
    names, headers = _with_sibling(38)
    decision = decided([n for n in names if n not in deltas(13)], headers)
    assert decision.delete == ()
    assert str(ref(13)) in decision.doubt


def test_an_unreadable_header_stops_it() -> None:
    class Unreadable(Known):
        def origins(self, asked: Sequence[CheckpointRef]) -> list[Origin]:
            raise CorruptFileError(f"the header of {asked} cannot be read")

    with pytest.raises(CorruptFileError):
        decided(_with_sibling(38)[0], Unreadable(HEADERS))


def test_buckets_take_turns() -> None:
    due = [[bucket for bucket in range(100) if clean_up_due(call, bucket, 100)] for call in range(50)]
    assert max(map(len, due)) == 4
    assert all(sum(clean_up_due(call, bucket, 100) for call in range(100)) == 4 for bucket in range(100))


def test_a_folder_that_nobody_cleans_is_noticed() -> None:
    assert not is_crowded(listed(deltas(*range(1, 1_000))), 100)
    assert is_crowded(listed(deltas(*range(1, 2_000))), 100)
    # Where that did not help, reading all those headers must not hold up every batch.
    assert not is_crowded(listed(deltas(*range(1, 9_000))), 100)


# -- on folders --------------------------------------------------------------------------------------


class Counting:
    """Counts what is asked of a file system."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return found(*args, **kwargs)

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
        bucket = Bucket(
            self.store, replicas, self.pointers[-1], writer, CommitContext(self.local, batches_retained=RETAINED)
        )
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
        """Every pointer of the retained batches is whole, on an empty disk."""
        for pointer, model in list(zip(self.pointers, self.models, strict=True))[-RETAINED - 1 :]:
            fresh = LocalStore.at(self.local / uuid.uuid4().hex, SCHEMA)
            assert state_at(fresh, self.files, pointer, self.local) == model
            fresh.close()


@pytest.fixture(params=["disk", "objects", "s3"])
def scene(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(cadence, "DELTAS_MIN", 3)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 3)
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        files = Folder(s3.root(uuid.uuid4().hex), s3.options)
    else:
        files = Folder(str(tmp_path / "root") if request.param == "disk" else f"memory://{uuid.uuid4().hex}")
    made = Scene(files, tmp_path)
    yield made
    made.store.close()


def test_files_stay_few_and_every_retained_pointer_whole(scene: Scene) -> None:
    before = len(scene.files.names())
    deleted = scene.clean()
    assert deleted > 15
    assert len(scene.files.names()) == before - deleted
    scene.check()
    assert scene.clean() == 0, "idempotent"
    for batch in range(40, 70):
        scene.batch(batch)
        scene.clean()
        assert len(scene.files.names()) <= 2 * 4 * 2 + 6 * RETAINED
    scene.check()


def test_it_costs_one_listing_where_nothing_ran_twice(scene: Scene) -> None:
    # What was verified once is known.
    scene.clean()
    counting = Counting(scene.files._fs)
    scene.files._fs = counting
    assert scene.clean() == 0
    assert [call for call in counting.calls if call != "invalidate_cache"] == ["ls"]


def test_a_clean_up_that_stops_anywhere_goes_on_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Folder.remove
    total = 0
    while True:
        left = 2

        def remove(self: Folder, name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
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


def test_a_late_clean_up_of_an_earlier_batch_deletes_less(scene: Scene) -> None:
    earlier = scene.clean(scene.pointers[30])
    later = scene.clean()
    assert earlier > 0
    assert later > 0
    assert scene.clean(scene.pointers[30]) == 0
    scene.check()


def test_a_damaged_snapshot_is_noticed_before_its_deltas_go(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    newest = scene.decision().lean_on[0]
    name = file_name(newest, SNAPSHOT)
    data = bytearray(scene.files.get(name))
    data[len(data) // 2] ^= 1
    scene.files.put(name, bytes(data))
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        scene.clean()
    assert f"{name} fails its checksum; older files are kept" in caplog.text
    scene.check()
    # The deltas under it are still there.
    assert file_name(newest, DELTA) in scene.files.names()


@pytest.mark.parametrize("deleted", [0, 3])
def test_a_run_that_was_replaced_deletes_nothing_more(scene: Scene, deleted: int) -> None:
    """Also where that happens in the middle."""
    before = scene.files.names()
    ours = iter(range(deleted))

    def lost() -> None:
        if next(ours, None) is None:
            raise LiveRunError("another run has the state")

    with pytest.raises(LiveRunError):
        scene.clean(still_ours=lost)
    assert len(scene.files.names()) == len(before) - deleted


def test_no_more_is_deleted_than_asked_for(scene: Scene) -> None:
    assert (
        clean_up(scene.files, clean_up_at(scene.pointers[-1], RETAINED, deletes_max=4), scene.local, known=scene.known)
        == 4
    )
    assert scene.clean() > 4
    scene.check()


def test_doubt_is_logged_and_nothing_goes(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.files.put("somebody's notes", b"x")
    before = scene.files.names()
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        assert scene.clean() == 0
    assert "somebody's notes is not a file of spark_state_ext" in caplog.text
    assert scene.files.names() == before


def test_file_systems_tell_when_files_were_written(scene: Scene) -> None:
    now_s = time.time()
    for found in scene.files.entries():
        assert found.modified_s is not None
        assert abs(found.modified_s - now_s) < 300
        assert found.size_bytes > 0
        assert not found.folder


def test_what_is_known_of_one_store_is_not_believed_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket's name at two endpoints: a snapshot that is whole at one may be damaged at the other."""
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

    def at(endpoint: Path) -> Folder:
        made = {"implementation": "fsspec.implementations.dirfs.DirFileSystem", "fs": LocalFileSystem()}
        return Folder("store://bucket/3", {**made, "path": str(endpoint)})

    old = time.time() + 10_000
    known = KnownFiles()
    deleted = [
        clean_up(at(endpoint), clean_up_at(life.pointers[-1], RETAINED), tmp_path, old, known=known)
        for endpoint in (east, west)
    ]
    assert deleted[0] > 0
    assert deleted[1] == 0, "the deltas are the only way back there"


class _Growing(dict[CheckpointRef, Origin]):
    """Origins that another thread adds to while they are looked through."""

    def items(self) -> Any:
        for item in super().items():
            self[ref(100)] = Origin(0, None)
            yield item


def test_a_clean_up_does_not_mind_threads_of_one_that_failed(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    growing = _Growing({ref(1): Origin(1, None)})
    known = KnownFiles()
    known._origins[files.identity] = growing
    assert FileHeaders(files, deltas(1), known).origins([ref(1)]) == [Origin(1, None)]
    assert list(growing) == [ref(1)]
