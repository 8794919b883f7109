"""The job of the savepoint matrix: it counts and sums by key; each input file is a batch.

As a program (``python tests/spark/savepoint_job.py SPEC.json``) this module runs a job in a process of its own, which stops within
its first batch and waits there to be killed.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from killed_jobs import PROVIDERS
from pyspark.sql import SparkSession
from streams import finish, read, write_batches

from spark_state_ext import ArrowState, Backend, disable, enable
from spark_state_ext.engine.start_from import StartFrom, start_from_plain, start_to_plain
from spark_state_ext.files.folder import Folder
from tests.helpers.jvm import JVM_OPTIONS, LOCAL_FILES

__all__ = ["OPERATOR", "Query", "batch_computation", "file_of", "create_session"]

OPERATOR = "counts"
KEYS, ROWS = 40, 60
RETAINED = 2
# The points at which a job waits to be killed.
IN_A_TASK, AFTER_ITS_TASKS = "in a task", "after its tasks"


def file_of(number: int, whole: bool) -> pa.Table:
    """Make the rows of one batch; a whole batch has rows of every key."""
    drawn = random.Random(number)
    keys = [*range(KEYS), *(drawn.randrange(KEYS) for _ in range(ROWS))] if whole else []
    keys = keys or [drawn.randrange(KEYS) for _ in range(ROWS)]
    return pa.table({"key": pa.array(keys, pa.int64()), "value": pa.array([drawn.randrange(100) for _ in keys])})


def batch_computation(files: Iterable[pa.Table]) -> dict[int, tuple[int, int]]:
    """Compute the counts and sums that the job must have emitted, in one pass over all files."""
    columns = pa.concat_tables(files).group_by("key").aggregate([("value", "count"), ("value", "sum")]).to_pydict()
    return {
        key: (n, total)
        for key, n, total in zip(columns["key"], columns["value_count"], columns["value_sum"], strict=True)
    }


def create_session(cores: int, provider: str) -> Any:
    """Create a session whose workers can import the ledger's file systems."""
    here = Path(__file__).resolve().parent
    current_path = os.environ.get("PYTHONPATH", "")
    folders = [str(here.parents[1]), str(here), *filter(None, current_path.split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    # conftest sets the same options for the suite: JVMs then start fast.
    os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(JVM_OPTIONS))
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = {
        **LOCAL_FILES,
        "spark.python.daemon.module": "tests.helpers.spark_daemon",
        "spark.sql.streaming.minBatchesToRetain": str(RETAINED),
        "spark.sql.streaming.pollingDelay": "5ms",
        "spark.sql.streaming.stateStore.providerClass": PROVIDERS[provider],
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.log.level": "OFF",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("matrix of savepoints")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@dataclass
class Query:
    """One of the jobs of a case, and what it has emitted.

    Parameters
    ----------
    folder
        The folder of its input, Spark's checkpoint and local stores.
    root, storage_options
        Where its state is.
    buckets
        The number of buckets.
    start_from
        The snapshot that it starts from.
    options
        Further options of `ArrowState`.
    whole
        Numbers of the files with rows of every key.
    hang
        The point in its first batch at which it waits to be killed: `IN_A_TASK` or `AFTER_ITS_TASKS`.
    table
        The latest count and sum that it emitted for each key.
    committed_s
        When its first batch was committed, seconds since 1970; None if that is unknown.
    batches
        The number of batches that it has run.
    moved_to
        The folder to which Spark's checkpoint was moved.
    """

    folder: Path
    root: str
    storage_options: dict[str, Any]
    buckets: int
    start_from: StartFrom | None = None
    options: dict[str, Any] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    hang: str = ""
    table: dict[int, tuple[int, int]] = field(default_factory=dict)
    committed_s: float | None = None
    batches: int = 0
    moved_to: Path | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint location."""
        return (self.moved_to or self.folder) / "checkpoint"

    @property
    def state(self) -> ArrowState:
        """The options that the session is given."""
        return ArrowState(
            self.root,
            OPERATOR,
            buckets=self.buckets,
            storage_options=self.storage_options,
            # Requests over HTTP are slow on a busy machine.
            lease_ms=2_000 if "://" in self.root else 1_000,
            local_dir=str(self.folder / "local"),
            start_from=self.start_from,
            **self.options,
        )

    @property
    def query_folder(self) -> Folder:
        """The folder of its state; no other query may use its root."""
        operator = Folder(self.root, self.storage_options).child(OPERATOR)
        (name,) = (entry.name for entry in operator.entries() if entry.name.count("-") == 4)
        return operator.child(name)

    @property
    def reached(self) -> Path:
        """The file that exists once the job waits to be killed."""
        return self.folder / "reached"

    def feed(self, numbers: Iterable[int]) -> None:
        """Add input files, one for each batch."""
        write_batches(self.folder / "in", [file_of(number, number in self.whole) for number in numbers])

    def plan(self, spark: Any) -> Any:
        """Plan the query and return its DataFrame."""
        counting = _make_counting(str(self.reached) if self.hang == IN_A_TASK else "")
        with _enabled(spark, self.state):
            events = read(spark, str(self.folder / "in"), "key long, value long")
            return events.groupBy("key").applyInPandasWithState(
                counting, "key long, n long, total long", "n long, total long", "update", "NoTimeout"
            )

    def run(self, spark: Any) -> Query:
        """Run the query over all input files that it has not read yet."""
        writer = self.plan(spark).writeStream.outputMode("update").foreachBatch(self._upsert)
        finish(writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start())
        return self

    def next_file(self) -> int:
        """Return the number of the file after its last batch, by Spark's own offsets."""
        (newest,) = sorted((self.checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))[-1:]
        return next_file(newest.read_text())

    def _upsert(self, df: Any, batch: int) -> None:
        rows = df.collect()
        if self.hang == AFTER_ITS_TASKS:
            self.reached.touch()
            time.sleep(3_600)
        first = self.checkpoint / "commits" / "0"
        if batch and self.committed_s is None and first.exists():
            self.committed_s = first.stat().st_mtime
        self.batches = batch + 1
        self.table.update({row.key: (row.n, row.total) for row in rows})

    def to_plain(self) -> dict[str, Any]:
        """Return what another process needs to run this query, as JSON values."""
        return {
            "folder": str(self.folder),
            "root": self.root,
            "storage_options": self.storage_options,
            "buckets": self.buckets,
            "start_from": start_to_plain(self.start_from),
            "options": {**self.options, "backends": [_plain(backend) for backend in self.options.get("backends", ())]},
            "hang": self.hang,
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Query:
        """Return the query that `to_plain` described."""
        options = dict(plain["options"])
        backends = [backend if isinstance(backend, str) else Backend(**backend) for backend in options.pop("backends")]
        options |= {"backends": backends} if backends else {}
        fields = {**plain, "folder": Path(plain["folder"]), "options": options}
        return Query(**{**fields, "start_from": start_from_plain(plain["start_from"])})


def next_file(offsets: str) -> int:
    """Return the number of the file after a batch, by the offsets that Spark wrote for the batch, which read one file."""
    return int(json.loads(offsets.splitlines()[-1])["logOffset"]) + 1


def _plain(backend: str | Backend) -> Any:
    return backend if isinstance(backend, str) else backend.to_plain()


@contextmanager
def _enabled(spark: Any, state: ArrowState) -> Iterator[None]:
    enable(spark, state)
    try:
        yield
    finally:
        disable(spark)


def _make_counting(reached: str) -> Callable[..., Iterator[pd.DataFrame]]:
    # A nested function is pickled by value, so that workers need not import this module.
    def counting(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        if reached:
            with open(reached, "a"):
                pass
            time.sleep(3_600)
        n, total = state.getOption or (0, 0)
        for pdf in pdfs:
            n, total = n + len(pdf), total + int(pdf["value"].sum())
        state.update((n, total))
        yield pd.DataFrame({"key": [key[0]], "n": [n], "total": [total]})

    return counting


def main(spec: Path) -> None:
    """Run the job until another process kills this one."""
    plain = json.loads(spec.read_text())
    query = Query.from_plain(plain["query"])
    query.run(create_session(2, plain["provider"]))
    raise SystemExit("this process was not killed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
