"""A source whose partitions increase while a query runs. Hashed buckets, the default, do not depend on them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, SPARK, count
from pyspark.sql import functions
from streams import using

from tests.helpers.waiting import eventually

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(SPARK < (4, 0), reason="PySpark 3.5 has no sources written in Python"),
]


@pytest.mark.soak
def test_hashed_buckets_count_every_row_while_the_partitions_of_the_source_increase(spark: Any, tmp_path: Path) -> None:
    """The source grows from 2 to 4 to 8 partitions in one run of the query; each batch has the counts of a batch job."""
    from growing_source import COUNTS_OF_PARTITIONS, GrowingSource, keys_of, partition_of, release

    emitted: list[dict[str, int]] = []

    def save(df: Any, batch: int) -> None:
        if rows := df.collect():
            emitted.append({row.key: row.n for row in rows})

    spark.dataSource.register(GrowingSource)
    events = spark.readStream.format("growing").load(str(tmp_path))
    # Spark reads each partition of the source in a task; this observes which of them rows came from.
    observed = events.observe("partitions", functions.collect_set("read_from").alias("read_from"))
    with using(spark, "arrow", tmp_path):
        out = observed.groupBy("key").applyInPandasWithState(count, COUNTS, "n bigint", "update", "NoTimeout")
    writer = out.writeStream.outputMode("update").foreachBatch(save)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    total: Counter[str] = Counter()
    moved: set[str] = set()
    try:
        for batch, partitions in enumerate(COUNTS_OF_PARTITIONS):
            release(tmp_path, batch + 1)
            eventually(lambda: len(emitted) > batch or query.exception() is not None)  # noqa: B023  # used at once
            assert query.exception() is None
            total += Counter(keys_of(batch))
            assert emitted[batch] == {key: total[key] for key in keys_of(batch)}
            moved |= {key for key in keys_of(batch) if partition_of(key, partitions) != partition_of(key, 2)}
        query.processAllAvailable()
        batches = [progress for progress in query.recentProgress if progress["numInputRows"] > 0]
        read_from = [set(progress["observedMetrics"]["partitions"]["read_from"]) for progress in batches]
    finally:
        query.stop()
    # The source did grow, and some keys later came from another partition.
    assert read_from == [set(range(partitions)) for partitions in COUNTS_OF_PARTITIONS]
    assert len(moved) > 10
