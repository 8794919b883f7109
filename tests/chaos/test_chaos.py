"""Half an hour of faults, compressed: either store alone gives what the batch computation gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos_job import BUCKETS, STORES, Driver, expected

from arrow_schemas import Pointer

MINUTES = 30
QUIET_BATCHES_MAX = 200


@pytest.mark.slow
def test_half_an_hour_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker makes the store by name.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    seed = int.from_bytes(os.urandom(3), "big")
    print(f"seed {seed}")
    driver = Driver(tmp_path, seed)
    try:
        driver.run(MINUTES)
        seen = driver.seen
        # On a busy machine less happens in that time.
        for _ in range(5):
            if seen.batches > 20 and seen.kills > 4 and seen.disks_lost > 0:
                break
            driver.run(MINUTES / 3)
        print(seen)
        assert seen.batches > 20
        assert seen.kills > 4
        assert seen.disks_lost > 0
        # Until nothing is inline any more; the stores go on failing meanwhile.
        for _ in range(QUIET_BATCHES_MAX):
            pointers = [Pointer.decode(data) for data in driver.pointers.values()]
            if all(not it.inline and len(it.replication) == len(STORES) for it in pointers):
                break
            driver.batch(changes=False)
        else:
            pytest.fail("uploads do not come to their end")
    finally:
        driver.stop()
    for names in (*((name,) for name in STORES), STORES):
        found = dict(driver.restored(names))
        assert found == {bucket: expected(driver.seen.batches, bucket) for bucket in range(BUCKETS)}, f"seed {seed}"
