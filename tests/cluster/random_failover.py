"""Minutes of random failover: ``python tests/cluster/random_failover.py --minutes 15 --seed 1``.

A standalone cluster of three workers, each with a host name, a boot, process numbers, a disk and a standby service of its own,
runs a query with two executors. Its state is in an S3 server over HTTP; files come all the time. At random moments, most of
them within a batch, something is killed, and is there again some seconds later:

* ``worker``: a worker with its executor, Python and standby service; its machine boots anew. ``worker_disk``: its disk is
  renamed away too.
* ``executor``: the executor of a worker, with its Python processes.
* ``service_kill``, ``service_term``: a standby service, with SIGKILL or SIGTERM. ``service_stop``: it stands still for a while.
* ``store``: what listens where clients know the object store. The server behind it holds its objects in memory and lives on:
  connections are reset and new ones are refused, which is all that clients see of a killed one.

In the end all of it is there again. The output of every batch must be that of the batch computation. All replicas must be in
sync, every file whole. A service that was dead for long must have been counted as lost by another one. The services' counters of
takeovers, added up, must be about the number of buckets whose host was another one than in the batch before: a service that is
killed forgets what it has not told yet, and an attempt that Spark did not take counts too.

One line of JSON; the exit status is 0 only if all is right.
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
from failover_watch import Watch, by_outcome, moves_of, told_in
from processes import WAIT_S, command_of, descendants, kill_tree, wait_until
from slow_s3 import slow_s3

from spark_state_ext.worker import metrics

# How often each is drawn.
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
# Another service must have seen within this that one is dead, whatever happens meanwhile.
_LOST_S_MAX = WAIT_S
# Whoever counts a move does it by then.
_COUNTED_S = 30.0
# Of so many moves some must have been counted, and in any case no more than so many times as many.
_SOME_OF_MOVES, _COUNTED_TIMES_MAX = 10, 2
_CONF = {
    # Two executors on three hosts: buckets of one go on beside those of the other.
    "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "4",
    # As Spark has it by default.
    "spark.sql.streaming.minBatchesToRetain": "100",
    # While the store is away every attempt fails.
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "1000",
}


@dataclass
class _Down:
    """Something that was killed or stopped.

    Parameters
    ----------
    revive
        Makes it work again.
    at_s
        When, by the monotonic clock.
    until
        And what must have been seen before.
    what
        For messages.
    """

    revive: Callable[[], None]
    at_s: float
    what: str
    until: Callable[[], bool] = lambda: True


@dataclass
class Done:
    """What was done, and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    within_batches: int = 0
    driver_restarts: int = 0
    services_lost: int = 0
    wrong: list[str] = field(default_factory=list)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _go_on(*pids: int) -> None:
    """Have processes that may stand still go on.

    What puts a service on its machine (``nsenter``) stands still with it. A machine whose service has no parent that takes
    note of its death does not end.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Feeder(threading.Thread):
    """Gives the query one file after the other, a few ahead of what it has committed.

    Parameters
    ----------
    query
        Which.
    """

    def __init__(self, query: FailoverQuery) -> None:
        super().__init__(daemon=True)
        self._query = query
        self._ended = threading.Event()

    def run(self) -> None:
        """Feed, until it is ended."""
        while not self._ended.wait(0.1):
            if self._query.committed(self._query.fed - _FILES_AHEAD):
                self._query.feed()

    def end(self) -> None:
        """Feed no more."""
        self._ended.set()
        self.join()


class RandomFailover:
    """A query, and what is done to it.

    Parameters
    ----------
    query
        With its cluster and its store.
    seed
        Of what is done, and when.
    """

    def __init__(self, query: FailoverQuery, seed: int) -> None:
        self.query, self.cluster, self.store = query, query.cluster, query.store
        self.done = Done()
        self._draw = random.Random(seed)
        self._ports = {worker.name: free_port() for worker in self.cluster.workers}
        self._down: dict[str, _Down] = {}
        self._watch: Watch | None = None
        # Of each worker's log, before its service was started last.
        self._logged_bytes: dict[str, int] = {}

    @property
    def watch(self) -> Watch:
        """Of the services' metrics."""
        assert self._watch is not None
        return self._watch

    def run(self, minutes: float) -> dict[str, Any]:
        """Run the query through all that happens to it; the line of JSON.

        Parameters
        ----------
        minutes
            For how long something happens.
        """
        query = self.query
        query.start()
        for _ in range(_WARM_UP_FILES):
            query.wait_for(query.feed(), SETUP_S_MAX)
        query.set_replicas()
        for worker in self.cluster.workers:
            self._start_service(worker)
        query.wait_for_replicas()
        # What moved before the last batch nobody has followed; that one is not known to be committed yet.
        first = query.fed - 1
        self._watch = Watch(self._ports)
        try:
            self._all_kinds(minutes)
            self._bring_to_its_end()
            return self._judged(first)
        finally:
            self.watch.close()

    # -- what happens ------------------------------------------------------------------------------

    def _all_kinds(self, minutes: float) -> None:
        feeder = Feeder(self.query)
        feeder.start()
        end_s = time.monotonic() + 60 * minutes
        due_s = time.monotonic()
        try:
            while time.monotonic() < end_s:
                self._look_at_driver()
                self._revive(time.monotonic())
                if time.monotonic() >= due_s:
                    self._happen()
                    due_s = time.monotonic() + self._draw.uniform(*_PAUSE_S)
                time.sleep(0.05)
            wait_until(lambda: self._revive(float("inf")) == 0, "all is revived", wait_s=2 * _LOST_S_MAX)
        finally:
            feeder.end()

    def _happen(self) -> None:
        """Have one of the kinds happen that can."""
        kinds = list(KINDS)
        kind = self._draw.choices(kinds, [KINDS[it] for it in kinds])[0]
        worker = self._draw.choice(self.cluster.workers)
        if not getattr(self, f"_{kind}")(worker):
            return
        self.done.kills[kind] += 1
        started = max((int(it.name) for it in self._offsets() if it.name.isdigit()), default=-1)
        self.done.within_batches += not self.query.committed(started)
        self._say(f"{kind} {'' if kind == 'store' else worker.name}")

    def _offsets(self) -> list[Path]:
        return list((self.query.folder / "checkpoint" / "offsets").iterdir())

    def _worker(self, worker: WorkerNode, lose_disk: bool = False) -> bool:
        # One of the three stays.
        if self._is_down(worker) or sum(self._is_down(it) for it in self.cluster.workers) > 1:
            return False
        service_down = self._down.pop(f"service {worker.name}", None)
        service = self.query.services.pop(worker.name, None)
        if service is not None:
            _go_on(service.pid)
        self.cluster.kill_worker(worker, lose_disk=lose_disk)
        if service is not None:
            service.wait()

        def revive() -> None:
            self.cluster.restart_worker(worker)
            # Its service comes a little later.
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
        # Python that has not come to the service yet ends as the signal says.
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
        self._put_down(f"service {worker.name}", lambda: _go_on(outside, pid), _DOWN_S)
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
        """Note what is to be revived; of the services that died, half wait until another one has seen it."""
        down = _Down(revive, time.monotonic() + self._draw.uniform(*between_s), what)
        if dead is not None and self._draw.random() < 0.5:
            before, name = self.watch.lost(but=dead.name), dead.name
            deadline_s = time.monotonic() + _LOST_S_MAX

            def seen() -> bool:
                if self.watch.lost(but=name) > before:
                    self.done.services_lost += 1
                    return True
                if not self.query.services.keys() - {name}:
                    # All are down, and wait for each other: nobody is left to see it.
                    return True
                if time.monotonic() > deadline_s:
                    self.done.wrong.append(f"no service has counted that of {name} as lost in {_LOST_S_MAX:.0f} s")
                    return True
                return False

            down.until = seen
        self._down[what] = down

    def _revive(self, now_s: float) -> int:
        """Revive what is due; how much is still down."""
        for name, down in list(self._down.items()):
            if down.at_s <= now_s and down.until():
                del self._down[name]
                down.revive()
                self._say(f"{name} is back")
        return len(self._down)

    # -- workers and services ----------------------------------------------------------------------

    def _is_down(self, worker: WorkerNode) -> bool:
        return f"worker {worker.name}" in self._down

    def _has_service(self, worker: WorkerNode) -> bool:
        return not self._is_down(worker) and f"service {worker.name}" not in self._down

    def _has_begun(self, worker: WorkerNode) -> bool:
        """Whether the service that was started last has told where it listens."""
        with self.query.service_log(worker).open("rb") as log:
            log.seek(self._logged_bytes[worker.name])
            return b" has /healthz " in log.read()

    def _start_service(self, worker: WorkerNode) -> None:
        log = self.query.service_log(worker)
        self._logged_bytes[worker.name] = log.stat().st_size if log.exists() else 0
        self.query.start_service(worker, self._ports[worker.name])

    def _pid_of(self, worker: WorkerNode, pid: int) -> int:
        """The service itself, below what puts it on its machine; it may just have been started."""

        def found() -> list[int]:
            return [it for it in descendants(pid) if " standby run " in command_of(it).replace("nsenter", "")]

        wait_until(lambda: bool(found()), f"the service of {worker.name} starts")
        return found()[-1]

    def _look_at_driver(self) -> None:
        """Where the query has failed, as it may without a store, somebody starts it again."""
        if self.query.driver.poll() is None:
            return
        self.done.driver_restarts += 1
        self._say(f"the driver ended with {self.query.driver.returncode}: {self.query.end_of_log()}")
        wait_until(
            lambda: not any(it.executors() for it in self.cluster.workers if not self._is_down(it)),
            "executors end with their driver",
        )
        self.query.start()

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} batch {self.query.fed - 1}: {text}", file=sys.stderr, flush=True)

    # -- what came of it ---------------------------------------------------------------------------

    def _bring_to_its_end(self) -> None:
        """Work off what was fed, and a few files more: what a batch did is known once another one has followed it."""

        def drained() -> bool:
            self._look_at_driver()
            return self.query.committed(self.query.fed - 1)

        for _ in range(1 + _LAST_FILES):
            wait_until(drained, f"the query works off its input; {self.query.end_of_log()}", wait_s=HEAL_S_MAX)
            self.query.feed()
        wait_until(drained, f"the query works off its input; {self.query.end_of_log()}", wait_s=HEAL_S_MAX)
        self.query.wait_for_replicas()

    def _judged(self, first: int) -> dict[str, Any]:
        moves = [it for it in moves_of(self.query.folder / "hosts") if it.batch >= first]
        time.sleep(_COUNTED_S)
        counted = self.watch.takeovers()
        told = [it for worker in self.cluster.workers for it in told_in(self.query.service_log(worker))]
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
            "batches_with_moves": len({it.batch for it in moves}),
            "failovers": {f"{outcome}{', failed' * (failed == 'true')}": n for (outcome, failed), n in counted.items()},
            "what_tasks_fetched": by_outcome(told, moves, calls),
            "services_seen_lost": self.done.services_lost,
            "driver_restarts": self.done.driver_restarts,
            "batch_s_median": round(usual_s, 2),
            "batch_s_max": round(max(gaps_s), 2),
            "unavailable_s": round(sum(it - usual_s for it in gaps_s if it > 3 * usual_s), 1),
            "verify": verified,
            "wrong": wrong,
        }

    def _gaps_s(self, first: int) -> list[float]:
        """Between the outputs of two batches."""
        times_s = sorted(
            it.stat().st_mtime for it in (self.query.folder / "out").glob("*.json") if int(it.stem) >= first
        )
        return [after - before for before, after in pairwise(times_s)]


def _run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = Size(given.gb, buckets=given.buckets)
    with slow_s3(folder) as store, Cluster(folder / "cluster", workers=3, cores=1, memory_mb=768) as cluster:
        if not cluster.isolated:
            print("hosts cannot be told apart here: namespaces are not allowed", file=sys.stderr)
            sys.exit(2)
        query = FailoverQuery(cluster, store, folder / "query", size, given.seed)
        query.conf = dict(_CONF)
        return RandomFailover(query, given.seed).run(given.minutes)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--gb", type=float, default=0.05, metavar="N", help="of state")
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps logs and state; made if absent")
    given = parser.parse_args()
    reason = unusable()
    if reason is not None:
        print(f"no cluster can run here: {reason}", file=sys.stderr)
        return 2
    end_with_the_cluster()
    with run_folder("random-failover", given.folder) as folder:
        told = {"minutes": given.minutes, "seed": given.seed, **_run(given, folder)}
    print(json.dumps(told), flush=True)
    return 1 if told["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
