"""A query that goes on where another host has followed it: real tasks find the copies as their own local stores."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import CLASSIC, COUNTS, Batches, Job, count, keyed

from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.worker.metrics import read as read_metrics
from tests.helpers.waiting import WAIT_S, eventually

pytestmark = pytest.mark.spark

_BUCKETS = 3


def restored(local_dir: Path, batch: int) -> list[int]:
    """Files that the calls of a batch have fetched, one a bucket, in no order."""
    folder = local_dir / f"spark_state_ext-{os.getuid()}" / "metrics"

    def calls() -> list[int]:
        found = read_metrics(folder).to_pylist()
        return [row["restored_files"] for row in found if row["batch"] == batch]

    eventually(lambda: len(calls()) >= _BUCKETS)
    return calls()


@CLASSIC
def test_a_task_goes_on_from_the_copy(session: Any, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    b.mkdir()
    job = Job(session, "arrow", tmp_path, count, output=COUNTS, options={"buckets": _BUCKETS})
    seen: Counter[str] = Counter()

    def run_on(local_dir: Path, *keys: str) -> None:
        """One batch, with this local folder; what it emits is what a batch computation over all input gives."""
        job.options = {**job.options, "local_dir": str(local_dir)}
        seen.update(keys)
        out: Batches = job.run(keyed(*keys))
        assert list(out.values()) == [sorted((key, seen[key]) for key in set(keys))]

    follower = RootFollower(FollowedRoot(str(tmp_path / "root"), local_dir=str(b)))

    def has_caught_up(version: int) -> bool:
        """Deltas that are inline are uploaded after the batch."""
        follower.hold(follower.find().operators)
        follower.tick()
        assert follower.drain(WAIT_S)
        follower.tick()
        found = follower.collect_results().values()
        return len(found) == _BUCKETS and all(
            it.is_caught_up and it.newest is not None and it.newest.version == version for it in found
        )

    letters = [chr(ord("a") + number) for number in range(26)]
    for number in range(3):
        run_on(a, *letters, "a")
        assert sum(restored(a, number)) == 0
    eventually(lambda: has_caught_up(3))
    # The query is started again, and its tasks land on the other host.
    run_on(b, *letters)
    assert restored(b, 3) == [0] * _BUCKETS
    # Back; the first host fetches what it has missed, one delta a bucket.
    run_on(a, *letters)
    assert restored(a, 4) == [1] * _BUCKETS
    # The copy lags by that batch, as nobody has followed: that is all that is fetched, and no snapshot.
    run_on(b, *letters)
    assert restored(b, 5) == [1] * _BUCKETS
    # A host that nobody has kept warm fetches all.
    run_on(tmp_path / "c", *letters)
    assert all(files >= 6 for files in restored(tmp_path / "c", 6))
    follower.close()
