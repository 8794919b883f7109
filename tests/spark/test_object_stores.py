"""Jobs with state in object stores over real HTTP, in several stores at once, and while it moves between stores."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, keyed

from spark_state_ext import Backend
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.metrics import by_batch
from spark_state_ext.worker.metrics import read as read_metrics
from tests.helpers.soak import examples, whole
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.spark

LETTERS = "abcdefghij"
# Number of batches of each start, and number of starts.
BATCHES, STARTS = examples(2, 3), examples(2, 4)


class CountingJob:
    """A job that counts letters and starts several times; it checks the counts of each start."""

    def __init__(self, session: Any, folder: Path, **options: Any) -> None:
        self.job = Job(session, "arrow", folder, count, COUNTS, options={"buckets": 4, **options})
        self.total: Counter[str] = Counter()
        self.starts = 0

    def run(self, batches: int = BATCHES, **options: Any) -> None:
        """Start the job again on a machine with an empty disk, and check its counts."""
        self.starts += 1
        self.job.options.update(local_dir=str(self.job.folder / f"local-{self.starts}"), **options)
        fed = [LETTERS[(self.starts + at) % 3 : 5 + at] * 2 for at in range(batches)]
        emitted = self.job.run(*(keyed(*letters) for letters in fed))
        assert len(emitted) == batches
        for letters, rows in zip(fed, emitted.values(), strict=True):
            self.total.update(letters)
            assert dict(rows) == {letter: self.total[letter] for letter in set(letters)}


@pytest.fixture(params=whole(["s3"], ["obstore", "azure"]))
def store(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    """A store and options for it: s3fs, obstore's implementation of fsspec, and adlfs."""
    if request.param == "azure":
        azure = request.getfixturevalue("azure")
        return azure, azure.options
    s3 = request.getfixturevalue("s3")
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="obstore has no release for this version of Python")
        return s3, s3.obstore_options
    return s3, s3.options


def file_names(root: str, options: dict[str, Any]) -> list[str]:
    operator = Folder(root, options).child("tested")
    query_folders = [name for name in operator.names() if name not in ("spill", "starting")]
    names_by_bucket = [
        operator.child(query_folder, str(bucket)).names() for query_folder in query_folders for bucket in range(4)
    ]
    return [name for names in names_by_bucket for name in names]


@pytest.mark.soak
def test_a_job_restarts_with_its_state_from_an_object_store(
    spark: Any, store: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    """Each start has an empty disk, so all of the state comes from the store and from Spark's own state."""
    server, options = store
    root = server.root(tmp_path.name)
    counting = CountingJob(spark, tmp_path, root=root, storage_options=options)
    for _ in range(STARTS):
        counting.run()
    assert sum(name.endswith(".delta.arrow") for name in file_names(root, options)) > STARTS * BATCHES
    # Without the changelog backend, uploads are synchronous.
    counting.run(backends=["fsspec"])


def test_a_job_writes_to_two_stores_and_restarts_from_each(spark: Any, s3: Any, azure: Any, tmp_path: Path) -> None:
    east, west = s3.root(tmp_path.name), azure.root(tmp_path.name)
    both = ["changelog", "fsspec", Backend(west, storage_options=azure.options)]
    counting = CountingJob(spark, tmp_path, root=east, storage_options=s3.options, backends=both)
    for _ in range(STARTS):
        counting.run()
    counting.run(restore_from=west)
    # One synchronous start makes both stores complete; then the job has only one of them.
    counting.run(backends=both[1:])
    counting.run(root=west, storage_options=azure.options, backends=["changelog", "fsspec"], restore_from=None)


@pytest.mark.soak
def test_a_job_moves_to_another_root_over_several_starts(spark: Any, tmp_path: Path) -> None:
    """It uses A, then A and B, then B, and restarts at each step; at the end A is removed."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    counting = CountingJob(spark, tmp_path, root=a)
    counting.run()
    for backends in (
        ["changelog", "fsspec", Backend(b)],
        ["changelog", "fsspec", Backend(b)],
        ["changelog", Backend(b), "fsspec"],
    ):
        counting.run(backends=backends)
    # A bucket of B is complete once the bucket is called after its snapshot arrived.
    job = counting.job
    with job.running() as query:
        for at in range(4):
            letters = LETTERS[at:]
            counting.total.update(letters)
            batch = last_batch(query)
            job.feed(keyed(*letters))
            eventually(partial(is_past, query, batch))
    counting.run(root=b, backends=["changelog", "fsspec"])
    # After the query has ended, the driver may still release its lease in A.
    eventually(partial(remove, a))
    for _ in range(2):
        counting.run()


def test_a_backend_of_another_package_restores_the_state_of_a_lost_root(spark: Any, tmp_path: Path) -> None:
    """The package registers its backend with an entry point."""
    root = tmp_path / "root"
    other = Backend(name="other", kind="sqlite", options={"path": str(tmp_path / "states.sqlite")})
    counting = CountingJob(spark, tmp_path, root=str(root), backends=["changelog", "fsspec", other])
    for _ in range(STARTS):
        counting.run()
    # One synchronous start makes both backends complete.
    counting.run(backends=["fsspec", other])
    query_folders = [query_folder for query_folder in (root / "tested").iterdir() if query_folder.name != "starting"]
    for query_folder in query_folders:
        for bucket in query_folder.glob("[0-9]*"):
            shutil.rmtree(bucket)
    counting.run(backends=["changelog", "fsspec", other], restore_from="other")


def last_batch(query: Any) -> int:
    """Return the number of the query's last batch; -1 before the first."""
    return int(query.lastProgress["batchId"]) if query.lastProgress else -1


def remove(folder: str) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.exists(folder)


def is_past(query: Any, batch: int) -> bool:
    return last_batch(query) > batch


def test_metrics_report_rows_keys_times_and_restores_of_each_batch(spark: Any, tmp_path: Path) -> None:
    counting = CountingJob(spark, tmp_path)
    counting.run(batches=4)
    folder = tmp_path / "local-1"
    # The metrics are written within a second.
    eventually(lambda: read_metrics(folder).num_rows >= 16)
    batches = by_batch(read_metrics(folder)).to_pylist()
    assert [row["batch"] for row in batches] == [0, 1, 2, 3]
    letters_by_batch = [LETTERS[(1 + at) % 3 : 5 + at] * 2 for at in range(4)]
    assert [row["rows"] for row in batches] == [len(letters) for letters in letters_by_batch]
    assert [row["keys"] for row in batches] == [len(set(letters)) for letters in letters_by_batch]
    assert all(row["buckets"] == 4 for row in batches)
    for row in batches:
        assert 0 < row["user_ms"] < row["total_ms"]
        assert 0 < row["commit_ms"] < row["total_ms"]
        assert row["inline_bytes"] > 0
        assert row["wait_ms"] == 0
        assert row["restored_files"] == 0
    counting.run(batches=1)
    again = tmp_path / "local-2"
    eventually(lambda: read_metrics(again).num_rows >= 4)
    (row,) = by_batch(read_metrics(again)).to_pylist()
    # The disk was empty.
    assert row["restored_files"] > 0
    assert row["cache_hits"] < 4
