"""A run between two batches, however far apart they are: it keeps its lease, and gives it free when it ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from streams import WAIT_S, read, write_batches
from test_guards import STATE, arrow_state, count_rows

from spark_state_ext.errors import LiveRunError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import RunIdentity


def test_an_idle_run_keeps_its_lease_until_it_ends(session: Any, tmp_path: Path) -> None:
    source = write_batches(tmp_path / "in", [pa.table({"key": pa.array([1, 2], pa.int64())})])
    out = arrow_state(tmp_path, lease_ms=6_000).apply_in_pandas_with_state(
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
        deadline_s = time.monotonic() + WAIT_S
        while query.lastProgress is None and query.isActive and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert query.exception() is None
        query_folder = Folder(str(tmp_path / "root" / "guarded" / str(query.id)))
        # Two leases' time after its only batch.
        time.sleep(12.0)
        for copied in range(2):
            other = RunIdentity("another application", f"plan {copied}", str(query.id), "another host")
            with pytest.raises(LiveRunError, match="Stop the other run"):
                Lease(query_folder, other, 6_000).hold()
    finally:
        query.stop()
    deadline_s = time.monotonic() + WAIT_S
    log = LeaseLog(query_folder)
    while (found := log.newest()) is not None and not found.record.released and time.monotonic() < deadline_s:
        time.sleep(0.1)
    started_s = time.monotonic()
    Lease(query_folder, RunIdentity("another application", "plan"), 60_000).hold()
    assert time.monotonic() - started_s < 30.0, "it did not wait for the lease"
