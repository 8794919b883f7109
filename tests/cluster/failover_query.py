"""A query on the cluster whose hosts are killed: its input, its output, its standby services."""

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
# The service, which tells in its log also what is in order.
_SERVICE = (
    "import logging, sys; logging.basicConfig(format='%(asctime)s %(message)s'); "
    "logging.getLogger('spark_state_ext').setLevel(logging.INFO); "
    "from spark_state_ext.__main__ import main; sys.exit(main())"
)


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


class FailoverQuery:
    """One query.

    Parameters
    ----------
    cluster
        Where.
    store
        With its root and savepoint.
    folder
        For input, checkpoint, output and logs; must not exist.
    size
        Of the state.
    seed
        Of the events.
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
        self._right: dict[int, list[list[int]]] = {}
        self._log = folder / "driver.log"
        self._driver: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> str:
        """The root of the operator's state."""
        return self.store.root(f"{self.folder.parent.name}/root")

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        """The driver that was started last."""
        assert self._driver is not None
        return self._driver

    # -- the driver --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the driver, or the next one where one has ended."""
        settings = self.folder / "settings.json"
        if self._driver is None:
            for name in ("in", "out", "hosts", "events"):
                (self.folder / name).mkdir(parents=True)
            settings.write_text(json.dumps(self._settings))
        self._driver = self.cluster.driver(Path(__file__).with_name("failover_job.py"), [str(settings)], self._log)

    def end(self) -> None:
        """Have the query stop.

        Raises
        ------
        RuntimeError
            When its driver failed.
        """
        (self.folder / "stop").touch()
        wait_until(lambda: self.driver.poll() is not None, "the driver ends")
        if self.driver.returncode != 0:
            raise RuntimeError(f"the driver failed: {self.end_of_log()}")

    def end_of_log(self) -> str:
        """The end of the driver's log, and where it is."""
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
            # A kill takes running tasks and files of shuffles with it, and is no reason to give up.
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
        """Give the query another file; its number, which is that of the batch."""
        keys = self._random.choice(self.size.rows, min(_EVENTS, self.size.rows), replace=False)
        amounts = self._random.integers(1000, size=len(keys))
        self._n[keys] += 1
        self._total[keys] += amounts
        number, self.fed = self.fed, self.fed + 1
        self._right[number] = sorted(np.column_stack([keys, self._n[keys], self._total[keys]]).tolist())
        hidden = self.folder / f".{number}"
        pq.write_table(pa.table({"key": keys, "amount": amounts}), hidden)
        hidden.rename(self.folder / "in" / f"{number:06}.parquet")
        return number

    def committed(self, batch: int) -> bool:
        """Whether Spark has committed a batch."""
        return self._commit(batch).exists()

    def wait_for(self, batch: int, wait_s: float) -> float:
        """When a batch was committed, seconds since 1970.

        Raises
        ------
        RuntimeError
            When the driver has ended.
        TimeoutError
            When it is not.
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
        expected = {f"{number:06}.json" for number in self._right}
        wrong += sorted(path.name for path in out.glob("*.json") if path.name not in expected)
        if wrong:
            raise RuntimeError(f"{self.folder.name}: not equal to the batch computation: {wrong}")

    # -- standby -----------------------------------------------------------------------------------

    def with_peers(self) -> None:
        """Have services give to peers, and executors ask them; before anything is started."""
        self._peer_secret = secrets.token_hex(16)
        self.conf[f"spark.executorEnv.{_PEER_SECRET}"] = self._peer_secret

    def start_service(self, worker: WorkerNode, port: int | None = None) -> None:
        """Start a worker's standby service; with a port it tells its metrics there."""
        options = ["--storage-options", json.dumps(self.store.options), "--local-dir", self.cluster.local_dir]
        if port is not None:
            options += ["--address", "127.0.0.1", "--port", str(port)]
        variables = {}
        if self._peer_secret:
            # All hosts of the cluster have one network.
            options += ["--peer-listen", "127.0.0.1:0", "--peer-address", "127.0.0.1"]
            variables[_PEER_SECRET] = self._peer_secret
        command = [str(self.cluster.python), "-c", _SERVICE, "standby", "run", *options, self.root]
        self.services[worker.name] = self.cluster.run_on(worker, command, self.service_log(worker), variables)

    def service_log(self, worker: WorkerNode) -> Path:
        """The log of a worker's services, one after the other."""
        return self.folder / f"standby-{worker.name}.log"

    def set_replicas(self) -> None:
        """Have services keep as many replicas as the size says, and tell of themselves often."""
        self.tool("standby", "settings", "--replicas", str(self.size.replicas), "--heartbeat", str(_HEARTBEAT_S))

    def wait_for_replicas(self) -> None:
        """Wait until every bucket has its replicas, and all have caught up."""
        self.tool("standby", "status", "--wait", "--timeout", str(int(HEAL_S_MAX)))

    def tool(self, *command: str) -> str:
        """Run a command of the command line about the root; what it says.

        Parameters
        ----------
        command
            Its words, and from the first one on that begins with ``-`` its options.

        Raises
        ------
        RuntimeError
            When it does not succeed.
        """
        words = [it for it in command[:2] if not it.startswith("-")]
        options = ["--storage-options", json.dumps(self.store.options), *command[len(words) :]]
        called = [str(self.cluster.python), "-m", "spark_state_ext", *words, self.root, *options]
        done = subprocess.run(called, capture_output=True, text=True, check=False, cwd=self.folder)
        if done.returncode != 0:
            said = f"{done.stdout[-_TAIL:]}{done.stderr[-_TAIL:]}"
            raise RuntimeError(f"{' '.join(words)} ends with {done.returncode}: {said}")
        return done.stdout + done.stderr

    def settle(self) -> None:
        """Wait until nobody has anything more to say to the store."""
        since_s, seen = time.monotonic(), self.store.passed()
        deadline_s = since_s + HEAL_S_MAX
        while time.monotonic() - since_s < _SETTLED_S:
            time.sleep(_SETTLED_S / 10)
            now = self.store.passed()
            if now["up_bytes"] - seen["up_bytes"] > 1 << 16 or now["down_bytes"] - seen["down_bytes"] > 1 << 20:
                since_s, seen = time.monotonic(), now
            if time.monotonic() > deadline_s:
                raise TimeoutError("the store is still busy")
