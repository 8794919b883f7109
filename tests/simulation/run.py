"""As many simulated histories as one likes: ``python tests/simulation/run.py --histories 20000 --seed 1``.

A history that fails is shortened by Hypothesis and printed; the same seed and number of processes find it again. Two
runs with other seeds go through other histories. After those of buckets come as many of drivers around one lease, of
queries that claim one folder, of savepoints, of erase requests, of queries that are rescaled, of their runs' epochs, and
of standbys.
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
from sim_search import searched  # noqa: E402
from sim_standby import simulate_standby  # noqa: E402
from sim_timeline import simulate_timeline  # noqa: E402
from sim_world import simulate  # noqa: E402


def run(count: int, from_seed: int) -> Counter[str]:
    """Simulate `count` histories; raises `WrongStateError` with the shortest history found to be wrong."""
    seen: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate(history)
        seen.update(
            histories=1,
            steps=len(history.steps),
            commits=world.commits,
            files_deleted=world.deleted,
            histories_with_clean_up=int(world.deleted > 0),
            histories_with_neighbours=int(history.config.buckets > 1),
            histories_with_timeouts=int(history.config.timeouts),
            histories_with_neighbours_and_timeouts=int(history.config.buckets > 1 and history.config.timeouts),
            histories_with_one_identity=int(history.config.same_run and world.begun > 1),
            histories_without_replacing_rename=int(not history.config.replaces),
            histories_that_erase_in_time=int(history.config.erase_window_ms > 0),
        )

    searched(histories(), check, count, from_seed, shrinks=True)
    return seen


def run_leases(count: int, from_seed: int) -> Counter[str]:
    """As `run`, of drivers around one lease; raises `WrongLeaseError`."""
    seen: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_lease(steps)
        seen.update(
            lease_histories=1,
            lease_take_overs=world.take_overs,
            lease_histories_with_two_live_drivers=int(world.live_max > 1),
            lease_histories_with_one_identity=int(world.collisions > 0),
        )

    searched(lease_histories(), check, count, from_seed, shrinks=True)
    return seen


def run_claims(count: int, from_seed: int) -> Counter[str]:
    """As `run_leases`, with queries that claim the folder."""
    seen: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_claims(steps)
        seen.update(
            claim_histories=1,
            claim_histories_with_chains=int(world.counted["claims in a chain"] > 0),
            claim_histories_with_releases_in_chains=int(world.counted["releases in a chain"] > 0),
        )
        seen.update({f"folder_{name.replace(' ', '_')}": times for name, times in world.counted.items()})

    searched(claim_histories(), check, count, from_seed, shrinks=True)
    return seen


def run_savepoints(count: int, from_seed: int) -> Counter[str]:
    """As `run`, of savepoints and of queries that start from them."""
    seen: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate_savepoints(history)
        seen.update(savepoint_histories=1)
        seen.update({name.replace(" ", "_").replace("-", "_"): times for name, times in world.yard.counted.items()})

    searched(savepoint_histories(), check, count, from_seed, shrinks=True)
    return seen


def run_erasures(count: int, from_seed: int) -> Counter[str]:
    """As `run`, of queries that are asked to erase keys."""
    seen: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate_erasures(history)
        seen.update(erasure_histories=1)
        seen.update({f"erasure_{name.replace(' ', '_')}": times for name, times in world.counted.items()})

    searched(erasure_histories(), check, count, from_seed, shrinks=True)
    return seen


def run_rescales(count: int, from_seed: int) -> Counter[str]:
    """As `run`, of queries that are started again with another number of buckets."""
    seen: Counter[str] = Counter()

    def check(history: History) -> None:
        world = simulate_rescales(history)
        seen.update(rescale_histories=1, rescale_commits=world.commits, rescale_files_deleted=world.deleted)
        seen.update({f"rescale_{name.replace(' ', '_')}": times for name, times in world.counted.items()})

    searched(rescale_histories(), check, count, from_seed, shrinks=True)
    return seen


def run_timelines(count: int, from_seed: int) -> Counter[str]:
    """As `run`, of the runs of one query; raises `WrongLineError`."""
    seen: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_timeline(steps)
        seen.update(timeline_histories=1)
        seen.update({f"timeline_{name}": times for name, times in world.counted.items()})

    searched(timeline_histories(), check, count, from_seed, shrinks=True)
    return seen


def run_standby(count: int, from_seed: int) -> Counter[str]:
    """As `run`, of hosts that keep replicas; raises `WrongStandbyError`."""
    seen: Counter[str] = Counter()

    def check(steps: tuple[Step, ...]) -> None:
        world = simulate_standby(steps)
        seen.update(standby_histories=1, standby_hosts_died=world.died, standby_moves=world.moves)

    searched(standby_histories(), check, count, from_seed, shrinks=True)
    return seen


def _share(counts: tuple[int, ...], from_seed: int, results: multiprocessing.Queue[Counter[str]]) -> None:
    logging.getLogger("spark_state_ext").setLevel(logging.CRITICAL)
    # What was imported stays; going through it again and again takes a twentieth of the time.
    gc.freeze()
    count, leases, savepoints, erasures, rescales, timelines, standby = counts
    seen = run(count, from_seed) if count else Counter[str]()
    if leases:
        seen.update(run_leases(leases, from_seed))
        seen.update(run_claims(leases, from_seed))
    if savepoints:
        seen.update(run_savepoints(savepoints, from_seed))
    if erasures:
        seen.update(run_erasures(erasures, from_seed))
    if rescales:
        seen.update(run_rescales(rescales, from_seed))
    if timelines:
        seen.update(run_timelines(timelines, from_seed))
    if standby:
        seen.update(run_standby(standby, from_seed))
    results.put(seen)


def main() -> int:
    """Run them in several processes; prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument(
        "--leases", type=int, help="histories of leases, and of claims; as many as the others by default"
    )
    parser.add_argument("--savepoints", type=int, help="histories of savepoints; as many as the others by default")
    parser.add_argument("--erasures", type=int, help="histories of erase requests; as many as the others by default")
    parser.add_argument("--rescales", type=int, help="histories of rescaling; as many as the others by default")
    parser.add_argument("--timelines", type=int, help="histories of epochs; as many as the others by default")
    parser.add_argument("--standby", type=int, help="histories of standbys; as many as the others by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    started_s = time.monotonic()
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[Counter[str]] = context.Queue()
    names = ("histories", "leases", "savepoints", "erasures", "rescales", "timelines", "standby")
    wanted = [getattr(arguments, name) for name in names]
    each = [arguments.histories if count is None else count for count in wanted]
    shares = tuple(-(-count // arguments.processes) for count in each)
    workers = [
        context.Process(target=_share, args=(shares, arguments.seed * 1_000 + i, results))
        for i in range(arguments.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        print(
            f"seed {arguments.seed}, {arguments.processes} processes: a history gave a wrong state or lease, see above"
        )
        return 1
    seen: Counter[str] = Counter()
    for _ in workers:
        # Not added, which leaves out what is 0.
        seen.update(results.get())
    print(json.dumps({"seed": arguments.seed, **seen, "seconds": round(time.monotonic() - started_s)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
