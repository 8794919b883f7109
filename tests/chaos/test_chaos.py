"""Faults of all kinds in compressed time: each store alone restores the state of the batch computation.

The suite runs until there were enough batches, kills and lost disks; the long form runs for half an hour of compressed time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos_job import BUCKETS, STORES, Driver, compute_state

from arrow_schemas import Pointer
from tests.helpers.soak import SOAK, examples
from tests.helpers.waiting import eventually

MINUTES = 30 if SOAK else 0
BATCHES, KILLS, DISKS_LOST = examples(10, 20), examples(2, 4), 1


@pytest.mark.slow
def test_each_store_restores_the_state_after_faults_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker imports the store's class by name.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    seed = int.from_bytes(os.urandom(3), "big")
    print(f"seed {seed}")
    driver = Driver(tmp_path, seed)
    try:
        driver.run(MINUTES)
        counts = driver.counts
        while counts.batches < BATCHES or counts.kills < KILLS or counts.disks_lost < DISKS_LOST:
            driver.step()
        print(counts)

        def all_is_uploaded() -> bool:
            pointers = [Pointer.decode(data) for data in driver.pointers.values()]
            if all(not pointer.inline and len(pointer.replication) == len(STORES) for pointer in pointers):
                return True
            driver.batch(changes=False)
            return False

        # Run until no delta is inline; the stores still fail meanwhile.
        eventually(all_is_uploaded)
    finally:
        driver.stop()
    for names in (*((name,) for name in STORES), STORES):
        states = dict(driver.restore(names))
        assert states == {bucket: compute_state(driver.counts.batches, bucket) for bucket in range(BUCKETS)}, (
            f"seed {seed}"
        )
