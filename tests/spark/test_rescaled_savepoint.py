"""A savepoint that was written anew with another number of buckets: jobs on real Spark start from it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import reads_state
from savepoint_job import Query, batch_computation, file_of

from arrow_schemas import BucketMap
from spark_state_ext import Savepoint, open_committed, rescale_savepoint, take_savepoint

pytestmark = [pytest.mark.spark, reads_state]


def test_jobs_start_from_it(spark: Any, tmp_path: Path) -> None:
    old = Query(tmp_path / "old", str(tmp_path / "old" / "root"), {}, 3)
    old.feed(range(3))
    old.run(spark)
    taken = str(tmp_path / "savepoint")
    take_savepoint(spark, taken, old.checkpoint, old.state)
    made = rescale_savepoint(taken, str(tmp_path / "rescaled"), BucketMap(8))
    assert next(iter(made.operators.values())).rows == len(batch_computation(file_of(at, False) for at in range(3)))
    for gone in (old.root, taken):
        shutil.rmtree(gone)
    new = replace(Query(tmp_path / "new", str(tmp_path / "new" / "root"), {}, 8), start_from=Savepoint(made.path))
    new.feed(range(3, 5))
    new.run(spark)
    # It needs nothing of the savepoint any more.
    shutil.rmtree(made.path)
    shutil.rmtree(new.folder / "local")
    new.feed([5])
    new.run(spark)
    with open_committed(spark, new.root, str(new.checkpoint)) as state:
        assert state.buckets == 8
        found = {row["key"]: (row["n"], row["total"]) for row in state.scan().read_all().to_pylist()}
    assert found == batch_computation(file_of(at, False) for at in range(6))
