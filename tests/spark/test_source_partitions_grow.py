"""Partitions of the source that become more while a query runs. Hashed buckets, the default, know nothing of them."""

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


def test_no_key_moves_when_the_source_grows_under_hashed_buckets(spark: Any, tmp_path: Path) -> None:
    """From 2 partitions to 4 to 8, within one run of the query: after every batch the counts are those of a batch job."""
    from growing_source import COUNTS_OF_PARTITIONS, GrowingSource, keys_of, partition_of, release

    emitted: list[dict[str, int]] = []

    def seen(df: Any, batch: int) -> None:
        if rows := df.collect():
            emitted.append({row.key: row.n for row in rows})

    spark.dataSource.register(GrowingSource)
    events = spark.readStream.format("growing").load(str(tmp_path))
    # A partition of the source is a task of Spark's: which of them rows came from.
    observed = events.observe("partitions", functions.collect_set("read_from").alias("read_from"))
    with using(spark, "arrow", tmp_path):
        out = observed.groupBy("key").applyInPandasWithState(count, COUNTS, "n bigint", "update", "NoTimeout")
    writer = out.writeStream.outputMode("update").foreachBatch(seen)
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
        progress = [it for it in query.recentProgress if it["numInputRows"] > 0]
        read_from = [set(it["observedMetrics"]["partitions"]["read_from"]) for it in progress]
    finally:
        query.stop()
    # The source did grow, and keys that came from one partition came from another later.
    assert read_from == [set(range(partitions)) for partitions in COUNTS_OF_PARTITIONS]
    assert len(moved) > 10
