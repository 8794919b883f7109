"""Jobs of today start from what every released format has left: from roots with pointers, and from savepoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from recorded_work import job

from arrow_schemas import OperatorFile, Pointer
from spark_state_ext import RetainedCheckpoint, Savepoint, savepoint_tables
from spark_state_ext.backends.registry import Backend
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.shared import Shared
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.starting import Starts
from spark_state_ext.spark.executor.key_work import Times
from spark_state_ext.spark.executor.opening import CallFolders, CallInfo, OpenBucket, open_bucket
from spark_state_ext.worker.spill import SpillBuffer
from tests.helpers.waiting import WAIT_S

GOLDEN = Path(__file__).parent.parent / "golden"
FORMATS = sorted(GOLDEN.glob("format-*"))
SAVEPOINTS = sorted(path for folder in GOLDEN.glob("savepoint-*") for path in folder.iterdir() if path.is_dir())
BATCH_MS = 1_800_000_000_000


class Query:
    """A query of today, one bucket of which is called from batch to batch, each time by another process."""

    def __init__(self, local: Path, start: Any, operator: OperatorFile, root: Path | None = None) -> None:
        self.root, self.local, self.batch = root or local / "root", local, 0
        # Nothing is left under way when a batch is over.
        commit = CommitOptions(commit_delay_ms_max=0)
        options = StateOptions(
            root=str(self.root),
            operator=operator.operator,
            buckets=operator.buckets,
            local_dir=str(local),
            lease_ms=1_000,
            backends=(Backend(str(self.root)),),
            commit=commit,
            start_from=start,
        )
        self.job: Job = replace(
            job("pandas", "EventTimeTimeout", None, 1 << 20),
            options=options,
            key_schema=operator.key_schema,
            state_schema=operator.state_schema,
            application_id="an application",
        )

    def call(self, bucket: int, stored: Pointer | None, work: Callable[[OpenBucket], Any]) -> Any:
        """One call of a bucket, in a process and on a disk of its own."""
        self.batch += 1
        here = replace(self.job, options=replace(self.job.options, local_dir=str(self.local / f"disk-{self.batch}")))
        shared = Shared()
        info = CallInfo(
            here, bucket, TaskInfo("new-query", "run", self.batch), Times(BATCH_MS + self.batch, 0, True), stored
        )
        beginning = Starts().of(here, bucket) if stored is None else None
        opened = open_bucket(shared, info, CallFolders.of(here), b"", beginning)
        try:
            return work(opened)
        finally:
            assert shared.background.wait(WAIT_S)
            opened.bucket.close()
            opened.bucket.store.close()


def _rows(opened: OpenBucket) -> list[dict[str, Any]]:
    found = [row for batch in opened.bucket.scan() for row in batch.to_pylist()]
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


def _committed(opened: OpenBucket, local: Path) -> Pointer:
    """A pointer of the new query: each row is written once more, so that it has a file of its own."""
    buffer = SpillBuffer(local, 1 << 20)
    for batch in opened.bucket.scan():
        buffer.append(batch)
    return opened.bucket.commit(buffer).pointer


def _root_of(golden: Path, root: Path) -> tuple[Pointer, OperatorFile, Path]:
    """The golden files as a root has them, with the pointer that Spark's checkpoint held."""
    pointer = Pointer.decode((golden / "pointer.bin").read_bytes())
    folder = root / pointer.operator / pointer.query_folder
    shutil.copytree(golden / "3", folder / "3")
    shutil.copy(golden / "operator_0.json", folder)
    return pointer, OperatorFile.decode((golden / "operator_0.json").read_bytes(), "operator_0.json"), folder


@pytest.mark.parametrize("mode", ["no_claim", "claim"])
@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_root_of_every_format_starts_a_job(golden: Path, tmp_path: Path, mode: str) -> None:
    old = tmp_path / "old"
    pointer, operator, folder = _root_of(golden, old)
    start = RetainedCheckpoint(str(old), "/checkpoint", mode=mode)
    query = Query(tmp_path / "new", start, operator, old if mode == "claim" else None)
    hold = Hold.place(Folder(str(folder)), "a test")
    captured = Captured(pointer.operator, pointer.batch, (), hold.id, 0, {pointer.bucket: pointer})
    notes = query.root / operator.operator / "starting"
    notes.mkdir(parents=True)
    (notes / "captured.start.arrow").write_bytes(captured.encode())
    query.job = replace(query.job, captured="captured.start.arrow")
    expected = json.loads((golden / "expected.json").read_text("utf-8"))

    def first(opened: OpenBucket) -> Pointer:
        assert json.dumps(_rows(opened)) == json.dumps(expected)
        return _committed(opened, tmp_path)

    committed = query.call(pointer.bucket, None, first)
    adopted = committed.query_folder == pointer.query_folder
    assert adopted == (mode == "claim")
    if not adopted:
        shutil.rmtree(old)
    again = query.call(pointer.bucket, committed, _rows)
    assert json.dumps(again) == json.dumps(expected)


@pytest.fixture(params=SAVEPOINTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def savepoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, as nothing may ever change the files themselves."""
    shutil.copytree(request.param, tmp_path / "savepoint")
    return tmp_path / "savepoint"


def test_there_are_savepoints_of_the_present_format() -> None:
    assert [f"{path.parent.name}/{path.name}" for path in SAVEPOINTS] == ["savepoint-1/canonical", "savepoint-1/native"]


def _expected(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name / "expected.json").read_text("utf-8"))  # type: ignore[no-any-return]


def _shown(table: pa.Table) -> Iterator[dict[str, Any]]:
    for row in table.to_pylist():
        yield {**row, "day": str(row["day"]), "last": str(row["last"])}


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["day"], row["name"] or ""))


def test_savepoints_of_every_format_are_read_without_spark(savepoint: Path) -> None:
    header = read_manifest(Folder(str(savepoint))).header
    assert (header.form, header.batch, header.watermark_ms) == (
        "canonical" if len(list(savepoint.rglob("*.arrow"))) == 3 else "native",
        2,
        208_000,
    )
    assert header.offsets is not None
    assert header.offsets.splitlines()[-1] == '{"logOffset":2}'
    tables = list(savepoint_tables(savepoint))
    assert len(tables) == 2
    assert all(table.num_rows for table in tables), "both buckets have rows"
    assert _sorted([row for table in tables for row in _shown(table)]) == _expected("savepoint-1")


def test_savepoints_of_every_format_start_a_job_without_spark(savepoint: Path, tmp_path: Path) -> None:
    operator = read_manifest(Folder(str(savepoint))).header.operators["golden"]
    query = Query(tmp_path / "new", Savepoint(str(savepoint)), operator)
    committed = [query.call(bucket, None, lambda opened: _committed(opened, tmp_path)) for bucket in range(2)]
    shutil.rmtree(savepoint)
    rows = [row for bucket in range(2) for row in query.call(bucket, committed[bucket], _rows)]
    assert len(rows) == len(_expected("savepoint-1"))
    assert sorted(row["state.n"] for row in rows) == sorted(row["n"] for row in _expected("savepoint-1"))
