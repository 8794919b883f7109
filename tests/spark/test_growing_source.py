"""The partitions of a source grow while a query runs, as in a Kafka topic: counts are right after every batch."""

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
    """A query that counts a log's rows by key, and the rows that it emitted."""

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
        self.emitted: list[tuple[str, int]] = []

    def start(self) -> Any:
        def save(df: Any, batch: int) -> None:
            self.emitted += [tuple(row) for row in df.collect()]

        writer = self._counts.writeStream.foreachBatch(save).outputMode("update")
        return writer.option("checkpointLocation", str(self._folder / "checkpoint")).start()


def run(
    counting: Counting, steps: list[tuple[list[str], int]], counts: list[dict[str, int]] | None = None
) -> list[dict[str, int]]:
    """Return the counts that the query emits after each step; also append them to `counts`.

    A step has keys, and the number of partitions that get their rows.
    """
    counts = [] if counts is None else counts
    query = counting.start()
    try:
        for keys, partitions in steps:
            counting.emitted.clear()
            counting.log.produce(keys, partitions)
            query.processAllAvailable()
            assert len({key for key, _ in counting.emitted}) == len(counting.emitted)
            counts.append(dict(counting.emitted))
    finally:
        query.stop()
    return counts


STEPS = [
    (LETTERS, 2),
    (LETTERS[:9] * 2, 2),
    (LETTERS, 4),
    (MOVED * 3, 4),
    (LETTERS, 8),
]


def test_counts_are_right_while_the_partitions_of_a_source_grow(spark: Any, tmp_path: Path) -> None:
    """One run of the query has 2, 4 and 8 partitions. 16 are an error until the next start declares them; 17 are always
    an error.

    The offsets of each batch show the number of partitions, as Kafka's do.
    """
    (tmp_path / "log").mkdir()
    location = str(tmp_path / "checkpoint")
    counting = Counting(spark, tmp_path, SourcePartition("partition", [2, 4, 8], checkpoint_location=location))
    assert MOVED
    fed = [keys for keys, _ in STEPS]
    assert run(counting, STEPS) == counted(*fed)
    assert [path.name for path in (tmp_path / "root" / "counts").glob("*/partitions_*")] == ["partitions_0.json"]
    with pytest.raises(PySparkException, match=r"(?s)PartitionsChangedError.*counts=\[2, 4, 8, 16\]"):
        run(counting, [(LETTERS, 16)])
    assert counting.emitted == []
    restarted = Counting(
        spark, tmp_path, SourcePartition("partition", [2, 4, 8, 16, 32], checkpoint_location=f"file:{location}")
    )
    fed += [LETTERS, MOVED]
    # The first batch is the failed one, whose rows are in the log. The last step has rows only in partitions that exist anyway.
    counts: list[dict[str, int]] = []
    with pytest.raises(
        PySparkException, match=r"(?s)PartitionsChangedError.*17 is not a multiple of 2, so it cannot be"
    ):
        run(restarted, [([], 16), (MOVED, 16), (SMALL, 17)], counts)
    assert counts == counted(*fed)[-2:]
    assert restarted.emitted == []
