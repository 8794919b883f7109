"""A query of the current release that starts from a snapshot, without Spark.

Each call runs as if in a new process with an empty disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from recorded_work import make_job

from arrow_schemas import OperatorFile, Pointer
from spark_state_ext import Backend
from spark_state_ext.beginning.starts import Starts
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.process_state import Shared
from spark_state_ext.engine.start_from import StartFrom
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.savepoints.captured_pointers import Captured
from spark_state_ext.spark.executor.call_info import CallInfo
from spark_state_ext.spark.executor.decision import Begin, Resume
from spark_state_ext.spark.executor.key_work import Times
from spark_state_ext.spark.executor.opened_bucket import CallFolders, OpenBucket, open_bucket
from spark_state_ext.worker.spill import SpillBuffer
from tests.helpers.waiting import WAIT_S

__all__ = ["GOLDEN", "Query", "capture_pointer", "commit_unchanged", "copy_golden_root", "read_rows", "rewrite_rows"]

GOLDEN = Path(__file__).parent.parent / "golden"
_FIRST_MS = 1_800_000_000_000
T = TypeVar("T")


class Query:
    """One query.

    Parameters
    ----------
    local
        Folder of its disks, and of its root if no other root is given.
    operator
        Its operator.
    start
        What it starts from.
    root
        Its root.
    backends
        Its backends; by default the root.
    """

    def __init__(
        self,
        local: Path,
        operator: OperatorFile,
        start: StartFrom | None,
        root: Path | None = None,
        backends: Sequence[Backend] = (),
    ) -> None:
        self.root, self.name, self._local, self._batch = root or local / "root", local.name, local, 0
        local.mkdir(exist_ok=True)
        options = StateOptions(
            root=str(self.root),
            operator=operator.operator,
            buckets=operator.buckets,
            local_dir=str(local),
            lease_ms=1_000,
            backends=tuple(backends) or (Backend(str(self.root)),),
            # Let a batch wait for all of its uploads.
            commit=CommitOptions(commit_delay_ms_max=0),
            start_from=start,
        )
        self.job: Job = replace(
            make_job("pandas", "EventTimeTimeout", None, 1 << 20),
            options=options,
            key_schema=operator.key_schema,
            state_schema=operator.state_schema,
            application_id="an application",
        )

    def call(self, bucket: int, stored: Pointer | None, work: Callable[[OpenBucket], T]) -> T:
        """Call a bucket once, in the next batch."""
        self._batch += 1
        job_here = replace(
            self.job, options=replace(self.job.options, local_dir=str(self._local / f"disk-{self._batch}"))
        )
        shared, times = Shared(), Times(_FIRST_MS + (0 if stored is None else self._batch), 0, True)
        info = CallInfo(job_here, bucket, TaskInfo(self.name, "run", self._batch), times, stored)
        decision = Begin(info, Starts().of(job_here, bucket)) if stored is None else Resume(info)
        opened = open_bucket(shared, decision, CallFolders.of(job_here), b"")
        try:
            return work(opened)
        finally:
            opened.close_sources()
            assert shared.background.wait(WAIT_S)
            assert shared.filling.wait(WAIT_S)
            opened.bucket.close()
            opened.bucket.store.close()


def read_rows(opened: OpenBucket) -> str:
    """Return the rows of a bucket as JSON."""
    rows = [row for batch in opened.bucket.scan() for row in batch.to_pylist()]
    return json.dumps(json.loads(json.dumps(rows, default=str)))


def rewrite_rows(opened: OpenBucket) -> Pointer:
    """Write each row of a bucket again, and return the new pointer."""
    buffer = SpillBuffer(opened.bucket.store.folder.parent, 1 << 20)
    for batch in opened.bucket.scan():
        buffer.append(batch)
    return opened.bucket.commit(buffer).pointer


def commit_unchanged(opened: OpenBucket) -> Pointer:
    """Commit a batch that changes nothing in the bucket, and return the new pointer."""
    return opened.bucket.commit(SpillBuffer(opened.bucket.store.folder.parent, 1 << 20)).pointer


def capture_pointer(query: Query, pointer: Pointer, old_root: Path, operator: str) -> None:
    """Record for a query's plan the pointer that Spark read from the retained checkpoint."""
    hold = Hold.place(Folder(str(old_root)).child(operator, pointer.query_folder), "a test")
    notes = Folder(str(query.root)).child(query.job.operator, "starting")
    notes.put("a.start.arrow", Captured(operator, pointer.batch, (), hold.id, 0, {pointer.bucket: pointer}).encode())
    query.job = replace(query.job, captured="a.start.arrow")


def copy_golden_root(golden: Path, root: Path) -> tuple[Pointer, OperatorFile]:
    """Copy golden files into a root; return the pointer that Spark's checkpoint held, and the operator file."""
    pointer = Pointer.decode((golden / "pointer.bin").read_bytes())
    folder = root / pointer.operator / pointer.query_folder
    shutil.copytree(golden / "3", folder / "3")
    shutil.copy(golden / "operator_0.json", folder)
    return pointer, OperatorFile.decode((golden / "operator_0.json").read_bytes(), "operator_0.json")
