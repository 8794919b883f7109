"""More or fewer buckets in the core: any number of them to any other, against a dict."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from core_support import change_sets
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from reading_support import Job as OldJob
from rescaled_query import RescaledQuery, job_from
from small_root import savepoint_of

from arrow_schemas import BucketMap
from arrow_schemas.savepoint import CANONICAL, NATIVE
from spark_state_ext import Savepoint
from spark_state_ext.backends.replication import is_complete, is_held
from spark_state_ext.commit import cadence
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.rescale.parents import PARENTS_FOLDER, note_parent, parent_of
from spark_state_ext.store import View
from spark_state_ext.testing.model import KEYS, Model, Row, expired_in, model_of
from tests.helpers.soak import SOAK, examples

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
    return model_of([view.expired(now_ms)])


def same(query: RescaledQuery) -> None:
    assert query.state() == query.model
    assert query.restored() == query.model
    for now_ms in (5, 18, 31):
        found: Model = {}
        for bucket in range(query.bucket_map.buckets):
            found |= query.called(bucket, partial(Bucket.read, work=partial(expired_before, now_ms)))
        assert found == expired_in(query.model, now_ms)


@given(COUNTS, COUNTS, st.lists(change_sets(), max_size=4), st.lists(change_sets(), max_size=3), st.data())
@settings(max_examples=examples(12, 400), deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_any_number_of_buckets_to_any_other(
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
        same(query)
        for changes in after:
            query.batch(changes, attempts=data.draw(st.integers(1, 2)))
            if data.draw(st.booleans()):
                query.runner.do()
            if data.draw(st.booleans()):
                query.lose_disks()
            same(query)


@pytest.mark.skipif(not SOAK, reason="the long form")
@pytest.mark.timeout(14_400)
def test_all_pairs_of_numbers(tmp_path: Path) -> None:
    batches: list[dict[tuple[object, ...], Row | None]] = [
        {key: Row(at, "first", at) for at, key in enumerate(KEYS)},
        {key: None if at % 5 == 0 else Row(at, "again", 20) for at, key in enumerate(KEYS[:12])},
    ]
    for n in range(1, 65):
        old = old_job(tmp_path / str(n), n, batches)
        for m in range(1, 65):
            folder = tmp_path / str(n) / str(m)
            folder.mkdir()
            query = rescaled(folder, old, BucketMap(m))
            query.start()
            assert query.state() == query.model
            query.batch({KEYS[3]: Row(1), KEYS[7]: None})
            query.runner.do()
            query.lose_disks()
            assert query.state() == query.model
            shutil.rmtree(folder)
        old.close()


@pytest.fixture
def old(tmp_path: Path) -> OldJob:
    """A job of three buckets with all keys, some of them changed twice, some gone, some with a timeout."""
    return old_job(
        tmp_path,
        3,
        [
            {key: Row(at, "first", at) for at, key in enumerate(KEYS)},
            {key: None if at % 5 == 0 else Row(at, "again", 20) for at, key in enumerate(KEYS[:12])},
        ],
    )


def test_a_bucket_stands_alone_once_it_has_a_snapshot(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(8))
    query.start()
    assert all(pointer.parents is not None for pointer in query.pointers)
    assert not list((tmp_path / "new").rglob("*.snapshot.arrow")), "no row is written anew"
    query.batch({key: Row(7) for key in KEYS})
    assert all(pointer.parents is not None for pointer in query.pointers), "no snapshot has arrived"
    query.lose_disks()
    same(query)
    # The first snapshot was lost with its process; the next one is made when it is due.
    for at in range(14):
        query.batch({key: Row(at) for key in KEYS})
        query.runner.do()
    assert [pointer.parents for pointer in query.pointers] == [None] * 8
    shutil.rmtree(Path(query.folder.child(PARENTS_FOLDER).root))
    query.lose_disks()
    same(query)


def test_clean_up_deletes_nothing_that_is_needed(tmp_path: Path, old: OldJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "DELTAS_MIN", 1)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 3)
    query = rescaled(tmp_path, old, BucketMap(2))
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


def test_one_bucket_alone_is_split_and_joined_again(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap.split(3, {1: 4}))
    query.start()
    same(query)
    assert query.bucket_map.buckets == 6


def test_a_bucket_without_state_has_none_and_the_watermark(tmp_path: Path) -> None:
    job = old_job(tmp_path, 4, [{KEYS[0]: Row(1)}])
    query = rescaled(tmp_path, job, BucketMap(64))
    query.start()
    assert sum(pointer.ref is not None for pointer in query.pointers) == 16
    same(query)
    query.batch({key: Row(2) for key in KEYS})
    same(query)


def test_who_brings_a_parent_of_other_files_goes_on_with_what_is_there(tmp_path: Path, old: OldJob) -> None:
    """A snapshot arrived while several brought it: the state is the same."""
    query = rescaled(tmp_path, old, BucketMap(5))
    query.start()
    there = parent_of(query.folder, 0)
    assert there is not None
    other = replace(there, saved=replace(there.saved, files=there.saved.files[-1:]))
    assert other.encode() != there.encode()
    assert note_parent(query.folder, other) == there
    same(query)


def test_a_bucket_of_which_no_backend_has_the_deltas_is_sent_whole(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(2))
    query.start()
    query.batch({key: Row(7) for key in KEYS})
    assert all(is_held(pointer) for pointer in query.pointers)
    query.runner.die()
    # Another backend takes the place of the one that had them, and the local store has all.
    query.pointers = [
        replace(pointer, replication={"elsewhere": it}, markers={}, inline=())
        for pointer in query.pointers
        for it in pointer.replication.values()
    ]
    query.batch({key: Row(8) for key in KEYS})
    assert all(is_complete(it) for pointer in query.pointers for it in pointer.replication.values())
    query.lose_disks()
    same(query)


def test_what_is_there_of_another_attempt_must_be_the_same(tmp_path: Path, old: OldJob) -> None:
    query = rescaled(tmp_path, old, BucketMap(5))
    query.start()
    first = query.pointers
    query.start()
    assert query.pointers == first
    old.batch({KEYS[1]: Row(99)})
    shutil.rmtree(tmp_path / "savepoint")
    other = rescaled(tmp_path, old, BucketMap(5))
    with pytest.raises(Exception, match=r"is of another state than bucket \d is to be rescaled from"):
        other.start()
