"""Simulate any number of histories: ``python tests/simulation/run.py --histories 20000 --seed 1``.

If a history fails, Hypothesis shortens and prints it. The same seed and number of processes find it again; another seed
gives other histories. After the histories of buckets, the same number of histories is simulated for each other subject:
drivers that compete for one lease, queries that claim one folder, savepoints, erase requests, rescaling, epochs of runs,
and standby.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from sim_claims import simulate_claims  # noqa: E402
from sim_erasures import simulate_erasures  # noqa: E402
from sim_histories import (  # noqa: E402
    claim_histories,
    erasure_histories,
    histories,
    lease_histories,
    rescale_histories,
    savepoint_histories,
    standby_histories,
    timeline_histories,
)
from sim_lease import simulate_lease  # noqa: E402
from sim_parts import History, Step  # noqa: E402
from sim_rescales import simulate_rescales  # noqa: E402
from sim_savepoints import simulate_savepoints  # noqa: E402
from sim_search import search_histories  # noqa: E402
from sim_standby import simulate_standby  # noqa: E402
from sim_timeline import simulate_timeline  # noqa: E402
from sim_world import simulate  # noqa: E402


def run(count: int, from_seed: int) -> Counter[str]:
    """Simulate `count` histories; raises `WrongStateError` with the shortest history that fails."""
    counts: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate(history)
        counts.update(
            histories=1,
            steps=len(history.steps),
            commits=world.commits,
            files_deleted=world.deleted,
            histories_with_clean_up=int(world.deleted > 0),
            histories_with_neighbours=int(history.config.buckets > 1),
            histories_with_timeouts=int(history.config.timeouts),
            histories_with_neighbours_and_timeouts=int(history.config.buckets > 1 and history.config.timeouts),
            histories_with_one_identity=int(history.config.same_run and world.start_count > 1),
            histories_without_replacing_rename=int(not history.config.replaces),
            histories_that_erase_in_time=int(history.config.erase_window_ms > 0),
        )

    search_histories(histories(), check, count, from_seed, shrinks=True)
    return counts


def run_leases(count: int, from_seed: int) -> Counter[str]:
    """Simulate drivers that compete for one lease; raises `WrongLeaseError`."""
    counts: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_lease(steps)
        counts.update(
            lease_histories=1,
            lease_take_overs=world.take_overs,
            lease_histories_with_two_live_drivers=int(world.live_max > 1),
            lease_histories_with_one_identity=int(world.collisions > 0),
        )

    search_histories(lease_histories(), check, count, from_seed, shrinks=True)
    return counts


def run_claims(count: int, from_seed: int) -> Counter[str]:
    """Simulate queries that claim one query folder; raises `WrongLeaseError`."""
    counts: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_claims(steps)
        counts.update(
            claim_histories=1,
            claim_histories_with_chains=int(world.counted["claims in a chain"] > 0),
            claim_histories_with_releases_in_chains=int(world.counted["releases in a chain"] > 0),
        )
        counts.update({f"folder_{name.replace(' ', '_')}": times for name, times in world.counted.items()})

    search_histories(claim_histories(), check, count, from_seed, shrinks=True)
    return counts


def run_savepoints(count: int, from_seed: int) -> Counter[str]:
    """Simulate savepoints and queries that start from them; raises `WrongStateError`."""
    counts: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate_savepoints(history)
        counts.update(savepoint_histories=1)
        counts.update({name.replace(" ", "_").replace("-", "_"): times for name, times in world.shared.counted.items()})

    search_histories(savepoint_histories(), check, count, from_seed, shrinks=True)
    return counts


def run_erasures(count: int, from_seed: int) -> Counter[str]:
    """Simulate queries with erase requests; raises `WrongStateError`."""
    counts: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate_erasures(history)
        counts.update(erasure_histories=1)
        counts.update({f"erasure_{name.replace(' ', '_')}": times for name, times in world.counted.items()})

    search_histories(erasure_histories(), check, count, from_seed, shrinks=True)
    return counts


def run_rescales(count: int, from_seed: int) -> Counter[str]:
    """Simulate queries that are rescaled; raises `WrongStateError`."""
    counts: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate_rescales(history)
        counts.update(rescale_histories=1, rescale_commits=world.commits, rescale_files_deleted=world.deleted)
        counts.update({f"rescale_{name.replace(' ', '_')}": times for name, times in world.counted.items()})

    search_histories(rescale_histories(), check, count, from_seed, shrinks=True)
    return counts


def run_timelines(count: int, from_seed: int) -> Counter[str]:
    """Simulate the runs of one query and their epochs; raises `WrongLineError`."""
    counts: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_timeline(steps)
        counts.update(timeline_histories=1)
        counts.update({f"timeline_{name}": times for name, times in world.counted.items()})

    search_histories(timeline_histories(), check, count, from_seed, shrinks=True)
    return counts


def run_standby(count: int, from_seed: int) -> Counter[str]:
    """Simulate hosts that keep standby replicas; raises `WrongStandbyError`."""
    counts: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_standby(steps)
        counts.update(standby_histories=1, standby_hosts_died=world.died, standby_moves=world.moves)

    search_histories(standby_histories(), check, count, from_seed, shrinks=True)
    return counts


def _simulate_share(share: tuple[int, ...], from_seed: int, results: multiprocessing.Queue[Counter[str]]) -> None:
    logging.getLogger("spark_state_ext").setLevel(logging.CRITICAL)
    # Imported objects stay, and the collector would spend a twentieth of the time on them.
    gc.freeze()
    count, leases, savepoints, erasures, rescales, timelines, standby = share
    counts = run(count, from_seed) if count else Counter[str]()
    if leases:
        counts.update(run_leases(leases, from_seed))
        counts.update(run_claims(leases, from_seed))
    if savepoints:
        counts.update(run_savepoints(savepoints, from_seed))
    if erasures:
        counts.update(run_erasures(erasures, from_seed))
    if rescales:
        counts.update(run_rescales(rescales, from_seed))
    if timelines:
        counts.update(run_timelines(timelines, from_seed))
    if standby:
        counts.update(run_standby(standby, from_seed))
    results.put(counts)


def main() -> int:
    """Run the histories in several processes and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument(
        "--leases", type=int, help="histories of leases, and as many of claims; as many as --histories by default"
    )
    parser.add_argument("--savepoints", type=int, help="histories of savepoints; as many as --histories by default")
    parser.add_argument("--erasures", type=int, help="histories of erase requests; as many as --histories by default")
    parser.add_argument("--rescales", type=int, help="histories of rescaling; as many as --histories by default")
    parser.add_argument("--timelines", type=int, help="histories of epochs; as many as --histories by default")
    parser.add_argument("--standby", type=int, help="histories of standby; as many as --histories by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    started_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[Counter[str]] = context.Queue()
    names = ("histories", "leases", "savepoints", "erasures", "rescales", "timelines", "standby")
    requested_counts = [getattr(arguments, name) for name in names]
    history_counts = [arguments.histories if count is None else count for count in requested_counts]
    shares = tuple(-(-count // arguments.processes) for count in history_counts)
    workers = [
        context.Process(target=_simulate_share, args=(shares, arguments.seed * 1_000 + i, results))
        for i in range(arguments.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        print(
            f"seed {arguments.seed}, {arguments.processes} processes: the invariants of a history were violated, see above"
        )
        return 1
    counts: Counter[str] = Counter()
    for _ in workers:
        # `update` keeps counts of 0; `+` drops them.
        counts.update(results.get())
    print(json.dumps({"seed": arguments.seed, **counts, "seconds": round(time.monotonic() - started_s)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
