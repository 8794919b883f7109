"""The backends' managers, which a worker keeps between calls, and when it closes them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_work import make_job

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
    """A backup manager that records that it was closed, and whose uploads wait."""

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
    """The backend ``fsspec`` with such backup managers."""

    def backup_manager(self, context: BackendContext) -> Closing:
        manager = super().backup_manager(context)
        assert isinstance(manager, FilesBackup)
        return Closing(manager.folder, context)


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
    template = make_job("pandas", "NoTimeout", None, 1 << 20)
    return replace(template, options=replace(template.options, root=root, backends=(Backend(root),)))


def get_replica(job: Job, tmp_path: Path, bucket: int = 3) -> Replica:
    (replica,) = Process.replicas.of(job, "home", bucket, tmp_path)
    return replica


def is_closed(replica: Replica) -> bool:
    """Return whether the backup manager is closed after all background work."""
    assert Process.background.wait(WAIT_S)
    assert isinstance(replica.backup, Closing)
    return replica.backup.closed.is_set()


def is_restore_closed(replica: Replica) -> bool:
    try:
        return not replica.restore.restore().size("operator_0.json")
    except InterruptedRestoreError:
        return True
    except FileNotFoundError:
        return False


def test_managers_are_kept_until_their_bucket_is_forgotten(job: Job, tmp_path: Path) -> None:
    """A call that failed has ended its restore manager; the next call needs one that can read."""
    replica = get_replica(job, tmp_path)
    assert get_replica(job, tmp_path) is replica
    Process.replicas.forget(job, "home", 3)
    assert is_restore_closed(replica)
    assert is_closed(replica)
    again = get_replica(job, tmp_path)
    assert again is not replica
    assert not is_restore_closed(again)
    # Forgetting a bucket without managers has no effect.
    Process.replicas.forget(job, "home", 4)


def test_managers_of_the_least_recently_used_buckets_are_closed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_BUCKETS_MAX", 2)
    first, second, third = (get_replica(job, tmp_path, bucket) for bucket in range(3))
    assert is_closed(first)
    assert is_restore_closed(first)
    assert not is_closed(second)
    assert not is_closed(third)


def test_a_backup_manager_is_closed_only_after_its_uploads(job: Job, tmp_path: Path) -> None:
    """Another attempt in this process may wait for the uploads."""
    replica, other = get_replica(job, tmp_path), get_replica(job, tmp_path, 4)
    assert isinstance(replica.backup, Closing)
    store = LocalStore.at(tmp_path / "store", RowSchema((), ()))
    ref = CheckpointRef(1, new_checkpoint_id())
    name = file_name(ref, DELTA)
    markers = replica.backup.snapshot(ref, {STATE: SealedFile.of(name, b"x")})
    upload = Upload(store, replica.name, replica.backup, ref, name, markers, 1)
    uploads = Process.uploads
    uploads.submit([upload])
    Process.replicas.forget(job, "home", 3)
    assert not is_closed(replica)
    replica.backup.gate.set_result(markers)
    assert upload.done.result(WAIT_S) == markers
    Process.replicas.forget(job, "home", 4)
    assert is_closed(other)
    assert is_closed(replica)
    store.close()
