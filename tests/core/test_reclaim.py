"""Local disks are not filled by what nobody uses."""

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


def store_in(stores: Path, bucket: int, query_folder: str = "home") -> LocalStore:
    store = LocalStore.at(stores / "root-operator" / query_folder / "s0" / str(bucket), SCHEMA)
    assert record_use(store.folder)
    return store


def test_stores_that_nobody_used_are_removed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    stores = [store_in(tmp_path, bucket) for bucket in range(3)]
    other = store_in(tmp_path, 0, "another query")
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
    # A process that had it open sees that it is gone, and makes a new one.
    assert not record_use(stores[1].folder)
    stores[1].close()
    again = store_in(tmp_path, 1)
    assert again.runs() == []
    for store in (*stores, other, again):
        store.close()


def test_a_store_removed_under_a_reader_is_a_cache_all_the_same(tmp_path: Path) -> None:
    store = store_in(tmp_path, 0)
    ref = CheckpointRef(1, "a" * 32)
    store.apply([make_run({KEYS[0]: Row(1)})], ref, None)
    remove_unused(tmp_path, tmp_path / "scratch", HOUR_S, time.time() + 2 * HOUR_S)
    assert not store.folder.exists()
    assert store.view(ref).rows_max == 1
    store.close()


def test_what_killed_workers_left_goes_too(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "tmpfolder").mkdir(parents=True)
    (scratch / "tmpfolder" / "rows").write_bytes(b"x")
    (scratch / "checkpoint-abc").write_bytes(b"x")
    store = store_in(tmp_path, 0)
    now_s = time.time()
    assert remove_unused(tmp_path, scratch, HOUR_S, now_s) == []
    used, later_s = next(store.folder.glob("*/used")), now_s + 24 * HOUR_S
    os.utime(used, (later_s, later_s))
    # A file may wait for its upload for hours, however short stores are kept.
    assert remove_unused(tmp_path, scratch, 0.0, now_s + 10 * HOUR_S) == []
    (scratch / "young").write_bytes(b"x")
    os.utime(scratch / "young", (later_s, later_s))
    remove_unused(tmp_path, scratch, HOUR_S, now_s + 24.5 * HOUR_S)
    assert [path.name for path in scratch.iterdir()] == ["young"]
    assert store.folder.exists()
    store.close()


def test_one_that_cannot_be_removed_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "checkpoint-abc").write_bytes(b"x")
    stores = [store_in(tmp_path, bucket) for bucket in range(3)]
    real = Path.rename

    def refused(path: Path, to: Path) -> Path:
        if path == stores[0].folder:
            raise PermissionError(13, "Permission denied")
        return real(path, to)

    monkeypatch.setattr(Path, "rename", refused)
    removed = remove_unused(tmp_path, scratch, HOUR_S, time.time() + 25 * HOUR_S)
    assert sorted(removed) == [stores[1].folder, stores[2].folder, scratch / "checkpoint-abc"]
    assert "cannot be removed: [Errno 13] Permission denied" in caplog.text
    for store in stores:
        store.close()


def test_an_interrupted_removal_is_finished_and_empty_folders_go(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    gone = tmp_path / "root-operator" / "home" / "s0" / "gone-123"
    gone.mkdir(parents=True)
    (gone / "data.mdb").write_bytes(b"x")
    remove_unused(tmp_path, scratch, HOUR_S)
    assert not gone.exists()
    assert list(tmp_path.iterdir()) == [scratch]
