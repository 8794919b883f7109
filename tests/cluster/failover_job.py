"""The driver of a query that survives its hosts, in a separate process and environment: ``failover_job.py SETTINGS``.

It makes a savepoint of the query's initial state unless there is one, and then processes one file of events after the other
until there is a file named ``stop``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_state_ext import ArrowState, Savepoint, write_savepoint

_INPUT = "key bigint, amount bigint"
_OUTPUT = "key bigint, n bigint, total bigint, bucket int, host string"
_STATE = "n bigint, total bigint, pad binary"
_OPERATOR = "totals"
# With the other columns, a row of a snapshot has about 100 bytes, which cannot be compressed.
_PAD_BYTES = 56


def add_up(batch: Any) -> pa.Table:
    """Count the events of keys and add up their amounts; the padding stays in the state."""
    new = batch.aggregate([([], "count_all"), ("amount", "sum")])
    n = pc.add(pc.fill_null(batch.state["n"], 0), new["count_all"])
    total = pc.add(pc.fill_null(batch.state["total"], 0), new["amount_sum"])
    batch.update({"n": n, "total": total, "pad": batch.state["pad"]})
    output = batch.keys.append_column("n", n).append_column("total", total)
    output = output.append_column("bucket", pa.repeat(pa.scalar(batch.bucket, pa.int32()), output.num_rows))
    return output.append_column("host", pa.repeat(os.environ["CLUSTER_WORKER"], output.num_rows))


def make_savepoint(spark: SparkSession, path: str, rows: int, settings: Mapping[str, Any]) -> None:
    """Write the state before the first event: each key once, with its own number as total."""
    pad = F.substring(F.unhex(F.sha2(F.col("id").cast("string"), 512)), 1, _PAD_BYTES)
    table = spark.range(rows).select(
        F.col("id").alias("key"), F.lit(1).cast("bigint").alias("n"), F.col("id").alias("total"), pad.alias("pad")
    )
    write_savepoint(
        table,
        path,
        keys=["key"],
        state_schema=_STATE,
        buckets=settings["buckets"],
        operator=_OPERATOR,
        storage_options=settings["storage_options"],
    )


def make_writer(out: Path) -> Any:
    """Return the sink: it writes a file with rows and one with hosts for each batch; repeated batches must be equal."""

    def write(df: Any, batch: int) -> None:
        output = df.collect()
        rows = sorted([list(row[:3]) for row in output])
        hosts = {row["bucket"]: row["host"] for row in output}
        (out.with_name("hosts") / f"{batch:06}.json").write_text(json.dumps(hosts))
        path = out / f"{batch:06}.json"
        if path.exists() and json.loads(path.read_text()) != rows:
            (out / f"differs-{batch}").write_text(json.dumps(rows))
        hidden = out / f".{batch}"
        hidden.write_text(json.dumps(rows))
        hidden.rename(path)

    return write


def main(settings: Mapping[str, Any]) -> None:
    """Make the savepoint, and run the query until the file ``stop`` exists."""
    folder = Path(settings["folder"])
    builder = SparkSession.builder.appName("failover")
    for name, value in settings["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    ready = folder / "savepoint-ready"
    if not ready.exists():
        make_savepoint(spark, settings["savepoint"], settings["rows"], settings)
        ready.touch()
    state = ArrowState(
        settings["root"],
        _OPERATOR,
        buckets=settings["buckets"],
        local_dir=settings["local_dir"],
        storage_options=settings["storage_options"],
        start_from=Savepoint(settings["savepoint"], storage_options=settings["storage_options"]),
        **settings["options"],
    )
    events = spark.readStream.schema(_INPUT).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    query = (
        state.apply_in_arrow_with_state(events, "key", add_up, _OUTPUT, _STATE)
        .writeStream.outputMode("update")
        .foreachBatch(make_writer(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    while query.isActive and not (folder / "stop").exists():
        time.sleep(0.1)
    error = query.exception()
    query.stop()
    spark.stop()
    if error is not None:
        raise error


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
