"""Unused files are removed from local disks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from arrow_schemas import CheckpointRef
from spark_state_ext.store import LocalStore
from spark_state_ext.store.reclaim import record_use, remove_unused
from spark_state_ext.testing.model import KEYS, SCHEMA, Row, make_run

HOUR_S = 3_600.0


def open_store(stores: Path, bucket: int, query_folder: str = "home") -> LocalStore:
    store = LocalStore.at(stores / "root-operator" / query_folder / "s0" / str(bucket), SCHEMA)
    assert record_use(store.folder)
    return store


def test_unused_stores_are_removed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    stores = [open_store(tmp_path, bucket) for bucket in range(3)]
    other = open_store(tmp_path, 0, "another query")
    now_s = time.time()
    assert remove_unused(tmp_path, scratch, HOUR_S, now_s + HOUR_S / 2) == []
    for used in (stores[0].folder, other.folder):
        for path in used.glob("*/*"):
            os.utime(path, (now_s + HOUR_S, now_s + HOUR_S))
    removed = remove_unused(tmp_path, scratch, HOUR_S, now_s + 1.5 * HOUR_S)
    assert sorted(removed) == [stores[1].folder, stores[2].folder]
    assert stores[0].folder.exists()
    assert other.folder.exists()
    assert not stores[1].folder.exists()
    # A process that has the store open notices the removal, and creates a new store.
    assert not record_use(stores[1].folder)
    stores[1].close()
    again = open_store(tmp_path, 1)
    assert again.runs() == []
    for store in (*stores, other, again):
        store.close()


def test_a_reader_can_use_an_open_store_after_its_removal(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    ref = CheckpointRef(1, "a" * 32)
    store.apply([make_run({KEYS[0]: Row(1)})], ref, None)
    remove_unused(tmp_path, tmp_path / "scratch", HOUR_S, time.time() + 2 * HOUR_S)
    assert not store.folder.exists()
    assert store.view(ref).rows_max == 1
    store.close()


def test_scratch_files_of_killed_workers_are_removed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "tmpfolder").mkdir(parents=True)
    (scratch / "tmpfolder" / "rows").write_bytes(b"x")
    (scratch / "checkpoint-abc").write_bytes(b"x")
    store = open_store(tmp_path, 0)
    now_s = time.time()
    assert remove_unused(tmp_path, scratch, HOUR_S, now_s) == []
    used, later_s = next(store.folder.glob("*/used")), now_s + 24 * HOUR_S
    os.utime(used, (later_s, later_s))
    # A file may wait hours for its upload, even if stores are kept for a shorter time.
    assert remove_unused(tmp_path, scratch, 0.0, now_s + 10 * HOUR_S) == []
    (scratch / "young").write_bytes(b"x")
    os.utime(scratch / "young", (later_s, later_s))
    remove_unused(tmp_path, scratch, HOUR_S, now_s + 24.5 * HOUR_S)
    assert [path.name for path in scratch.iterdir()] == ["young"]
    assert store.folder.exists()
    store.close()


def test_a_store_that_cannot_be_removed_does_not_block_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "checkpoint-abc").write_bytes(b"x")
    stores = [open_store(tmp_path, bucket) for bucket in range(3)]
    real = Path.rename

    def refuse_one(path: Path, to: Path) -> Path:
        if path == stores[0].folder:
            raise PermissionError(13, "Permission denied")
        return real(path, to)

    monkeypatch.setattr(Path, "rename", refuse_one)
    removed = remove_unused(tmp_path, scratch, HOUR_S, time.time() + 25 * HOUR_S)
    assert sorted(removed) == [stores[1].folder, stores[2].folder, scratch / "checkpoint-abc"]
    assert "cannot be removed: [Errno 13] Permission denied" in caplog.text
    for store in stores:
        store.close()


def test_an_interrupted_removal_is_completed_and_empty_folders_are_removed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    removed = tmp_path / "root-operator" / "home" / "s0" / "gone-123"
    removed.mkdir(parents=True)
    (removed / "data.mdb").write_bytes(b"x")
    remove_unused(tmp_path, scratch, HOUR_S)
    assert not removed.exists()
    assert list(tmp_path.iterdir()) == [scratch]
