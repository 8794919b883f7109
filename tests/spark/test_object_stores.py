"""Jobs whose state lies in object stores, over real HTTP, in several at once, and on its way from one to another."""

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
# Of each start, and how often it starts.
BATCHES, STARTS = examples(2, 3), examples(2, 4)


class Counted:
    """A job that counts letters, from start to start, and what it must have counted."""

    def __init__(self, session: Any, folder: Path, **options: Any) -> None:
        self.job = Job(session, "arrow", folder, count, COUNTS, options={"buckets": 4, **options})
        self.total: Counter[str] = Counter()
        self.starts = 0

    def run(self, batches: int = BATCHES, **options: Any) -> None:
        """Another start, on a machine with an empty disk."""
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
    """A store and options for it: s3fs, somebody else's implementation of fsspec, and adlfs."""
    if request.param == "azure":
        azure = request.getfixturevalue("azure")
        return azure, azure.options
    s3 = request.getfixturevalue("s3")
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="obstore has no release for this version of Python")
        return s3, s3.obstore_options
    return s3, s3.options


def _files(root: str, options: dict[str, Any]) -> list[str]:
    operator = Folder(root, options).child("tested")
    query_folders = [name for name in operator.names() if name not in ("spill", "starting")]
    found = [operator.child(query_folder, str(bucket)).names() for query_folder in query_folders for bucket in range(4)]
    return [name for names in found for name in names]


def test_a_job_on_an_object_store(spark: Any, store: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    """Restarted again and again where nothing is on the disk: all of the state comes from the store and Spark's own."""
    server, options = store
    root = server.root(tmp_path.name)
    counted = Counted(spark, tmp_path, root=root, storage_options=options)
    for _ in range(STARTS):
        counted.run()
    assert sum(name.endswith(".delta.arrow") for name in _files(root, options)) > STARTS * BATCHES
    # And synchronously.
    counted.run(backends=["fsspec"])


def test_two_stores_at_once_and_each_alone(spark: Any, s3: Any, azure: Any, tmp_path: Path) -> None:
    east, west = s3.root(tmp_path.name), azure.root(tmp_path.name)
    both = ["changelog", "fsspec", Backend(west, storage_options=azure.options)]
    counted = Counted(spark, tmp_path, root=east, storage_options=s3.options, backends=both)
    for _ in range(STARTS):
        counted.run()
    counted.run(restore_from=west)
    # Synchronously once, so that both have everything; then one of them is all there is.
    counted.run(backends=both[1:])
    counted.run(root=west, storage_options=azure.options, backends=["changelog", "fsspec"], restore_from=None)


def test_from_one_root_to_another_while_the_job_runs(spark: Any, tmp_path: Path) -> None:
    """A, then A and B, then B; restarted at every stage; at the end A is gone."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    counted = Counted(spark, tmp_path, root=a)
    counted.run()
    for backends in (
        ["changelog", "fsspec", Backend(b)],
        ["changelog", "fsspec", Backend(b)],
        ["changelog", Backend(b), "fsspec"],
    ):
        counted.run(backends=backends)
    # B holds everything in every bucket once each has been called after its snapshot arrived.
    job = counted.job
    with job.running() as query:
        for at in range(4):
            fed = LETTERS[at:]
            counted.total.update(fed)
            done = _batches(query)
            job.feed(keyed(*fed))
            eventually(partial(_is_past, query, done))
    counted.run(root=b, backends=["changelog", "fsspec"])
    # The driver may still be about to release the lease there, after the query's end.
    eventually(partial(_removed, a))
    for _ in range(2):
        counted.run()


def test_beside_a_backend_of_another_package(spark: Any, tmp_path: Path) -> None:
    """Registered by entry point; then the root is lost."""
    root = tmp_path / "root"
    other = Backend(name="other", kind="sqlite", options={"path": str(tmp_path / "states.sqlite")})
    counted = Counted(spark, tmp_path, root=str(root), backends=["changelog", "fsspec", other])
    for _ in range(STARTS):
        counted.run()
    # Synchronously once, so that both have everything.
    counted.run(backends=["fsspec", other])
    query_folders = [query_folder for query_folder in (root / "tested").iterdir() if query_folder.name != "starting"]
    for query_folder in query_folders:
        for bucket in query_folder.glob("[0-9]*"):
            shutil.rmtree(bucket)
    counted.run(backends=["changelog", "fsspec", other], restore_from="other")


def _batches(query: Any) -> int:
    """Number of its last batch; -1 before the first."""
    return int(query.lastProgress["batchId"]) if query.lastProgress else -1


def _removed(folder: str) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.exists(folder)


def _is_past(query: Any, batch: int) -> bool:
    return _batches(query) > batch


def test_metrics_tell_what_the_batches_did(spark: Any, tmp_path: Path) -> None:
    counted = Counted(spark, tmp_path)
    counted.run(batches=4)
    folder = tmp_path / "local-1"
    # Written within a second.
    eventually(lambda: read_metrics(folder).num_rows >= 16)
    batches = by_batch(read_metrics(folder)).to_pylist()
    assert [row["batch"] for row in batches] == [0, 1, 2, 3]
    fed = [LETTERS[(1 + at) % 3 : 5 + at] * 2 for at in range(4)]
    assert [row["rows"] for row in batches] == [len(letters) for letters in fed]
    assert [row["keys"] for row in batches] == [len(set(letters)) for letters in fed]
    assert all(row["buckets"] == 4 for row in batches)
    for row in batches:
        assert 0 < row["user_ms"] < row["total_ms"]
        assert 0 < row["commit_ms"] < row["total_ms"]
        assert row["inline_bytes"] > 0
        assert row["wait_ms"] == 0
        assert row["restored_files"] == 0
    counted.run(batches=1)
    again = tmp_path / "local-2"
    eventually(lambda: read_metrics(again).num_rows >= 4)
    (row,) = by_batch(read_metrics(again)).to_pylist()
    # Nothing was on the disk.
    assert row["restored_files"] > 0
    assert row["cache_hits"] < 4
