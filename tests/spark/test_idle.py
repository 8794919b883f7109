"""A run between two batches, however far apart they are: it keeps its lease, and gives it free when it ends."""

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

# Renewed after a third of it: ten seconds are left for whatever holds a machine up.
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
        # A lease's time after its only batch, and it is still renewed.
        log = LeaseLog(query_folder)
        before = log.newest()
        assert before is not None
        eventually(lambda: (found := log.newest()) is not None and found.number >= before.number + 3)
        for copied in range(2):
            other = RunIdentity("another application", f"plan {copied}", str(query.id), "another host")
            with pytest.raises(LiveRunError, match="Stop the other run"):
                Lease(query_folder, other, LEASE_MS).hold()
    finally:
        query.stop()
    eventually(lambda: (found := log.newest()) is None or found.record.released)
    started_s = time.monotonic()
    Lease(query_folder, RunIdentity("another application", "plan"), 3_600_000).hold()
    assert time.monotonic() - started_s < WAIT_S, "it did not wait for the lease"
