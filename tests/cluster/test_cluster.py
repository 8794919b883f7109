"""A query on a real cluster: executors, a driver and a disk are lost, and its results are those of the batch computation.

A longer form is ``python tests/cluster/cluster_runs.py --long``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cluster_trial import CASES, SHARES, Case, Trial

from spark_state_ext.worker.boot import boot_id
from tests.helpers.soak import SOAK, whole


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(1800 if SOAK else 900)
@pytest.mark.parametrize("case", whole(CASES[-1:], CASES[:-1]), ids=lambda case: case.name)
def test_results_are_those_of_the_batch_computation(cluster: Any, tmp_path: Path, case: Case) -> None:
    seed = int.from_bytes(os.urandom(3), "big")
    orders = SHARES[case.name]
    trial = Trial(cluster, tmp_path.resolve() / "trial", case, orders, seed)
    seen = trial.run()
    print(f"seed {seed}: {seen}")
    assert seen.differences == []
    assert seen.missing(orders) == []
    check_processes(cluster, trial)


def check_processes(cluster: Any, trial: Trial) -> None:
    """The package is the wheel's, and workers are machines of their own."""
    site = str(cluster.python.parents[1] / "lib")
    processes = trial.processes()
    packages = [*trial.driver_packages(), *(it["package"] for it in processes)]
    assert len(trial.driver_packages()) == 1 + trial.seen.drivers_killed
    assert [it for it in packages if not it.startswith(site)] == []
    assert {it["worker"] for it in processes} == {worker.name for worker in cluster.workers}
    calls = cluster.calls()
    assert calls.num_rows > 0
    if cluster.isolated:
        hosts = {(it["worker"], it["host"], it["boot"], it["processes"]) for it in processes}
        assert len(hosts) == len({it[2] for it in hosts}) == len({it[3] for it in hosts}) == len(cluster.workers)
        assert all(it["host"] == it["worker"] for it in processes)
        assert boot_id() not in {it["boot"].replace("-", "")[:16] for it in processes}
        told = zip(calls.column("host").to_pylist(), calls.column("worker").to_pylist(), strict=True)
        assert all(host == worker for host, worker in told)
