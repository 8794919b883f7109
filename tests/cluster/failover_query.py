"""A query on the cluster whose hosts are killed, with its input, its output and its standby services."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cluster import Cluster, WorkerNode
from processes import wait_until
from slow_s3 import SlowS3

__all__ = ["HEAL_S_MAX", "SETUP_S_MAX", "FailoverQuery", "Size"]

SETUP_S_MAX, HEAL_S_MAX = 1200.0, 900.0
_ROW_BYTES = 100
_EVENTS = 2_000
_TAIL = 2500
_SETTLED_S = 3.0
_HEARTBEAT_S = 2.0
_PEER_SECRET = "SPARK_STATE_EXT_PEER_SECRET"
# The service with a log level that also shows normal events.
_SERVICE = (
    "import logging, sys; logging.basicConfig(format='%(asctime)s %(message)s'); "
    "logging.getLogger('spark_state_ext').setLevel(logging.INFO); "
    "from spark_state_ext.__main__ import main; sys.exit(main())"
)


@dataclass(frozen=True)
class Size:
    """The size of the state, and the speed of the line to the store.

    Parameters
    ----------
    gb
        Total state in 10^9 bytes.
    bytes_s, request_s
        Bandwidth of the line to the store while a host fails, and the delay of each request.
    buckets
        Buckets of the operator.
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
        """Return the total number of keys."""
        return int(self.gb * 1e9 / _ROW_BYTES)


class FailoverQuery:
    """One query.

    Parameters
    ----------
    cluster
        The cluster.
    store
        The store with the root and the savepoint.
    folder
        Folder for input, checkpoint, output and logs; must not exist.
    size
        Size of the state.
    seed
        Seed of the events.
    """

    def __init__(self, cluster: Cluster, store: SlowS3, folder: Path, size: Size, seed: int) -> None:
        self.cluster, self.store, self.folder, self.size = cluster, store, folder, size
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.fed = 0
        self.conf: dict[str, str] = {}
        self._peer_secret = ""
        self._random = np.random.default_rng(seed)
        self._n = np.ones(size.rows, np.int64)
        self._total = np.arange(size.rows, dtype=np.int64)
        self._expected: dict[int, list[list[int]]] = {}
        self._log = folder / "driver.log"
        self._driver: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> str:
        """Return the root of the operator's state."""
        return self.store.root(f"{self.folder.parent.name}/root")

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        """Return the most recently started driver."""
        assert self._driver is not None
        return self._driver

    # -- the driver --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first driver, or the next one after a driver has ended."""
        settings = self.folder / "settings.json"
        if self._driver is None:
            for name in ("in", "out", "hosts", "events"):
                (self.folder / name).mkdir(parents=True)
            settings.write_text(json.dumps(self._settings))
        self._driver = self.cluster.driver(Path(__file__).with_name("failover_job.py"), [str(settings)], self._log)

    def end(self) -> None:
        """Stop the query.

        Raises
        ------
        RuntimeError
            If its driver failed.
        """
        (self.folder / "stop").touch()
        wait_until(lambda: self.driver.poll() is not None, "the driver ends")
        if self.driver.returncode != 0:
            raise RuntimeError(f"the driver failed: {self.end_of_log()}")

    def end_of_log(self) -> str:
        """Return the path and the end of the driver's log."""
        return f"{self._log}\n{self._log.read_text(errors='replace')[-_TAIL:]}"

    @property
    def _settings(self) -> dict[str, Any]:
        conf = {
            **self.cluster.conf,
            "spark.log.level": "WARN",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": (self.folder / "events").as_uri(),
            "spark.eventLog.compress": "false",
            "spark.eventLog.rolling.enabled": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": str(self.cluster.cores),
            "spark.sql.streaming.minBatchesToRetain": "5",
            # A kill loses running tasks and files of shuffles, and must not end the query.
            "spark.task.maxFailures": "20",
            "spark.stage.maxConsecutiveAttempts": "20",
            **self.conf,
        }
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

    # -- input and output --------------------------------------------------------------------------

    def feed(self) -> int:
        """Give the query another file, and return its number, which is also that of the batch."""
        keys = self._random.choice(self.size.rows, min(_EVENTS, self.size.rows), replace=False)
        amounts = self._random.integers(1000, size=len(keys))
        self._n[keys] += 1
        self._total[keys] += amounts
        number, self.fed = self.fed, self.fed + 1
        self._expected[number] = sorted(np.column_stack([keys, self._n[keys], self._total[keys]]).tolist())
        hidden = self.folder / f".{number}"
        pq.write_table(pa.table({"key": keys, "amount": amounts}), hidden)
        hidden.rename(self.folder / "in" / f"{number:06}.parquet")
        return number

    def committed(self, batch: int) -> bool:
        """Return whether Spark has committed a batch."""
        return self._commit(batch).exists()

    def wait_for(self, batch: int, wait_s: float) -> float:
        """Wait until a batch is committed, and return that time in seconds since 1970.

        Raises
        ------
        RuntimeError
            If the driver has ended.
        TimeoutError
            If the batch is not committed in time.
        """

        def committed() -> bool:
            if self.driver.poll() is not None:
                raise RuntimeError(f"the driver ended: {self.end_of_log()}")
            return self.committed(batch)

        wait_until(committed, f"batch {batch} is committed; see {self._log}", every_s=0.01, wait_s=wait_s)
        return self._commit(batch).stat().st_ctime

    def _commit(self, batch: int) -> Path:
        return self.folder / "checkpoint" / "commits" / str(batch)

    def compare(self) -> None:
        """Compare the output with the batch computation.

        Raises
        ------
        RuntimeError
            If they differ.
        """
        out = self.folder / "out"
        wrong = [path.name for path in out.glob("differs-*")]
        for number, expected_rows in self._expected.items():
            path = out / f"{number:06}.json"
            if not path.exists() or json.loads(path.read_text()) != expected_rows:
                wrong.append(path.name)
        expected_names = {f"{number:06}.json" for number in self._expected}
        wrong += sorted(path.name for path in out.glob("*.json") if path.name not in expected_names)
        if wrong:
            raise RuntimeError(f"{self.folder.name}: not equal to the batch computation: {wrong}")

    # -- standby -----------------------------------------------------------------------------------

    def with_peers(self) -> None:
        """Let services answer peers and executors ask them; call this before any start."""
        self._peer_secret = secrets.token_hex(16)
        self.conf[f"spark.executorEnv.{_PEER_SECRET}"] = self._peer_secret

    def start_service(self, worker: WorkerNode, port: int | None = None) -> None:
        """Start a worker's standby service; with a port, it serves its metrics there."""
        options = ["--storage-options", json.dumps(self.store.options), "--local-dir", self.cluster.local_dir]
        if port is not None:
            options += ["--address", "127.0.0.1", "--port", str(port)]
        variables = {}
        if self._peer_secret:
            # All hosts of the cluster share one network.
            options += ["--peer-listen", "127.0.0.1:0", "--peer-address", "127.0.0.1"]
            variables[_PEER_SECRET] = self._peer_secret
        command = [str(self.cluster.python), "-c", _SERVICE, "standby", "run", *options, self.root]
        self.services[worker.name] = self.cluster.run_on(worker, command, self.service_log(worker), variables)

    def service_log(self, worker: WorkerNode) -> Path:
        """Return the log of all services of a worker."""
        return self.folder / f"standby-{worker.name}.log"

    def set_replicas(self) -> None:
        """Set the number of replicas to that of the size, and a short heartbeat of members."""
        self.tool("standby", "settings", "--replicas", str(self.size.replicas), "--heartbeat", str(_HEARTBEAT_S))

    def wait_for_replicas(self) -> None:
        """Wait until every bucket has its replicas, and all are in sync."""
        self.tool("standby", "status", "--wait", "--timeout", str(int(HEAL_S_MAX)))

    def tool(self, *command: str) -> str:
        """Run a command of the command line for the root, and return its output.

        Parameters
        ----------
        command
            The words of the command, and from the first word on that begins with ``-`` its options.

        Raises
        ------
        RuntimeError
            If the command fails.
        """
        words = [word for word in command[:2] if not word.startswith("-")]
        options = ["--storage-options", json.dumps(self.store.options), *command[len(words) :]]
        command_line = [str(self.cluster.python), "-m", "spark_state_ext", *words, self.root, *options]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=self.folder)
        if done.returncode != 0:
            output = f"{done.stdout[-_TAIL:]}{done.stderr[-_TAIL:]}"
            raise RuntimeError(f"{' '.join(words)} ends with {done.returncode}: {output}")
        return done.stdout + done.stderr

    def settle(self) -> None:
        """Wait until almost no bytes have passed to or from the store for `_SETTLED_S` seconds."""
        since_s, last = time.monotonic(), self.store.passed()
        deadline_s = since_s + HEAL_S_MAX
        while time.monotonic() - since_s < _SETTLED_S:
            time.sleep(_SETTLED_S / 10)
            now = self.store.passed()
            if now["up_bytes"] - last["up_bytes"] > 1 << 16 or now["down_bytes"] - last["down_bytes"] > 1 << 20:
                since_s, last = time.monotonic(), now
            if time.monotonic() > deadline_s:
                raise TimeoutError("the store is still busy")
