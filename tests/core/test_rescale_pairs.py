"""Rescale from each number of buckets to each other one, with the newest deltas only in pointers."""

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
# The numbers that the suite uses.
SOME = (1, 5, 64)
ALL: list[Key] = [*KEYS, *((f"k{at}", float(at)) for at in range(125))]
CAPTURED = "1-plan.start.arrow"
TIMES_MS = (5, 18, 31)


def draw_changes(numbers: random.Random, part: float) -> dict[Key, Row | None]:
    """Return changes of a part of all keys: new counts, with and without a timeout, and removals."""
    return {
        key: None
        if numbers.random() < 0.2
        else Row(numbers.randrange(1000), None, numbers.choice((None, 4, 10, 17, 18, 30, 40)))
        for key in ALL
        if numbers.random() < part
    }


class _Stuck(WorkerUploads):
    """Starts no upload."""

    def submit(self, uploads: Iterable[Upload]) -> None:
        """Ignore the uploads."""


def run_old_query(folder: Path, buckets: int) -> OldJob:
    """Run a query for four batches; the last two are in no file."""
    numbers = random.Random(buckets)
    job = OldJob(folder / "old", folder / "old-local", buckets=buckets)
    for part in (1.0, 0.4, 0.2, 0.2):
        job.batch(draw_changes(numbers, part))
        if len(job.models) == 2:
            job.context = {"options": CommitOptions(), "uploads": _Stuck()}
    job.close()
    assert max(len(pointer.inline) for pointer in job.pointers[-1]) == 2, "deltas are pending"
    return job


def start_rescaled(folder: Path, old: OldJob, buckets: int) -> RescaledQuery:
    """Start another query from the last batch of the old one, as its plan has read it."""
    pointers = {pointer.bucket: replace(pointer, query_folder=old.query_id) for pointer in old.pointers[-1]}
    files = Folder(str(folder / "new")).child(old.operator, STARTING_FOLDER)
    files.put(CAPTURED, Captured(old.operator, 3, (), "hold", 0, pointers).encode())
    start = RetainedCheckpoint(str(old.root), "/checkpoint")
    job = job_from(folder / "new", old, BucketMap(buckets), start, captured=CAPTURED)
    query = RescaledQuery(job, folder, dict(old.models[-1]))

    def open_replicas(pointer: Pointer) -> list[Replica]:
        return sole_replica(old.folder.child(str(pointer.bucket)), folder, "old")

    query.start(open_replicas)
    return query


def read_bucket(view: View) -> tuple[Model, list[Model]]:
    """Return all rows of a bucket, and those that have timed out at each of `TIMES_MS`."""
    return scan(view), [make_model([view.expired(now_ms)]) for now_ms in TIMES_MS]


def check_state(query: RescaledQuery) -> None:
    """Check that each bucket has exactly its own keys, with the right timeouts."""
    model: Model = {}
    expired: list[Model] = [{} for _ in TIMES_MS]
    for bucket in range(query.bucket_map.buckets):
        rows, timed_out = query.called(bucket, partial(Bucket.read, work=read_bucket))
        assert all(bucket_in(query.bucket_map, key) == bucket for key in rows)
        model |= rows
        for at, rows_at in enumerate(timed_out):
            expired[at] |= rows_at
    assert model == query.model
    assert expired == [find_expired(query.model, now_ms) for now_ms in TIMES_MS]


@pytest.mark.soak
@pytest.mark.timeout(7_200 if SOAK else 900)
@pytest.mark.parametrize("n", NUMBERS if SOAK else SOME)
def test_each_number_of_buckets_can_be_rescaled_to_each_other(n: int, tmp_path: Path) -> None:
    old = run_old_query(tmp_path, n)
    for m in NUMBERS if SOAK else SOME:
        folder = tmp_path / str(m)
        folder.mkdir()
        query = start_rescaled(folder, old, m)
        assert all((pointer.parents is None) == (pointer.ref is None or n == m) for pointer in query.pointers)
        check_state(query)
        query.batch(draw_changes(random.Random(f"{n} {m}"), 0.3))
        if (n + m) % 2:
            query.lose_disks()
        check_state(query)
        shutil.rmtree(folder)
