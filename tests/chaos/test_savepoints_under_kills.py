"""Savepoints of a running query; the script `savepoints_under_kills.py` runs for minutes and also kills workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from savepoints_under_kills import CONF, KEYS, ROWS, compute_state, run


def test_the_model_has_each_row_once() -> None:
    state = compute_state(6)
    assert pa.compute.sum(state["n"]).as_py() == 7 * ROWS
    assert pa.compute.max(state["last"]).as_py() == 7 * ROWS - 1
    assert state.num_rows == KEYS
    assert not state.equals(compute_state(5))


@pytest.mark.spark
@pytest.mark.slow
def test_each_savepoint_is_the_state_of_one_batch(spark: Any, tmp_path: Path) -> None:
    # Tasks of the shared session must not fail, so no worker is killed here.
    for name, value in CONF.items():
        spark.conf.set(name, value)
    try:
        outcome = run(spark, tmp_path / "run", seconds=0.0, savepoints=2, kill_every_s=0.0, seed=0)
    finally:
        for name in CONF:
            spark.conf.unset(name)
    assert not outcome.wrong
    assert not outcome.refused
    assert len(outcome.savepoints) == 2
