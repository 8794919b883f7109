"""`CommitContext`: the settings and services that all parts of a bucket's commit use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.failures import NO_RUN, Run
from spark_state_ext.commit.uploads import Uploads, WorkerUploads
from spark_state_ext.store.lazy_file import LazyOptions
from spark_state_ext.worker.background import Inline, Runner

__all__ = ["BATCHES_RETAINED", "CommitContext"]

# Spark's default of spark.sql.streaming.minBatchesToRetain.
BATCHES_RETAINED = 100


@dataclass(frozen=True)
class CommitContext:
    """The settings and services of a commit, created by the bucket's call.

    Parameters
    ----------
    scratch
        Local folder for temporary files.
    options
        Options of commits; by default commits are synchronous.
    batches_retained
        Spark's ``spark.sql.streaming.minBatchesToRetain``.
    cadence
        When snapshots are due.
    uploads
        Sends files while batches continue.
    runner
        Runs work in the background: writing snapshots, and reading back files that another machine has sent. By
        default it runs the work within the call.
    run
        The run of the call: failures of other runs do not count. Unknown by default.
    batch_ms
        Spark's time of the batch, milliseconds since 1970.
    clock_s
        The machine's monotonic clock.
    while_waiting
        Called regularly during waits for checkpoint files or uploads; an exception that it raises ends the restore or
        the commit.
    lazy
        Options of lazy restore; None: no lazy restore.
    """

    scratch: Path
    options: CommitOptions = field(default_factory=lambda: CommitOptions(journal=False))
    batches_retained: int = BATCHES_RETAINED
    cadence: SnapshotCadence = field(default_factory=SnapshotCadence)
    uploads: Uploads = field(default_factory=WorkerUploads)
    runner: Runner = field(default_factory=Inline)
    run: Run = NO_RUN
    batch_ms: int = 0
    clock_s: Callable[[], float] = time.monotonic
    while_waiting: Callable[[], None] = lambda: None
    lazy: LazyOptions | None = None
