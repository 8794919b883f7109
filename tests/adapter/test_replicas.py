"""Managers of backends that a worker keeps from call to call, and when it closes them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_work import job as recorded_job

from arrow_schemas.lineage import DELTA, CheckpointRef, file_name, new_checkpoint_id
from arrow_schemas.row import RowSchema
from spark_state_ext.backends import STATE, BackendContext, Markers
from spark_state_ext.backends.files import FilesBackend, FilesBackup
from spark_state_ext.backends.registry import Backend
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.uploads import Upload, WorkerUploads
from spark_state_ext.engine import replicas
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.errors import InterruptedRestoreError
from spark_state_ext.files.sealed_file import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.background import Background
from tests.helpers.waiting import WAIT_S


class Closing(FilesBackup):
    """A backup that tells that it was closed, and whose uploads wait."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.closed = threading.Event()
        self.gate: Future[Markers] = Future()

    def upload(self, ref: CheckpointRef, markers: Markers) -> Future[Markers]:
        return self.gate

    def close(self) -> None:
        super().close()
        self.closed.set()


class ClosingBackend(FilesBackend):
    """The backend ``fsspec`` with these."""

    def backup_manager(self, context: BackendContext) -> Closing:
        made = super().backup_manager(context)
        assert isinstance(made, FilesBackup)
        return Closing(made.folder, context)


class Process:
    """The worker process of a test."""

    background: Background
    uploads: WorkerUploads
    replicas: Replicas


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(replicas, "load_factory", lambda kind: ClosingBackend())
    background, uploads = Background(), WorkerUploads()
    monkeypatch.setattr(Process, "background", background, raising=False)
    monkeypatch.setattr(Process, "uploads", uploads, raising=False)
    monkeypatch.setattr(Process, "replicas", Replicas(background, uploads), raising=False)
    root = str(tmp_path / "root")
    made = recorded_job("pandas", "NoTimeout", None, 1 << 20)
    return replace(made, options=replace(made.options, root=root, backends=(Backend(root),)))


def _replica(job: Job, tmp_path: Path, bucket: int = 3) -> Replica:
    (replica,) = Process.replicas.of(job, "home", bucket, tmp_path)
    return replica


def _closed(replica: Replica) -> bool:
    """After all that waits in the background."""
    assert Process.background.wait(WAIT_S)
    assert isinstance(replica.backup, Closing)
    return replica.backup.closed.is_set()


def _restore_is_closed(replica: Replica) -> bool:
    try:
        return not replica.restore.restore().size("operator_0.json")
    except InterruptedRestoreError:
        return True
    except FileNotFoundError:
        return False


def test_managers_are_kept_until_their_bucket_is_forgotten(job: Job, tmp_path: Path) -> None:
    """As after a call that failed: its restore has ended, and the next call must be able to read."""
    replica = _replica(job, tmp_path)
    assert _replica(job, tmp_path) is replica
    Process.replicas.forget(job, "home", 3)
    assert _restore_is_closed(replica)
    assert _closed(replica)
    again = _replica(job, tmp_path)
    assert again is not replica
    assert not _restore_is_closed(again)
    # What is not kept, nobody need close.
    Process.replicas.forget(job, "home", 4)


def test_managers_of_buckets_that_were_used_long_ago_are_closed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_BUCKETS_MAX", 2)
    first, second, third = (_replica(job, tmp_path, bucket) for bucket in range(3))
    assert _closed(first)
    assert _restore_is_closed(first)
    assert not _closed(second)
    assert not _closed(third)


def test_a_backup_with_uploads_under_way_is_closed_later(job: Job, tmp_path: Path) -> None:
    """Another attempt in this process waits for them."""
    replica, other = _replica(job, tmp_path), _replica(job, tmp_path, 4)
    assert isinstance(replica.backup, Closing)
    store = LocalStore.at(tmp_path / "store", RowSchema((), ()))
    ref = CheckpointRef(1, new_checkpoint_id())
    name = file_name(ref, DELTA)
    markers = replica.backup.snapshot(ref, {STATE: SealedFile.of(name, b"x")})
    upload = Upload(store, replica.name, replica.backup, ref, name, markers, 1)
    uploads = Process.uploads
    uploads.submit([upload])
    Process.replicas.forget(job, "home", 3)
    assert not _closed(replica)
    replica.backup.gate.set_result(markers)
    assert upload.done.result(WAIT_S) == markers
    Process.replicas.forget(job, "home", 4)
    assert _closed(other)
    assert _closed(replica)
    store.close()
