"""Spark with Arrow state, and Spark alone, on the running count and sum: ours among the peers, measured as they are.

A variant is an API: ``arrow`` (a function over Arrow tables), ``rows`` (one over plain rows) and ``jvm`` (Spark's own
``groupBy().agg()`` with RocksDB and changelog checkpoints). A batch's time is all of Spark's work on it.
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

_WAYS = {"arrow": ARROW, "rows": ROWS, "jvm": NATIVE}
VARIANTS = tuple(_WAYS)
_BUCKETS = 4
_CORES = 2
_FILES = 2
_OURS = "each batch's delta in Spark's checkpoint or in a synced file, snapshots in the background"
_SPARKS = "each batch's changelog in a file, snapshots in the background"


def main() -> int:
    """Run a variant."""
    task = read_task(VARIANTS, __doc__)
    batches = [[pq.read_table(path) for path in files] for files in task.files()]
    with session("peer", _CORES, "4g", task.work, {}) as spark:
        stream = TimedStream(spark, task.variant, INPUT, task.work / "query", plans(_BUCKETS)[_WAYS[task.variant]])
        for tables in batches:
            stream.process(tables)
        seconds = list(stream.seconds)
        # The state as it is then: one more event of nothing for every key, in a batch that is not timed.
        keys = pc.unique(pa.chunked_array([chunk for b in batches for t in b for chunk in t["key"].chunks]))
        nothing = pa.table({"key": keys, "value": pa.array([0.0] * len(keys))})
        state = stream.kept(cut(nothing, _FILES))
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
