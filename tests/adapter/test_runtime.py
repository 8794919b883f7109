"""The stores and folders that a worker uses in several calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from recorded_work import make_job

from arrow_schemas import RowSchema
from spark_state_ext.engine import folders
from spark_state_ext.engine.stores import Stores
from spark_state_ext.store import LocalStore
from spark_state_ext.worker import descriptors, local_folders

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))


def test_only_the_most_recently_used_stores_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "stores_max", lambda: 2)
    stores = Stores()

    def open_store(name: str) -> LocalStore:
        return stores.at(str(tmp_path / name), SCHEMA)

    first, second = open_store("a"), open_store("b")
    assert open_store("a") is first
    assert open_store("c") is not second
    assert list(stores) == [str(tmp_path / "a"), str(tmp_path / "c")]
    # A store that was closed can be opened again.
    assert open_store("b") is not second
    assert open_store("b").runs() == []


def test_containers_that_share_a_folder_have_separate_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB requires that two processes which use a store have different process ids."""
    job = make_job("pandas", "NoTimeout", None, 1 << 20)
    job = replace(job, options=replace(job.options, local_dir=str(tmp_path)))
    local_folders_found = []
    for container in ("pid:[4026531836]", "pid:[4026532617]", "pid:[4026531836]"):
        monkeypatch.setattr(local_folders, "get_pid_namespace", lambda container=container: container)
        local_folders_found.append(folders.local_folder(job, "home", 1, 3))
    assert local_folders_found[0] == local_folders_found[2] != local_folders_found[1]
    assert {folder.relative_to(folder.parents[3]).parts[1:] for folder in local_folders_found} == {("home", "s1", "3")}
