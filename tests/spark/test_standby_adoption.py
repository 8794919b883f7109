"""A query that moves to a host with standby replicas: real tasks use the replicas as their own local stores."""

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


def count_restored_files(local_dir: Path, batch: int) -> list[int]:
    """Return the number of files that each bucket's call of a batch has fetched, in any order."""
    folder = local_dir / f"spark_state_ext-{os.getuid()}" / "metrics"

    def read_calls() -> list[int]:
        rows = read_metrics(folder).to_pylist()
        return [row["restored_files"] for row in rows if row["batch"] == batch]

    eventually(lambda: len(read_calls()) >= _BUCKETS)
    return read_calls()


@CLASSIC
def test_a_task_that_moves_to_a_standby_host_fetches_only_what_the_replica_does_not_have(
    session: Any, tmp_path: Path
) -> None:
    first_host, standby_host = tmp_path / "a", tmp_path / "b"
    standby_host.mkdir()
    job = Job(session, "arrow", tmp_path, count, output=COUNTS, options={"buckets": _BUCKETS})
    counts: Counter[str] = Counter()

    def run_on(local_dir: Path, *keys: str) -> None:
        """Run one batch with this local folder, and compare its output with a count over all input."""
        job.options = {**job.options, "local_dir": str(local_dir)}
        counts.update(keys)
        emitted: Batches = job.run(keyed(*keys))
        assert list(emitted.values()) == [sorted((key, counts[key]) for key in set(keys))]

    follower = RootFollower(FollowedRoot(str(tmp_path / "root"), local_dir=str(standby_host)))

    def has_caught_up(version: int) -> bool:
        """Inline deltas are uploaded after the batch, so that the follower needs several rounds."""
        follower.hold(follower.find().operators)
        follower.tick()
        assert follower.drain(WAIT_S)
        follower.tick()
        statuses = follower.collect_results().values()
        return len(statuses) == _BUCKETS and all(
            status.is_caught_up and status.newest is not None and status.newest.version == version
            for status in statuses
        )

    letters = [chr(ord("a") + number) for number in range(26)]
    for number in range(3):
        run_on(first_host, *letters, "a")
        assert sum(count_restored_files(first_host, number)) == 0
    eventually(lambda: has_caught_up(3))
    # The query is restarted, and its tasks run on the standby host.
    run_on(standby_host, *letters)
    assert count_restored_files(standby_host, 3) == [0] * _BUCKETS
    # The query returns to the first host, which fetches one delta for each bucket.
    run_on(first_host, *letters)
    assert count_restored_files(first_host, 4) == [1] * _BUCKETS
    # The replica lags by that batch, which the follower has not fetched: the tasks fetch its deltas, and no snapshot.
    run_on(standby_host, *letters)
    assert count_restored_files(standby_host, 5) == [1] * _BUCKETS
    # A host without a replica fetches all files.
    run_on(tmp_path / "c", *letters)
    assert all(files >= 6 for files in count_restored_files(tmp_path / "c", 6))
    follower.close()
