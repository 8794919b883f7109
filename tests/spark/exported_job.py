"""A query whose Python workers end with each task; test_exported runs it.

Usage: ``python tests/spark/exported_job.py FOLDER --batches 4``. It writes its metrics to ``FOLDER/local`` and its
state to ``FOLDER/root``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from killed_jobs import session
from streams import finish, read, write_batches

from spark_state_ext import ArrowState, StateBatch
from spark_state_ext.worker.metrics import by_batch
from spark_state_ext.worker.metrics import read as read_metrics
from spark_state_ext.worker.telemetry import Telemetry
from tests.helpers.waiting import WAIT_S

ROWS, KEYS = 500, 60


def count_all(batch: StateBatch) -> pa.Table:
    # A task waits only half a second for its export, and a slow machine takes longer.
    Telemetry.flush.__defaults__ = (WAIT_S,)
    n = pc.add(pc.fill_null(batch.state["n"], 0), batch.counts)
    batch.update({"n": n})
    return batch.keys.append_column("n", n)


def main() -> int:
    """Run the query and print one line of JSON: totals of its metrics files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, default=4)
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    spark = session(0, "hdfs", {"spark.python.worker.reuse": "false", "spark.sql.streaming.minBatchesToRetain": "2"})
    tables = [
        pa.table({"sensor": pa.array([(batch * 7 + row) % KEYS for row in range(ROWS)], pa.int64())})
        for batch in range(arguments.batches)
    ]
    events = read(spark, write_batches(folder / "in", tables), "sensor long")
    state = ArrowState(str(folder / "root"), operator="count", buckets=4, local_dir=str(folder / "local"))
    counts = state.apply_in_arrow_with_state(events, "sensor", count_all, "sensor long, n long", "n long")
    writer = counts.writeStream.format("noop").outputMode("update").trigger(availableNow=True)
    finish(writer.option("checkpointLocation", str(folder / "checkpoint")).start())
    calls = read_metrics(folder / "local")
    batches = by_batch(calls)
    print(json.dumps({"calls": calls.num_rows, "rows": pc.sum(calls["rows"]).as_py(), "batches": batches.num_rows}))
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
