"""What a worker keeps between calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from recorded_work import job

from arrow_schemas import RowSchema
from spark_state_ext.engine import folders
from spark_state_ext.engine.stores import Stores
from spark_state_ext.store import LocalStore
from spark_state_ext.worker import descriptors, local_folders

SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()),))


def test_only_the_stores_used_last_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "stores_max", lambda: 2)
    stores = Stores()

    def opened(name: str) -> LocalStore:
        return stores.at(str(tmp_path / name), SCHEMA)

    first, second = opened("a"), opened("b")
    assert opened("a") is first
    assert opened("c") is not second
    assert list(stores) == [str(tmp_path / "a"), str(tmp_path / "c")]
    # Closed and opened again, it works.
    assert opened("b") is not second
    assert opened("b").runs() == []


def test_containers_that_share_a_folder_have_stores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB counts on it that two processes which use a store have two numbers."""
    the_job = job("pandas", "NoTimeout", None, 1 << 20)
    the_job = replace(the_job, options=replace(the_job.options, local_dir=str(tmp_path)))
    found = []
    for container in ("pid:[4026531836]", "pid:[4026532617]", "pid:[4026531836]"):
        monkeypatch.setattr(local_folders, "get_pid_namespace", lambda container=container: container)
        found.append(folders.local_folder(the_job, "home", 1, 3))
    assert found[0] == found[2] != found[1]
    assert {folder.relative_to(folder.parents[3]).parts[1:] for folder in found} == {("home", "s1", "3")}
