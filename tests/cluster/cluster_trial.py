"""A query on the cluster, and what is done to it: executors and drivers killed, tasks held up, disks lost; all of it counted."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import cluster_work as work
import pyarrow.compute as pc
from cluster import Cluster
from processes import WAIT_S, wait_until

__all__ = ["CASES", "SHARES", "SHORT", "Case", "Seen", "Trial", "long_orders"]

_STATES = "org.apache.spark.sql.execution.streaming.state"
# What is done while which file of the input is worked on, at its least: everything once.
SHORT = {1: "slow", 2: "kill", 3: "restart", 4: "kill late, jvm", 5: "kill, disk"}
# The same, shared out between the cases.
SHARES = {
    "hdfs-1": {1: "slow", 2: "kill", 3: "restart"},
    "rocksdb-1": {1: "kill late, jvm", 3: "slow"},
    "rocksdb-2": {1: "slow", 2: "kill, disk", 3: "restart"},
}
_FILES_AFTER = 2
_PARTITIONS = 4
_TAIL = 2500


@dataclass(frozen=True)
class Case:
    """How Spark keeps the state that it keeps itself.

    Parameters
    ----------
    provider
        Short name of its state store provider.
    checkpoint_format
        Version of the state store's checkpoints.
    """

    provider: str
    checkpoint_format: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.provider}-{self.checkpoint_format}"

    @property
    def conf(self) -> dict[str, str]:
        """The settings."""
        kinds = {"hdfs": "HDFSBackedStateStoreProvider", "rocksdb": "RocksDBStateStoreProvider"}
        return {
            "spark.sql.streaming.stateStore.providerClass": f"{_STATES}.{kinds[self.provider]}",
            "spark.sql.streaming.stateStore.checkpointFormatVersion": str(self.checkpoint_format),
        }


# Spark's HDFS-backed provider has no ids of checkpoints, so there is no fourth.
CASES = (Case("hdfs", 1), Case("rocksdb", 1), Case("rocksdb", 2))


def long_orders(seed: int) -> dict[int, str]:
    """Orders for a longer query, drawn at random: each kind twice, side by side with others or apart."""
    draw = random.Random(seed)
    kinds = ["slow", "kill", "kill, jvm", "kill late", "kill late, jvm", "kill, disk", "kill, all", "restart"] * 2
    draw.shuffle(kinds)
    orders, at = {}, 0
    for kind in kinds:
        at += draw.choice((1, 1, 2))
        orders[at] = kind
    return orders


@dataclass
class Seen:
    """What happened, and what came of it.

    Parameters
    ----------
    executors_killed, executors_lost, executors_added
        Killed with SIGKILL; lost as their drivers saw it, and come.
    drivers_killed, disks_lost
        How many.
    speculative_attempts, speculation_won
        Attempts that Spark started beside a slow one, and how many of them were through first.
    moves
        How often the buckets of a partition were worked on by another worker than in the batch before.
    restored_files
        Checkpoint files that executors fetched.
    batches, keys, sessions
        Batches with data, keys, and sessions that timed out.
    equal
        The query emitted what the batch computation gives.
    """

    executors_killed: int = 0
    executors_lost: int = 0
    executors_added: int = 0
    drivers_killed: int = 0
    disks_lost: int = 0
    speculative_attempts: int = 0
    speculation_won: int = 0
    moves: int = 0
    restored_files: int = 0
    batches: int = 0
    keys: int = 0
    sessions: int = 0
    equal: bool = False
    differences: list[str] = field(default_factory=list)

    def missing(self, orders: Mapping[int, str]) -> list[str]:
        """What should have happened and was not seen."""
        kinds = list(orders.values())
        least = {
            "executors_killed": sum(kind.startswith("kill") for kind in kinds),
            "executors_lost": 1,
            "drivers_killed": kinds.count("restart"),
            "disks_lost": sum("disk" in kind for kind in kinds),
            "speculative_attempts": kinds.count("slow"),
            "moves": 1,
            "restored_files": 1,
            "sessions": 1,
        }
        told = asdict(self)
        return [f"{name} is {told[name]}, expected {n} or more" for name, n in least.items() if told[name] < n]


class Trial:
    """One query from its beginning to its end.

    Parameters
    ----------
    cluster
        Where.
    folder
        For input, state, output and logs; must not exist.
    case
        How Spark keeps its state.
    orders
        What happens while which file is worked on.
    seed
        Of the input, and of what happens at random.
    """

    def __init__(self, cluster: Cluster, folder: Path, case: Case, orders: Mapping[int, str], seed: int) -> None:
        self.cluster = cluster
        self.folder = folder
        self.case = case
        self.orders = dict(orders)
        self.seen = Seen()
        self._draw = random.Random(seed)
        self._meeting = folder / "meeting"
        self._out = folder / "out"
        self._log = folder / "driver.log"
        self._tables = work.tables(max(self.orders, default=0) + 1 + _FILES_AFTER, seed)

    def run(self) -> Seen:
        """Run the query through all that happens to it, and compare."""
        for folder in (self._meeting, self._out, self.folder / "events"):
            folder.mkdir(parents=True)
        work.write_input(self.folder / "in", self._tables)
        started_ms = time.time() * 1000
        self._drive()
        self._count_events()
        self._count_calls(started_ms)
        self._compare()
        return self.seen

    def processes(self) -> list[dict[str, str]]:
        """What each Python process of the executors said of itself."""
        return [json.loads(path.read_text()) for path in sorted(self._meeting.glob("process-*"))]

    def driver_packages(self) -> list[str]:
        """Where the drivers had the package from."""
        return [path.read_text() for path in self._meeting.glob("driver-*")]

    # -- what happens ------------------------------------------------------------------------------

    @property
    def _settings(self) -> dict[str, Any]:
        conf = {
            **self.cluster.conf,
            **self.case.conf,
            "spark.log.level": "WARN",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": (self.folder / "events").as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": str(_PARTITIONS),
            # So that clean-up has something to do within so few batches.
            "spark.sql.streaming.minBatchesToRetain": "2",
            # Whoever is free takes a task, wherever its state was: tasks move.
            "spark.locality.wait": "0s",
            "spark.speculation": "true",
            "spark.speculation.interval": "50ms",
            "spark.speculation.multiplier": "1.2",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "100ms",
            # A kill takes running tasks and files of shuffles with it, and is no reason to give up.
            "spark.task.maxFailures": "20",
            "spark.stage.maxConsecutiveAttempts": "20",
        }
        return {
            "folder": str(self.folder),
            "local_dir": self.cluster.local_dir,
            "conf": conf,
            "orders": {str(at): order for at, order in self.orders.items()},
            "wait_s": WAIT_S,
            "gap_ms": work.GAP_MS,
        }

    def _drive(self) -> None:
        settings = self.folder / "settings.json"
        settings.write_text(json.dumps(self._settings))
        script = Path(__file__).with_name("cluster_job.py")

        def start() -> subprocess.Popen[bytes]:
            return self.cluster.driver(script, [str(settings)], self._log)

        driver = start()
        # A query that neither ends nor asks for anything is at its end.
        quiet_since_s = time.monotonic()
        while driver.poll() is None:
            if self._kill_executors():
                quiet_since_s = time.monotonic()
            for at in self._asked("restart", "restarted"):
                self.cluster.kill_driver(driver)
                self.seen.drivers_killed += 1
                (self._meeting / f"restarted-{at}").touch()
                driver, quiet_since_s = start(), time.monotonic()
            if time.monotonic() - quiet_since_s > 2 * WAIT_S:
                self.cluster.kill_driver(driver)
                raise TimeoutError(f"the query does not come to its end: {self._end_of_log()}")
            time.sleep(0.05)
        if driver.returncode != 0:
            raise RuntimeError(f"the driver failed: {self._end_of_log()}")
        wait_until(lambda: not any(it.executors() for it in self.cluster.workers), "executors end with their driver")

    def _asked(self, name: str, answer: str) -> list[int]:
        """Files in which a task or a driver asks for something that has not been done yet."""
        asked = (int(path.name.rpartition("-")[2]) for path in self._meeting.glob(f"{name}-*"))
        return [at for at in asked if not (self._meeting / f"{answer}-{at}").exists()]

    def _kill_executors(self) -> bool:
        asked = self._asked("kill", "killed")
        for at in asked:
            order, name = self.orders[at], (self._meeting / f"kill-{at}").read_text()
            if "late" in order:
                # Anywhere in the batch: while state is read, committed or sent away, or in the sink.
                time.sleep(self._draw.random())
            for worker in self.cluster.workers:
                if worker.name == name or "all" in order:
                    lose_disk = "disk" in order
                    self.seen.executors_killed += self.cluster.kill_executors(
                        worker, python_too="jvm" not in order, lose_disk=lose_disk
                    )
                    self.seen.disks_lost += lose_disk
            (self._meeting / f"killed-{at}").touch()
        return bool(asked)

    def _end_of_log(self) -> str:
        return f"{self._log}\n{self._log.read_text(errors='replace')[-_TAIL:]}"

    # -- what came of it ---------------------------------------------------------------------------

    def _events(self) -> list[dict[str, Any]]:
        """What drivers noted; a driver that was killed left a line half written."""
        found = []
        for path in sorted((self.folder / "events").iterdir()):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
        return found

    def _count_events(self) -> None:
        batches: dict[tuple[str, int], int] = {}
        hosts: dict[int, dict[int, str]] = {}
        application = ""
        for event in self._events():
            match event["Event"]:
                case "SparkListenerApplicationStart":
                    application = event["App ID"]
                case "SparkListenerExecutorAdded":
                    self.seen.executors_added += 1
                case "SparkListenerExecutorRemoved":
                    self.seen.executors_lost += 1
                case "SparkListenerStageSubmitted" if event["Stage Info"]["Number of Tasks"] == _PARTITIONS:
                    # The stage with the state; its number is one of the application's.
                    batch = int(event["Properties"]["streaming.sql.batchId"])
                    batches[application, event["Stage Info"]["Stage ID"]] = batch
                case "SparkListenerTaskStart":
                    self.seen.speculative_attempts += event["Task Info"]["Speculative"]
                case "SparkListenerTaskEnd":
                    task, reason = event["Task Info"], event["Task End Reason"]["Reason"]
                    self.seen.speculation_won += task["Speculative"] and reason == "Success"
                    batch = batches.get((application, event["Stage ID"]), -1)
                    if reason == "Success" and batch >= 0:
                        # Of tasks that ran again, as the driver was killed, the last one counts.
                        hosts.setdefault(task["Partition ID"], {})[batch] = task["Host"]
        for by_batch in hosts.values():
            in_order = [by_batch[batch] for batch in sorted(by_batch)]
            self.seen.moves += sum(a != b for a, b in pairwise(in_order))

    def _count_calls(self, started_ms: float) -> None:
        # Without what was on a disk that was lost.
        calls = self.cluster.calls()
        calls = calls.filter(pc.greater_equal(calls.column("ended_ms"), int(started_ms)))
        self.seen.restored_files = sum(calls.column("restored_files").to_pylist())

    def _compare(self) -> None:
        should, found = work.expected(self._tables), work.emitted(self._out)
        self.seen.batches = len(found.totals)
        self.seen.keys = len({key for keys in found.totals.values() for key in keys})
        self.seen.sessions = found.sessions.total()
        self.seen.differences = [*found.repeated, *work.differences(should, found)]
        self.seen.equal = not self.seen.differences
