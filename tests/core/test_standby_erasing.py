"""A standby service while `erase_history` removes keys from old files: its replicas no longer have the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER
from test_erase_history import PLACE, erase, life_at, lived
from test_erase_scan import TEXT

from arrow_schemas.standby import BucketKey
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.erasing.checkpoint_files import rewrite
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import SCHEMA, scan
from tests.helpers.clock import VirtualClock
from tests.helpers.erased_bytes import files_with
from tests.helpers.waiting import WAIT_S


@pytest.mark.parametrize("stopped", [False, True])
def test_a_replica_is_rebuilt_from_the_files_without_the_erased_keys(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service runs while the query is stopped, and lists the files as soon as there is a new operator file."""
    life = life_at(tmp_path, cadence=SnapshotCadence())
    lived(life)
    clock = VirtualClock()
    (tmp_path / "b").mkdir()
    root = FollowedRoot(str(tmp_path / "root"), {}, str(tmp_path / "b"))
    follower = RootFollower(root, clock=clock)

    def follow() -> None:
        follower.find()
        follower.hold(follower.list_known())
        clock.sleep(100.0)
        follower.tick()
        assert follower.drain(WAIT_S)
        follower.tick()

    def follow_and_rewrite(*given: Any) -> int:
        follow()
        return rewrite(*given)

    follow()
    monkeypatch.setattr("spark_state_ext.erasing.history.rewrite", follow_and_rewrite)
    if stopped:
        # Stop after all files are rewritten, but before the second operator file is written.
        operator_files, create = [], Folder.create

        def create_once(self: Folder, name: str, data: bytes) -> bool:
            if name.startswith("operator_"):
                operator_files.append(name)
                if len(operator_files) == 2:
                    raise StorageError("stopped")
            return create(self, name, data)

        with monkeypatch.context() as patched, pytest.raises(StorageError, match="stopped"):
            patched.setattr(Folder, "create", create_once)
            erase(life)
        follow()
        assert erase(life).files == 0, "no file may have the keys any longer"
    else:
        assert erase(life).files > 2
    follow()
    (key,) = follower.list_held()
    assert key == BucketKey("counts", PLACE.rpartition("/")[2], 3)
    assert follower.collect_results()[key].is_caught_up
    numbers = [int(path.stem.partition("_")[2]) for path in (tmp_path / PLACE).glob("operator_*.json")]
    store_folder = root.store_folder(key, max(numbers))
    follower.close()
    # The next task on this host opens this folder.
    assert store_folder.is_dir()
    assert files_with(TEXT, store_folder) == []
    store = LocalStore.at(store_folder, SCHEMA)
    bucket = Bucket(store, life.replicas(PLACE), life.pointers[-1], WRITER, CommitContext(tmp_path / "scratch"))
    assert bucket.read(scan) == life.models[-1]
    assert bucket.fetched_files == 0
    for opened in (store, *life.stores):
        opened.close()
