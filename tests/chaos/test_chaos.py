"""Faults of all kinds, with time compressed: either store alone gives what the batch computation gives.

The suite goes on until there were enough batches, kills and lost disks; the long form goes on for half an hour, compressed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos_job import BUCKETS, STORES, Driver, expected

from arrow_schemas import Pointer
from tests.helpers.soak import SOAK, examples
from tests.helpers.waiting import eventually

MINUTES = 30 if SOAK else 0
BATCHES, KILLS, DISKS_LOST = examples(10, 20), examples(2, 4), 1


@pytest.mark.slow
def test_faults_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker makes the store by name.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    seed = int.from_bytes(os.urandom(3), "big")
    print(f"seed {seed}")
    driver = Driver(tmp_path, seed)
    try:
        driver.run(MINUTES)
        seen = driver.seen
        while seen.batches < BATCHES or seen.kills < KILLS or seen.disks_lost < DISKS_LOST:
            driver.step()
        print(seen)

        def quiet() -> bool:
            pointers = [Pointer.decode(data) for data in driver.pointers.values()]
            if all(not it.inline and len(it.replication) == len(STORES) for it in pointers):
                return True
            driver.batch(changes=False)
            return False

        # Until nothing is inline any more; the stores go on failing meanwhile.
        eventually(quiet)
    finally:
        driver.stop()
    for names in (*((name,) for name in STORES), STORES):
        found = dict(driver.restored(names))
        assert found == {bucket: expected(driver.seen.batches, bucket) for bucket in range(BUCKETS)}, f"seed {seed}"
