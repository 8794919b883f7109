"""What all parts of a bucket's commit work with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

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
    """What a bucket's call gives to all parts of its commit.

    Parameters
    ----------
    scratch
        Local folder for temporary files.
    options
        Limits of commits; by default they are synchronous.
    batches_retained
        Spark's ``spark.sql.streaming.minBatchesToRetain``.
    uploads
        Sends files beside batches.
    runner
        Writes snapshots, and reads back what another machine has sent; by default within the call.
    run
        Whose call it is: failures of others do not count. By default nothing tells.
    batch_ms
        The batch's time by Spark, milliseconds since 1970.
    clock_s
        The machine's monotonic clock.
    while_waiting
        Called now and then while checkpoint files or uploads are waited for; what it raises ends the restore, or the
        commit.
    lazy
        How the call restores lazily; by default it does not.
    """

    scratch: Path
    options: CommitOptions = field(default_factory=lambda: CommitOptions(journal=False))
    batches_retained: int = BATCHES_RETAINED
    uploads: Uploads = field(default_factory=WorkerUploads)
    runner: Runner = field(default_factory=Inline)
    run: Run = NO_RUN
    batch_ms: int = 0
    clock_s: Callable[[], float] = time.monotonic
    while_waiting: Callable[[], None] = lambda: None
    lazy: LazyOptions | None = None
