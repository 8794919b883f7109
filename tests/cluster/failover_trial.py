"""A query on the cluster whose only executor's host is killed several times with its disk, and the time that it takes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from cluster import Cluster, WorkerNode
from failover_query import HEAL_S_MAX, SETUP_S_MAX, FailoverQuery, Size
from processes import wait_until
from slow_s3 import SlowS3

__all__ = ["CONTROL", "LAZY", "MODES", "PEER", "STANDBY", "Failover", "FailoverTrial"]

# The ways in which a task on a new host gets its state.
CONTROL, LAZY, PEER, STANDBY, ONE_REPLICA = "control", "lazy", "peer", "standby", "one_replica"
MODES = (CONTROL, LAZY, PEER, STANDBY, ONE_REPLICA)
_REPLICAS = {PEER: 1, STANDBY: 2, ONE_REPLICA: 1}
_WARM_UP_FILES = 3


@dataclass(frozen=True)
class Failover:
    """The result of killing a host.

    Parameters
    ----------
    killed, landed
        The killed worker, and the one whose executor continued.
    seconds
        Seconds from its death until Spark had committed the next batch.
    lost_s, executor_s
        Seconds from its death until Spark knew that the executor was lost, and until it had another one.
    read_s
        The longest time in which a task of that batch restored its state.
    task_s
        The longest task with state.
    restored_files, down_bytes
        Checkpoint files that tasks fetched, and bytes that came over the line until the commit.
    """

    killed: str
    landed: str
    seconds: float
    lost_s: float
    executor_s: float
    read_s: float
    task_s: float
    restored_files: int
    down_bytes: int


@dataclass
class _Kill:
    """A kill whose events in Spark's log are not read yet."""

    worker: str
    dead_s: float
    batch: int
    committed_s: float
    down_bytes: int
    calls: pa.Table


class FailoverTrial(FailoverQuery):
    """A query with one executor, from its beginning to its end.

    Parameters
    ----------
    cluster, store, folder, size, seed
        Arguments of `FailoverQuery`.
    mode
        One of `MODES`. For `PEER` the last worker of the cluster is a bystander, and the only one with a service.
    """

    def __init__(self, cluster: Cluster, store: SlowS3, folder: Path, mode: str, size: Size, seed: int) -> None:
        super().__init__(cluster, store, folder, replace(size, replicas=_REPLICAS.get(mode, 0)), seed)
        self.mode = mode
        # With one executor, one host has the whole state.
        self.conf = {"spark.cores.max": str(cluster.cores)}
        if mode == CONTROL:
            # No file is that large, so that no restore is lazy.
            self.conf["spark.executorEnv.SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN"] = str(1 << 62)
        # Services run on no worker, on the one without executors, or on all.
        self._followers = cluster.workers[-1:] if mode == PEER else cluster.workers if mode in _REPLICAS else []
        if mode in (PEER, ONE_REPLICA):
            self.with_peers()

    def run(self, kills: int) -> list[Failover]:
        """Run the query, kill its hosts, and compare its output with the batch computation.

        Raises
        ------
        RuntimeError
            If the driver or a standby service ended, or an output is wrong.
        TimeoutError
            If a wait takes too long.
        """
        self.store.line()
        self.start()
        for _ in range(_WARM_UP_FILES):
            self.wait_for(self.feed(), SETUP_S_MAX)
        self.settle()
        if self._followers:
            self.set_replicas()
            for worker in self._followers:
                self.start_service(worker)
            self.wait_for_replicas()
        kills_made = [self._kill() for _ in range(kills)]
        self.end()
        self.compare()
        return self._measure(kills_made)

    # -- hosts -------------------------------------------------------------------------------------

    def active(self) -> WorkerNode:
        """Return the worker with the executor."""
        (worker,) = [candidate for candidate in self.cluster.workers if candidate.executors()]
        return worker

    def _kill(self) -> _Kill:
        worker = self.active()
        # Kill between two batches, so that only the next batch is delayed.
        self.store.line(self.size.bytes_s, self.size.request_s)
        time.sleep(0.5)
        before = self.store.passed()["down_bytes"]
        dead_s = self.cluster.kill_worker(worker)
        batch = self.feed()
        committed_s = self.wait_for(batch, HEAL_S_MAX)
        down_bytes = self.store.passed()["down_bytes"] - before
        # The rest of the recovery is not measured, so remove the limits.
        self.store.line()
        wait_until(lambda: self._calls(batch).num_rows >= self.size.buckets, "executors write their metrics")
        kill = _Kill(worker.name, dead_s, batch, committed_s, down_bytes, self._calls(batch))
        print(
            json.dumps({"killed": worker.name, "seconds": round(committed_s - dead_s, 2), "down_bytes": down_bytes}),
            file=sys.stderr,
            flush=True,
        )
        self.cluster.restart_worker(worker)
        if worker in self._followers:
            self.start_service(worker)
        self.wait_for(self.feed(), HEAL_S_MAX)
        self.settle()
        if self._followers:
            self.wait_for_replicas()
        return kill

    def _calls(self, batch: int) -> pa.Table:
        calls = self.cluster.calls()
        return calls.filter(pc.equal(calls.column("batch"), batch))

    # -- Spark's events ----------------------------------------------------------------------------

    def _events(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in sorted((self.folder / "events").iterdir())
            for line in path.read_text(errors="replace").splitlines()
        ]

    def _measure(self, kills: list[_Kill]) -> list[Failover]:
        events = self._events()
        removed_s = [event["Timestamp"] / 1000 for event in events if event["Event"] == "SparkListenerExecutorRemoved"]
        added_s = [event["Timestamp"] / 1000 for event in events if event["Event"] == "SparkListenerExecutorAdded"]
        tasks = [event["Task Info"] for event in events if event["Event"] == "SparkListenerTaskEnd"]

        def find_delay(kill: _Kill, times_s: list[float]) -> float:
            return min((time_s - kill.dead_s for time_s in times_s if time_s >= kill.dead_s), default=float("nan"))

        failovers = []
        for kill in kills:
            task_times_s = [
                (task["Finish Time"] - task["Launch Time"]) / 1000
                for task in tasks
                if kill.dead_s <= task["Launch Time"] / 1000 and task["Finish Time"] / 1000 <= kill.committed_s
            ]
            by_process = kill.calls.group_by(["worker", "pid"]).aggregate([("read_ms", "sum")])
            failovers.append(
                Failover(
                    killed=kill.worker,
                    landed=" ".join(sorted(set(kill.calls.column("worker").to_pylist()))),
                    seconds=kill.committed_s - kill.dead_s,
                    lost_s=find_delay(kill, removed_s),
                    executor_s=find_delay(kill, added_s),
                    read_s=max(by_process.column("read_ms_sum").to_pylist()) / 1000,
                    task_s=max(task_times_s, default=float("nan")),
                    restored_files=sum(kill.calls.column("restored_files").to_pylist()),
                    down_bytes=kill.down_bytes,
                )
            )
        return failovers
