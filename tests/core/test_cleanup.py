"""Clean-up: what it decides, over values; and what it deletes, on real folders."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_support import KEYS, SCHEMA, Model, Row, buffer_of, changed, first_pointer, state_at
from object_store import S3

from arrow_schemas import CheckpointRef, LineageEntry, LineageHeader, Pointer, Writer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name, parse_file_name
from spark_state_ext import cleanup as cleanup_module
from spark_state_ext import lineage as lineage_module
from spark_state_ext.backend import Backend, Entry
from spark_state_ext.bucket import Bucket
from spark_state_ext.checkpoint import read_header
from spark_state_ext.cleanup import Decision, classify, clean_up, clean_up_due, is_crowded
from spark_state_ext.errors import CorruptFileError, LiveRunError
from spark_state_ext.store import LocalStore

RETAINED = 5
NOW_S = 1e9
DAY_S = 86_400.0


def ref(version: int, sibling: str = "a") -> CheckpointRef:
    return CheckpointRef(version, sibling * 32)


def pointer_at(version: int, first: int, calls: int | None = None, beats: int | None = None) -> Pointer:
    """A pointer of a bucket whose version *v* was written in its call *v*."""
    return replace(
        first_pointer(),
        lineage=tuple(LineageEntry(ref(v), 1, v) for v in range(first, version + 1)),
        calls=version if calls is None else calls,
        beats=version if beats is None else beats,
    )


def listed(names: Sequence[str], age_s: float = 10 * DAY_S) -> list[Entry]:
    return [Entry(name, 1, NOW_S - age_s, False) for name in names]


def deltas(*versions: int, sibling: str = "a") -> list[str]:
    return [file_name(ref(v, sibling), DELTA) for v in versions]


def snapshots(*versions: int, sibling: str = "a") -> list[str]:
    return [file_name(ref(v, sibling), SNAPSHOT) for v in versions]


def versions_of(names: Iterable[str]) -> list[int]:
    return [(parse_file_name(name) or (ref(1), ""))[0].version for name in names]


def line(first: int, last: int, presumed: Sequence[int], sibling: str = "a") -> dict[CheckpointRef, LineageHeader]:
    """Headers of consecutive versions, written in calls of the same number."""
    made = {}
    for v in range(first, last + 1):
        start = max([1, *(p for p in presumed if p < v)])
        lineage = tuple(ref(at, sibling if at >= first else "a") for at in range(start, v))
        made[ref(v, sibling)] = header(ref(v, sibling), lineage, v, v)
    return made


def header(of: CheckpointRef, lineage: tuple[CheckpointRef, ...], call: int, beat: int) -> LineageHeader:
    writer = Writer("q", "r", 0, "h", call, beat)
    return LineageHeader(DELTA, "counts", 3, of, lineage[-1] if lineage else None, lineage, 0, writer, "0")


PRESUMED = [10, 20, 30, 35]
POINTER = pointer_at(40, 35)
HEADERS = line(1, 40, PRESUMED)
LINEAR = [*deltas(*range(1, 41)), *snapshots(10, 20, 30)]


def test_what_is_older_than_two_settled_snapshots_goes() -> None:
    decision = classify(listed(LINEAR), POINTER, RETAINED, NOW_S, HEADERS.__getitem__)
    # 20 and 30 are settled, present, and the newest such; 35 is presumed only.
    assert decision.lean_on == (ref(30), ref(20))
    assert sorted(decision.delete) == sorted([*deltas(*range(1, 20)), *snapshots(10)])
    versions = versions_of(decision.delete)
    assert versions == sorted(versions), "the oldest first"
    assert not decision.doubt


def test_snapshots_are_found_however_many_never_arrived() -> None:
    """In the listing, by the headers' lineages: what the pointer presumes plays no part."""
    names = [*deltas(*range(1, 41)), *snapshots(10, 20)]
    decision = classify(listed(names), POINTER, RETAINED, NOW_S, HEADERS.__getitem__)
    assert decision.lean_on == (ref(20), ref(10))
    assert sorted(decision.delete) == sorted(deltas(*range(1, 10)))


@pytest.mark.parametrize(("calls", "expected"), [(35, [20, 10]), (36, [30, 20])])
def test_a_snapshot_that_retained_batches_may_not_reach_is_not_leaned_on(calls: int, expected: list[int]) -> None:
    """Rule 15: needed until so many batches after the one that replaced it."""
    pointer = pointer_at(36, 35, calls)
    names = [*deltas(*range(1, 37)), *snapshots(10, 20, 30)]
    decision = classify(listed(names), pointer, RETAINED, NOW_S, HEADERS.__getitem__)
    assert [found.version for found in decision.lean_on] == expected


def test_a_quiet_bucket_counts_calls_and_not_versions() -> None:
    """Its pointer is old but live: what counts is when it was replaced, not how many versions there are."""
    pointer = pointer_at(31, 30, calls=100_000)
    names = [*deltas(*range(1, 32)), *snapshots(10, 20, 30)]
    decision = classify(listed(names), pointer, RETAINED, NOW_S, HEADERS.__getitem__)
    assert decision.lean_on == (ref(30), ref(20))


def test_files_from_before_calls_were_counted_go_too() -> None:
    """They tell no call, which is long ago once the calls that are counted exceed the batches retained."""
    untold = {found: replace(h, writer=replace(h.writer, call=0, beat=0)) for found, h in HEADERS.items()}
    for calls, expected in ((RETAINED, ()), (RETAINED + 1, (ref(30), ref(20)))):
        pointer = pointer_at(40, 35, calls, calls)
        assert classify(listed(LINEAR), pointer, RETAINED, NOW_S, untold.__getitem__).lean_on == expected


@pytest.mark.parametrize("present", [[], [30], [35]])
def test_two_snapshots_must_be_there(present: list[int]) -> None:
    names = [*deltas(*range(1, 41)), *snapshots(*present)]
    assert classify(listed(names), POINTER, RETAINED, NOW_S, HEADERS.__getitem__) == Decision()


def test_a_damaged_snapshot_is_not_leaned_on() -> None:
    decision = classify(listed(LINEAR), POINTER, RETAINED, NOW_S, HEADERS.__getitem__, frozenset([ref(30)]))
    assert decision.lean_on == (ref(20), ref(10))
    assert sorted(decision.delete) == sorted(deltas(*range(1, 10)))


@pytest.mark.parametrize("name", ["notes.txt", "1_abc.delta.arrow", "40_" + "a" * 32 + ".delta.arrow.bak"])
def test_an_unknown_file_stops_it(name: str) -> None:
    decision = classify(listed([*LINEAR, name]), POINTER, RETAINED, NOW_S, HEADERS.__getitem__)
    assert decision.delete == ()
    assert name in decision.doubt


def test_the_wrong_folder_stops_it() -> None:
    decision = classify(listed(deltas(1, 2, 3)), POINTER, RETAINED, NOW_S, HEADERS.__getitem__)
    assert decision.delete == ()
    assert str(ref(40)) in decision.doubt


def test_temporary_files_go_by_age_only() -> None:
    old, young = listed([".tmp-1-x"]), listed([".tmp-2-x"], age_s=60)
    unknown = [Entry(".tmp-3-x", 1, None, False)]
    decision = classify([*old, *young, *unknown], first_pointer(), RETAINED, NOW_S, HEADERS.__getitem__)
    assert decision.delete == (".tmp-1-x",)


def _with_sibling(beat: int) -> tuple[list[str], Any]:
    """Version 15 was written twice; the other one's beat is given."""
    sibling = ref(15, "b")
    lineage = tuple(ref(v) for v in range(10, 15))
    known = {**HEADERS, sibling: header(sibling, lineage, beat, beat)}
    return [*LINEAR, *deltas(15, sibling="b")], known.__getitem__


@pytest.mark.parametrize("beat", [15, 40 - 2 * RETAINED - 1])
def test_a_sibling_goes_when_its_beat_is_long_over(beat: int) -> None:
    names, of = _with_sibling(beat)
    decision = classify(listed(names), POINTER, RETAINED, NOW_S, of)
    assert file_name(ref(15, "b"), DELTA) in decision.delete
    assert len(decision.delete) == 21


def test_a_young_sibling_stays_whatever_its_beat() -> None:
    _, of = _with_sibling(15)
    young = listed(deltas(15, sibling="b"), age_s=60)
    decision = classify([*listed(LINEAR), *young], POINTER, RETAINED, NOW_S, of)
    assert file_name(ref(15, "b"), DELTA) not in decision.delete
    assert len(decision.delete) == 20


@pytest.mark.parametrize("beat", [38, 40 - 2 * RETAINED])
def test_age_alone_never_suffices(beat: int) -> None:
    """A sibling that may be followed still keeps all that it leans on, down to the second snapshot."""
    names, of = _with_sibling(beat)
    names += snapshots(5)
    decision = classify(listed(names, age_s=1_000 * DAY_S), POINTER, RETAINED, NOW_S, of)
    kept = {file_name(ref(15, "b"), DELTA), *deltas(*range(5, 15)), *snapshots(5, 10)}
    assert kept.isdisjoint(decision.delete)
    assert set(decision.delete) == {*deltas(1, 2, 3, 4), *deltas(*range(15, 20))}
    assert decision.lean_on == (ref(30), ref(20), ref(10), ref(5))


def test_a_sibling_does_not_lean_on_a_damaged_snapshot() -> None:
    names, of = _with_sibling(38)
    decision = classify(listed(names), POINTER, RETAINED, NOW_S, of, frozenset([ref(10)]))
    assert set(decision.delete) == {*deltas(*range(15, 20))}, "its first delta is as good as a snapshot"
    assert decision.lean_on == (ref(30), ref(20))


def test_a_quiet_lineage_in_parallel_keeps_what_it_leans_on() -> None:
    """No version has two ids: the one lineage goes on from 21 on, the other stopped changing at 20."""
    busy = line(21, 40, PRESUMED, "b")
    other = {ref(19, "c"): header(ref(19, "c"), tuple(ref(v) for v in range(10, 19)), 38, 38)}
    # Only even versions of it, as it was called by more timeouts.
    names = [*deltas(*range(1, 19)), *deltas(20), *deltas(19, sibling="c"), *deltas(*range(21, 41), sibling="b")]
    names += [*snapshots(10), *snapshots(30, 35, sibling="b")]
    # 20 is an ancestor of the pointer by its headers, 19 is not.
    busy = {
        found: replace(
            h, lineage=(*(ref(v) for v in range(10, 19)), ref(20), *h.lineage[h.lineage.index(ref(20)) + 1 :])
        )
        if ref(20) in h.lineage
        else h
        for found, h in busy.items()
    }
    known = {**HEADERS, **busy, **other}
    known[ref(20)] = header(ref(20), tuple(ref(v) for v in range(10, 19)), 20, 20)
    pointer = replace(pointer_at(40, 36, 50, 45), lineage=tuple(LineageEntry(ref(v, "b"), 1) for v in range(36, 41)))
    decision = classify(listed(names), pointer, RETAINED, NOW_S, known.__getitem__)
    assert decision.lean_on == (ref(35, "b"), ref(30, "b"), ref(10))
    assert set(decision.delete) == {*deltas(20), *deltas(*range(21, 30), sibling="b")}


def test_a_recent_sibling_without_its_ancestors_stops_it() -> None:
    names, of = _with_sibling(38)
    decision = classify(listed([n for n in names if n not in deltas(13)]), POINTER, RETAINED, NOW_S, of)
    assert decision.delete == ()
    assert str(ref(13)) in decision.doubt


def test_an_unreadable_header_stops_it() -> None:
    names = _with_sibling(38)[0]

    def unreadable(asked: CheckpointRef) -> LineageHeader:
        raise CorruptFileError(f"the header of {asked} cannot be read")

    with pytest.raises(CorruptFileError):
        classify(listed(names), POINTER, RETAINED, NOW_S, unreadable)


def test_buckets_take_turns() -> None:
    due = [[bucket for bucket in range(100) if clean_up_due(call, bucket, 100)] for call in range(50)]
    assert max(map(len, due)) == 4
    assert all(sum(clean_up_due(call, bucket, 100) for call in range(100)) == 4 for bucket in range(100))


def test_a_folder_that_nobody_cleans_is_noticed() -> None:
    assert not is_crowded(listed(deltas(*range(1, 400))), 100)
    assert is_crowded(listed(deltas(*range(1, 900))), 100)


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

    def __init__(self, files: Backend, local: Path) -> None:
        self.files = files.child("3")
        self.local = local
        self.store = LocalStore(local / "store", SCHEMA)
        self.pointers = [first_pointer()]
        self.models: list[Model] = [{}]
        for batch in range(30):
            self.batch(batch)

    def batch(self, batch: int) -> None:
        bucket = Bucket(
            self.store, self.files, self.pointers[-1], Writer("q", "r", batch, "h"), self.local, None, RETAINED
        )
        changes = {KEYS[batch % 9]: Row(batch), KEYS[(batch + 4) % 9]: None if batch % 4 == 3 else Row(-batch, "n")}
        self.pointers.append(replace(bucket.commit(buffer_of(changes, self.local)), batch=batch))
        self.models.append(changed(self.models[-1], changes))

    def clean(self, pointer: Pointer | None = None, still_ours: Any = lambda: None) -> int:
        return clean_up(self.files, pointer or self.pointers[-1], RETAINED, self.local, still_ours)

    def decision(self) -> Decision:
        def header_of(found: CheckpointRef) -> LineageHeader:
            return read_header(self.files, found, DELTA)

        return classify(self.files.entries(), self.pointers[-1], RETAINED, NOW_S, header_of)

    def check(self) -> None:
        """Every pointer of the retained batches is whole, on an empty disk."""
        for pointer, model in list(zip(self.pointers, self.models, strict=True))[-RETAINED - 1 :]:
            fresh = LocalStore(self.local / uuid.uuid4().hex, SCHEMA)
            assert state_at(fresh, self.files, pointer, self.local) == model
            fresh.close()


@pytest.fixture(params=["disk", "objects", "s3"])
def scene(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(lineage_module, "DELTAS_MIN", 3)
    monkeypatch.setattr(lineage_module, "DELTAS_MAX", 3)
    monkeypatch.setattr(cleanup_module, "_whole", type(cleanup_module._whole)())
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        files = Backend(s3.root(uuid.uuid4().hex), s3.options)
    else:
        files = Backend(str(tmp_path / "root") if request.param == "disk" else f"memory://{uuid.uuid4().hex}")
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
    for batch in range(30, 60):
        scene.batch(batch)
        scene.clean()
        assert len(scene.files.names()) <= 2 * 4 * 2 + 2 * RETAINED
    scene.check()


def test_it_costs_one_listing_where_nothing_ran_twice(scene: Scene) -> None:
    # What was verified once is known.
    scene.clean()
    counting = Counting(scene.files._fs)
    scene.files._fs = counting
    assert scene.clean() == 0
    assert [call for call in counting.calls if call != "invalidate_cache"] == ["ls"]


def test_a_clean_up_that_stops_anywhere_goes_on_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Backend.remove
    total = 0
    while True:
        left = 2

        def remove(self: Backend, name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt("the process dies here")
            real(self, name)

        with monkeypatch.context() as patched:
            patched.setattr(Backend, "remove", remove)
            try:
                total += scene.clean()
                break
            except KeyboardInterrupt:
                total += 2
        scene.check()
    assert total > 15
    scene.check()


def test_a_late_clean_up_of_an_earlier_batch_deletes_less(scene: Scene) -> None:
    earlier = scene.clean(scene.pointers[15])
    later = scene.clean()
    assert earlier > 0
    assert later > 0
    assert scene.clean(scene.pointers[15]) == 0
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


def test_a_run_that_was_replaced_deletes_nothing(scene: Scene) -> None:
    def lost() -> None:
        raise LiveRunError("another run has the state")

    before = scene.files.names()
    with pytest.raises(LiveRunError):
        scene.clean(still_ours=lost)
    assert scene.files.names() == before


def test_doubt_is_logged_and_nothing_goes(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.files.put("somebody's notes", b"x")
    before = scene.files.names()
    with caplog.at_level(logging.WARNING, "spark_state_ext"):
        assert scene.clean() == 0
    assert "somebody's notes is none of our files" in caplog.text
    assert scene.files.names() == before


def test_file_systems_tell_when_files_were_written(scene: Scene) -> None:
    now_s = time.time()
    for found in scene.files.entries():
        assert found.modified_s is not None
        assert abs(found.modified_s - now_s) < 300
        assert found.size_bytes > 0
        assert not found.folder
