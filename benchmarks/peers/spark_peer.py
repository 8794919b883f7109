"""The running count and sum in Spark, with Arrow state and with Spark's own state, measured like the peers.

A variant is an API: ``arrow`` (a function over Arrow tables), ``rows`` (a function over plain rows) or ``jvm`` (Spark's
own ``groupBy().agg()`` with RocksDB and changelog checkpoints). The time of a batch includes all of Spark's work on it.
"""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.counting import INPUT
from benchmarks.peers.protocol import leave, read_task
from benchmarks.spark import session
from benchmarks.streams import TimedStream, cut
from benchmarks.vectorised import ARROW, NATIVE, ROWS, plans

_PLANS = {"arrow": ARROW, "rows": ROWS, "jvm": NATIVE}
VARIANTS = tuple(_PLANS)
_BUCKETS = 4
_CORES = 2
_FILES = 2
_OURS = "each batch's delta in Spark's checkpoint or in a synced file, snapshots in the background"
_SPARKS = "each batch's changelog in a file, snapshots in the background"


def main() -> int:
    """Run the variant that the command line names, and write its times and its final state."""
    task = read_task(VARIANTS, __doc__)
    batches = [[pq.read_table(path) for path in files] for files in task.files()]
    with session("peer", _CORES, "4g", task.work, {}) as spark:
        stream = TimedStream(spark, task.variant, INPUT, task.work / "query", plans(_BUCKETS)[_PLANS[task.variant]])
        for tables in batches:
            stream.process(tables)
        seconds = list(stream.seconds)
        # An untimed batch with one event of value 0 for every key outputs the final state. Its counts are 1 too high.
        keys = pc.unique(pa.chunked_array([chunk for b in batches for t in b for chunk in t["key"].chunks]))
        no_change = pa.table({"key": keys, "value": pa.array([0.0] * len(keys))})
        state = stream.kept(cut(no_change, _FILES))
        stream.stop()
        version = spark.version
    leave(
        task,
        seconds,
        state["key"].to_numpy(),
        state["n"].to_numpy() - 1,
        state["total"].to_numpy(),
        {
            "durability": _SPARKS if task.variant == "jvm" else _OURS,
            "rows put out": "to Spark's noop sink",
            "version": version,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
