"""Jobs on real Spark start from a savepoint that was rewritten with another number of buckets."""

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
from tests.helpers.waiting import removed

pytestmark = [pytest.mark.spark, reads_state]


def test_a_job_starts_from_a_rescaled_savepoint(spark: Any, tmp_path: Path) -> None:
    old = Query(tmp_path / "old", str(tmp_path / "old" / "root"), {}, 3)
    old.feed(range(3))
    old.run(spark)
    original_path = str(tmp_path / "savepoint")
    take_savepoint(spark, original_path, old.checkpoint, old.state)
    rescaled = rescale_savepoint(original_path, str(tmp_path / "rescaled"), BucketMap(8))
    assert next(iter(rescaled.operators.values())).rows == len(
        batch_computation(file_of(number, False) for number in range(3))
    )
    for folder in (old.root, original_path):
        removed(Path(folder))
    new = replace(Query(tmp_path / "new", str(tmp_path / "new" / "root"), {}, 8), start_from=Savepoint(rescaled.path))
    new.feed(range(3, 5))
    new.run(spark)
    # The job no longer needs the savepoint.
    shutil.rmtree(rescaled.path)
    removed(new.folder / "local")
    new.feed([5])
    new.run(spark)
    with open_committed(spark, new.root, str(new.checkpoint)) as state:
        assert state.buckets == 8
        rows = {row["key"]: (row["n"], row["total"]) for row in state.scan().read_all().to_pylist()}
    assert rows == batch_computation(file_of(number, False) for number in range(6))
