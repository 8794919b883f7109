"""Make an archive of the classes that Spark loads, for the JVMs that tests start: ``python class_archive.py FILE``.

Tests start some hundred JVMs: drivers, executors and servers. Each spends most of its first seconds on loading and
verifying the same classes. With an archive (class data sharing, JDK 13 and newer) a driver needs a third less processor
time until its first batch is done. A JVM that cannot use the archive, for example because its class path differs,
starts without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def main(archive: Path) -> None:
    """Run a small stateful query in a JVM that writes the archive when it ends."""
    os.environ["SPARK_SUBMIT_OPTS"] = (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto -Xlog:disable -XX:ArchiveClassesAtExit={archive}"
    )
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        .getOrCreate()
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(session, Path(folder))
    finally:
        session.stop()


def run(session: Any, folder: Path) -> None:
    """Run a query that loads what most tests load: files, Arrow to Python and back, Spark's own state, a sink."""
    from pyspark.sql import functions as F

    def pass_through(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    rows = session.range(10).selectExpr("id AS k", "CAST(id AS STRING) AS v")
    rows.write.parquet(str(folder / "in"))
    read = session.readStream.schema("k long, v string").parquet(str(folder / "in"))
    counted = read.mapInArrow(pass_through, "k long, v string").groupBy("k").agg(F.count("*").alias("n"))
    query = (
        counted.writeStream.outputMode("update")
        .foreachBatch(lambda batch, _: batch.collect())
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
