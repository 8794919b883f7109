"""Many jobs start from one savepoint, and share nothing but the bytes of files, which nobody writes to.

The suite starts twenty, the long form a thousand. Their files are hard links to those of the savepoint, which are links
to those of the job that it was taken of: whoever opened one for writing would change all of them.
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
from spark_state_ext.commit import cadence
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
_FIELD = '{{"metadata":{{}},"name":"{}","nullable":true,"type":"{}"}}'
_KEY = f'{{"fields":[{_FIELD.format("name", "string")},{_FIELD.format("x", "double")}],"type":"struct"}}'
_STATE = f'{{"fields":[{_FIELD.format("count", "long")},{_FIELD.format("note", "string")}],"type":"struct"}}'
OPERATOR = OperatorFile("counts", "", BUCKETS, _KEY, _STATE)


def contents(*folders: Path) -> dict[tuple[str, int, int], str]:
    """Digests of all files, by path, inode and time of the last write."""
    found = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        told = path.stat()
        found[str(path), told.st_ino, told.st_mtime_ns] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@dataclass
class Started:
    """A job that was started from a savepoint, batch after batch; it has its local store open only while it works."""

    number: int
    job: Job
    scratch: Path
    model: Model
    pointer: Pointer = field(default_factory=first_pointer)

    @property
    def name(self) -> str:
        """Of its query folder."""
        return f"job-{self.number}"

    @property
    def files(self) -> Folder:
        """Its bucket's."""
        return Folder(self.job.options.root).child(self.job.operator, self.name, str(BUCKET))

    def start(self, starts: Starts) -> None:
        """What the first call of its bucket does; an attempt at it may have done so before."""
        state = starts.of(self.job, BUCKET)
        assert state is not None
        for _ in range(1 + self.number % 2):
            self.pointer, _ = bring_files(state, self.job, self.name, lambda parent: (), self.scratch)

    def batch(self, at: int) -> None:
        """A batch that no other job has, and a clean-up."""
        changes: Changes = {
            KEYS[(self.number + at) % 9]: Row(self.number, f"{self.name} {at}"),
            KEYS[(self.number * at + 4) % 9]: None if self.number % 3 else Row(-self.number),
        }
        with self._bucket(self.scratch / "local" / self.name) as bucket:
            assert bucket.read(scan) == self.model
            self.pointer = bucket.commit(buffer_of(changes, self.scratch)).pointer
        self.model = apply_changes(self.model, changes)
        clean_up(self.files, clean_up_at(self.pointer, RETAINED), self.scratch, time.time() + 700)

    def restored(self) -> Model:
        """Its state on an empty disk."""
        with self._bucket(self.scratch / "fresh") as bucket:
            found = bucket.read(scan)
        shutil.rmtree(self.scratch / "fresh")
        return found

    @contextlib.contextmanager
    def _bucket(self, local: Path) -> Iterator[Bucket]:
        (backend,) = self.job.options.backends
        with contextlib.closing(LocalStore.at(local, SCHEMA)) as store:
            replicas = sole_replica(self.files, self.scratch, backend.name)
            yield Bucket(store, replicas, self.pointer, WRITER, CommitContext(self.scratch, batches_retained=RETAINED))


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


def taken(life: Life, path: Path) -> None:
    """A savepoint of the life's bucket; its operator has others, which have no state."""
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
    write_manifest(target, SavepointManifest(header, tuple(sorted([*empty, copy.saved], key=lambda it: it.bucket))))


@pytest.mark.parametrize("ingested", [False, True])
@pytest.mark.timeout(7_200 if SOAK else 900)
def test_jobs_that_start_from_one_savepoint_share_nothing(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingested: bool
) -> None:
    """Whether a snapshot is put into the local store as it is, or read."""
    # Clean-up goes by what the savepoint's pointers were made under, too.
    life.batches_retained = 1
    life.history(12)
    savepoint = tmp_path / "savepoint"
    taken(life, savepoint)
    shared = {path.stat().st_ino for path in savepoint.rglob("*.*.arrow")}
    before = contents(savepoint, tmp_path / "a")
    # From here on each batch is due for a snapshot, so that clean-up deletes what came from the savepoint.
    monkeypatch.setattr(cadence, "DELTAS_MIN", 1)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 1)
    if ingested:
        monkeypatch.setattr(checkpoint, "_INGESTED_BYTES_MIN", 0)
    starts, scratch = Starts(), tmp_path / "scratch"
    scratch.mkdir()
    job = job_from(tmp_path / "root", savepoint)
    jobs = [Started(number, job, scratch, life.models[-1]) for number in range(JOBS)]
    for one in jobs:
        one.start(starts)
    # All are links to the same files: whoever wrote to one would write to all.
    links = [path for path in (tmp_path / "root").rglob("*.*.arrow") if path.stat().st_ino in shared]
    assert len(links) == JOBS * len(shared)
    for at in range(BATCHES):
        for one in jobs:
            one.batch(at)
    # Each has deleted names that it has no more use for, and nobody else's.
    assert not any(path.exists() for path in links)
    assert contents(savepoint, tmp_path / "a") == before
    assert len({str(sorted(one.model.items(), key=repr)) for one in jobs}) == JOBS
    # Each stands alone: without the savepoint, the job that it was taken of, and every other job.
    for gone in (savepoint, tmp_path / "a"):
        shutil.rmtree(gone)
    for one in jobs:
        assert one.restored() == one.model
        shutil.rmtree(tmp_path / "root" / OPERATOR.operator / one.name)


def test_a_link_that_is_written_to_would_be_seen(life: Life, tmp_path: Path) -> None:
    """The test above could not fail otherwise."""
    life.history(5)
    taken(life, tmp_path / "savepoint")
    before = contents(tmp_path / "savepoint")
    link = next((tmp_path / "a").rglob("*.*.arrow"))
    data = link.read_bytes()
    with link.open("r+b") as file:
        file.write(data[:-1] + b"?")
    assert contents(tmp_path / "savepoint") != before
