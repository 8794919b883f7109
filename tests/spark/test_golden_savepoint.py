"""On real Spark, current jobs start from golden savepoints, and from roots of the first format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import reads_state
from test_savepoints import FIRST, NEXT, Query, counted

from spark_state_ext import ArrowState, RetainedCheckpoint, Savepoint
from tests.golden.make_savepoint import BATCHES, BUCKETS, OPERATOR, Row, expected, feed, rows, run

pytestmark = pytest.mark.spark

GOLDEN = Path(__file__).parent.parent / "golden"
SAVEPOINTS = sorted(path for folder in GOLDEN.glob("savepoint-*") for path in folder.iterdir() if path.is_dir())
# The first batch has a row that is late by the saved watermark, which Spark does not know in the new query.
LATE = 150
MORE: list[list[Row]] = [[*rows([1, 7, 30], 400), *rows([2], LATE)], rows([3], 20_000), rows([3], 20_001)]


def as_dict(row: Any) -> dict[str, Any]:
    return {"name": row.name, "day": str(row.day), "n": row.n, "total": row.total, "tags": row.tags}


def expected_rows(batches: list[list[Row]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in ("name", "day", "n", "total", "tags")} for row in expected(batches)]


@pytest.mark.parametrize("golden", SAVEPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_job_starts_from_a_golden_savepoint(spark: Any, golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden, tmp_path / "savepoint")
    feed(tmp_path / "in", MORE)
    state = ArrowState(
        str(tmp_path / "root"),
        OPERATOR,
        buckets=BUCKETS,
        local_dir=str(tmp_path / "local"),
        start_from=Savepoint(str(tmp_path / "savepoint")),
    )
    output = run(spark, tmp_path, state)
    on_time = [[row for row in MORE[0] if row[2] >= LATE + 100], *MORE[1:]]
    first = [as_dict(row) for batch, row in output if batch == 0]
    keys = {(row[0], str(row[1])) for row in on_time[0]}
    assert sorted(first, key=str) == sorted(
        [row for row in expected_rows([*BATCHES, on_time[0]]) if (row["name"], row["day"]) in keys], key=str
    )
    # Each key without rows times out once, even if the new query never saw it.
    timed_out = [as_dict(row) for _, row in output if row.gone]
    quiet = [row for row in expected_rows([*BATCHES, on_time[0]]) if row["name"] != "key 3 ü"]
    assert len(quiet) > 12
    assert sorted(timed_out, key=str) == sorted(quiet, key=str)


@reads_state
@pytest.mark.parametrize("mode", ["no_claim", "claim"])
def test_a_job_starts_from_a_root_of_the_first_format(spark: Any, tmp_path: Path, mode: str) -> None:
    """`pointer_write="v1"` writes byte for byte what the first versions of this package wrote."""
    old = Query(spark, tmp_path / "old", pointer_write="v1", pointer_read="v1").run(FIRST)
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), mode=mode)
    options = {"root": root} if mode == "claim" else {}
    new = Query(spark, tmp_path / "new", start_from=start, **options).run(NEXT)
    assert new.table["a"] == counted(FIRST, NEXT)["a"]
    new.run([["a", "d"]])
    assert (new.table["a"], new.table["d"]) == (counted(FIRST, NEXT)["a"] + 1, 2)
