"""Running small streaming jobs, on Spark's own operator or on ours, with nothing but public DataFrame calls."""

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
    """One parquet file a micro-batch, in order; later calls add to the folder."""
    folder.mkdir(exist_ok=True)
    first = len(list(folder.glob("*.parquet")))
    for at, table in enumerate(batches, first):
        hidden = folder / f".{at:04}"
        pq.write_table(table, hidden)
        # The file source goes by age; seconds apart, in the past. A query that runs already must not see a file that is
        # of today or half written: what is a week older than the newest file is passed over.
        os.utime(hidden, (1_000_000 + at, 1_000_000 + at))
        hidden.rename(folder / f"{at:04}.parquet")
    return str(folder)


@contextlib.contextmanager
def using(session: Any, operator: str, folder: Path, **options: Any) -> Iterator[None]:
    """Run `applyInPandasWithState` of a session on the operator asked for."""
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
    """The files as a stream, one a batch."""
    return session.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(folder)


def collect(session: Any, out: Any, mode: str, rows: int | None = None) -> list[Any]:
    """Run a query over all its input and return the rows it emitted, in no order.

    With `rows`, wait until there are that many and then stop: a query with processing-time timeouts does not end by
    itself.
    """
    name = f"t{uuid.uuid4().hex}"
    writer = out.writeStream.format("memory").queryName(name).outputMode(mode)
    if rows is None:
        finish(writer.trigger(availableNow=True).start())
    else:
        query = writer.start()
        eventually(lambda: session.table(name).count() >= rows or not query.isActive, 0.1)
        failed = query.exception()
        query.stop()
        if failed is not None:
            raise failed
    emitted: list[Any] = session.table(name).collect()
    session.sql(f"DROP VIEW IF EXISTS {name}")
    return emitted


def finish(query: Any) -> None:
    """Wait for the end of an availableNow query; its failure is raised here."""
    try:
        assert query.awaitTermination(WAIT_S), "the query did not end in time"
    finally:
        query.stop()


def to_parquet(out: Any, target: Path, checkpoint: Path) -> None:
    """Run a query in append mode into a parquet folder; works across restarts."""
    finish(
        out.writeStream.format("parquet")
        .outputMode("append")
        .option("path", str(target))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
