"""A job with timeouts on Spark's own operator, which tests stop at a batch, and then continue or import."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jobs import TIMED, Batches, configured, ddl, emitted, event_rows
from pyspark.sql.streaming.state import GroupStateTimeout
from streams import finish, read, using, write_batches

from benchmarks.spark import ROCKSDB
from spark_state_ext import Savepoint
from tests.helpers.waiting import eventually

__all__ = ["FIRST", "HDFS", "NEXT", "NativeJob", "conf_of", "count_for_20_s", "count_until_silent"]

HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
OUTPUT = "key string, n bigint, fired boolean"
STATE = "n bigint, note string, share double"
# Rows are key, event time in seconds, value. Before the first stop there are keys with a state, keys with a timeout, keys with
# only a timeout, and a NULL key. After it, some of these time out, and one row is late.
FIRST = [
    event_rows(("a", 10, 1), ("b", 11, 1), (None, 12, 1)),
    event_rows(("a", 20, 2), ("gone", 21, 1), ("kept", 22, 1)),
    event_rows(("c", 40, 1), ("d", 41, 1), ("gone-2", 42, 1)),
]
NEXT = [
    event_rows(("a", 60, 1), ("late", 5, 1), (None, 61, 1), ("d", 62, 1)),
    event_rows(("e", 200, 1), ("kept", 201, 1)),
]


def conf_of(provider: str, checkpoint_format: int) -> dict[str, str]:
    """Return the session configuration for a state store provider."""
    store = "spark.sql.streaming.stateStore."
    conf = {f"{store}providerClass": {"hdfs": HDFS, "rocksdb": ROCKSDB}[provider]}
    if checkpoint_format == 2:
        conf[f"{store}checkpointFormatVersion"] = "2"
        conf[f"{store}rocksdb.changelogCheckpointing.enabled"] = "true"
    return conf


def count_until_silent(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's rows until the key has had no row for ten seconds of event time."""
    n = 0 if state.getOption is None else state.getOption[0]
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"key": [key[0]], "n": [n], "fired": [True]})
        return
    frames = list(pdfs)
    n += sum(len(pdf) for pdf in frames)
    last = max(pdf["at"].max() for pdf in frames)
    if str(key[0]).startswith("gone"):
        state.remove()
    else:
        state.update((n, None if n == 1 else str(n), n / 3))
    if key[0] != "kept":
        state.setTimeoutTimestamp(int(last.timestamp() * 1000) + 10_000)
    yield pd.DataFrame({"key": [key[0]], "n": [n], "fired": [False]})


def count_for_20_s(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's rows until twenty seconds of processing time have passed."""
    n = 0 if state.getOption is None else state.getOption[0]
    if state.hasTimedOut:
        state.remove()
    else:
        n += sum(len(pdf) for pdf in pdfs)
        state.update((n, None, None))
        state.setTimeoutDuration(20_000)
    yield pd.DataFrame({"key": [key[0]], "n": [n], "fired": [state.hasTimedOut]})


@dataclass
class NativeJob:
    """The job in its own folder, with its input, its sink, and the checkpoint from which it continues."""

    session: Any
    folder: Path
    conf: dict[str, str]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def sink(self) -> Path:
        return self.folder / "sink"

    def run(self, batches: Sequence[Any], start_from: Savepoint | None = None, checkpoint: str = "checkpoint") -> None:
        """Run the job over more input: on Spark's operator, or on Arrow state from a savepoint."""
        source = write_batches(self.folder / "in", batches)
        with configured(self.session, self.conf):
            stream = read(self.session, source, ddl(TIMED)).withWatermark("at", "5 seconds")
            operator = "spark" if start_from is None else "arrow"
            with using(self.session, operator, self.folder, start_from=start_from):
                out = stream.groupBy("key").applyInPandasWithState(
                    count_until_silent, OUTPUT, STATE, "append", GroupStateTimeout.EventTimeTimeout
                )
                writer = out.writeStream.format("parquet").option("path", str(self.sink)).outputMode("append")
                location = str(self.folder / checkpoint)
                finish(writer.option("checkpointLocation", location).trigger(availableNow=True).start())

    def run_until(self, rows: int, start_from: Savepoint | None = None, checkpoint: str = "checkpoint") -> None:
        """Run the job with `count_for_20_s` until the sink has `rows` rows and batch 1 is planned."""
        with configured(self.session, self.conf):
            stream = read(self.session, str(self.folder / "in"), ddl(TIMED))
            operator = "spark" if start_from is None else "arrow"
            with using(self.session, operator, self.folder, start_from=start_from):
                out = stream.groupBy("key").applyInPandasWithState(
                    count_for_20_s, OUTPUT, STATE, "append", GroupStateTimeout.ProcessingTimeTimeout
                )
                writer = out.writeStream.format("parquet").option("path", str(self.sink)).outputMode("append")
                query = writer.option("checkpointLocation", str(self.folder / checkpoint)).start()
                try:
                    planned = self.folder / checkpoint / "offsets" / "1"
                    eventually(lambda: (self.rows() >= rows and planned.exists()) or query.exception() is not None, 0.2)
                finally:
                    query.stop()
                assert query.exception() is None, query.exception()

    def rows(self) -> int:
        return sum(map(len, self.emitted().values())) if self.sink.exists() else 0

    def last_batch(self) -> int:
        return max(int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*"))

    def cut_back(self, to_batch: int, planned: bool) -> None:
        """Make the folder look as if the job had been killed after a batch or, with `planned`, after it planned the next one."""
        newer = [path for path in (self.checkpoint / "commits").glob("[0-9]*") if int(path.stem) > to_batch]
        newer += [path for path in (self.checkpoint / "offsets").glob("[0-9]*") if int(path.stem) > to_batch + planned]
        newer += [path for path in (self.sink / "_spark_metadata").glob("[0-9]*") if int(path.stem) > to_batch]
        for path in newer:
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def copy(self, folder: Path) -> NativeJob:
        """Copy the job to another folder, with its input files, sink and checkpoint."""
        shutil.copytree(self.folder, folder)
        job = NativeJob(self.session, folder, self.conf)
        # The logs of the source and of the sink name the old folder.
        for log in [*(folder / "checkpoint/sources").rglob("*"), *(folder / "sink/_spark_metadata").rglob("*")]:
            if log.is_file() and not log.name.startswith("."):
                log.write_text(log.read_text().replace(f"{self.folder}/", f"{folder}/"))
                log.with_name(f".{log.name}.crc").unlink(missing_ok=True)
        return job

    def emitted(self) -> Batches:
        return emitted(self.sink)
