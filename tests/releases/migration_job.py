"""A driver with one release of the package, which runs a job in steps; `test_migration` controls it.

Usage: ``python migration_job.py FOLDER CONF``, with settings of the session in JSON. For each line of JSON on its input
it runs the job over the available batches, with Arrow state or with Spark's own, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

import spark_state_ext
from spark_state_ext import ArrowState

LEASE_MS = 1_000


def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count and sum up a key's rows, and return the result again when the key had no rows for ten seconds."""
    rows, total = state.getOption or (0, 0.0)
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"key": [key[0]], "rows": [rows], "total": [total], "gone": [True]})
        return
    for pdf in pdfs:
        rows, total = rows + len(pdf), total + float(pdf["value"].sum())
    state.update((rows, total))
    state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 10_000)
    yield pd.DataFrame({"key": [key[0]], "rows": [rows], "total": [total], "gone": [False]})


def make_session(folder: Path, more: dict[str, str]) -> SparkSession:
    """Return a session on one core."""
    conf = {
        **more,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # A batch without data is half of the work, and the next batch shows the same.
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[1]")
    for name, value in conf.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def run(spark: SparkSession, folder: Path, options: dict[str, Any], *, arrow: bool) -> list[list[Any]]:
    """Return the job's output rows for the available batches."""
    reader = spark.readStream.schema("key string, value double, time timestamp").option("maxFilesPerTrigger", 1)
    events = reader.json(str(folder / "in")).withWatermark("time", "0 seconds")
    schemas = ("key string, rows long, total double, gone boolean", "rows long, total double", "update")
    if arrow:
        out = ArrowState(str(folder / "state"), buckets=4, lease_ms=LEASE_MS, **options).apply_in_pandas_with_state(
            events, "key", count, *schemas, GroupStateTimeout.EventTimeTimeout
        )
    else:
        out = events.groupBy("key").applyInPandasWithState(count, *schemas, GroupStateTimeout.EventTimeTimeout)
    rows: list[list[Any]] = []
    query = (
        out.writeStream.outputMode("update")
        .foreachBatch(lambda df, batch: rows.extend([batch, *row] for row in df.collect()))
        .option("checkpointLocation", str(folder / ("arrow" if arrow else "spark")))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sorted(rows)


def main(folder: Path, conf: dict[str, str]) -> None:
    """Answer each line of the standard input."""
    spark = make_session(folder, conf)
    print(json.dumps({"package": str(Path(spark_state_ext.__file__).parent)}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"rows": run(spark, folder, request["options"], arrow=request["arrow"])}
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
