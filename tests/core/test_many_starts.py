"""Many jobs start from one savepoint, and share only the bytes of files, which no job writes to.

The suite starts 20 jobs, the long form 1,000. Their files are hard links to the savepoint's files, which are links to
the original job's files: writing to one would change them all.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from core_support import WRITER, buffer_of, clean_up_at, first_pointer
from life import Life

from arrow_schemas import OperatorFile, Pointer
from arrow_schemas.savepoint import NATIVE, SavedBucket, SavepointHeader, SavepointManifest, make_relocatable
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.registry import Backend
from spark_state_ext.beginning.first_call import bring_files
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.files import checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.retention import clean_up
from spark_state_ext.savepoints.bucket_copy import save_bucket
from spark_state_ext.savepoints.writer import write_manifest
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Changes, Model, Row, apply_changes, scan
from tests.helpers.jobs import job_of
from tests.helpers.soak import SOAK, examples

JOBS, BATCHES, RETAINED = examples(20, 1_000), 6, 0
BUCKETS, BUCKET = 8, 3
# Each batch of a started job makes a snapshot, so that clean-up deletes the savepoint's files.
CADENCE = SnapshotCadence(1, 1)
_FIELD = '{{"metadata":{{}},"name":"{}","nullable":true,"type":"{}"}}'
_KEY = f'{{"fields":[{_FIELD.format("name", "string")},{_FIELD.format("x", "double")}],"type":"struct"}}'
_STATE = f'{{"fields":[{_FIELD.format("count", "long")},{_FIELD.format("note", "string")}],"type":"struct"}}'
OPERATOR = OperatorFile("counts", "", BUCKETS, _KEY, _STATE)


def contents(*folders: Path) -> dict[tuple[str, int, int], str]:
    """Return digests of all files, by path, inode and time of the last write."""
    digests = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        digests[str(path), stat.st_ino, stat.st_mtime_ns] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


@dataclass
class StartedJob:
    """A job that was started from a savepoint. Its local store is open only during its batches."""

    number: int
    job: Job
    scratch: Path
    model: Model
    pointer: Pointer = field(default_factory=first_pointer)

    @property
    def name(self) -> str:
        """The name of its query folder."""
        return f"job-{self.number}"

    @property
    def files(self) -> Folder:
        """The folder of its bucket."""
        return Folder(self.job.options.root).child(self.job.operator, self.name, str(BUCKET))

    def start(self, starts: Starts) -> None:
        """Run the first call of the bucket; for half of the jobs, an earlier attempt has run it already."""
        state = starts.of(self.job, BUCKET)
        assert state is not None
        for _ in range(1 + self.number % 2):
            self.pointer, _ = bring_files(state, self.job, self.name, lambda parent: (), self.scratch)

    def batch(self, at: int) -> None:
        """Run a batch that no other job has, and a clean-up."""
        changes: Changes = {
            KEYS[(self.number + at) % 9]: Row(self.number, f"{self.name} {at}"),
            KEYS[(self.number * at + 4) % 9]: None if self.number % 3 else Row(-self.number),
        }
        with self._bucket(self.scratch / "local" / self.name) as bucket:
            assert bucket.read(scan) == self.model
            self.pointer = bucket.commit(buffer_of(changes, self.scratch)).pointer
        self.model = apply_changes(self.model, changes)
        clean_up(self.files, clean_up_at(self.pointer, RETAINED), self.scratch, time.time() + 700)

    def restore_state(self) -> Model:
        """Return the job's state, restored on an empty disk."""
        with self._bucket(self.scratch / "fresh") as bucket:
            state = bucket.read(scan)
        shutil.rmtree(self.scratch / "fresh")
        return state

    @contextlib.contextmanager
    def _bucket(self, local: Path) -> Iterator[Bucket]:
        (backend,) = self.job.options.backends
        with contextlib.closing(LocalStore.at(local, SCHEMA)) as store:
            replicas = sole_replica(self.files, self.scratch, backend.name)
            context = CommitContext(self.scratch, batches_retained=RETAINED, cadence=CADENCE)
            yield Bucket(store, replicas, self.pointer, WRITER, context)


def job_from(root: Path, savepoint: Path) -> Job:
    options = StateOptions(
        root=str(root),
        operator=OPERATOR.operator,
        buckets=BUCKETS,
        start_from=Savepoint(str(savepoint)),
        backends=(Backend(str(root)),),
    )
    return job_of(
        options,
        key_schema=_KEY,
        state_schema=_STATE,
        columns=("name", "x"),
        key_positions=(0, 1),
        batches_retained=RETAINED,
    )


def write_savepoint(life: Life, path: Path) -> None:
    """Write a savepoint of the bucket; the operator's other buckets have no state."""
    target = Folder(str(path))
    copy = save_bucket(
        life.pointers[-1], life.replicas(), target.child(OPERATOR.operator, str(BUCKET)), NATIVE, SCHEMA, life.local
    )
    assert copy.duplicated == len(copy.saved.files) > 1
    empty = [
        SavedBucket(OPERATOR.operator, at, make_relocatable(replace(first_pointer(at), buckets=BUCKETS), ()), ())
        for at in range(BUCKETS)
        if at != BUCKET
    ]
    header = SavepointHeader("12" * 16, NATIVE, 1_700_000_000_000, {OPERATOR.operator: OPERATOR}, "0.1.0", "q", 4, None)
    write_manifest(
        target, SavepointManifest(header, tuple(sorted([*empty, copy.saved], key=lambda saved: saved.bucket)))
    )


@pytest.mark.parametrize("ingested", [False, True])
@pytest.mark.timeout(7_200 if SOAK else 900)
def test_jobs_that_start_from_one_savepoint_share_nothing(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingested: bool
) -> None:
    """Jobs ingest a snapshot unchanged, or read its rows."""
    # Clean-up also depends on the number of retained batches with which the savepoint's pointers were made.
    life.batches_retained = 1
    life.history(12)
    savepoint = tmp_path / "savepoint"
    write_savepoint(life, savepoint)
    shared = {path.stat().st_ino for path in savepoint.rglob("*.*.arrow")}
    before = contents(savepoint, tmp_path / "a")
    if ingested:
        monkeypatch.setattr(checkpoint, "_INGESTED_BYTES_MIN", 0)
    starts, scratch = Starts(), tmp_path / "scratch"
    scratch.mkdir()
    job = job_from(tmp_path / "root", savepoint)
    jobs = [StartedJob(number, job, scratch, life.models[-1]) for number in range(JOBS)]
    for started_job in jobs:
        started_job.start(starts)
    # All links lead to the same files, so a write to one would change all.
    links = [path for path in (tmp_path / "root").rglob("*.*.arrow") if path.stat().st_ino in shared]
    assert len(links) == JOBS * len(shared)
    for at in range(BATCHES):
        for started_job in jobs:
            started_job.batch(at)
    # Each job has deleted the links that it no longer needs, and only its own.
    assert not any(path.exists() for path in links)
    assert contents(savepoint, tmp_path / "a") == before
    assert len({str(sorted(started_job.model.items(), key=repr)) for started_job in jobs}) == JOBS
    # Each job works without the savepoint, the original job and all other jobs.
    for gone in (savepoint, tmp_path / "a"):
        shutil.rmtree(gone)
    for started_job in jobs:
        assert started_job.restore_state() == started_job.model
        shutil.rmtree(tmp_path / "root" / OPERATOR.operator / started_job.name)


def test_the_digests_detect_a_write_to_a_link(life: Life, tmp_path: Path) -> None:
    """The test above relies on this."""
    life.history(5)
    write_savepoint(life, tmp_path / "savepoint")
    before = contents(tmp_path / "savepoint")
    link = next((tmp_path / "a").rglob("*.*.arrow"))
    data = link.read_bytes()
    with link.open("r+b") as file:
        file.write(data[:-1] + b"?")
    assert contents(tmp_path / "savepoint") != before
