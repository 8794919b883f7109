"""Minutes of random failover: ``python tests/cluster/random_failover.py --minutes 15 --seed 1``.

A standalone cluster of three workers, each with its own host name, boot id, process numbers, disk and standby service, runs a
query with two executors. Its state is in an S3 server over HTTP, and new files come all the time. At random moments, most of
them within a batch, one of these is killed, and started again some seconds later:

* ``worker``: a worker with its executor, Python and standby service; its machine boots again. ``worker_disk``: its disk is
  renamed too.
* ``executor``: the executor of a worker, with its Python processes.
* ``service_kill``, ``service_term``: a standby service, with SIGKILL or SIGTERM. ``service_stop``: it is stopped for a while.
* ``store``: the proxy at the address of the object store. The server behind it keeps its objects in memory and continues:
  connections are reset and new ones are refused, as if the store itself had been killed.

In the end all of them run again. The output of every batch must equal that of the batch computation. All replicas must be in
sync, and every file complete. Another service must have counted a service as lost that was dead for long. The sum of the
services' counters of takeovers must be about the number of buckets whose host changed from batch to batch: a killed service
loses counts that it has not published yet, and attempts that Spark did not commit count too.

The script prints one line of JSON; the exit status is 0 only if all checks pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from cluster import Cluster, WorkerNode, unusable
from commands import end_with_the_cluster, run_folder
from failover_query import HEAL_S_MAX, SETUP_S_MAX, FailoverQuery, Size
from failover_watch import Watch, count_by_outcome, read_counted_moves, read_moves
from processes import WAIT_S, command_of, descendants, kill_tree, wait_until
from slow_s3 import slow_s3

from spark_state_ext.worker import metrics

# The weight of each kind in the random choice.
KINDS = {
    "worker": 3,
    "worker_disk": 3,
    "executor": 3,
    "service_kill": 3,
    "service_term": 2,
    "service_stop": 2,
    "store": 3,
}
_WARM_UP_FILES, _FILES_AHEAD, _LAST_FILES = 3, 2, 3
_PAUSE_S, _DOWN_S, _STORE_DOWN_S = (2.0, 10.0), (1.0, 15.0), (1.0, 8.0)
# Another service must notice a dead one within this time, whatever happens meanwhile.
_LOST_S_MAX = WAIT_S
# All moves are counted by then.
_COUNTED_S = 30.0
# From this number of moves on, some must have been counted; and the counts may be at most this factor times the moves.
_SOME_OF_MOVES, _COUNTED_TIMES_MAX = 10, 2
_CONF = {
    # With two executors on three hosts, a host may get the buckets of the other one in addition to its own.
    "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "4",
    # This is Spark's default.
    "spark.sql.streaming.minBatchesToRetain": "100",
    # Every attempt fails while the store is unavailable.
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "1000",
}


@dataclass
class _Down:
    """A component that was killed or stopped.

    Parameters
    ----------
    revive
        Starts it again.
    at_s
        Time to revive it, by the monotonic clock.
    until
        Condition that must hold before it is revived.
    what
        Name for messages.
    """

    revive: Callable[[], None]
    at_s: float
    what: str
    until: Callable[[], bool] = lambda: True


@dataclass
class Done:
    """The events and errors of a run."""

    kills: Counter[str] = field(default_factory=Counter)
    within_batches: int = 0
    driver_restarts: int = 0
    services_lost: int = 0
    wrong: list[str] = field(default_factory=list)


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def continue_processes(*pids: int) -> None:
    """Continue processes that may be stopped.

    The process that puts a service on its machine (``nsenter``) stops with the service. A machine does not end until the
    parent of its service has noticed the service's death.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Feeder(threading.Thread):
    """A thread that gives the query one file after the other, a few ahead of its last commit.

    Parameters
    ----------
    query
        The query.
    """

    def __init__(self, query: FailoverQuery) -> None:
        super().__init__(daemon=True)
        self._query = query
        self._ended = threading.Event()

    def run(self) -> None:
        """Feed the query until `end` is called."""
        while not self._ended.wait(0.1):
            if self._query.committed(self._query.fed - _FILES_AHEAD):
                self._query.feed()

    def end(self) -> None:
        """Stop feeding."""
        self._ended.set()
        self.join()


class RandomFailover:
    """A query with random failures.

    Parameters
    ----------
    query
        The query with its cluster and its store.
    seed
        Seed of the failures and their times.
    """

    def __init__(self, query: FailoverQuery, seed: int) -> None:
        self.query, self.cluster, self.store = query, query.cluster, query.store
        self.done = Done()
        self._draw = random.Random(seed)
        self._ports = {worker.name: free_port() for worker in self.cluster.workers}
        self._down: dict[str, _Down] = {}
        self._watch: Watch | None = None
        # The size of each worker's log before the last start of its service.
        self._logged_bytes: dict[str, int] = {}

    @property
    def watch(self) -> Watch:
        """Return the watch of the services' metrics."""
        assert self._watch is not None
        return self._watch

    def run(self, minutes: float) -> dict[str, Any]:
        """Run the query with random failures, and return the line of JSON.

        Parameters
        ----------
        minutes
            Duration of the failures.
        """
        query = self.query
        query.start()
        for _ in range(_WARM_UP_FILES):
            query.wait_for(query.feed(), SETUP_S_MAX)
        query.set_replicas()
        for worker in self.cluster.workers:
            self._start_service(worker)
        query.wait_for_replicas()
        # Moves before the last batch were not watched; that batch itself may not be committed yet.
        first = query.fed - 1
        self._watch = Watch(self._ports)
        try:
            self._cause_failures(minutes)
            self._complete()
            return self._judge(first)
        finally:
            self.watch.close()

    # -- failures ----------------------------------------------------------------------------------

    def _cause_failures(self, minutes: float) -> None:
        feeder = Feeder(self.query)
        feeder.start()
        end_s = time.monotonic() + 60 * minutes
        due_s = time.monotonic()
        try:
            while time.monotonic() < end_s:
                self._check_driver()
                self._revive(time.monotonic())
                if time.monotonic() >= due_s:
                    self._cause_failure()
                    due_s = time.monotonic() + self._draw.uniform(*_PAUSE_S)
                time.sleep(0.05)
            wait_until(lambda: self._revive(float("inf")) == 0, "all components are revived", wait_s=2 * _LOST_S_MAX)
        finally:
            feeder.end()

    def _cause_failure(self) -> None:
        """Cause a failure of a random kind, if it is possible now."""
        kinds = list(KINDS)
        kind = self._draw.choices(kinds, [KINDS[name] for name in kinds])[0]
        worker = self._draw.choice(self.cluster.workers)
        if not getattr(self, f"_{kind}")(worker):
            return
        self.done.kills[kind] += 1
        started = max((int(path.name) for path in self._offsets() if path.name.isdigit()), default=-1)
        self.done.within_batches += not self.query.committed(started)
        self._log(f"{kind} {'' if kind == 'store' else worker.name}")

    def _offsets(self) -> list[Path]:
        return list((self.query.folder / "checkpoint" / "offsets").iterdir())

    def _worker(self, worker: WorkerNode, lose_disk: bool = False) -> bool:
        # At least one of the three workers must stay up.
        if self._is_down(worker) or sum(self._is_down(other) for other in self.cluster.workers) > 1:
            return False
        service_down = self._down.pop(f"service {worker.name}", None)
        service = self.query.services.pop(worker.name, None)
        if service is not None:
            continue_processes(service.pid)
        self.cluster.kill_worker(worker, lose_disk=lose_disk)
        if service is not None:
            service.wait()

        def revive() -> None:
            self.cluster.restart_worker(worker)
            # Its service starts a little later.
            self._put_down(f"service {worker.name}", lambda: self._start_service(worker), (0.0, 4.0))

        self._put_down(f"worker {worker.name}", revive, _DOWN_S, None if service_down else worker)
        return True

    def _worker_disk(self, worker: WorkerNode) -> bool:
        return self._worker(worker, lose_disk=True)

    def _executor(self, worker: WorkerNode) -> bool:
        return not self._is_down(worker) and self.cluster.kill_executors(worker) > 0

    def _service_kill(self, worker: WorkerNode) -> bool:
        if not self._has_service(worker):
            return False
        service = self.query.services.pop(worker.name)
        kill_tree(service.pid)
        service.wait()
        self._put_down(f"service {worker.name}", lambda: self._start_service(worker), _DOWN_S, worker)
        return True

    def _service_term(self, worker: WorkerNode) -> bool:
        if not self._has_service(worker):
            return False
        service = self.query.services.pop(worker.name)
        pid, has_begun = self._pid_of(worker, service.pid), self._has_begun(worker)
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: service.poll() is not None, f"the service of {worker.name} ends on SIGTERM")
        # If Python has not started the service yet, the signal ends the process without a handler.
        if service.returncode != 0 and (has_begun or service.returncode != -signal.SIGTERM):
            self.done.wrong.append(f"on SIGTERM the service of {worker.name} ended with {service.returncode}")
        self._put_down(f"service {worker.name}", lambda: self._start_service(worker), _DOWN_S, worker)
        return True

    def _service_stop(self, worker: WorkerNode) -> bool:
        if not self._has_service(worker):
            return False
        pid = self._pid_of(worker, self.query.services[worker.name].pid)
        os.kill(pid, signal.SIGSTOP)
        outside = self.query.services[worker.name].pid
        self._put_down(f"service {worker.name}", lambda: continue_processes(outside, pid), _DOWN_S)
        return True

    def _store(self, worker: WorkerNode) -> bool:
        if "store" in self._down:
            return False
        self.store.kill()
        self._put_down("store", self.store.revive, _STORE_DOWN_S)
        return True

    def _put_down(
        self, what: str, revive: Callable[[], None], between_s: tuple[float, float], dead: WorkerNode | None = None
    ) -> None:
        """Record a component to revive; half of the dead services stay down until another service has noticed it."""
        down = _Down(revive, time.monotonic() + self._draw.uniform(*between_s), what)
        if dead is not None and self._draw.random() < 0.5:
            before, name = self.watch.lost(but=dead.name), dead.name
            deadline_s = time.monotonic() + _LOST_S_MAX

            def is_noticed() -> bool:
                if self.watch.lost(but=name) > before:
                    self.done.services_lost += 1
                    return True
                if not self.query.services.keys() - {name}:
                    # All other services are down too, so none can notice it.
                    return True
                if time.monotonic() > deadline_s:
                    self.done.wrong.append(f"no service has counted that of {name} as lost in {_LOST_S_MAX:.0f} s")
                    return True
                return False

            down.until = is_noticed
        self._down[what] = down

    def _revive(self, now_s: float) -> int:
        """Revive the components that are due, and return the number of those still down."""
        for name, down in list(self._down.items()):
            if down.at_s <= now_s and down.until():
                del self._down[name]
                down.revive()
                self._log(f"{name} is back")
        return len(self._down)

    # -- workers and services ----------------------------------------------------------------------

    def _is_down(self, worker: WorkerNode) -> bool:
        return f"worker {worker.name}" in self._down

    def _has_service(self, worker: WorkerNode) -> bool:
        return not self._is_down(worker) and f"service {worker.name}" not in self._down

    def _has_begun(self, worker: WorkerNode) -> bool:
        """Return whether the most recently started service has logged its address."""
        with self.query.service_log(worker).open("rb") as log:
            log.seek(self._logged_bytes[worker.name])
            return b" has /healthz " in log.read()

    def _start_service(self, worker: WorkerNode) -> None:
        log = self.query.service_log(worker)
        self._logged_bytes[worker.name] = log.stat().st_size if log.exists() else 0
        self.query.start_service(worker, self._ports[worker.name])

    def _pid_of(self, worker: WorkerNode, pid: int) -> int:
        """Return the id of the service's own process below ``nsenter``; wait if it is just starting."""

        def find_pids() -> list[int]:
            return [child for child in descendants(pid) if " standby run " in command_of(child).replace("nsenter", "")]

        wait_until(lambda: bool(find_pids()), f"the service of {worker.name} starts")
        return find_pids()[-1]

    def _check_driver(self) -> None:
        """Start the query again if it has failed, which may happen without a store."""
        if self.query.driver.poll() is None:
            return
        self.done.driver_restarts += 1
        self._log(f"the driver ended with {self.query.driver.returncode}: {self.query.end_of_log()}")
        wait_until(
            lambda: not any(worker.executors() for worker in self.cluster.workers if not self._is_down(worker)),
            "executors end with their driver",
        )
        self.query.start()

    def _log(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} batch {self.query.fed - 1}: {text}", file=sys.stderr, flush=True)

    # -- results -----------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Wait for all files that were fed and for a few more, because a batch's moves are known only after the next batch."""

        def drained() -> bool:
            self._check_driver()
            return self.query.committed(self.query.fed - 1)

        for _ in range(1 + _LAST_FILES):
            wait_until(drained, f"the query processes its input; {self.query.end_of_log()}", wait_s=HEAL_S_MAX)
            self.query.feed()
        wait_until(drained, f"the query processes its input; {self.query.end_of_log()}", wait_s=HEAL_S_MAX)
        self.query.wait_for_replicas()

    def _judge(self, first: int) -> dict[str, Any]:
        moves = [move for move in read_moves(self.query.folder / "hosts") if move.batch >= first]
        time.sleep(_COUNTED_S)
        counted = self.watch.takeovers()
        counted_moves = [
            move for worker in self.cluster.workers for move in read_counted_moves(self.query.service_log(worker))
        ]
        wrong = self.done.wrong
        total = counted.total()
        if total > _COUNTED_TIMES_MAX * len(moves) or (len(moves) >= _SOME_OF_MOVES and not total):
            wrong.append(f"{len(moves)} buckets moved, and the metrics of all hosts have {total}")
        calls = pa.concat_tables([metrics.read(worker.folder) for worker in self.cluster.workers])
        self.query.end()
        try:
            self.query.compare()
        except RuntimeError as error:
            wrong.append(str(error))
        try:
            verified = self.query.tool("verify").strip().splitlines()[-1]
        except RuntimeError as error:
            wrong.append(str(error))
            verified = ""
        gaps_s = self._gaps_s(first)
        usual_s = median(gaps_s)
        return {
            "batches": self.query.fed,
            "kills": dict(sorted(self.done.kills.items())),
            "within_batches": self.done.within_batches,
            "moves": len(moves),
            "batches_with_moves": len({move.batch for move in moves}),
            "failovers": {f"{outcome}{', failed' * (failed == 'true')}": n for (outcome, failed), n in counted.items()},
            "what_tasks_fetched": count_by_outcome(counted_moves, moves, calls),
            "services_seen_lost": self.done.services_lost,
            "driver_restarts": self.done.driver_restarts,
            "batch_s_median": round(usual_s, 2),
            "batch_s_max": round(max(gaps_s), 2),
            "unavailable_s": round(sum(gap_s - usual_s for gap_s in gaps_s if gap_s > 3 * usual_s), 1),
            "verify": verified,
            "wrong": wrong,
        }

    def _gaps_s(self, first: int) -> list[float]:
        """Return the seconds between the outputs of consecutive batches."""
        times_s = sorted(
            path.stat().st_mtime for path in (self.query.folder / "out").glob("*.json") if int(path.stem) >= first
        )
        return [after - before for before, after in pairwise(times_s)]


def run_failover(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = Size(arguments.gb, buckets=arguments.buckets)
    with slow_s3(folder) as store, Cluster(folder / "cluster", workers=3, cores=1, memory_mb=768) as cluster:
        if not cluster.isolated:
            print("hosts cannot be isolated here: namespaces are not allowed", file=sys.stderr)
            sys.exit(2)
        query = FailoverQuery(cluster, store, folder / "query", size, arguments.seed)
        query.conf = dict(_CONF)
        return RandomFailover(query, arguments.seed).run(arguments.minutes)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--gb", type=float, default=0.05, metavar="N", help="total state")
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps logs and state; made if absent")
    arguments = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    end_with_the_cluster()
    with run_folder("random-failover", arguments.folder) as folder:
        line = {"minutes": arguments.minutes, "seed": arguments.seed, **run_failover(arguments, folder)}
    print(json.dumps(line), flush=True)
    return 1 if line["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
