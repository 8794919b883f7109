"""A query on the cluster with killed executors and drivers, delayed tasks and lost disks, all of which are counted."""

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

__all__ = ["CASES", "SHARES", "SHORT", "Case", "Outcome", "Trial", "make_long_orders"]

_STATES = "org.apache.spark.sql.execution.streaming.state"
# The shortest orders, by the number of the input file during which they apply: each kind once.
SHORT = {1: "slow", 2: "kill", 3: "restart", 4: "kill late, jvm", 5: "kill, disk"}
# The same orders, distributed over the cases.
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
    """The way in which Spark stores its own state.

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
        """Return a name for output."""
        return f"{self.provider}-{self.checkpoint_format}"

    @property
    def conf(self) -> dict[str, str]:
        """Return the settings of Spark."""
        kinds = {"hdfs": "HDFSBackedStateStoreProvider", "rocksdb": "RocksDBStateStoreProvider"}
        return {
            "spark.sql.streaming.stateStore.providerClass": f"{_STATES}.{kinds[self.provider]}",
            "spark.sql.streaming.stateStore.checkpointFormatVersion": str(self.checkpoint_format),
        }


# Spark's HDFS-backed provider has no checkpoint ids, so there is no fourth case.
CASES = (Case("hdfs", 1), Case("rocksdb", 1), Case("rocksdb", 2))


def make_long_orders(seed: int) -> dict[int, str]:
    """Return random orders for a longer query: each kind twice, for adjacent or distant files."""
    draw = random.Random(seed)
    kinds = ["slow", "kill", "kill, jvm", "kill late", "kill late, jvm", "kill, disk", "kill, all", "restart"] * 2
    draw.shuffle(kinds)
    orders, at = {}, 0
    for kind in kinds:
        at += draw.choice((1, 1, 2))
        orders[at] = kind
    return orders


@dataclass
class Outcome:
    """The events of a trial and its result.

    Parameters
    ----------
    executors_killed, executors_lost, executors_added
        Executors that were killed with SIGKILL, that their drivers reported as lost, and that were added.
    drivers_killed, disks_lost
        Numbers of killed drivers and lost disks.
    speculative_attempts, speculation_won
        Attempts that Spark started in addition to a slow one, and those of them that ended first.
    moves
        How often the buckets of a partition were processed by another worker than in the previous batch.
    restored_files
        Checkpoint files that executors fetched.
    batches, keys, sessions
        Batches with data, keys, and sessions that timed out.
    equal
        True if the query's output equals that of the batch computation.
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
        """Return the expected events that did not happen."""
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
        counts = asdict(self)
        return [f"{name} is {counts[name]}, expected {n} or more" for name, n in least.items() if counts[name] < n]


class Trial:
    """One query from its beginning to its end.

    Parameters
    ----------
    cluster
        The cluster.
    folder
        Folder for input, state, output and logs; must not exist.
    case
        The way in which Spark stores its own state.
    orders
        The order for each input file.
    seed
        Seed of the input and of random times.
    """

    def __init__(self, cluster: Cluster, folder: Path, case: Case, orders: Mapping[int, str], seed: int) -> None:
        self.cluster = cluster
        self.folder = folder
        self.case = case
        self.orders = dict(orders)
        self.outcome = Outcome()
        self._draw = random.Random(seed)
        self._meeting = folder / "meeting"
        self._out = folder / "out"
        self._log = folder / "driver.log"
        self._tables = work.make_tables(max(self.orders, default=0) + 1 + _FILES_AFTER, seed)

    def run(self) -> Outcome:
        """Run the query with all orders, and compare its output with the batch computation."""
        for folder in (self._meeting, self._out, self.folder / "events"):
            folder.mkdir(parents=True)
        work.write_input(self.folder / "in", self._tables)
        started_ms = time.time() * 1000
        self._drive()
        self._count_events()
        self._count_calls(started_ms)
        self._compare()
        return self.outcome

    def processes(self) -> list[dict[str, str]]:
        """Return the identities that the executors' Python processes have written."""
        return [json.loads(path.read_text()) for path in sorted(self._meeting.glob("process-*"))]

    def driver_packages(self) -> list[str]:
        """Return the locations of the drivers' package."""
        return [path.read_text() for path in self._meeting.glob("driver-*")]

    # -- events ------------------------------------------------------------------------------------

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
            # Clean-up must have files to delete within these few batches.
            "spark.sql.streaming.minBatchesToRetain": "2",
            # Any free executor takes a task, wherever its state is, so that tasks move.
            "spark.locality.wait": "0s",
            "spark.speculation": "true",
            "spark.speculation.interval": "50ms",
            "spark.speculation.multiplier": "1.2",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "100ms",
            # A kill loses running tasks and files of shuffles, and must not end the query.
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
        # A query that neither ends nor requests anything for a long time hangs.
        quiet_since_s = time.monotonic()
        while driver.poll() is None:
            if self._kill_executors():
                quiet_since_s = time.monotonic()
            for at in self._open_requests("restart", "restarted"):
                self.cluster.kill_driver(driver)
                self.outcome.drivers_killed += 1
                (self._meeting / f"restarted-{at}").touch()
                driver, quiet_since_s = start(), time.monotonic()
            if time.monotonic() - quiet_since_s > 2 * WAIT_S:
                self.cluster.kill_driver(driver)
                raise TimeoutError(f"the query does not end: {self._end_of_log()}")
            time.sleep(0.05)
        if driver.returncode != 0:
            raise RuntimeError(f"the driver failed: {self._end_of_log()}")
        wait_until(
            lambda: not any(worker.executors() for worker in self.cluster.workers), "executors end with their driver"
        )

    def _open_requests(self, name: str, answer: str) -> list[int]:
        """Return the input files for which a task or a driver has requested an event that has not happened yet."""
        requests = (int(path.name.rpartition("-")[2]) for path in self._meeting.glob(f"{name}-*"))
        return [at for at in requests if not (self._meeting / f"{answer}-{at}").exists()]

    def _kill_executors(self) -> bool:
        requests = self._open_requests("kill", "killed")
        for at in requests:
            order, name = self.orders[at], (self._meeting / f"kill-{at}").read_text()
            if "late" in order:
                # Kill at a random point of the batch: while state is read, committed or uploaded, or in the sink.
                time.sleep(self._draw.random())
            for worker in self.cluster.workers:
                if worker.name == name or "all" in order:
                    lose_disk = "disk" in order
                    self.outcome.executors_killed += self.cluster.kill_executors(
                        worker, python_too="jvm" not in order, lose_disk=lose_disk
                    )
                    self.outcome.disks_lost += lose_disk
            (self._meeting / f"killed-{at}").touch()
        return bool(requests)

    def _end_of_log(self) -> str:
        return f"{self._log}\n{self._log.read_text(errors='replace')[-_TAIL:]}"

    # -- results -----------------------------------------------------------------------------------

    def _events(self) -> list[dict[str, Any]]:
        """Return the events in the drivers' logs, without the last line of a killed driver, which may be incomplete."""
        events = []
        for path in sorted((self.folder / "events").iterdir()):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue
        return events

    def _count_events(self) -> None:
        batches: dict[tuple[str, int], int] = {}
        hosts: dict[int, dict[int, str]] = {}
        application = ""
        for event in self._events():
            match event["Event"]:
                case "SparkListenerApplicationStart":
                    application = event["App ID"]
                case "SparkListenerExecutorAdded":
                    self.outcome.executors_added += 1
                case "SparkListenerExecutorRemoved":
                    self.outcome.executors_lost += 1
                case "SparkListenerStageSubmitted" if event["Stage Info"]["Number of Tasks"] == _PARTITIONS:
                    # This is the stage with the state; its number is unique only within the application.
                    batch = int(event["Properties"]["streaming.sql.batchId"])
                    batches[application, event["Stage Info"]["Stage ID"]] = batch
                case "SparkListenerTaskStart":
                    self.outcome.speculative_attempts += event["Task Info"]["Speculative"]
                case "SparkListenerTaskEnd":
                    task, reason = event["Task Info"], event["Task End Reason"]["Reason"]
                    self.outcome.speculation_won += task["Speculative"] and reason == "Success"
                    batch = batches.get((application, event["Stage ID"]), -1)
                    if reason == "Success" and batch >= 0:
                        # If a task ran again because the driver was killed, its last run counts.
                        hosts.setdefault(task["Partition ID"], {})[batch] = task["Host"]
        for by_batch in hosts.values():
            in_order = [by_batch[batch] for batch in sorted(by_batch)]
            self.outcome.moves += sum(a != b for a, b in pairwise(in_order))

    def _count_calls(self, started_ms: float) -> None:
        # Metrics on lost disks are missing.
        calls = self.cluster.calls()
        calls = calls.filter(pc.greater_equal(calls.column("ended_ms"), int(started_ms)))
        self.outcome.restored_files = sum(calls.column("restored_files").to_pylist())

    def _compare(self) -> None:
        expected, actual = work.compute_output(self._tables), work.read_output(self._out)
        self.outcome.batches = len(actual.totals)
        self.outcome.keys = len({key for keys in actual.totals.values() for key in keys})
        self.outcome.sessions = actual.sessions.total()
        self.outcome.differences = [*actual.repeated, *work.find_differences(expected, actual)]
        self.outcome.equal = not self.outcome.differences
