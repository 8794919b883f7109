"""A query on the cluster whose only executor's host is killed again and again, with its disk; and how long that takes."""

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

# How a task comes to its state where its host is new.
CONTROL, LAZY, PEER, STANDBY, ONE_REPLICA = "control", "lazy", "peer", "standby", "one_replica"
MODES = (CONTROL, LAZY, PEER, STANDBY, ONE_REPLICA)
_REPLICAS = {PEER: 1, STANDBY: 2, ONE_REPLICA: 1}
_WARM_UP_FILES = 3


@dataclass(frozen=True)
class Failover:
    """What came of killing a host.

    Parameters
    ----------
    killed, landed
        The worker that was killed, and the one whose executor went on.
    seconds
        From its death until Spark had committed the next batch.
    lost_s, executor_s
        From its death until Spark knew that the executor was lost, and until it had another one.
    read_s
        The longest that a task of that batch took to restore what it needed.
    task_s
        The longest task with state.
    restored_files, down_bytes
        Checkpoint files that tasks fetched, and what came over the line until the commit.
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
    """Before the events of Spark are read."""

    worker: str
    dead_s: float
    batch: int
    committed_s: float
    down_bytes: int
    calls: pa.Table


class FailoverTrial(FailoverQuery):
    """One query from its beginning to its end, with one executor.

    Parameters
    ----------
    cluster, store, folder, size, seed
        As for `FailoverQuery`.
    mode
        One of `MODES`. For `PEER` the last worker of the cluster is a bystander, and the only one with a service.
    """

    def __init__(self, cluster: Cluster, store: SlowS3, folder: Path, mode: str, size: Size, seed: int) -> None:
        super().__init__(cluster, store, folder, replace(size, replicas=_REPLICAS.get(mode, 0)), seed)
        self.mode = mode
        # One executor: one host has all of the state.
        self.conf = {"spark.cores.max": str(cluster.cores)}
        if mode == CONTROL:
            # No file is so large.
            self.conf["spark.executorEnv.SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN"] = str(1 << 62)
        # Where services run: nowhere, where no task can run, or everywhere.
        self._followers = cluster.workers[-1:] if mode == PEER else cluster.workers if mode in _REPLICAS else []
        if mode in (PEER, ONE_REPLICA):
            self.with_peers()

    def run(self, kills: int) -> list[Failover]:
        """Run the query, kill its hosts, and compare what it emitted.

        Raises
        ------
        RuntimeError
            When the driver or a standby ended, or an output is wrong.
        TimeoutError
            When something does not come.
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
        found = [self._kill() for _ in range(kills)]
        self.end()
        self.compare()
        return self._timed(found)

    # -- hosts -------------------------------------------------------------------------------------

    def active(self) -> WorkerNode:
        """The worker with the executor."""
        (found,) = [worker for worker in self.cluster.workers if worker.executors()]
        return found

    def _kill(self) -> _Kill:
        worker = self.active()
        # Between two batches, so that the next one is all of what the death costs.
        self.store.line(self.size.bytes_s, self.size.request_s)
        time.sleep(0.5)
        before = self.store.passed()["down_bytes"]
        dead_s = self.cluster.kill_worker(worker)
        batch = self.feed()
        committed_s = self.wait_for(batch, HEAL_S_MAX)
        down_bytes = self.store.passed()["down_bytes"] - before
        # Nobody waits for the rest.
        self.store.line()
        wait_until(lambda: self._calls(batch).num_rows >= self.size.buckets, "executors write their metrics")
        found = _Kill(worker.name, dead_s, batch, committed_s, down_bytes, self._calls(batch))
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
        return found

    def _calls(self, batch: int) -> pa.Table:
        calls = self.cluster.calls()
        return calls.filter(pc.equal(calls.column("batch"), batch))

    # -- what Spark saw ----------------------------------------------------------------------------

    def _events(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in sorted((self.folder / "events").iterdir())
            for line in path.read_text(errors="replace").splitlines()
        ]

    def _timed(self, kills: list[_Kill]) -> list[Failover]:
        events = self._events()
        removed_s = [it["Timestamp"] / 1000 for it in events if it["Event"] == "SparkListenerExecutorRemoved"]
        added_s = [it["Timestamp"] / 1000 for it in events if it["Event"] == "SparkListenerExecutorAdded"]
        tasks = [it["Task Info"] for it in events if it["Event"] == "SparkListenerTaskEnd"]

        def after(kill: _Kill, times_s: list[float]) -> float:
            return min((it - kill.dead_s for it in times_s if it >= kill.dead_s), default=float("nan"))

        found = []
        for kill in kills:
            within_it = [
                (it["Finish Time"] - it["Launch Time"]) / 1000
                for it in tasks
                if kill.dead_s <= it["Launch Time"] / 1000 and it["Finish Time"] / 1000 <= kill.committed_s
            ]
            by_process = kill.calls.group_by(["worker", "pid"]).aggregate([("read_ms", "sum")])
            found.append(
                Failover(
                    killed=kill.worker,
                    landed=" ".join(sorted(set(kill.calls.column("worker").to_pylist()))),
                    seconds=kill.committed_s - kill.dead_s,
                    lost_s=after(kill, removed_s),
                    executor_s=after(kill, added_s),
                    read_s=max(by_process.column("read_ms_sum").to_pylist()) / 1000,
                    task_s=max(within_it, default=float("nan")),
                    restored_files=sum(kill.calls.column("restored_files").to_pylist()),
                    down_bytes=kill.down_bytes,
                )
            )
        return found
