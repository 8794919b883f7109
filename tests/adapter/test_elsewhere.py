"""A job whose root does not contain its state."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_work import make_job

from arrow_schemas import CheckpointRef, Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name
from arrow_schemas.pointer import ReplicationStatus
from spark_state_ext.backends.registry import Backend
from spark_state_ext.commit.uploads import WorkerUploads
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.errors import ChangedJobError, StateElsewhereError, StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.background import Background

QUERY_FOLDER = "home"
FIRST, NEWEST = CheckpointRef(4, "a" * 32), CheckpointRef(7, "b" * 32)


def job_at(root: Path, *backends: Backend) -> Job:
    template = make_job("pandas", "NoTimeout", None, 1 << 20)
    options = replace(template.options, root=str(root), backends=backends or (Backend(str(root)),))
    return replace(template, options=options)


def make_pointer(*replication: tuple[Path | str, ReplicationStatus]) -> Pointer:
    return Pointer(
        "recorded", 3, 8, 0, 5, None, QUERY_FOLDER, replication={str(name): status for name, status in replication}
    )


def make_root(path: Path, *names: str) -> Path:
    query_folder = path / "operator" / QUERY_FOLDER
    (query_folder / "3").mkdir(parents=True)
    (query_folder / "operator_0.json").write_text("{}")
    for name in names:
        (query_folder / "3" / name).write_bytes(b"file")
    return path


def refuse(job: Job, pointer: Pointer, scratch: Path) -> None:
    job = replace(job, options=replace(job.options, operator="operator"))
    Replicas(Background(), WorkerUploads()).refuse_elsewhere(
        job, Folder(job.options.root).child("operator"), pointer, scratch
    )


def list_tree(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@pytest.mark.parametrize("through", [None, NEWEST], ids=["state in Spark only", "state in files"])
def test_an_empty_root_is_refused(tmp_path: Path, through: CheckpointRef | None) -> None:
    a, b = make_root(tmp_path / "a", file_name(NEWEST, DELTA)), tmp_path / "b"
    pointer = make_pointer((a, ReplicationStatus(through)))
    before = list_tree(tmp_path)
    with pytest.raises(StateElsewhereError, match=f"'operator' has its state in {a}, but the job names {b},") as raised:
        refuse(job_at(b), pointer, tmp_path)
    assert f"set the root back to {a}" in str(raised.value)
    assert isinstance(raised.value, ChangedJobError)
    assert list_tree(tmp_path) == before, "no file was written"
    refuse(job_at(a), pointer, tmp_path)


def test_the_error_asks_to_add_a_root_that_is_missing_in_the_backends(tmp_path: Path) -> None:
    """The root is right, so that setting it back would not help."""
    a, b = make_root(tmp_path / "a", file_name(NEWEST, DELTA)), tmp_path / "b"
    with pytest.raises(StateElsewhereError, match="add 'fsspec' to backends, which means the root") as raised:
        refuse(job_at(a, Backend(str(b))), make_pointer((a, ReplicationStatus(NEWEST))), tmp_path)
    assert f"has its state in {a}, but the job names {b}, which does not have it" in str(raised.value)
    assert "set the root back" not in str(raised.value)
    assert f"looked for under {a}" not in str(raised.value)


@pytest.mark.parametrize("kind", [DELTA, SNAPSHOT])
def test_a_copied_root_is_accepted(tmp_path: Path, kind: str) -> None:
    a = make_root(tmp_path / "a", file_name(NEWEST, kind))
    shutil.copytree(a, tmp_path / "b")
    refuse(job_at(tmp_path / "b"), make_pointer((a, ReplicationStatus(NEWEST))), tmp_path)
    refuse(job_at(tmp_path / "b"), make_pointer((a, ReplicationStatus(None))), tmp_path)


def test_a_copy_from_before_the_newest_file_is_refused(tmp_path: Path) -> None:
    a = tmp_path / "a"
    b = make_root(tmp_path / "b", file_name(FIRST, DELTA))
    with pytest.raises(StateElsewhereError):
        refuse(job_at(b), make_pointer((a, ReplicationStatus(NEWEST))), tmp_path)


def test_one_of_several_backends_with_the_state_is_enough(tmp_path: Path) -> None:
    """The backend that the pointer names is not asked: restores look there, and a removed root is written again."""
    a, b = tmp_path / "a", tmp_path / "b"
    pointer = make_pointer((a, ReplicationStatus(NEWEST)), (b, ReplicationStatus(NEWEST, since=NEWEST)))
    for backends in ([Backend(str(b))], [Backend(str(tmp_path / "c")), Backend(str(a))]):
        refuse(job_at(tmp_path / "c", *backends), pointer, tmp_path)
    # The files were moved, and the backend keeps its old name.
    refuse(job_at(tmp_path / "c", Backend(str(tmp_path / "c"), name=str(a))), pointer, tmp_path)


def test_a_pointer_without_backends_is_accepted(tmp_path: Path) -> None:
    """Pointers of an old format mean the root, whatever its name is."""
    refuse(job_at(tmp_path / "a"), make_pointer(), tmp_path)


def test_a_backend_that_fails_is_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_denied(self: Folder, name: str) -> Any:
        raise StorageError("reading: rights") from PermissionError("rights")

    monkeypatch.setattr(Folder, "size", raise_denied)
    with pytest.raises(StorageError, match="rights"):
        refuse(job_at(tmp_path / "b"), make_pointer((tmp_path / "a", ReplicationStatus(NEWEST))), tmp_path)
