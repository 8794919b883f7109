"""Starts where no backend of the job, or of the query that it starts from, is a file system."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlite_backend import SqliteFiles
from started_query import GOLDEN, Query, captured, golden_root, rewritten, rows, unchanged

from arrow_schemas import Pointer
from arrow_schemas.lineage import SNAPSHOT, file_name
from spark_state_ext import Backend, RetainedCheckpoint, Savepoint
from spark_state_ext.backends import BackendContext
from spark_state_ext.errors import ExecutorPackageError, StateElsewhereError
from spark_state_ext.files.folder import Folder
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.worker.threads import CallerExecutor

FORMS = ["native", "canonical"]
FORMATS = sorted(GOLDEN.glob("format-*"))


def _sqlite(tmp_path: Path, name: str = "states") -> Backend:
    return Backend(name="other", kind="sqlite", options={"path": str(tmp_path / f"{name}.sqlite")})


def _files(backend: Backend, pointer: Pointer) -> list[str]:
    place = f"/{pointer.operator}/{pointer.query_folder}/{pointer.bucket}"
    with sqlite3.connect(backend.options["path"]) as database:
        return [name for (name,) in database.execute("SELECT name FROM files WHERE place LIKE ?", (f"%{place}",))]


@pytest.mark.parametrize("form", FORMS)
def test_a_full_snapshot_is_sent_where_no_backend_is_a_file_system(form: str, tmp_path: Path) -> None:
    savepoint = tmp_path / "savepoint"
    shutil.copytree(GOLDEN / "savepoint-1" / form, savepoint)
    operator = read_manifest(Folder(str(savepoint))).header.operators["golden"]
    backend = _sqlite(tmp_path)
    query = Query(tmp_path / "new-query", operator, Savepoint(str(savepoint)), backends=[backend])
    before = [query.call(bucket, None, rows) for bucket in range(2)]
    # Batches without a row for these buckets: what is committed is theirs alone all the same.
    committed = [query.call(bucket, None, unchanged) for bucket in range(2)]
    for pointer in committed:
        assert pointer.replication.keys() == {"other"}
        assert pointer.replication["other"].since is None, "confirmed before Spark gets the pointer"
        assert pointer.ref is not None
        assert file_name(pointer.ref, SNAPSHOT) in _files(backend, pointer)
    shutil.rmtree(savepoint)
    assert [query.call(bucket, committed[bucket], rows) for bucket in range(2)] == before
    later = [query.call(bucket, committed[bucket], rewritten) for bucket in range(2)]
    assert [query.call(bucket, later[bucket], rows) for bucket in range(2)] == before
    assert sum(len(json.loads(text)) for text in before) == 13


@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_full_snapshot_is_sent_of_what_another_query_left(golden: Path, tmp_path: Path) -> None:
    old, backend = tmp_path / "old", _sqlite(tmp_path)
    pointer, operator = golden_root(golden, old)
    # Pointers of formats 2 and 3 call the root "files".
    places = [Backend(str(old), name="files" if pointer.replication else "")]
    start = RetainedCheckpoint(str(old), "/checkpoint", backends=places)
    query = Query(tmp_path / "new-query", operator, start, backends=[backend])
    captured(query, pointer, old, pointer.operator)
    expected = json.dumps(json.loads((golden / "expected.json").read_text("utf-8")))
    committed = query.call(pointer.bucket, None, unchanged)
    assert committed.replication.keys() == {"other"}
    assert not committed.inline
    shutil.rmtree(old)
    assert query.call(pointer.bucket, committed, rows) == expected


def _left_in_sqlite(tmp_path: Path) -> tuple[Query, Pointer, str]:
    """A query whose only backend is another package's, its last pointer, and its rows."""
    operator = read_manifest(Folder(str(GOLDEN / "savepoint-1" / "native"))).header.operators["golden"]
    start = Savepoint(str(GOLDEN / "savepoint-1" / "native"))
    old = Query(tmp_path / "old-query", operator, start, backends=[_sqlite(tmp_path)])
    pointer = old.call(1, old.call(1, None, rewritten), rewritten)
    return old, pointer, old.call(1, pointer, rows)


@pytest.mark.parametrize("backends", ["a file system", "the same one", "another one"])
def test_what_another_package_keeps_is_read_for_a_start(backends: str, tmp_path: Path) -> None:
    old, pointer, expected = _left_in_sqlite(tmp_path)
    chosen: dict[str, list[Backend]] = {"a file system": [], "the same one": [_sqlite(tmp_path)]}
    chosen["another one"] = [_sqlite(tmp_path, "second")]
    start = RetainedCheckpoint(str(old.root), "/checkpoint", backends=[_sqlite(tmp_path)])
    operator = old.job.operator_file("")
    query = Query(tmp_path / "new-query", operator, start, backends=chosen[backends])
    captured(query, pointer, old.root, "golden")
    committed = query.call(1, None, unchanged)
    assert committed.query_folder == "new-query"
    # Both backends have one name here, and mean two places.
    for name in _files(_sqlite(tmp_path), pointer):
        SqliteFiles(_context(tmp_path, pointer)).remove(name)
    assert query.call(1, committed, rows) == expected


def _context(tmp_path: Path, pointer: Pointer) -> BackendContext:
    options = _sqlite(tmp_path).factory_options
    return BackendContext(
        "other", options, pointer.operator, pointer.query_folder, pointer.bucket, CallerExecutor(), tmp_path, 0.0
    )


@pytest.mark.parametrize("backends", ["a file system", "another one"])
def test_a_start_that_does_not_name_where_the_state_is_says_so(backends: str, tmp_path: Path) -> None:
    old, pointer, _ = _left_in_sqlite(tmp_path)
    start = RetainedCheckpoint(str(old.root), "/checkpoint")
    chosen = [] if backends == "a file system" else [_sqlite(tmp_path, "second")]
    query = Query(tmp_path / "new-query", old.job.operator_file(""), start, backends=chosen)
    captured(query, pointer, old.root, "golden")
    with pytest.raises(
        StateElsewhereError, match=r"has its state in other, but start_from names .*: name the backends that have it"
    ):
        query.call(1, None, unchanged)


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    old, pointer, _ = _left_in_sqlite(tmp_path)
    start = RetainedCheckpoint(str(old.root), "/checkpoint", backends=[_sqlite(tmp_path)])
    query = Query(tmp_path / "new-query", old.job.operator_file(""), start)
    captured(query, pointer, old.root, "golden")
    # The client has it, and this worker does not.
    object.__setattr__(query.job.options.start_from, "backends", (Backend(name="other", kind="tape"),))
    with pytest.raises(ExecutorPackageError, match="no installed package provides the backend kind 'tape'"):
        query.call(1, None, unchanged)


def test_a_claim_by_a_job_that_does_not_name_where_the_state_is_is_not_made(tmp_path: Path) -> None:
    old = tmp_path / "old"
    pointer, operator = golden_root(FORMATS[-1], old)
    start = RetainedCheckpoint(str(old), "/checkpoint", mode="claim")
    query = Query(tmp_path / "new-query", operator, start, old, [_sqlite(tmp_path)])
    captured(query, pointer, old, pointer.operator)
    with pytest.raises(StateElsewhereError, match="has its state in files, west, but the job names other"):
        query.call(pointer.bucket, None, unchanged)
    assert not (old / "golden" / pointer.query_folder / "lease").exists()
