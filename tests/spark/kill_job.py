"""A job whose function kills its own Python worker at random points; test_worker_kill runs it in a separate process.

Usage: ``python kill_job.py FOLDER OPERATOR KILLS``. Prints the final counts as JSON.
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
from pyspark.sql.streaming.state import GroupState
from streams import finish, read, using, write_batches

BATCHES, KEYS, ROWS = 8, 120, 400


def values(batch: int) -> pa.Table:
    """Return the rows of one batch, which are the same in every run."""
    generator = random.Random(batch)
    return pa.table({"key": pa.array([generator.randrange(KEYS) for _ in range(ROWS)], pa.int64())})


def main(folder: Path, operator: str, kills: int) -> None:
    """Run the job over all batches, kill workers meanwhile, and print the counts."""
    spark, maybe_die = session(kills), killer(folder, kills, chance=0.05)

    def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        maybe_die()
        n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        yield pd.DataFrame({"key": [key[0]], "n": [n]})

    counts: dict[int, int] = {}
    events = read(spark, write_batches(folder / "in", [values(batch) for batch in range(BATCHES)]), "key long")
    with using(spark, operator, folder):
        out = events.groupBy("key").applyInPandasWithState(count, "key long, n long", "n long", "update", "NoTimeout")
        finish(
            out.writeStream.outputMode("update")
            .foreachBatch(lambda df, batch: counts.update({row.key: row.n for row in df.collect()}))
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
    spark.stop()
    print(json.dumps({str(key): counts[key] for key in sorted(counts)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
