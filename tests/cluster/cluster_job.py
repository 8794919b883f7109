"""The driver of a cluster's query, in a separate process and environment: ``cluster_job.py SETTINGS``.

Its function follows orders for the input file of a row: a task waits until another attempt at it runs, or until its executor
is killed. Processes coordinate through files in a folder: the first process that creates a file has the claim.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState

import spark_state_ext
from spark_state_ext import ArrowState, enable

_INPUT = "at int, key long, value long, time timestamp"
_OUTPUT = "kind string, key long, at int, n long, total long, first long, last long"
_STATE = "n long, total long, first long, last long, rows long"


def make_follower(folder: Path, orders: Mapping[int, str], wait_s: float) -> Callable[[int], None]:
    """Return a function that follows the order for a file in a worker.

    Parameters
    ----------
    folder
        Folder through which processes coordinate.
    orders
        The order for each file: ``slow``, or a kind of ``kill``.
    wait_s
        Maximum seconds that a task waits; then it fails.
    """

    # Nested functions are pickled by value, because the workers do not have this module.
    def claim(name: str, text: str) -> bool:
        """Create a file atomically with its text, and return whether this process was the first."""
        if (folder / name).exists():
            return False
        hidden = folder / f".{name}-{os.getpid()}-{time.monotonic_ns()}-{os.environ['CLUSTER_WORKER']}"
        hidden.write_text(text)
        try:
            os.link(hidden, folder / name)
        except FileExistsError:
            return False
        finally:
            hidden.unlink()
        return True

    def wait_for_file(until: str) -> None:
        deadline_s = time.monotonic() + wait_s
        while not (folder / until).exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{until} did not come within {wait_s} seconds")
            time.sleep(0.02)

    def identify() -> None:
        """Write the identity of this process and the location of its package to a file."""
        worker, pid = os.environ["CLUSTER_WORKER"], os.getpid()
        identity = {
            "worker": worker,
            "host": socket.gethostname(),
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "processes": os.readlink("/proc/self/ns/pid"),
            "package": spark_state_ext.__file__,
            "paths": os.environ.get("PYTHONPATH", ""),
        }
        claim(f"process-{worker}-{pid}", json.dumps(identity))

    def follow(at: int) -> None:
        identify()
        task = TaskContext.get()
        assert task is not None
        for earlier, order in orders.items():
            # A late kill comes before the end of the next file.
            if earlier < at and order.startswith("kill"):
                wait_for_file(f"killed-{earlier}")
        order = orders.get(at, "")
        me = f"{task.partitionId()} {task.taskAttemptId()}"
        if order == "slow":
            if claim(f"slow-{at}", me):
                wait_for_file(f"seen-{at}")
            partition, attempt = (folder / f"slow-{at}").read_text().split()
            if int(partition) == task.partitionId() and int(attempt) != task.taskAttemptId():
                claim(f"seen-{at}", me)
        elif order.startswith("kill") and claim(f"kill-{at}", os.environ["CLUSTER_WORKER"]) and "late" not in order:
            wait_for_file(f"killed-{at}")

    return follow


def make_sums_and_sessions(follow: Callable[[int], None], gap_ms: int) -> Callable[..., Iterator[pd.DataFrame]]:
    """Return the function of a key's rows."""
    columns = ["kind", "key", "at", "n", "total", "first", "last"]

    def step(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n, total, first, last, rows = state.getOption or (0, 0, 0, 0, 0)
        out: list[tuple[Any, ...]] = []
        if state.hasTimedOut:
            out.append(("session", key[0], -1, rows, 0, first, last))
            state.update((n, total, 0, 0, 0))
        else:
            rows_in = pd.concat(list(pdfs)).sort_values("time")
            at = int(rows_in["at"].max())
            follow(at)
            for value, when in zip(rows_in["value"], rows_in["time"], strict=True):
                ms = round(when.timestamp() * 1000)
                if rows and ms - last > gap_ms:
                    out.append(("session", key[0], -1, rows, 0, first, last))
                    rows = 0
                first, last, rows = ms if rows == 0 else first, ms, rows + 1
                n, total = n + 1, total + int(value)
            state.update((n, total, first, last, rows))
            state.setTimeoutTimestamp(last + gap_ms)
            out.append(("total", key[0], at, n, total, 0, 0))
        yield pd.DataFrame(out, columns=columns)

    return step


def make_writer(out: Path, meeting: Path, orders: Mapping[int, str], wait_s: float) -> Callable[[Any, int], None]:
    """Return the sink, which writes one file for each batch; a batch that runs again must have the same rows."""

    def write(df: Any, batch: int) -> None:
        rows = sorted([list(row) for row in df.collect()])
        path = out / f"{batch:06}.json"
        if path.exists() and json.loads(path.read_text()) != rows:
            (out / f"differs-{batch}").write_text(json.dumps(rows))
        hidden = out / f".{batch}"
        hidden.write_text(json.dumps(rows))
        hidden.rename(path)
        for at in {row[2] for row in rows if row[0] == "total"}:
            if orders.get(at) != "restart" or (meeting / f"restarted-{at}").exists():
                continue
            # The state of the batch is written, but the batch is not committed. The trial kills this process now.
            (meeting / f"restart-{at}").touch()
            time.sleep(wait_s)
            raise TimeoutError("this driver was not killed")

    return write


def main(settings: Mapping[str, Any]) -> None:
    """Run the query over the rest of its input."""
    folder = Path(settings["folder"])
    meeting, out = folder / "meeting", folder / "out"
    orders = {int(at): order for at, order in settings["orders"].items()}
    builder = SparkSession.builder.appName("spark_state_ext on a cluster")
    for name, value in settings["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    (meeting / f"driver-{os.getpid()}").write_text(spark_state_ext.__file__)
    enable(spark, ArrowState(folder / "root", "clustered", local_dir=settings["local_dir"], buckets=8, lease_ms=1_000))
    step = make_sums_and_sessions(make_follower(meeting, orders, settings["wait_s"]), settings["gap_ms"])
    events = spark.readStream.schema(_INPUT).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    query = (
        events.withWatermark("time", "0 seconds")
        .groupBy(F.col("key"))
        .applyInPandasWithState(step, _OUTPUT, _STATE, "update", "EventTimeTimeout")
        .writeStream.outputMode("update")
        .foreachBatch(make_writer(out, meeting, orders, settings["wait_s"]))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
