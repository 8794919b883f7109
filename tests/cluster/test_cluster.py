"""A query on a real cluster loses executors, a driver and a disk, and its output still equals the batch computation.

``python tests/cluster/cluster_runs.py --long`` is a longer form.
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
def test_the_output_equals_the_batch_computation_after_failures(cluster: Any, tmp_path: Path, case: Case) -> None:
    seed = int.from_bytes(os.urandom(3), "big")
    orders = SHARES[case.name]
    trial = Trial(cluster, tmp_path.resolve() / "trial", case, orders, seed)
    outcome = trial.run()
    print(f"seed {seed}: {outcome}")
    assert outcome.differences == []
    assert outcome.missing(orders) == []
    check_processes(cluster, trial)


def check_processes(cluster: Any, trial: Trial) -> None:
    """Check that the package is from the wheel, and that the workers are separate machines."""
    site = str(cluster.python.parents[1] / "lib")
    processes = trial.processes()
    packages = [*trial.driver_packages(), *(process["package"] for process in processes)]
    assert len(trial.driver_packages()) == 1 + trial.outcome.drivers_killed
    assert [package for package in packages if not package.startswith(site)] == []
    assert {process["worker"] for process in processes} == {worker.name for worker in cluster.workers}
    calls = cluster.calls()
    assert calls.num_rows > 0
    if cluster.isolated:
        hosts = {(process["worker"], process["host"], process["boot"], process["processes"]) for process in processes}
        assert (
            len(hosts) == len({host[2] for host in hosts}) == len({host[3] for host in hosts}) == len(cluster.workers)
        )
        assert all(process["host"] == process["worker"] for process in processes)
        assert boot_id() not in {process["boot"].replace("-", "")[:16] for process in processes}
        hosts_and_workers = zip(calls.column("host").to_pylist(), calls.column("worker").to_pylist(), strict=True)
        assert all(host == worker for host, worker in hosts_and_workers)
