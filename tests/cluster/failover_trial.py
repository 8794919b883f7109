"""A query on the cluster whose only executor's host is killed again and again, with its disk; and how long that takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from cluster import Cluster, WorkerNode
from processes import wait_until
from slow_s3 import SlowS3

__all__ = ["CONTROL", "LAZY", "STANDBY", "Failover", "FailoverTrial", "Size"]

# How a task comes to its state where its host is new.
CONTROL, LAZY, STANDBY = "control", "lazy", "standby"
_ROW_BYTES = 100
_EVENTS = 2_000
_WARM_UP_FILES = 3
_TAIL = 2500
_SETTLED_S = 3.0
_HEARTBEAT_S = 2.0
_SETUP_S_MAX, _HEAL_S_MAX = 1200.0, 900.0


@dataclass(frozen=True)
class Size:
    """How much state, and the line to it.

    Parameters
    ----------
    gb
        State in all, 10^9 bytes.
    bytes_s, request_s
        Of the line to the store while a host fails.
    buckets
        Of the operator.
    replicas
        Standby replicas of each bucket.
    """

    gb: float
    bytes_s: float = 50e6
    request_s: float = 0.03
    buckets: int = 16
    replicas: int = 2

    @property
    def rows(self) -> int:
        """Keys in all."""
        return int(self.gb * 1e9 / _ROW_BYTES)


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


class FailoverTrial:
    """One query from its beginning to its end.

    Parameters
    ----------
    cluster
        Where.
    store
        With its root and savepoint.
    folder
        For input, checkpoint, output and logs; must not exist.
    mode
        `CONTROL`, `LAZY` or `STANDBY`.
    size
        Of the state.
    seed
        Of the events.
    """

    def __init__(self, cluster: Cluster, store: SlowS3, folder: Path, mode: str, size: Size, seed: int) -> None:
        self.cluster, self.store, self.folder, self.mode, self.size = cluster, store, folder, mode, size
        self._random = np.random.default_rng(seed)
        self._n = np.ones(size.rows, np.int64)
        self._total = np.arange(size.rows, dtype=np.int64)
        self._fed = 0
        self._right: dict[int, list[list[int]]] = {}
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._log = folder / "driver.log"

    @property
    def root(self) -> str:
        """The root of the operator's state."""
        return self.store.root(f"{self.folder.parent.name}/root")

    def run(self, kills: int) -> list[Failover]:
        """Run the query, kill its hosts, and compare what it emitted.

        Raises
        ------
        RuntimeError
            When the driver or a standby ended, or an output is wrong.
        TimeoutError
            When something does not come.
        """
        for name in ("in", "out", "events"):
            (self.folder / name).mkdir(parents=True)
        self.store.line()
        settings = self.folder / "settings.json"
        settings.write_text(json.dumps(self._settings))
        driver = self.cluster.driver(Path(__file__).with_name("failover_job.py"), [str(settings)], self._log)
        self._alive = driver
        for _ in range(_WARM_UP_FILES):
            self._wait_for(self.feed(), _SETUP_S_MAX)
        self.settle()
        if self.mode == STANDBY:
            self._standby("settings", "--replicas", str(self.size.replicas), "--heartbeat", str(_HEARTBEAT_S))
            for worker in self.cluster.workers:
                self.start_service(worker)
            self.wait_for_replicas()
        found = [self._kill() for _ in range(kills)]
        (self.folder / "stop").touch()
        wait_until(lambda: driver.poll() is not None, "the driver ends")
        if driver.returncode != 0:
            raise RuntimeError(f"the driver failed: {self._end_of_log()}")
        self.compare()
        return self._timed(found)

    # -- input and output --------------------------------------------------------------------------

    def feed(self) -> int:
        """Give the query another file; its number, which is that of the batch."""
        keys = self._random.choice(self.size.rows, min(_EVENTS, self.size.rows), replace=False)
        amounts = self._random.integers(1000, size=len(keys))
        self._n[keys] += 1
        self._total[keys] += amounts
        number, self._fed = self._fed, self._fed + 1
        self._right[number] = sorted(np.column_stack([keys, self._n[keys], self._total[keys]]).tolist())
        hidden = self.folder / f".{number}"
        pq.write_table(pa.table({"key": keys, "amount": amounts}), hidden)
        hidden.rename(self.folder / "in" / f"{number:06}.parquet")
        return number

    def compare(self) -> None:
        """Compare what was emitted with the batch computation.

        Raises
        ------
        RuntimeError
            When they differ.
        """
        out = self.folder / "out"
        wrong = [path.name for path in out.glob("differs-*")]
        for number, right in self._right.items():
            path = out / f"{number:06}.json"
            if not path.exists() or json.loads(path.read_text()) != right:
                wrong.append(path.name)
        if wrong:
            raise RuntimeError(f"{self.folder.name}: not equal to the batch computation: {wrong}")

    def settle(self) -> None:
        """Wait until nobody has anything more to say to the store."""
        since_s, seen = time.monotonic(), self.store.passed()
        deadline_s = since_s + _HEAL_S_MAX
        while time.monotonic() - since_s < _SETTLED_S:
            time.sleep(_SETTLED_S / 10)
            now = self.store.passed()
            if now["up_bytes"] - seen["up_bytes"] > 1 << 16 or now["down_bytes"] - seen["down_bytes"] > 1 << 20:
                since_s, seen = time.monotonic(), now
            if time.monotonic() > deadline_s:
                raise TimeoutError("the store is still busy")

    def _wait_for(self, batch: int, wait_s: float) -> float:
        """When a batch was committed, seconds since 1970."""
        commit = self.folder / "checkpoint" / "commits" / str(batch)

        def committed() -> bool:
            if self._alive.poll() is not None:
                raise RuntimeError(f"the driver ended: {self._end_of_log()}")
            return commit.exists()

        wait_until(committed, f"batch {batch} is committed; see {self._log}", every_s=0.01, wait_s=wait_s)
        return commit.stat().st_ctime

    # -- hosts -------------------------------------------------------------------------------------

    def active(self) -> WorkerNode:
        """The worker with the executor."""
        (found,) = [worker for worker in self.cluster.workers if worker.executors()]
        return found

    def start_service(self, worker: WorkerNode) -> None:
        """Start a worker's standby service."""
        options = ["--storage-options", json.dumps(self.store.options), "--local-dir", self.cluster.local_dir]
        command = [str(self.cluster.python), "-m", "spark_state_ext", "standby", "run", *options, self.root]
        log = self.folder / f"standby-{worker.name}.log"
        self._services[worker.name] = self.cluster.run_on(worker, command, log, {})

    def wait_for_replicas(self) -> None:
        """Wait until every bucket has its replicas, and all have caught up."""
        self._standby("status", "--wait", "--timeout", str(int(_HEAL_S_MAX)))

    def _standby(self, name: str, *arguments: str) -> None:
        options = ["--storage-options", json.dumps(self.store.options), *arguments]
        command = [str(self.cluster.python), "-m", "spark_state_ext", "standby", name, self.root, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        if done.returncode != 0:
            raise RuntimeError(
                f"standby {name} ends with {done.returncode}: {done.stdout[-_TAIL:]}{done.stderr[-_TAIL:]}"
            )

    def _kill(self) -> _Kill:
        worker = self.active()
        # Between two batches, so that the next one is all of what the death costs.
        self.store.line(self.size.bytes_s, self.size.request_s)
        time.sleep(0.5)
        before = self.store.passed()["down_bytes"]
        dead_s = self.cluster.kill_worker(worker)
        batch = self.feed()
        committed_s = self._wait_for(batch, _HEAL_S_MAX)
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
        if self.mode == STANDBY:
            self.start_service(worker)
        self._wait_for(self.feed(), _HEAL_S_MAX)
        self.settle()
        if self.mode == STANDBY:
            self.wait_for_replicas()
        return found

    def _calls(self, batch: int) -> pa.Table:
        calls = self.cluster.calls()
        return calls.filter(pc.equal(calls.column("batch"), batch))

    # -- what Spark saw ----------------------------------------------------------------------------

    @property
    def _settings(self) -> dict[str, Any]:
        conf = {
            **self.cluster.conf,
            # One executor: one host has all of the state.
            "spark.cores.max": str(self.cluster.cores),
            "spark.log.level": "WARN",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": (self.folder / "events").as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": str(self.cluster.cores),
            "spark.sql.streaming.minBatchesToRetain": "5",
            # A kill takes running tasks and files of shuffles with it, and is no reason to give up.
            "spark.task.maxFailures": "20",
            "spark.stage.maxConsecutiveAttempts": "20",
        }
        if self.mode == CONTROL:
            # No file is so large.
            conf["spark.executorEnv.SPARK_STATE_EXT_LAZY_RESTORE_BYTES_MIN"] = str(1 << 62)
        return {
            "folder": str(self.folder),
            "root": self.root,
            "savepoint": self.store.root(f"{self.folder.parent.name}/savepoint"),
            "storage_options": self.store.options,
            "local_dir": self.cluster.local_dir,
            "rows": self.size.rows,
            "buckets": self.size.buckets,
            "options": {},
            "conf": conf,
        }

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

    def _end_of_log(self) -> str:
        return f"{self._log}\n{self._log.read_text(errors='replace')[-_TAIL:]}"
