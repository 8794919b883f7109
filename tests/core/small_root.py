"""A small root and a savepoint of it that are always the same: ids, times and rows are fixed."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from reading_support import Job, operator_file

from arrow_schemas.savepoint import CANONICAL, NATIVE, SavepointHeader, SavepointManifest
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LeaseRecord, RunIdentity
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.writer import write_manifest
from spark_state_ext.testing.model import SCHEMA, Changes, Row

__all__ = ["BEGUN_S", "NAMES", "QUERY", "SAVEPOINT_ID", "SmallRoot", "fixed_ids", "savepoint_of", "small_root"]

QUERY = "5ee1e7a2-3f0c-4d0b-9a55-0c6d5f0d8a01"
SAVEPOINT_ID = "5a" * 16
# 2024-02-01T12:00:00Z; a batch a minute.
BEGUN_S = 1_706_788_800
NAMES = ("ann", "bob", "cid", "dan", "eve", "fay")


@dataclass(frozen=True)
class SmallRoot:
    """The root and its job."""

    root: Path
    job: Job

    @property
    def query_folder(self) -> Path:
        return self.root / "counts" / QUERY


@contextmanager
def fixed_ids() -> Iterator[None]:
    """Replace random ids by the same sequence each time.

    Only this thread gets them: threads of earlier tests, such as the keeper of a lease, would use up some of them.
    """
    numbers, this_thread, random_id = random.Random(7), threading.get_ident(), uuid.uuid4

    def fixed_id() -> uuid.UUID:
        if threading.get_ident() != this_thread:
            return random_id()
        return uuid.UUID(int=numbers.getrandbits(128), version=4)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(uuid, "uuid4", fixed_id)
        yield


def _changes(batch: int) -> Changes:
    """Return a batch's changes: it counts some names and sets a timeout of one; batch 4 also removes one."""
    changes: dict[tuple[object, ...], Row | None] = {
        (name, 0.5 * at): Row(10 * batch + at, f"batch {batch}", 60_000 * batch if at == 1 else None)
        for at, name in enumerate(NAMES)
        if (batch + at) % 3 or at > 2
    }
    if batch == 4:
        changes["cid", 1.0] = None
    return changes


@contextmanager
def small_root(folder: Path, batches: int = 8, buckets: int = 2) -> Iterator[SmallRoot]:
    """Make a root with one query of several batches.

    Parameters
    ----------
    folder
        Parent folder of the root.
    batches, buckets
        Number of batches and of buckets.
    """
    (folder / "scratch").mkdir(parents=True)
    with fixed_ids():
        job = Job(folder / "root", folder / "scratch", query_id=QUERY, buckets=buckets)
        try:
            for batch in range(batches):
                job.batch(_changes(batch))
            owner = RunIdentity("application_1706788800000_0001", "plan", QUERY, "host")
            lease = LeaseRecord(owner, BEGUN_S * 1000, 60_000, released=True, nonce="0" * 32)
            log = LeaseLog(job.folder)
            assert log.append(log.newest(first=True), lease)
            dated(folder / "root")
            yield SmallRoot(folder / "root", job)
        finally:
            job.close()


def dated(folder: Path) -> None:
    """Set the times of files to those of their batches: a checkpoint's version is its batch's number plus one."""
    for path in folder.rglob("*"):
        if path.is_file():
            version = path.name.partition("_")[0]
            at_s = BEGUN_S + 60 * (int(version) if version.isdecimal() else 0)
            # Of two savepoints that are taken at the same time, the slower one removes its files.
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (at_s, at_s))


def savepoint_of(
    job: Job,
    path: Path,
    form: str = NATIVE,
    batch: int | None = None,
    made_ms: Callable[[], int] = lambda: BEGUN_S * 1000,
) -> Folder:
    """Take a savepoint of a job after a batch, without Spark."""
    assert form in (NATIVE, CANONICAL)
    folder = Folder(str(path))
    at = len(job.pointers) - 1 if batch is None else batch + 1
    saved = []
    for pointer in job.pointers[at]:
        files = job.folder.child(str(pointer.bucket))
        target = folder.child(job.operator, str(pointer.bucket))
        replicas = sole_replica(files, job.scratch, "fsspec")
        saved.append(save_bucket(pointer, replicas, target, form, SCHEMA, job.scratch).saved)
    operators = {job.operator: operator_file(job.operator, job.query_id, job.buckets)}
    header = SavepointHeader(SAVEPOINT_ID, form, made_ms(), operators, "0.1.0", job.query_id, at - 1, 42_000)
    write_manifest(folder, SavepointManifest(header, tuple(saved)))
    dated(path)
    return folder
