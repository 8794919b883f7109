"""The job of the matrix of savepoints: it counts and sums by key, over files of which each is a batch.

As a program (``python tests/spark/savepoint_job.py SPEC.json``) it starts a job in a process of its own, which stops within
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

__all__ = ["OPERATOR", "Query", "batch_computation", "file_of", "session_of"]

OPERATOR = "counts"
KEYS, ROWS = 40, 60
RETAINED = 2
# Where a job waits to be killed.
IN_A_TASK, AFTER_ITS_TASKS = "in a task", "after its tasks"


def file_of(number: int, whole: bool) -> pa.Table:
    """One batch; a whole one has rows of each key."""
    drawn = random.Random(number)
    keys = [*range(KEYS), *(drawn.randrange(KEYS) for _ in range(ROWS))] if whole else []
    keys = keys or [drawn.randrange(KEYS) for _ in range(ROWS)]
    return pa.table({"key": pa.array(keys, pa.int64()), "value": pa.array([drawn.randrange(100) for _ in keys])})


def batch_computation(files: Iterable[pa.Table]) -> dict[int, tuple[int, int]]:
    """What the job must have counted and summed, in one go over all files."""
    found = pa.concat_tables(files).group_by("key").aggregate([("value", "count"), ("value", "sum")]).to_pydict()
    return {
        key: (n, total) for key, n, total in zip(found["key"], found["value_count"], found["value_sum"], strict=True)
    }


def session_of(cores: int, provider: str) -> Any:
    """A session whose workers find the ledger."""
    here = Path(__file__).resolve().parent
    known = os.environ.get("PYTHONPATH", "")
    wanted = [str(here.parents[1]), str(here)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*wanted, *filter(None, known.split(os.pathsep))]))
    # As conftest has it for the suite: JVMs of tests start fast.
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
    """One of the jobs in line.

    Parameters
    ----------
    folder
        For its input, Spark's checkpoint and local stores.
    root, storage_options
        Where its state is.
    buckets
        How many buckets.
    start_from
        What it starts from.
    options
        More of `ArrowState`.
    whole
        Numbers of files with rows of each key.
    hang
        Where it waits to be killed, in its first batch: `IN_A_TASK` or `AFTER_ITS_TASKS`.
    table
        What it has emitted last for each key.
    committed_s
        When its first batch was committed, seconds since 1970; None: it is not known to be.
    batches
        How many it has run.
    moved_to
        Where Spark's checkpoint was moved to.
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
        """As handed to the session."""
        return ArrowState(
            self.root,
            OPERATOR,
            buckets=self.buckets,
            storage_options=self.storage_options,
            # Requests over HTTP take their time on a busy machine.
            lease_ms=2_000 if "://" in self.root else 1_000,
            local_dir=str(self.folder / "local"),
            start_from=self.start_from,
            **self.options,
        )

    @property
    def query_folder(self) -> Folder:
        """The folder of its state, where it has its root for itself."""
        operator = Folder(self.root, self.storage_options).child(OPERATOR)
        (found,) = (entry.name for entry in operator.entries() if entry.name.count("-") == 4)
        return operator.child(found)

    @property
    def reached(self) -> Path:
        """Is there once it waits to be killed."""
        return self.folder / "reached"

    def feed(self, numbers: Iterable[int]) -> None:
        """Give it more batches."""
        write_batches(self.folder / "in", [file_of(number, number in self.whole) for number in numbers])

    def planned(self, spark: Any) -> Any:
        """Its DataFrame."""
        counting = _counting(str(self.reached) if self.hang == IN_A_TASK else "")
        with _enabled(spark, self.state):
            events = read(spark, str(self.folder / "in"), "key long, value long")
            return events.groupBy("key").applyInPandasWithState(
                counting, "key long, n long, total long", "n long, total long", "update", "NoTimeout"
            )

    def run(self, spark: Any) -> Query:
        """Run it over all that it was fed with and has not read yet."""
        writer = self.planned(spark).writeStream.outputMode("update").foreachBatch(self._upsert)
        finish(writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start())
        return self

    def next_file(self) -> int:
        """Which of its files comes after its last batch: what Spark's own offsets say."""
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
        """For a process of its own."""
        return {
            "folder": str(self.folder),
            "root": self.root,
            "storage_options": self.storage_options,
            "buckets": self.buckets,
            "start_from": start_to_plain(self.start_from),
            "options": {**self.options, "backends": [_plain(it) for it in self.options.get("backends", ())]},
            "hang": self.hang,
        }

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Query:
        """Inverse of `to_plain`."""
        options = dict(plain["options"])
        backends = [it if isinstance(it, str) else Backend(**it) for it in options.pop("backends")]
        options |= {"backends": backends} if backends else {}
        fields = {**plain, "folder": Path(plain["folder"]), "options": options}
        return Query(**{**fields, "start_from": start_from_plain(plain["start_from"])})


def next_file(offsets: str) -> int:
    """The file after a batch, by the batch's offsets as Spark writes them: each batch reads one file."""
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


def _counting(reached: str) -> Callable[..., Iterator[pd.DataFrame]]:
    # Nested, so that it travels to the workers by value: these need not find this module.
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
    """Run the job until somebody kills this process."""
    plain = json.loads(spec.read_text())
    query = Query.of(plain["query"])
    query.run(session_of(2, plain["provider"]))
    raise SystemExit("nobody has killed this process")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
