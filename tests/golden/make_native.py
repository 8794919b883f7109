"""Writes a folder such as `native-3.5/`: checkpoints of a stopped job on Spark's own operator, for every later release to import.

Run it with the PySpark that the folder is named for, once for each: ``python tests/golden/make_native.py native-3.5``. It needs
nothing of this package. The job's input lies in a neutral place, as the source's log names it. Each kind is made by a process of its
own: a JVM of Spark 4.0 keeps the first checkpoint format that it meets.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

HERE = Path(__file__).parent
INPUT = Path(tempfile.gettempdir()) / "golden-native"
_STORE = "spark.sql.streaming.stateStore."
_CLASS, _FORMAT = f"{_STORE}providerClass", f"{_STORE}checkpointFormatVersion"
_CLASSES = "org.apache.spark.sql.execution.streaming.state."
_ROCKSDB = {_CLASS: f"{_CLASSES}RocksDBStateStoreProvider"}
FORMAT_1 = {"hdfs": {_CLASS: f"{_CLASSES}HDFSBackedStateStoreProvider"}, "rocksdb": _ROCKSDB}
# Of PySpark 4.0 and newer: as logs of changes, and as snapshots.
FORMAT_2 = {
    f"rocksdb-2-{name}": {**_ROCKSDB, _FORMAT: "2", f"{_STORE}rocksdb.changelogCheckpointing.enabled": logs}
    for name, logs in (("changes", "true"), ("snapshots", "false"))
}
# Key and event time in seconds, a batch each.
BATCHES = [[("a", 10), ("b", 11), ("gone", 12)], [("a", 20), ("c", 21)]]


def spells(key: Any, frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """A key's rows; "gone" has a timeout and no state, and "b" a state and no timeout."""
    n = (0 if state.getOption is None else state.getOption[0]) + sum(len(frame) for frame in frames)
    if key[0] == "gone":
        state.remove()
    else:
        state.update((n, n / 2))
    if key[0] != "b":
        state.setTimeoutTimestamp(1_000_000 * n)
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def make(name: str, kind: str, conf: dict[str, str]) -> None:
    builder = (
        SparkSession.builder.master("local[1]")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.ui.enabled", "false")
    )
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    (INPUT / kind).mkdir(parents=True)
    checkpoint = INPUT / f"{kind}-checkpoint"
    for at, rows in enumerate(BATCHES):
        lines = [f'{{"key": "{key}", "s": {s}}}\n' for key, s in rows]
        (INPUT / kind / f"{at}.json").write_text("".join(lines))
        stream = spark.readStream.schema("key string, s long").json(str(INPUT / kind))
        timed = stream.withColumn("at", F.timestamp_seconds("s")).withWatermark("at", "1 second")
        out = timed.groupBy("key").applyInPandasWithState(
            spells, "key string, n long", "n long, half double", "append", "EventTimeTimeout"
        )
        writer = out.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
    spark.stop()
    target = HERE / name / kind
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(checkpoint, target, ignore=lambda _, names: [it for it in names if it.startswith(".")])


def main(name: str, kind: str | None = None) -> None:
    release = pyspark.__version__.split(".")[:2]
    assert name == f"native-{'.'.join(release)}", f"this is PySpark {pyspark.__version__}"
    kinds = {**FORMAT_1, **(FORMAT_2 if int(release[0]) >= 4 else {})}
    if kind is not None:
        make(name, kind, kinds[kind])
        return
    shutil.rmtree(INPUT, ignore_errors=True)
    for each in kinds:
        subprocess.run([sys.executable, __file__, name, each], check=True)
    shutil.rmtree(INPUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
