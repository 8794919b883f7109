"""Savepoints back to back of a query that runs; `savepoints_under_kills.py` goes on for minutes, and kills workers meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from savepoints_under_kills import CONF, KEYS, ROWS, expected, run


def test_the_model_has_each_row_once() -> None:
    found = expected(6)
    assert pa.compute.sum(found["n"]).as_py() == 7 * ROWS
    assert pa.compute.max(found["last"]).as_py() == 7 * ROWS - 1
    assert found.num_rows == KEYS
    assert not found.equals(expected(5))


@pytest.mark.spark
@pytest.mark.slow
def test_each_savepoint_is_the_state_of_one_batch(spark: Any, tmp_path: Path) -> None:
    # Tasks of the shared session must not fail, so nobody is killed here.
    for name, value in CONF.items():
        spark.conf.set(name, value)
    try:
        seen = run(spark, tmp_path / "run", seconds=0.0, savepoints=2, kill_every_s=0.0, seed=0)
    finally:
        for name in CONF:
            spark.conf.unset(name)
    assert not seen.wrong
    assert not seen.refused
    assert len(seen.savepoints) == 2
