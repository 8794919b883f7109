"""Every number of buckets from 1 to 64 to every other one, from a query whose newest deltas are in its pointers only."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from reading_support import Job as OldJob
from rescaled_query import RescaledQuery, bucket_in, job_from

from arrow_schemas import BucketMap, Pointer
from spark_state_ext import RetainedCheckpoint
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.uploads import Upload, WorkerUploads
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import STARTING_FOLDER
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.store import View
from spark_state_ext.testing.model import KEYS, Key, Model, Row, find_expired, make_model, scan
from tests.helpers.soak import SOAK

NUMBERS = range(1, 65)
# In the suite.
SOME = (1, 5, 64)
ALL: list[Key] = [*KEYS, *((f"k{at}", float(at)) for at in range(125))]
CAPTURED = "1-plan.start.arrow"
TIMES_MS = (5, 18, 31)


def drawn(numbers: random.Random, part: float) -> dict[Key, Row | None]:
    """Changes of a part of all keys: new counts, with and without a timeout, and removals."""
    return {
        key: None
        if numbers.random() < 0.2
        else Row(numbers.randrange(1000), None, numbers.choice((None, 4, 10, 17, 18, 30, 40)))
        for key in ALL
        if numbers.random() < part
    }


class _Stuck(WorkerUploads):
    """No upload ever begins."""

    def submit(self, uploads: Iterable[Upload]) -> None:
        """Leave them."""


def old_query(folder: Path, buckets: int) -> OldJob:
    """A query of four batches, of which the last two are in no file."""
    numbers = random.Random(buckets)
    job = OldJob(folder / "old", folder / "old-local", buckets=buckets)
    for part in (1.0, 0.4, 0.2, 0.2):
        job.batch(drawn(numbers, part))
        if len(job.models) == 2:
            job.context = {"options": CommitOptions(), "uploads": _Stuck()}
    job.close()
    assert max(len(pointer.inline) for pointer in job.pointers[-1]) == 2, "deltas are pending"
    return job


def started(folder: Path, old: OldJob, buckets: int) -> RescaledQuery:
    """Another query that starts from the old one's last batch, which its plan has read."""
    pointers = {it.bucket: replace(it, query_folder=old.query_id) for it in old.pointers[-1]}
    files = Folder(str(folder / "new")).child(old.operator, STARTING_FOLDER)
    files.put(CAPTURED, Captured(old.operator, 3, (), "hold", 0, pointers).encode())
    start = RetainedCheckpoint(str(old.root), "/checkpoint")
    job = job_from(folder / "new", old, BucketMap(buckets), start, captured=CAPTURED)
    query = RescaledQuery(job, folder, dict(old.models[-1]))

    def replicas(pointer: Pointer) -> list[Replica]:
        return sole_replica(old.folder.child(str(pointer.bucket)), folder, "old")

    query.start(replicas)
    return query


def looked_at(view: View) -> tuple[Model, list[Model]]:
    """All of a bucket, and what has timed out by each of some times."""
    return scan(view), [make_model([view.expired(now_ms)]) for now_ms in TIMES_MS]


def same(query: RescaledQuery) -> None:
    """Every bucket has its keys and no others, and says the same of their timeouts."""
    found: Model = {}
    expired: list[Model] = [{} for _ in TIMES_MS]
    for bucket in range(query.bucket_map.buckets):
        rows, timed_out = query.called(bucket, partial(Bucket.read, work=looked_at))
        assert all(bucket_in(query.bucket_map, key) == bucket for key in rows)
        found |= rows
        for at, those in enumerate(timed_out):
            expired[at] |= those
    assert found == query.model
    assert expired == [find_expired(query.model, now_ms) for now_ms in TIMES_MS]


@pytest.mark.timeout(7_200 if SOAK else 900)
@pytest.mark.parametrize("n", NUMBERS if SOAK else SOME)
def test_all_pairs_of_numbers(n: int, tmp_path: Path) -> None:
    old = old_query(tmp_path, n)
    for m in NUMBERS if SOAK else SOME:
        folder = tmp_path / str(m)
        folder.mkdir()
        query = started(folder, old, m)
        assert all((it.parents is None) == (it.ref is None or n == m) for it in query.pointers)
        same(query)
        query.batch(drawn(random.Random(f"{n} {m}"), 0.3))
        if (n + m) % 2:
            query.lose_disks()
        same(query)
        shutil.rmtree(folder)
