"""Current jobs start from the roots with pointers and from the savepoints of every released format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from started_query import GOLDEN, Query, capture_pointer, copy_golden_root, read_rows, rewrite_rows

from spark_state_ext import RetainedCheckpoint, Savepoint, savepoint_tables
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import read_manifest

FORMATS = sorted(GOLDEN.glob("format-*"))
SAVEPOINTS = sorted(path for folder in GOLDEN.glob("savepoint-*") for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("mode", ["no_claim", "claim"])
@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_root_of_every_format_starts_a_job(golden: Path, tmp_path: Path, mode: str) -> None:
    old = tmp_path / "old"
    pointer, operator = copy_golden_root(golden, old)
    start = RetainedCheckpoint(str(old), "/checkpoint", mode=mode)
    query = Query(tmp_path / "new-query", operator, start, old if mode == "claim" else None)
    capture_pointer(query, pointer, old, pointer.operator)
    expected = json.dumps(json.loads((golden / "expected.json").read_text("utf-8")))
    assert query.call(pointer.bucket, None, read_rows) == expected
    committed = query.call(pointer.bucket, None, rewrite_rows)
    adopted = committed.query_folder == pointer.query_folder
    assert adopted == (mode == "claim")
    if not adopted:
        shutil.rmtree(old)
    assert query.call(pointer.bucket, committed, read_rows) == expected


@pytest.fixture(params=SAVEPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def savepoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy, because the golden files must never change."""
    shutil.copytree(request.param, tmp_path / request.param.name)
    return tmp_path / str(request.param.name)


def test_golden_savepoints_of_the_current_format_exist() -> None:
    assert [f"{path.parent.name}/{path.name}" for path in SAVEPOINTS] == ["savepoint-1/canonical", "savepoint-1/native"]


def read_expected() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((GOLDEN / "savepoint-1" / "expected.json").read_text("utf-8"))
    return rows


def format_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for row in table.to_pylist():
        yield {**row, "day": str(row["day"]), "last": str(row["last"])}


def test_savepoint_tables_reads_savepoints_of_every_format(savepoint: Path) -> None:
    header = read_manifest(Folder(str(savepoint))).header
    assert (header.form, header.batch, header.watermark_ms) == (savepoint.name, 2, 208_000)
    assert header.offsets is not None
    assert header.offsets.splitlines()[-1] == '{"logOffset":2}'
    tables = list(savepoint_tables(savepoint))
    assert len(tables) == 2
    assert all(table.num_rows for table in tables), "both buckets have rows"
    rows = [row for table in tables for row in format_rows(table)]
    assert sorted(rows, key=lambda row: (row["day"], row["name"] or "")) == read_expected()
    assert all(row["timeout_ms"] for row in rows)


def test_a_golden_savepoint_has_files_of_every_kind() -> None:
    """The other tests need deltas of several batches, one of which was in a pointer only."""
    native, canonical = (read_manifest(Folder(str(GOLDEN / "savepoint-1" / form))) for form in ("native", "canonical"))
    kinds = [[file.name.split(".")[1] for file in saved.files] for saved in (*native.buckets, *canonical.buckets)]
    assert kinds == [["delta"] * 2, ["delta"] * 3, ["snapshot"], ["snapshot"]]
    assert all(saved.pointer.earliest_timeout_ms is None for saved in native.buckets), "timeouts are by event time"


def test_savepoints_of_every_format_start_a_job(savepoint: Path, tmp_path: Path) -> None:
    operator = read_manifest(Folder(str(savepoint))).header.operators["golden"]
    query = Query(tmp_path / "new-query", operator, Savepoint(str(savepoint)))
    committed = [query.call(bucket, None, rewrite_rows) for bucket in range(2)]
    shutil.rmtree(savepoint)
    rows = [row for bucket in range(2) for row in json.loads(query.call(bucket, committed[bucket], read_rows))]
    assert sorted(row["state.n"] for row in rows) == sorted(row["n"] for row in read_expected())
