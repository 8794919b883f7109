"""A job whose root is not where its state lies."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_work import job

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


def _job(root: Path, *backends: Backend) -> Job:
    made = job("pandas", "NoTimeout", None, 1 << 20)
    options = replace(made.options, root=str(root), backends=backends or (Backend(str(root)),))
    return replace(made, options=options)


def _pointer(*replication: tuple[Path | str, ReplicationStatus]) -> Pointer:
    return Pointer("recorded", 3, 8, 0, 5, None, QUERY_FOLDER, replication={str(name): it for name, it in replication})


def _root(path: Path, *names: str) -> Path:
    query_folder = path / "operator" / QUERY_FOLDER
    (query_folder / "3").mkdir(parents=True)
    (query_folder / "operator_0.json").write_text("{}")
    for name in names:
        (query_folder / "3" / name).write_bytes(b"file")
    return path


def _refuse(the_job: Job, pointer: Pointer, scratch: Path) -> None:
    the_job = replace(the_job, options=replace(the_job.options, operator="operator"))
    Replicas(Background(), WorkerUploads()).refuse_elsewhere(
        the_job, Folder(the_job.options.root).child("operator"), pointer, scratch
    )


def _tree(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


@pytest.mark.parametrize("through", [None, NEWEST], ids=["all in Spark's state", "in files"])
def test_a_root_that_has_nothing_is_refused(tmp_path: Path, through: CheckpointRef | None) -> None:
    a, b = _root(tmp_path / "a", file_name(NEWEST, DELTA)), tmp_path / "b"
    pointer = _pointer((a, ReplicationStatus(through)))
    before = _tree(tmp_path)
    with pytest.raises(StateElsewhereError, match=f"'operator' has its state in {a}, but the job names {b},") as raised:
        _refuse(_job(b), pointer, tmp_path)
    assert f"set the root back to {a}" in str(raised.value)
    assert isinstance(raised.value, ChangedJobError)
    assert _tree(tmp_path) == before, "nothing was written"
    _refuse(_job(a), pointer, tmp_path)


def test_a_root_that_was_left_out_of_the_backends_is_to_be_added(tmp_path: Path) -> None:
    """The root is right: to set it back would change nothing."""
    a, b = _root(tmp_path / "a", file_name(NEWEST, DELTA)), tmp_path / "b"
    with pytest.raises(StateElsewhereError, match="add 'fsspec' to backends, which means the root") as raised:
        _refuse(_job(a, Backend(str(b))), _pointer((a, ReplicationStatus(NEWEST))), tmp_path)
    assert f"has its state in {a}, but the job names {b}, which does not have it" in str(raised.value)
    assert "set the root back" not in str(raised.value)
    assert f"looked for under {a}" not in str(raised.value)


@pytest.mark.parametrize("kind", [DELTA, SNAPSHOT])
def test_a_root_that_was_copied_is_taken(tmp_path: Path, kind: str) -> None:
    a = _root(tmp_path / "a", file_name(NEWEST, kind))
    shutil.copytree(a, tmp_path / "b")
    _refuse(_job(tmp_path / "b"), _pointer((a, ReplicationStatus(NEWEST))), tmp_path)
    _refuse(_job(tmp_path / "b"), _pointer((a, ReplicationStatus(None))), tmp_path)


def test_a_copy_from_before_the_newest_file_is_refused(tmp_path: Path) -> None:
    a = tmp_path / "a"
    b = _root(tmp_path / "b", file_name(FIRST, DELTA))
    with pytest.raises(StateElsewhereError):
        _refuse(_job(b), _pointer((a, ReplicationStatus(NEWEST))), tmp_path)


def test_one_of_several_places_is_enough(tmp_path: Path) -> None:
    """That which is named need not be asked: restores look for themselves, and a removed root is written anew."""
    a, b = tmp_path / "a", tmp_path / "b"
    pointer = _pointer((a, ReplicationStatus(NEWEST)), (b, ReplicationStatus(NEWEST, since=NEWEST)))
    for backends in ([Backend(str(b))], [Backend(str(tmp_path / "c")), Backend(str(a))]):
        _refuse(_job(tmp_path / "c", *backends), pointer, tmp_path)
    # Moved files, under their old name.
    _refuse(_job(tmp_path / "c", Backend(str(tmp_path / "c"), name=str(a))), pointer, tmp_path)


def test_a_pointer_that_names_no_places_is_taken(tmp_path: Path) -> None:
    """Of an old format: the root is meant, whatever it is called."""
    _refuse(_job(tmp_path / "a"), _pointer(), tmp_path)


def test_a_place_that_does_not_answer_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Folder, name: str) -> Any:
        raise StorageError("reading: rights") from PermissionError("rights")

    monkeypatch.setattr(Folder, "size", refused)
    with pytest.raises(StorageError, match="rights"):
        _refuse(_job(tmp_path / "b"), _pointer((tmp_path / "a", ReplicationStatus(NEWEST))), tmp_path)
