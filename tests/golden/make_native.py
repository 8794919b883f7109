"""Writes a folder such as `native-3.5/`: checkpoints of a stopped job on Spark's own operator, for every later release to import.

Run it with the PySpark that the folder is named for, once for each: ``python tests/golden/make_native.py native-3.5``. It needs
nothing of this package. The job's input lies in a neutral place, as the source's log names it.
"""

from __future__ import annotations

import shutil
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
PROVIDERS = {"hdfs": "HDFSBackedStateStoreProvider", "rocksdb": "RocksDBStateStoreProvider"}
_CLASSES = "org.apache.spark.sql.execution.streaming.state."
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


def main(name: str) -> None:
    assert name == f"native-{'.'.join(pyspark.__version__.split('.')[:2])}", f"this is PySpark {pyspark.__version__}"
    shutil.rmtree(INPUT, ignore_errors=True)
    for provider, class_name in PROVIDERS.items():
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.streaming.stateStore.providerClass", _CLASSES + class_name)
            .getOrCreate()
        )
        (INPUT / provider).mkdir(parents=True)
        checkpoint = INPUT / f"{provider}-checkpoint"
        for at, rows in enumerate(BATCHES):
            lines = [f'{{"key": "{key}", "s": {s}}}\n' for key, s in rows]
            (INPUT / provider / f"{at}.json").write_text("".join(lines))
            stream = spark.readStream.schema("key string, s long").json(str(INPUT / provider))
            timed = stream.withColumn("at", F.timestamp_seconds("s")).withWatermark("at", "1 second")
            out = timed.groupBy("key").applyInPandasWithState(
                spells, "key string, n long", "n long, half double", "append", "EventTimeTimeout"
            )
            writer = out.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
        spark.stop()
        target = HERE / name / provider
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(checkpoint, target, ignore=lambda _, names: [it for it in names if it.startswith(".")])
    shutil.rmtree(INPUT)


if __name__ == "__main__":
    main(sys.argv[1])
