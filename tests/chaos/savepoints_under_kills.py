"""Savepoints of a running query whose Python workers are killed: each savepoint is the state of one committed batch.

The query counts rows of Spark's source ``rate-micro-batch``, whose batches have known rows. So a model computes the state
after each batch without running the query. Kills hit whatever works at that moment: batches, and the tasks that take
savepoints. Batches are timed before, while, and after savepoints are taken, with kills all the time.

``PYTHONPATH=.:tests/spark python tests/chaos/savepoints_under_kills.py --seconds 120``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.processes import descendants
from spark_state_ext import ArrowState, take_savepoint
from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.saved_rows import read_visible_rows
from tests.helpers.waiting import eventually

__all__ = ["CONF", "Kills", "Outcome", "compute_state", "run"]

ROWS, KEYS, BUCKETS, RETAINED = 4_000, 10_000, 6, 4
AT_LEAST, SLOWER_AT_MOST = 10, 1.5
# This number and the number of keys have no common factor, so that the rows of a batch are of different keys.
_STEP = 7_919
# Let Spark keep the progress of all batches.
CONF = {"spark.sql.streaming.numRecentProgressUpdates": "1000000"}
_OUTPUT = "key long, n long, last long"


def make_count_function() -> Callable[[Any], pa.Table]:
    """Return the function of the query."""

    # A nested function is pickled by value, so that workers need not import this module.
    def count(batch: Any) -> pa.Table:
        """Return the number of rows that each key has had, and its last one."""
        new = batch.aggregate([([], "count_all"), ("value", "max")])
        n = pc.add(pc.fill_null(batch.state["n"], 0), new["count_all"])
        batch.update({"n": n, "last": new["value_max"]})
        return batch.keys.append_column("n", n).append_column("last", new["value_max"])

    return count


def compute_state(batch: int) -> pa.Table:
    """Return the state after a batch by the batch computation: all rows up to the batch's last one, by key."""
    rows = np.arange((batch + 1) * ROWS)
    keys = rows * _STEP % KEYS
    n = np.bincount(keys, minlength=KEYS)
    last = np.full(KEYS, -1)
    np.maximum.at(last, keys, rows)
    keys_seen = np.flatnonzero(n)
    return pa.table({"key": keys_seen, "n": n[keys_seen], "last": last[keys_seen]})


def read_saved_state(savepoint: Path, scratch: Path) -> pa.Table:
    """Return the state in a savepoint, read without Spark."""
    folder = Folder(str(savepoint))
    manifest = read_manifest(folder)
    (operator,) = manifest.header.operators.values()
    batches = [
        batch
        for bucket in manifest.buckets
        for batch in read_visible_rows(folder, bucket, operator.row_schema(), scratch)
    ]
    return pa.Table.from_batches(batches).select(["key", "n", "last"]).sort_by("key")


@dataclass
class Outcome:
    """The result of a run.

    Parameters
    ----------
    kills
        Number of Python processes that were killed.
    batches, batches_while_taken
        Number of committed batches, and how many of them were committed while a savepoint was taken.
    seconds_a_savepoint
        Seconds from one savepoint to the next.
    without_s, with_s
        Median seconds of a batch without savepoints, and while savepoints are taken.
    savepoints
        The batches of the savepoints.
    refused
        Reasons why other savepoints were refused, for example that Spark had dropped the batch.
    wrong
        Everything that differs from what it should be.
    """

    kills: int = 0
    batches: int = 0
    batches_while_taken: int = 0
    seconds_a_savepoint: float = 0.0
    without_s: float = 0.0
    with_s: float = 0.0
    savepoints: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The ratio of the median batch while savepoints are taken to the median batch without savepoints."""
        return self.with_s / self.without_s


class Kills:
    """A context manager that kills Python processes of a Spark application at random times.

    Parameters
    ----------
    every_s
        Mean seconds between two kills; 0 for no kills.
    seed
        Seed of the choice of processes and times.
    progress
        No process is killed until this value has changed, so that work also completes between two kills on a slow machine.
    """

    def __init__(self, every_s: float, seed: int, progress: Callable[[], object]) -> None:
        self._every_s = every_s
        self._draw = random.Random(seed)
        self._progress = progress
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._kill_repeatedly, daemon=True)
        self.count = 0

    def __enter__(self) -> Kills:
        if self._every_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._every_s:
            self._thread.join()

    def _kill_repeatedly(self) -> None:
        reached = None
        while not self._stopped.wait(self._every_s * self._draw.uniform(0.5, 1.5)):
            if (now := self._progress()) == reached:
                continue
            reached = now
            pids = [pid for pid in descendants(os.getpid()) if is_python_worker(pid)]
            if pids:
                # The kill may also hit the daemon that forks the workers.
                os.kill(self._draw.choice(pids), signal.SIGKILL)
                self.count += 1


def is_python_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # the process has ended
    return b"-m" in command and any(part.endswith(b"daemon") for part in command)


def run(spark: Any, folder: Path, seconds: float, savepoints: int, kill_every_s: float, seed: int) -> Outcome:
    """Run the query for that long and until there are that many savepoints, and compare them with the model.

    Parameters
    ----------
    spark
        A session with `CONF`. It must allow retries of tasks if there are kills.
    folder
        Folder for all files; must not exist.
    seconds
        How long savepoints are taken. The query runs for half of this time before and for half of it after that.
    savepoints
        Minimum number of savepoints.
    kill_every_s, seed
        Arguments of `Kills`.
    """
    folder.mkdir(parents=True)
    outcome, state = (
        Outcome(),
        ArrowState(str(folder / "root"), "counted", buckets=BUCKETS, local_dir=str(folder / "local")),
    )
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2).load()
    rows = source.selectExpr("value", f"value * {_STEP} % {KEYS} AS key")
    query = (
        state.apply_in_arrow_with_state(rows, "key", make_count_function(), _OUTPUT, "n long, last long")
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    taken: dict[Path, int] = {}
    try:
        eventually(lambda: find_last_batch(query) >= 2)
        with Kills(kill_every_s, seed, lambda: (find_last_batch(query), len(taken))) as kills:
            time.sleep(seconds / 2)
            begin, started_s = find_last_batch(query), time.monotonic()
            while time.monotonic() - started_s < seconds or len(taken) < savepoints:
                path = folder / f"savepoint-{len(taken) + len(outcome.refused)}"
                try:
                    taken[path] = take_savepoint(spark, path, folder / "checkpoint", state).batch
                    log(f"a savepoint of batch {taken[path]} after {time.monotonic() - started_s:.1f} s")
                except Exception as error:
                    if not query.isActive:
                        break
                    outcome.refused.append(read_first_line(error))
                    log(outcome.refused[-1])
            took_s, end = time.monotonic() - started_s, find_last_batch(query)
            time.sleep(seconds / 2)
        outcome.kills = kills.count
        # Spark reports the progress of a batch a moment after it has committed the batch.
        eventually(lambda: not query.isActive or find_last_batch(query) >= max(taken.values(), default=-1))
        if not query.isActive:
            outcome.wrong.append(f"the query ended: {query.exception()}")
        progress = [report for report in query.recentProgress if report["numInputRows"]]
    finally:
        query.stop()
    seconds_of = {report["batchId"]: report["durationMs"]["triggerExecution"] / 1000 for report in progress}
    # The first batches start Spark's and Python's processes.
    without = [s for at, s in seconds_of.items() if 2 < at <= begin or at > end + 1]
    while_taken = [s for at, s in seconds_of.items() if begin < at <= end]
    outcome.batches, outcome.batches_while_taken = len(seconds_of), len(while_taken)
    outcome.seconds_a_savepoint = took_s / max(1, len(taken))
    outcome.without_s = statistics.median(without or [float("nan")])
    outcome.with_s = statistics.median(while_taken or [float("nan")])
    outcome.savepoints = list(taken.values())
    compare(outcome, seconds_of.keys(), taken, folder)
    return outcome


def find_last_batch(query: Any) -> int:
    """Return the last committed batch according to Spark's progress, or -1 if there is none."""
    last = query.lastProgress
    return -1 if last is None else int(last["batchId"])


def compare(outcome: Outcome, committed: Any, taken: dict[Path, int], folder: Path) -> None:
    models = {batch: compute_state(batch) for batch in range(max(committed, default=-1) + 1)}
    if sorted(committed) != list(models):
        outcome.wrong.append(f"batches are missing in Spark's progress: {sorted(models.keys() - committed)}")
    for path, batch in taken.items():
        state = read_saved_state(path, folder)
        equal = [at for at, model in models.items() if state.equals(model)]
        if equal != [batch]:
            outcome.wrong.append(
                f"{path.name} says that it is of batch {batch}, and has the state of {equal or 'none'}"
            )
    holds = [str(path) for path in (folder / "root").rglob("holds/*.json")]
    if holds and not outcome.refused:
        outcome.wrong.append(f"holds are left: {holds}")


def read_first_line(error: Exception) -> str:
    """Return the first line of an error of this package or of Spark; raise any other error."""
    from pyspark.errors import PySparkException

    if not isinstance(error, (StateError, PySparkException)):
        raise error
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the query and print one line of JSON; return 1 if the outcome is wrong or misses a target."""
    from killed_jobs import session

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=None, metavar="DIR", help="parent of a temporary folder")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long savepoints are taken")
    parser.add_argument("--savepoints", type=int, default=AT_LEAST, metavar="N", help="minimum number of savepoints")
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="S", help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills")
    arguments = parser.parse_args()
    # Allow a task to fail as often as there are kills.
    retained = {"spark.sql.streaming.minBatchesToRetain": str(RETAINED)}
    spark = session(1_000, conf={**CONF, **retained, "spark.ui.showConsoleProgress": "false"})
    with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
        outcome = run(
            spark, Path(folder) / "run", arguments.seconds, arguments.savepoints, arguments.kill_every, arguments.seed
        )
    spark.stop()
    print(json.dumps({**asdict(outcome), "ratio": outcome.ratio}))
    targets_met = len(outcome.savepoints) >= arguments.savepoints and outcome.ratio <= SLOWER_AT_MOST
    return int(bool(outcome.wrong) or not targets_met or not (outcome.kills or not arguments.kill_every))


if __name__ == "__main__":
    sys.exit(main())
