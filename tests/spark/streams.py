"""Runs small streaming jobs on Spark's own operator or on ours, with public DataFrame calls only."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spark_state_ext import ArrowState, disable, enable
from tests.helpers.waiting import WAIT_S, eventually


def write_batches(folder: Path, batches: Sequence[pa.Table]) -> str:
    """Write one parquet file for each micro-batch, in order; later calls add files to the folder."""
    folder.mkdir(exist_ok=True)
    first = len(list(folder.glob("*.parquet")))
    for number, table in enumerate(batches, first):
        hidden = folder / f".{number:04}"
        pq.write_table(table, hidden)
        # The file source orders files by age, so that they are seconds apart, and in the past. A running query must see
        # neither a half-written file nor one of today: it would then ignore files that are a week older.
        os.utime(hidden, (1_000_000 + number, 1_000_000 + number))
        hidden.rename(folder / f"{number:04}.parquet")
    return str(folder)


@contextlib.contextmanager
def using(session: Any, operator: str, folder: Path, **options: Any) -> Iterator[None]:
    """Run a session's `applyInPandasWithState` on the given operator within the context."""
    if operator == "spark":
        yield
        return
    options = {"buckets": 3, "lease_ms": 1_000, "local_dir": str(folder / "local"), **options}
    enable(session, ArrowState(options.pop("root", str(folder / "root")), "tested", **options))
    try:
        yield
    finally:
        disable(session)


def read(session: Any, folder: str, schema: str) -> Any:
    """Return the files as a stream with one file in each batch."""
    return session.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(folder)


def collect(session: Any, out: Any, mode: str, rows: int | None = None) -> list[Any]:
    """Run a query over all its input and return the rows that it emitted, in any order.

    With `rows`, wait for this number of rows and then stop: a query with processing-time timeouts does not end by itself.
    """
    name = f"t{uuid.uuid4().hex}"
    writer = out.writeStream.format("memory").queryName(name).outputMode(mode)
    if rows is None:
        finish(writer.trigger(availableNow=True).start())
    else:
        query = writer.start()
        eventually(lambda: session.table(name).count() >= rows or not query.isActive, 0.1)
        error = query.exception()
        query.stop()
        if error is not None:
            raise error
    emitted: list[Any] = session.table(name).collect()
    session.sql(f"DROP VIEW IF EXISTS {name}")
    return emitted


def finish(query: Any) -> None:
    """Wait for the end of an availableNow query, and raise its error if it fails."""
    try:
        assert query.awaitTermination(WAIT_S), "the query did not end in time"
    finally:
        query.stop()


def to_parquet(out: Any, target: Path, checkpoint: Path) -> None:
    """Run a query in append mode into a parquet folder; the query may be a restarted one."""
    finish(
        out.writeStream.format("parquet")
        .outputMode("append")
        .option("path", str(target))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
