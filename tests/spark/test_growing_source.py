"""A source whose partitions grow while the query runs, as those of a Kafka topic: counts are right after every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import SPARK
from partitioned import Log, counted, partition_of
from pyspark.errors import PySparkException

from spark_state_ext import Agg, ArrowState, SourcePartition, aggregate

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(SPARK < (4, 0), reason="PySpark 3.5 has no streaming sources in Python"),
]

LETTERS = list("abcdefghijklmnopqrstuvwxyz")
SMALL = [key for key in LETTERS if partition_of(key, 17) < 2]
MOVED = [key for key in LETTERS if (partition_of(key, 2), partition_of(key, 4)) == (1, 3)]


class Counting:
    """A query that counts a log's rows by key, and all that it has told."""

    def __init__(self, spark: Any, folder: Path, bucket_by: SourcePartition) -> None:
        from partitioned import LogSource

        spark.dataSource.register(LogSource)
        self.log = Log(folder / "log")
        self._folder = folder
        state = ArrowState(
            str(folder / "root"), "counts", bucket_by=bucket_by, local_dir=str(folder / "local"), lease_ms=1_000
        )
        rows = spark.readStream.format("partitioned_log").option("folder", str(self.log.folder)).load()
        self._counts = aggregate(state, rows, "key", {"n": Agg.count()})
        self.told: list[tuple[str, int]] = []

    def start(self) -> Any:
        def save(df: Any, batch: int) -> None:
            self.told += [tuple(row) for row in df.collect()]

        writer = self._counts.writeStream.foreachBatch(save).outputMode("update")
        return writer.option("checkpointLocation", str(self._folder / "checkpoint")).start()


def run(
    counting: Counting, steps: list[tuple[list[str], int]], found: list[dict[str, int]] | None = None
) -> list[dict[str, int]]:
    """What the query tells after each step, in which so many partitions get rows; also in `found`."""
    found = [] if found is None else found
    query = counting.start()
    try:
        for keys, partitions in steps:
            counting.told.clear()
            counting.log.produce(keys, partitions)
            query.processAllAvailable()
            assert len({key for key, _ in counting.told}) == len(counting.told)
            found.append(dict(counting.told))
    finally:
        query.stop()
    return found


STEPS = [
    (LETTERS, 2),
    (LETTERS[:9] * 2, 2),
    (LETTERS, 4),
    (MOVED * 3, 4),
    (LETTERS, 8),
]


def test_counts_while_a_source_grows(spark: Any, tmp_path: Path) -> None:
    """2, 4, 8 partitions in one run of the query; 16 are not declared, and the next start has them. 17 cannot be had.

    The offsets of each batch show how many there are, as Kafka's do.
    """
    (tmp_path / "log").mkdir()
    location = str(tmp_path / "checkpoint")
    counting = Counting(spark, tmp_path, SourcePartition("partition", [2, 4, 8], checkpoint_location=location))
    assert MOVED
    fed = [keys for keys, _ in STEPS]
    assert run(counting, STEPS) == counted(*fed)
    assert [it.name for it in (tmp_path / "root" / "counts").glob("*/partitions_*")] == ["partitions_0.json"]
    with pytest.raises(PySparkException, match=r"(?s)PartitionsChangedError.*counts=\[2, 4, 8, 16\]"):
        run(counting, [(LETTERS, 16)])
    assert counting.told == []
    again = Counting(
        spark, tmp_path, SourcePartition("partition", [2, 4, 8, 16, 32], checkpoint_location=f"file:{location}")
    )
    fed += [LETTERS, MOVED]
    # The batch that failed first: the log has its rows. Then one whose rows do not show that there are 17.
    told: list[dict[str, int]] = []
    with pytest.raises(
        PySparkException, match=r"(?s)PartitionsChangedError.*17 is not a multiple of 2, so it cannot be"
    ):
        run(again, [([], 16), (MOVED, 16), (SMALL, 17)], told)
    assert told == counted(*fed)[-2:]
    assert again.told == []
