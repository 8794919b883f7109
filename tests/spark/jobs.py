"""A stateful job that starts several times: its input files, its checkpoint, and the rows that each batch emitted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql.streaming.state import GroupStateTimeout
from streams import finish, read, using, write_batches

__all__ = [
    "CLASSIC",
    "CLASSIC_FIRST",
    "COUNTS",
    "EVERYWHERE",
    "KEYED",
    "SPARK",
    "TIMED",
    "Batches",
    "Job",
    "configured",
    "count",
    "ddl",
    "emitted",
    "event_rows",
    "keyed",
    "reads_state",
    "table",
]

SPARK = (int(pyspark.__version__.split(".")[0]), int(pyspark.__version__.split(".")[1]))
# Marks tests that need a savepoint of a query, a retained checkpoint, or the pointers in Spark's own state.
reads_state = pytest.mark.skipif(
    SPARK < (4, 0), reason="PySpark 3.5 has no reader of state, and savepoints of queries say so"
)

# The sessions and operators of a test. Spark's own operator on Connect would only test Spark. Most of what a task does is the
# same under both kinds of session, so only tests of plans, `foreachBatch`, errors, and of what the client sends to the server
# run on Connect.
CLASSIC = pytest.mark.parametrize("session", ["classic"], indirect=True)


def _sessions(*connect: pytest.MarkDecorator) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("session", "operator"),
        [
            pytest.param("classic", "spark", marks=pytest.mark.parity),
            ("classic", "arrow"),
            pytest.param("connect", "arrow", marks=connect),
        ],
        indirect=True,
    )


EVERYWHERE = _sessions(pytest.mark.connect)
# Runs on Connect in the soak only.
CLASSIC_FIRST = _sessions(pytest.mark.connect, pytest.mark.soak)

Row = tuple[Any, ...]
Batches = dict[int, list[Row]]

KEYED = pa.schema([("key", pa.string()), ("value", pa.int64())])
TIMED = pa.schema([("key", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.int64())])
_NAMES = {
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.bool_(): "boolean",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
}


COUNTS = "key string, n bigint"


def count(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count the rows of a key so far; the output is `COUNTS`."""
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def ddl(schema: Any) -> str:
    """Return an Arrow schema as Spark's DDL."""
    return ", ".join(f"`{column.name}` {_spark_name(column.type)}" for column in schema)


def _spark_name(kind: Any) -> str:
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    if pa.types.is_list(kind):
        return f"array<{_spark_name(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{_spark_name(kind.key_type)}, {_spark_name(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{part.name}: {_spark_name(part.type)}' for part in kind)}>"
    return _NAMES[kind]


def table(schema: Any, rows: Sequence[Row]) -> Any:
    """Return rows as an Arrow table."""
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)


def keyed(*keys: str | None) -> Any:
    """Return a batch of `KEYED` rows whose values count from 0."""
    return table(KEYED, list(zip(keys, range(len(keys)), strict=True)))


def event_rows(*rows: tuple[str | None, int | None, int]) -> Any:
    """Return a batch of `TIMED` rows from keys, event times in seconds and values."""
    at = pa.array([None if s is None else s * 1_000_000 for _, s, _ in rows], pa.int64()).cast(TIMED.field("at").type)
    return pa.table([[k for k, _, _ in rows], at, pa.array([v for *_, v in rows], pa.int64())], schema=TIMED)


@contextlib.contextmanager
def configured(session: Any, conf: dict[str, str]) -> Iterator[None]:
    """Set configuration of a session for the duration of a block."""
    before = {name: session.conf.get(name, None) for name in conf}
    for name, value in conf.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)


def emitted(sink: Path, since: int = 0) -> Batches:
    """Return the rows that each batch has written to Spark's file sink, sorted by their text; reads without Spark."""
    batches: Batches = {}
    seen: set[str] = set()
    # Every tenth log, for instance `9.compact`, also lists the files of the logs before it.
    for log in sorted((sink / "_spark_metadata").glob("[0-9]*"), key=lambda path: int(path.stem)):
        rows: list[Row] = []
        for line in log.read_text().splitlines()[1:]:
            path = unquote(urlparse(json.loads(line)["path"]).path)
            if path not in seen and int(log.stem) >= since:
                rows += [tuple(row.values()) for row in pq.read_table(path, partitioning=None).to_pylist()]
            seen.add(path)
        if int(log.stem) >= since:
            batches[int(log.stem)] = sorted(rows, key=repr)
    return batches


@dataclass
class Job:
    """A job ``read → groupBy(keys).applyInPandasWithState(function) → parquet`` on Spark's operator or on Arrow state.

    Parameters
    ----------
    session, operator
        The session, and the operator: `spark` or `arrow`.
    folder
        Holds input, output, checkpoint and state.
    function, keys, output, state, timeout, mode
        As for `applyInPandasWithState`.
    schema
        Arrow schema of the input.
    watermark
        Event-time column and delay.
    before, after
        Change the DataFrame between source and operator, and between operator and sink.
    options
        More options of `ArrowState`.
    conf
        Configuration of the session while the query is planned and runs.
    """

    session: Any
    operator: str
    folder: Path
    function: Callable[..., Any]
    output: Any = "text string"
    state: Any = "n bigint"
    keys: Sequence[Any] = ("key",)
    timeout: str = GroupStateTimeout.NoTimeout
    mode: str = "append"
    schema: Any = KEYED
    watermark: tuple[str, str] | None = None
    before: Callable[[Any], Any] = lambda df: df
    after: Callable[[Any], Any] = lambda df: df
    options: dict[str, Any] = field(default_factory=dict)
    conf: dict[str, str] = field(default_factory=dict)

    @property
    def sink(self) -> Path:
        """The output folder."""
        return self.folder / "out"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint location."""
        return self.folder / "checkpoint"

    def feed(self, *batches: Any) -> None:
        """Add input: each table becomes one file, which one batch reads."""
        write_batches(self.folder / "in", batches)

    def planned(self) -> Any:
        """Plan the job and return its DataFrame."""
        events = read(self.session, str(self.folder / "in"), ddl(self.schema))
        if self.watermark is not None:
            events = events.withWatermark(*self.watermark)
        with using(self.session, self.operator, self.folder, **self.options):
            grouped = self.before(events).groupBy(*self.keys)
            return self.after(
                grouped.applyInPandasWithState(self.function, self.output, self.state, self.mode, self.timeout)
            )

    def writer(self) -> Any:
        """Return the query's writer, which needs only a trigger."""
        return (
            self.planned()
            .writeStream.format("parquet")
            .outputMode("append")
            .option("path", str(self.sink))
            .option("checkpointLocation", str(self.checkpoint))
        )

    def configured(self) -> contextlib.AbstractContextManager[None]:
        """Set the job's configuration, and what `emitted` needs to read the sink's log, for the duration of a block."""
        return configured(
            self.session,
            {
                "spark.sql.streaming.fileSink.log.compactInterval": "1000",
                "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
                **self.conf,
            },
        )

    def run(self, *batches: Any) -> Batches:
        """Add input, run until all of it is read, and return the rows that each batch of this start emitted."""
        self.feed(*batches)
        since = max(emitted(self.sink), default=-1) + 1
        with self.configured():
            finish(self.writer().trigger(availableNow=True).start())
        return emitted(self.sink, since)

    @contextlib.contextmanager
    def running(self) -> Iterator[Any]:
        """Run the query until the block ends."""
        with self.configured():
            query = self.writer().trigger(processingTime="0 seconds").start()
            try:
                yield query
            finally:
                query.stop()
