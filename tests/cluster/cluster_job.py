"""The driver of a cluster's query, in a process and an environment of its own: ``cluster_job.py SETTINGS``.

Its function follows orders, by the number of the input file that a row is from: a task stands still until another attempt at
it runs, or until its executor is killed. Processes meet in a folder: who makes a file there first is the one.
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


def follower(folder: Path, orders: Mapping[int, str], wait_s: float) -> Callable[[int], None]:
    """What follows the orders of a file in a worker.

    Parameters
    ----------
    folder
        Where processes meet.
    orders
        What happens while which file is worked on: ``slow``, or some kind of ``kill``.
    wait_s
        How long a task stands still at most; then it fails.
    """

    # Nested, so that all of it travels to the workers by value: these do not have this module.
    def claim(name: str, text: str) -> bool:
        """Whether this process is the first; the file is there with its text at once."""
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

    def stand_still(until: str) -> None:
        deadline_s = time.monotonic() + wait_s
        while not (folder / until).exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{until} did not come within {wait_s} seconds")
            time.sleep(0.02)

    def identify() -> None:
        """Who this process is, and where its package is from."""
        worker, pid = os.environ["CLUSTER_WORKER"], os.getpid()
        told = {
            "worker": worker,
            "host": socket.gethostname(),
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "processes": os.readlink("/proc/self/ns/pid"),
            "package": spark_state_ext.__file__,
            "paths": os.environ.get("PYTHONPATH", ""),
        }
        claim(f"process-{worker}-{pid}", json.dumps(told))

    def follow(at: int) -> None:
        identify()
        task = TaskContext.get()
        assert task is not None
        for earlier, order in orders.items():
            # A kill that comes late comes before the next file is through.
            if earlier < at and order.startswith("kill"):
                stand_still(f"killed-{earlier}")
        order = orders.get(at, "")
        me = f"{task.partitionId()} {task.taskAttemptId()}"
        if order == "slow":
            if claim(f"slow-{at}", me):
                stand_still(f"seen-{at}")
            partition, attempt = (folder / f"slow-{at}").read_text().split()
            if int(partition) == task.partitionId() and int(attempt) != task.taskAttemptId():
                claim(f"seen-{at}", me)
        elif order.startswith("kill") and claim(f"kill-{at}", os.environ["CLUSTER_WORKER"]) and "late" not in order:
            stand_still(f"killed-{at}")

    return follow


def sums_and_sessions(follow: Callable[[int], None], gap_ms: int) -> Callable[..., Iterator[pd.DataFrame]]:
    """The function of a key's rows."""
    columns = ["kind", "key", "at", "n", "total", "first", "last"]

    def step(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        n, total, first, last, rows = state.getOption or (0, 0, 0, 0, 0)
        out: list[tuple[Any, ...]] = []
        if state.hasTimedOut:
            out.append(("session", key[0], -1, rows, 0, first, last))
            state.update((n, total, 0, 0, 0))
        else:
            found = pd.concat(list(pdfs)).sort_values("time")
            at = int(found["at"].max())
            follow(at)
            for value, when in zip(found["value"], found["time"], strict=True):
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


def writer(out: Path, meeting: Path, orders: Mapping[int, str], wait_s: float) -> Callable[[Any, int], None]:
    """The sink: one file a batch. A batch that runs again has to give the same rows."""

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
            # The batch's state is written and the batch is not committed; this process is killed now.
            (meeting / f"restart-{at}").touch()
            time.sleep(wait_s)
            raise TimeoutError("this driver was not killed")

    return write


def main(settings: Mapping[str, Any]) -> None:
    """Run the query over what is left of its input."""
    folder = Path(settings["folder"])
    meeting, out = folder / "meeting", folder / "out"
    orders = {int(at): order for at, order in settings["orders"].items()}
    builder = SparkSession.builder.appName("spark_state_ext on a cluster")
    for name, value in settings["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    (meeting / f"driver-{os.getpid()}").write_text(spark_state_ext.__file__)
    enable(spark, ArrowState(folder / "root", "clustered", local_dir=settings["local_dir"], buckets=8, lease_ms=1_000))
    step = sums_and_sessions(follower(meeting, orders, settings["wait_s"]), settings["gap_ms"])
    events = spark.readStream.schema(_INPUT).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    query = (
        events.withWatermark("time", "0 seconds")
        .groupBy(F.col("key"))
        .applyInPandasWithState(step, _OUTPUT, _STATE, "update", "EventTimeTimeout")
        .writeStream.outputMode("update")
        .foreachBatch(writer(out, meeting, orders, settings["wait_s"]))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
