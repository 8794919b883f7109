"""Checkpoints that older releases of Spark wrote (`tests/golden/make_native.py`) are imported by every newer one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import reads_state

from spark_state_ext import import_native, read_savepoint

pytestmark = [pytest.mark.spark, reads_state]

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("provider", ["hdfs", "rocksdb"])
@pytest.mark.parametrize("release", ["3.5"])
def test_a_checkpoint_of_an_older_spark_is_imported(spark: Any, tmp_path: Path, release: str, provider: str) -> None:
    old = GOLDEN / f"native-{release}" / provider

    job = import_native(spark, old, tmp_path / "savepoint", tmp_path / "new", buckets=2, operator="golden", idle_s=0)

    rows = {row.key: (row.n, row.half, row.timeout_ms) for row in read_savepoint(spark, job.savepoint.path).collect()}
    assert rows == {
        "a": (2, 1.0, 2_000_000),
        "b": (1, 0.5, None),
        "c": (1, 0.5, 1_000_000),
        "gone": (None, None, 1_000_000),
    }
    assert (job.rows, job.states, job.timeouts) == (4, 3, 3)
    assert sorted(path.name for path in (tmp_path / "new" / "commits").iterdir()) == [str(job.batch)]
    assert json.loads((tmp_path / "new" / "metadata").read_text())["id"] == job.query_id
    assert {path.name for path in (tmp_path / "new" / "sources" / "0").iterdir()} == {
        path.name for path in (old / "sources" / "0").iterdir()
    }
