"""The demo's query: an ordinary stateful job, and the call of `enable` that keeps its state in Arrow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.demo import flights

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

WATERMARK_DELAY = "1 hour"
CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
}


@dataclass(frozen=True)
class Folders:
    """The folders of the demo; the server must see them under the same paths."""

    root: Path

    @property
    def source(self) -> Path:
        """The folder of the files that the stream reads."""
        return self.root / "flights"

    @property
    def checkpoint(self) -> Path:
        """The folder of Spark's checkpoint."""
        return self.root / "checkpoint"

    @property
    def state(self) -> Path:
        """The folder of the state as Arrow files."""
        return self.root / "state"

    @property
    def local(self) -> Path:
        """The folder of the executors' local stores."""
        return self.root / "local"

    @property
    def table(self) -> Path:
        """The folder of the table that the stream writes."""
        return self.root / "table"

    def batches(self, kind: str) -> int:
        """Return the number of batches that Spark has planned (`offsets`) or committed (`commits`)."""
        folder = self.checkpoint / kind
        numbers = [int(entry.name) for entry in folder.glob("[0-9]*")] if folder.exists() else []
        return max(numbers, default=-1) + 1


@contextmanager
def connect(url: str, cores: int) -> Iterator[SparkSession]:
    """Yield a new session on a Connect server; close it at the end, even if the server is dead by then."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote(url).create()
    try:
        for name, value in {**CONF, "spark.sql.shuffle.partitions": str(cores)}.items():
            session.conf.set(name, value)
        yield session
    finally:
        # Without this, a client would try for ten minutes to release its session on a dead server, here or when Python
        # exits.
        session.client.set_retry_policies([])
        session.client.close()
        session.stop()


def start(session: SparkSession, folders: Folders, operator: str, buckets: int) -> StreamingQuery:
    """Start the query, or continue it from its checkpoint."""
    if operator == "arrow":
        from spark_state_ext import ArrowState, enable

        state = ArrowState(str(folders.state), operator="flights", buckets=buckets, local_dir=str(folders.local))
        enable(session, state)
    departures = (
        session.readStream.schema(flights.INPUT_SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folders.source))
        .withWatermark("sched_dep", WATERMARK_DELAY)
    )
    aircraft_rows = departures.groupBy("tailnum").applyInPandasWithState(
        flights.follow_aircraft,
        outputStructType=flights.OUTPUT_SCHEMA,
        stateStructType=flights.STATE_SCHEMA,
        outputMode="append",
        timeoutConf="EventTimeTimeout",
    )
    return (
        aircraft_rows.writeStream.format("parquet")
        .option("path", str(folders.table))
        .option("checkpointLocation", str(folders.checkpoint))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )


def read_table(session: SparkSession, folders: Folders) -> pd.DataFrame:
    """Return the output of the stream. Spark reads only the files of committed batches, not those of a killed batch."""
    return session.read.parquet(str(folders.table)).toPandas()


class Progress:
    """Prints a line for each batch of a query soon after it has finished."""

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.rows = 0
        self.seconds: list[float] = []
        self._seen: set[tuple[str, int]] = set()

    def heading(self) -> None:
        """Print the names of the columns."""
        names = f"{'batch':>7}{'rows':>10}{'seconds':>10}{'rows/s':>10}   {'watermark':<20}"
        # With Arrow state, Spark counts one row of state for each bucket, not for each aircraft.
        print((names + ("in state" if self.operator == "spark" else "")).rstrip(), flush=True)

    def show(self, query: StreamingQuery) -> None:
        """Print the batches that have finished since the last call."""
        for batch in query.recentProgress:
            identity = (str(batch["runId"]), int(batch["batchId"]))
            millis = dict(batch["durationMs"]).get("addBatch")
            # Spark also reports triggers that ran no batch.
            if identity not in self._seen and millis is not None:
                self._seen.add(identity)
                self._print_line(batch)

    def _print_line(self, batch: Any) -> None:
        rows = sum(int(source["numInputRows"]) for source in batch["sources"])
        seconds = float(batch["durationMs"]["triggerExecution"]) / 1000
        self.rows += rows
        self.seconds.append(seconds)
        watermark = str(dict(batch["eventTime"]).get("watermark", ""))[:16].replace("T", " ")
        line = f"{batch['batchId']:>7}{rows:>10,}{seconds:>10.2f}{rows / seconds:>10,.0f}   {watermark:<20}"
        if self.operator == "spark":
            line += f"{batch['stateOperators'][0]['numRowsTotal']:,}"
        print(line.rstrip(), flush=True)


def follow(query: StreamingQuery, progress: Progress, until: Callable[[], bool]) -> bool:
    """Show progress until a condition holds (return True) or the query ends (return False, or raise if it failed)."""
    polled = 0.0
    while True:
        if until():
            return True
        if time.monotonic() - polled > 0.5:
            active = query.isActive
            progress.show(query)
            if not active:
                break
            polled = time.monotonic()
        time.sleep(0.02)
    failure = query.exception()
    if failure is not None:
        raise failure
    return False
