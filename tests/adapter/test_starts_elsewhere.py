"""Starts if no backend of the job, or of the query that it starts from, is a file system."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlite_backend import SqliteFiles
from started_query import GOLDEN, Query, capture_pointer, commit_unchanged, copy_golden_root, read_rows, rewrite_rows

from arrow_schemas import Pointer
from arrow_schemas.lineage import SNAPSHOT, file_name
from spark_state_ext import Backend, RetainedCheckpoint, Savepoint
from spark_state_ext.backends import BackendContext
from spark_state_ext.engine.replicas import Leases
from spark_state_ext.engine.task import TaskInfo
from spark_state_ext.errors import ExecutorPackageError, LiveRunError, StateElsewhereError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import LeaseRegistry
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Claim, LeaseRecord, RunIdentity
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.worker.threads import CallerExecutor

FORMS = ["native", "canonical"]
FORMATS = sorted(GOLDEN.glob("format-*"))


def make_sqlite_backend(tmp_path: Path, name: str = "states") -> Backend:
    return Backend(name="other", kind="sqlite", options={"path": str(tmp_path / f"{name}.sqlite")})


def list_files(backend: Backend, pointer: Pointer) -> list[str]:
    place = f"/{pointer.operator}/{pointer.query_folder}/{pointer.bucket}"
    with sqlite3.connect(backend.options["path"]) as database:
        return [name for (name,) in database.execute("SELECT name FROM files WHERE place LIKE ?", (f"%{place}",))]


@pytest.mark.parametrize("form", FORMS)
def test_a_start_sends_a_full_snapshot_if_no_backend_is_a_file_system(form: str, tmp_path: Path) -> None:
    savepoint = tmp_path / "savepoint"
    shutil.copytree(GOLDEN / "savepoint-1" / form, savepoint)
    operator = read_manifest(Folder(str(savepoint))).header.operators["golden"]
    backend = make_sqlite_backend(tmp_path)
    query = Query(tmp_path / "new-query", operator, Savepoint(str(savepoint)), backends=[backend])
    before = [query.call(bucket, None, read_rows) for bucket in range(2)]
    # The batch has no row for these buckets, and yet their commit no longer needs the savepoint.
    committed = [query.call(bucket, None, commit_unchanged) for bucket in range(2)]
    for pointer in committed:
        assert pointer.replication.keys() == {"other"}
        assert pointer.replication["other"].since is None, "confirmed before Spark gets the pointer"
        assert pointer.ref is not None
        assert file_name(pointer.ref, SNAPSHOT) in list_files(backend, pointer)
    shutil.rmtree(savepoint)
    assert [query.call(bucket, committed[bucket], read_rows) for bucket in range(2)] == before
    later = [query.call(bucket, committed[bucket], rewrite_rows) for bucket in range(2)]
    assert [query.call(bucket, later[bucket], read_rows) for bucket in range(2)] == before
    assert sum(len(json.loads(text)) for text in before) == 13


@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_start_from_a_retained_checkpoint_sends_a_full_snapshot(golden: Path, tmp_path: Path) -> None:
    old, backend = tmp_path / "old", make_sqlite_backend(tmp_path)
    pointer, operator = copy_golden_root(golden, old)
    # Pointers of formats 2 and 3 name the root "files".
    places = [Backend(str(old), name="files" if pointer.replication else "")]
    start = RetainedCheckpoint(str(old), "/checkpoint", backends=places)
    query = Query(tmp_path / "new-query", operator, start, backends=[backend])
    capture_pointer(query, pointer, old, pointer.operator)
    expected = json.dumps(json.loads((golden / "expected.json").read_text("utf-8")))
    committed = query.call(pointer.bucket, None, commit_unchanged)
    assert committed.replication.keys() == {"other"}
    assert not committed.inline
    shutil.rmtree(old)
    assert query.call(pointer.bucket, committed, read_rows) == expected


def leave_state_in_sqlite(tmp_path: Path) -> tuple[Query, Pointer, str]:
    """Return a query whose only backend is of another package, its last pointer and its rows."""
    operator = read_manifest(Folder(str(GOLDEN / "savepoint-1" / "native"))).header.operators["golden"]
    start = Savepoint(str(GOLDEN / "savepoint-1" / "native"))
    old = Query(tmp_path / "old-query", operator, start, backends=[make_sqlite_backend(tmp_path)])
    pointer = old.call(1, old.call(1, None, rewrite_rows), rewrite_rows)
    return old, pointer, old.call(1, pointer, read_rows)


@pytest.mark.parametrize("backends", ["a file system", "the same one", "another one"])
def test_a_start_reads_state_from_the_backend_of_another_package(backends: str, tmp_path: Path) -> None:
    old, pointer, expected = leave_state_in_sqlite(tmp_path)
    chosen: dict[str, list[Backend]] = {"a file system": [], "the same one": [make_sqlite_backend(tmp_path)]}
    chosen["another one"] = [make_sqlite_backend(tmp_path, "second")]
    start = RetainedCheckpoint(str(old.root), "/checkpoint", backends=[make_sqlite_backend(tmp_path)])
    operator = old.job.operator_file("")
    query = Query(tmp_path / "new-query", operator, start, backends=chosen[backends])
    capture_pointer(query, pointer, old.root, "golden")
    committed = query.call(1, None, commit_unchanged)
    assert committed.query_folder == "new-query"
    # Both backends have the same name here but are two databases.
    for name in list_files(make_sqlite_backend(tmp_path), pointer):
        SqliteFiles(make_context(tmp_path, pointer)).remove(name)
    assert query.call(1, committed, read_rows) == expected


def make_context(tmp_path: Path, pointer: Pointer) -> BackendContext:
    options = make_sqlite_backend(tmp_path).factory_options
    return BackendContext(
        "other", options, pointer.operator, pointer.query_folder, pointer.bucket, CallerExecutor(), tmp_path, 0.0
    )


@pytest.mark.parametrize("backends", ["a file system", "another one"])
def test_a_start_that_does_not_name_the_backend_with_the_state_is_refused(backends: str, tmp_path: Path) -> None:
    old, pointer, _ = leave_state_in_sqlite(tmp_path)
    start = RetainedCheckpoint(str(old.root), "/checkpoint")
    chosen = [] if backends == "a file system" else [make_sqlite_backend(tmp_path, "second")]
    query = Query(tmp_path / "new-query", old.job.operator_file(""), start, backends=chosen)
    capture_pointer(query, pointer, old.root, "golden")
    with pytest.raises(
        StateElsewhereError, match=r"has its state in other, but start_from names .*: name the backends that have it"
    ):
        query.call(1, None, commit_unchanged)


def test_the_error_of_a_missing_package_names_the_backend_kind(tmp_path: Path) -> None:
    old, pointer, _ = leave_state_in_sqlite(tmp_path)
    start = RetainedCheckpoint(str(old.root), "/checkpoint", backends=[make_sqlite_backend(tmp_path)])
    query = Query(tmp_path / "new-query", old.job.operator_file(""), start)
    capture_pointer(query, pointer, old.root, "golden")
    # The client has the package, but this worker does not.
    object.__setattr__(query.job.options.start_from, "backends", (Backend(name="other", kind="tape"),))
    with pytest.raises(ExecutorPackageError, match="no installed package provides the backend kind 'tape'"):
        query.call(1, None, commit_unchanged)


def test_a_claim_by_a_job_that_does_not_name_the_backend_with_the_state_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old"
    pointer, operator = copy_golden_root(FORMATS[-1], old)
    start = RetainedCheckpoint(str(old), "/checkpoint", mode="claim")
    query = Query(tmp_path / "new-query", operator, start, old, [make_sqlite_backend(tmp_path)])
    capture_pointer(query, pointer, old, pointer.operator)
    with pytest.raises(StateElsewhereError, match="has its state in files, west, but the job names other"):
        query.call(pointer.bucket, None, commit_unchanged)
    assert not (old / "golden" / pointer.query_folder / "lease").exists()


def test_a_claim_follows_the_last_record_of_the_root_alone(tmp_path: Path) -> None:
    """A backend that was added later has fewer lease records than the root."""
    operator = read_manifest(Folder(str(GOLDEN / "savepoint-1" / "native"))).header.operators["golden"]
    roots = [tmp_path / "root", tmp_path / "added"]
    query = Query(tmp_path / "new", operator, None, roots[0], [Backend(str(root), name=root.name) for root in roots])
    old = RunIdentity("an old application", "its plan", "old", "its host")
    for root, renewals in zip(roots, (5, 4), strict=True):
        log = LeaseLog(Folder(str(root)).child("golden", "old"))
        for _ in range(renewals):
            assert log.append(log.newest(), LeaseRecord(old, 1_000, 500, released=True))
    newest = LeaseLog(Folder(str(roots[0])).child("golden", "old")).newest()
    assert newest is not None
    claim = Claim("new", str(roots[0]), 1_000, after=newest.number)
    task = TaskInfo("new", "run", 0)
    leases = Leases.of(
        query.job, task, Folder(str(roots[0])).child("golden"), "old", LeaseRegistry(), claim, claims=True
    )
    leases.hold()
    for folder in leases.folders:
        newest = LeaseLog(folder).newest()
        assert newest is not None
        assert newest.record.claim is not None
        assert newest.record.claim.id == claim.id
    # A record that the old query wrote since, in the root, is still noticed.
    late = Leases.of(
        query.job, task, Folder(str(roots[0])).child("golden"), "other", LeaseRegistry(), claim, claims=True
    )
    with pytest.raises(LiveRunError, match="was written since its checkpoint was read"):
        late.hold()
