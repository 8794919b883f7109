"""A run keeps its lease between two batches, however long that takes, and releases it when it ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from streams import read, write_batches
from test_guards import STATE, arrow_state, count_rows

from spark_state_ext.errors import LiveRunError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import RunIdentity
from tests.helpers.waiting import WAIT_S, eventually

# The run renews its lease after a third of this, so the machine may be slow for ten seconds.
LEASE_MS = 15_000


def test_an_idle_run_keeps_its_lease_until_it_ends(session: Any, tmp_path: Path) -> None:
    source = write_batches(tmp_path / "in", [pa.table({"key": pa.array([1, 2], pa.int64())})])
    out = arrow_state(tmp_path, lease_ms=LEASE_MS).apply_in_pandas_with_state(
        read(session, source, "key long"), "key", count_rows, "key long, n long", STATE, "update", "NoTimeout"
    )
    query = (
        out.writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="1 hour")
        .start()
    )
    try:
        eventually(lambda: query.lastProgress is not None or not query.isActive)
        assert query.exception() is None
        query_folder = Folder(str(tmp_path / "root" / "guarded" / str(query.id)))
        # The only batch is over for the duration of a lease, and the run still renews it.
        log = LeaseLog(query_folder)
        before = log.newest()
        assert before is not None
        eventually(lambda: (newest := log.newest()) is not None and newest.number >= before.number + 3)
        for plan in range(2):
            other = RunIdentity("another application", f"plan {plan}", str(query.id), "another host")
            with pytest.raises(LiveRunError, match="Stop the other run"):
                Lease(query_folder, other, LEASE_MS).hold()
    finally:
        query.stop()
    eventually(lambda: (newest := log.newest()) is None or newest.record.released)
    started_s = time.monotonic()
    Lease(query_folder, RunIdentity("another application", "plan"), 3_600_000).hold()
    assert time.monotonic() - started_s < WAIT_S, "the next run does not wait for the lease"
