"""Savepoints back to back of a running query, while somebody kills its Python workers: each is one committed batch's state.

The query counts rows of Spark's source ``rate-micro-batch``, which says which rows a batch has. So the state after each
batch is known without running anything: that is the model. Kills hit whatever works at that moment: batches, and the
tasks that take savepoints. Batches are timed before, while, and after savepoints are taken, with kills all the time.

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

__all__ = ["CONF", "Kills", "Seen", "expected", "run"]

ROWS, KEYS, BUCKETS, RETAINED = 4_000, 10_000, 6, 4
AT_LEAST, SLOWER_AT_MOST = 10, 1.5
# A number that has no factor in common with that of keys: rows of a batch are of different keys.
_STEP = 7_919
# Spark remembers what it told of all batches.
CONF = {"spark.sql.streaming.numRecentProgressUpdates": "1000000"}
_OUTPUT = "key long, n long, last long"


def counting() -> Callable[[Any], pa.Table]:
    """The function of the query."""

    # Nested, so that it travels to the workers by value: these need not find this module.
    def counts(batch: Any) -> pa.Table:
        """How many rows each key has had, and its last one."""
        new = batch.aggregate([([], "count_all"), ("value", "max")])
        n = pc.add(pc.fill_null(batch.state["n"], 0), new["count_all"])
        batch.update({"n": n, "last": new["value_max"]})
        return batch.keys.append_column("n", n).append_column("last", new["value_max"])

    return counts


def expected(batch: int) -> pa.Table:
    """The state after a batch, by the batch computation: all rows up to its last one, by key."""
    rows = np.arange((batch + 1) * ROWS)
    keys = rows * _STEP % KEYS
    n = np.bincount(keys, minlength=KEYS)
    last = np.full(KEYS, -1)
    np.maximum.at(last, keys, rows)
    found = np.flatnonzero(n)
    return pa.table({"key": found, "n": n[found], "last": last[found]})


def saved(savepoint: Path, scratch: Path) -> pa.Table:
    """The state in a savepoint, read without Spark."""
    folder = Folder(str(savepoint))
    manifest = read_manifest(folder)
    (operator,) = manifest.header.operators.values()
    batches = [
        batch for it in manifest.buckets for batch in read_visible_rows(folder, it, operator.row_schema(), scratch)
    ]
    return pa.Table.from_batches(batches).select(["key", "n", "last"]).sort_by("key")


@dataclass
class Seen:
    """What happened.

    Parameters
    ----------
    kills
        Python processes that were killed.
    batches, batches_while_taken
        Batches that were committed, and those of them while savepoints were taken.
    seconds_a_savepoint
        From one to the next.
    without_s, with_s
        Median seconds of a batch, without savepoints and while they are taken.
    savepoints
        Batches of savepoints that were taken.
    refused
        Why others were not: Spark had dropped the batch, say.
    wrong
        What is not as it should be.
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
        """The median batch while savepoints are taken to that without."""
        return self.with_s / self.without_s


class Kills:
    """Kills a Python process of a Spark application now and then; a context manager.

    Parameters
    ----------
    every_s
        About so often; 0: never.
    seed
        Of which, and when.
    progress
        Nobody is killed while this stays what it is: on a slow machine too something comes to its end between two kills.
    """

    def __init__(self, every_s: float, seed: int, progress: Callable[[], object]) -> None:
        self._every_s = every_s
        self._draw = random.Random(seed)
        self._progress = progress
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill_now_and_then, daemon=True)
        self.count = 0

    def __enter__(self) -> Kills:
        if self._every_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._every_s:
            self._thread.join()

    def _kill_now_and_then(self) -> None:
        reached = None
        while not self._over.wait(self._every_s * self._draw.uniform(0.5, 1.5)):
            if (now := self._progress()) == reached:
                continue
            reached = now
            found = [pid for pid in descendants(os.getpid()) if _is_pythons(pid)]
            if found:
                # Workers are forked by a daemon, which may be hit too.
                os.kill(self._draw.choice(found), signal.SIGKILL)
                self.count += 1


def _is_pythons(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended
    return b"-m" in command and any(part.endswith(b"daemon") for part in command)


def run(spark: Any, folder: Path, seconds: float, savepoints: int, kill_every_s: float, seed: int) -> Seen:
    """Run the query, for so long and until so many savepoints were taken, and compare.

    Parameters
    ----------
    spark
        A session with `CONF`. Its tasks may be tried again, where there are kills.
    folder
        For everything; must not exist.
    seconds
        How long savepoints are taken. Half of it passes before, and half after.
    savepoints
        How many there are at least.
    kill_every_s, seed
        As for `Kills`.
    """
    folder.mkdir(parents=True)
    seen, state = Seen(), ArrowState(str(folder / "root"), "counted", buckets=BUCKETS, local_dir=str(folder / "local"))
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).option("numPartitions", 2).load()
    rows = source.selectExpr("value", f"value * {_STEP} % {KEYS} AS key")
    query = (
        state.apply_in_arrow_with_state(rows, "key", counting(), _OUTPUT, "n long, last long")
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    taken: dict[Path, int] = {}
    try:
        eventually(lambda: _finished(query) >= 2)
        with Kills(kill_every_s, seed, lambda: (_finished(query), len(taken))) as kills:
            time.sleep(seconds / 2)
            begin, started_s = _finished(query), time.monotonic()
            while time.monotonic() - started_s < seconds or len(taken) < savepoints:
                path = folder / f"savepoint-{len(taken) + len(seen.refused)}"
                try:
                    taken[path] = take_savepoint(spark, path, folder / "checkpoint", state).batch
                    _tell(f"a savepoint of batch {taken[path]} after {time.monotonic() - started_s:.1f} s")
                except Exception as error:
                    if not query.isActive:
                        break
                    seen.refused.append(_first_line(error))
                    _tell(seen.refused[-1])
            took_s, end = time.monotonic() - started_s, _finished(query)
            time.sleep(seconds / 2)
        seen.kills = kills.count
        # Spark tells of a batch a moment after it has committed it.
        eventually(lambda: not query.isActive or _finished(query) >= max(taken.values(), default=-1))
        if not query.isActive:
            seen.wrong.append(f"the query ended: {query.exception()}")
        progress = [it for it in query.recentProgress if it["numInputRows"]]
    finally:
        query.stop()
    seconds_of = {it["batchId"]: it["durationMs"]["triggerExecution"] / 1000 for it in progress}
    # The first ones start Spark's and Python's machinery up.
    without = [s for at, s in seconds_of.items() if 2 < at <= begin or at > end + 1]
    while_taken = [s for at, s in seconds_of.items() if begin < at <= end]
    seen.batches, seen.batches_while_taken = len(seconds_of), len(while_taken)
    seen.seconds_a_savepoint = took_s / max(1, len(taken))
    seen.without_s = statistics.median(without or [float("nan")])
    seen.with_s = statistics.median(while_taken or [float("nan")])
    seen.savepoints = list(taken.values())
    _compare(seen, seconds_of.keys(), taken, folder)
    return seen


def _finished(query: Any) -> int:
    """The last batch that is committed, by Spark's progress; -1: none."""
    last = query.lastProgress
    return -1 if last is None else int(last["batchId"])


def _compare(seen: Seen, committed: Any, taken: dict[Path, int], folder: Path) -> None:
    models = {batch: expected(batch) for batch in range(max(committed, default=-1) + 1)}
    if sorted(committed) != list(models):
        seen.wrong.append(f"batches are missing in Spark's progress: {sorted(models.keys() - committed)}")
    for path, batch in taken.items():
        found = saved(path, folder)
        equal = [at for at, model in models.items() if found.equals(model)]
        if equal != [batch]:
            seen.wrong.append(f"{path.name} says that it is of batch {batch}, and has the state of {equal or 'none'}")
    holds = [str(it) for it in (folder / "root").rglob("holds/*.json")]
    if holds and not seen.refused:
        seen.wrong.append(f"holds are left: {holds}")


def _first_line(error: Exception) -> str:
    """What an error says; ours and those of Spark's jobs, no others."""
    from pyspark.errors import PySparkException

    if not isinstance(error, (StateError, PySparkException)):
        raise error
    return f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run it, and print one line of JSON; exits with 1 where something is wrong, or a promise is not kept."""
    from killed_jobs import session

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, default=None, metavar="DIR", help="for a folder that goes in the end")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long savepoints are taken")
    parser.add_argument("--savepoints", type=int, default=AT_LEAST, metavar="N", help="how many there are at least")
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="S", help="seconds between two kills, about")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    given = parser.parse_args()
    # A task may fail as often as there are kills.
    retained = {"spark.sql.streaming.minBatchesToRetain": str(RETAINED)}
    spark = session(1_000, conf={**CONF, **retained, "spark.ui.showConsoleProgress": "false"})
    with tempfile.TemporaryDirectory(dir=given.work_dir) as folder:
        seen = run(spark, Path(folder) / "run", given.seconds, given.savepoints, given.kill_every, given.seed)
    spark.stop()
    print(json.dumps({**asdict(seen), "ratio": seen.ratio}))
    kept = len(seen.savepoints) >= given.savepoints and seen.ratio <= SLOWER_AT_MOST
    return int(bool(seen.wrong) or not kept or not (seen.kills or not given.kill_every))


if __name__ == "__main__":
    sys.exit(main())
