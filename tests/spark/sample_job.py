"""The job of SPARK-49374's appendix: random keys, three elements sampled from each; run by test_sampling.

Usage: ``python sample_job.py FOLDER OPERATOR PROVIDER RESTARTS KILLS``. Each start of the query takes one file; workers kill
themselves at random points. What is pushed out of a sample is emitted; in the end all samples are. Prints the emitted elements
as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from killed_jobs import killer, session
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from streams import read, to_parquet, using, write_batches

KEYS, ROWS, SAMPLE = 16, 40, 3


def elements(restart: int) -> range:
    """Elements of one file."""
    return range(restart * ROWS, (restart + 1) * ROWS)


def main(folder: Path, operator: str, provider: str, restarts: int, kills: int) -> None:
    """Start the query again and again, and flush the samples in the last start."""
    # So that clean-up has something to do within so few batches.
    spark = session(kills, provider, {"spark.sql.streaming.minBatchesToRetain": "3"})
    die_now_and_then = killer(folder, kills, chance=0.15)

    def sample(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        die_now_and_then()
        kept = list(state.get[0]) if state.exists else []
        flush = False
        for pdf in pdfs:
            kept += pdf.loc[~pdf["flush"], "element"].tolist()
            flush |= bool(pdf["flush"].any())
        random.shuffle(kept)
        stays = 0 if flush else SAMPLE
        state.update((kept[:stays],))
        out = kept[stays:]
        yield pd.DataFrame({"element": pd.Series(out, dtype="int64")})

    schema = "element long, flush boolean, at int"
    for restart in range(restarts + 1):
        last = restart == restarts
        rows = list(range(KEYS)) if last else list(elements(restart))
        table = pa.table(
            {
                "element": pa.array(rows, pa.int64()),
                "flush": pa.array([last] * len(rows)),
                "at": pa.array([i if last else None for i, _ in enumerate(rows)], pa.int32()),
            }
        )
        events = read(spark, write_batches(folder / "in", [table]), schema)
        keyed = events.withColumn("key", F.coalesce("at", (F.rand() * KEYS).cast("int")))
        with using(spark, operator, folder, buckets=2):
            out = (
                keyed.select("key", "element", "flush")
                .groupBy("key")
                .applyInPandasWithState(sample, "element long", "kept array<long>", "append", "NoTimeout")
            )
            to_parquet(out, folder / "out", folder / "checkpoint")
    found = sorted(row.element for row in spark.read.parquet(str(folder / "out")).collect())
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
