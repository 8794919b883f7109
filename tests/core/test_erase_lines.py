"""Erasing keys from the history of a query that went back: which lineage counts, and that none brings a key back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from core_support import WRITER
from reading_support import Job, bucket_of, state_of
from test_erase_history import FEW_DELTAS, Faults, drop_key, sample_steps
from test_erase_scan import JANE, KEYS, TEXT

from arrow_schemas import Pointer
from spark_state_ext import erase_history, open_state
from spark_state_ext.__main__ import main
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.registry import Backend
from spark_state_ext.commit.cadence import SnapshotCadence
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.erasing import history as erasing
from spark_state_ext.erasing.checkpoint_files import rewrite
from spark_state_ext.erasing.history import ErasedHistory
from spark_state_ext.errors import CorruptFileError, StorageError, UsageError
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS as OTHERS
from spark_state_ext.testing.model import SCHEMA, Changes, Model, Row, scan
from tests.helpers.erased_bytes import files_with
from tests.helpers.soak import SOAK

BUCKETS = 2
# One key for each bucket, so that every batch writes a file in each bucket.
EVERYWHERE = [next(key for key in OTHERS if bucket_of(key, BUCKETS) == bucket) for bucket in range(BUCKETS)]


@dataclass
class History:
    """A query that may go back, with every pointer that it gave to Spark."""

    tmp: Path
    knows_batch: bool = True
    cadence: SnapshotCadence = FEW_DELTAS
    made: list[tuple[list[Pointer], Model]] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = {"cadence": self.cadence}
        self.job = Job(
            self.tmp / "root", self.tmp, buckets=BUCKETS, retained=100, context=context, told=self.knows_batch
        )
        self.restored = 0

    def batch(self, changes: Changes | None = None, at: int | None = None) -> None:
        number = len(self.made)
        self.job.batch({**{key: Row(number) for key in EVERYWHERE}, **(changes or {})}, at=at)
        assert not any(pointer.inline for pointer in self.job.pointers[-1])
        self.made.append((self.job.pointers[-1], self.job.models[-1]))

    def batches(self, count: int) -> None:
        for _ in range(count):
            self.batch()

    def back_to(self, batch: int, changes: Changes | None = None) -> None:
        """Start another run, which makes this batch again."""
        self.job.run_id = f"run {len(self.made)}"
        self.batch(changes, at=batch)

    def erase(self, **more: Any) -> ErasedHistory:
        given: dict[str, Any] = {"inline_batches": 0, **more}
        return erase_history(str(self.job.root), KEYS, operator="counts", **given)

    def restore(self, pointers: list[Pointer]) -> Model:
        """Return the state of all buckets at some pointers, restored on an empty disk."""
        model: Model = {}
        for pointer in pointers:
            self.restored += 1
            folder = self.tmp / f"fresh-{self.restored}"
            store = LocalStore.at(folder, SCHEMA)
            replicas = sole_replica(self.job.folder.child(str(pointer.bucket)), self.tmp, "fsspec")
            bucket = Bucket(store, replicas, pointer, WRITER, CommitContext(self.tmp, batches_retained=100))
            model |= bucket.read(scan)
            bucket.close()
            store.close()
            shutil.rmtree(folder)
        return model

    def check_no_batch_has_key(self) -> None:
        """Assert that every batch of every line can be restored without the key."""
        assert files_with(TEXT, self.tmp / "root") == []
        for pointers, model in self.made:
            assert self.restore(pointers) == drop_key(model)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.job.close()


def test_a_key_on_the_committed_line_is_refused_even_if_the_given_up_line_removed_it(history: History) -> None:
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(6)
    # The query goes back to before the key was removed; the given-up line has the higher versions.
    history.back_to(4)
    history.batches(2)
    assert JANE in history.made[-1][1]
    before = files_with(TEXT, history.tmp / "root")
    with pytest.raises(UsageError, match=r"1 of the keys are or may be in the newest state.*erase_keys"):
        history.erase()
    assert files_with(TEXT, history.tmp / "root") == before


def test_a_key_that_only_the_given_up_line_has_is_erased_there(history: History) -> None:
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batches(6)
    history.back_to(4, {JANE: None})
    history.batches(2)
    assert JANE not in history.made[-1][1]
    done = history.erase()
    assert done.files
    assert done.receipt.absent
    history.check_no_batch_has_key()


def test_a_given_up_line_that_may_be_inline_is_refused_until_its_batches_are_made_again(history: History) -> None:
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(12)
    history.batch({JANE: Row(2)})
    history.back_to(17)
    assert JANE not in history.made[-1][1]
    with pytest.raises(UsageError, match=r"batches that the query went back from, up to batch 19.*inline_batches=0"):
        history.erase(inline_batches=2)
    history.batches(3)
    assert history.erase(inline_batches=2).receipt.absent
    history.check_no_batch_has_key()


@pytest.mark.parametrize("knows_batch", [True, False])
def test_the_age_of_a_tombstone_is_counted_on_the_committed_line(knows_batch: bool, tmp_path: Path) -> None:
    """The given-up line has counted more batches since the tombstone."""
    history = History(tmp_path, knows_batch)
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    history.batches(20)
    history.back_to(6)
    with pytest.raises(UsageError, match=r"batches with data ago.*run .* more batches"):
        history.erase(inline_batches=2)
    # The given-up line has no younger tombstone, so it requires no further batches.
    history.batches(9)
    assert history.erase(inline_batches=2).receipt.absent
    history.check_no_batch_has_key()
    history.job.close()


def test_a_tombstone_that_only_the_given_up_line_has_does_not_count(history: History) -> None:
    """A bucket that the new run has not changed has the state from before the first batch that this run made again."""
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(3)
    key_bucket = bucket_of(JANE, BUCKETS)
    # From here on, only the other bucket changes.
    history.job.run_id = "another run"
    history.job.batch({EVERYWHERE[1 - key_bucket]: Row(99)}, at=4)
    history.job.batch({EVERYWHERE[1 - key_bucket]: Row(98)})
    assert JANE in history.job.models[-1]
    with pytest.raises(UsageError, match="newest state"):
        history.erase()


@pytest.mark.parametrize("touched", [True, False])
def test_a_restart_after_going_back_does_not_commit_the_given_up_line(history: History, touched: bool) -> None:
    """The run that went back has changed the key's bucket once or never, and the last run has not changed it."""
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(3)
    key_bucket = bucket_of(JANE, BUCKETS)
    history.job.run_id = "went back"
    keys = EVERYWHERE if touched else [EVERYWHERE[1 - key_bucket]]
    history.job.batch({key: Row(99) for key in keys}, at=4)
    for number in range(3):
        history.job.batch({EVERYWHERE[1 - key_bucket]: Row(100 + number)})
    history.job.run_id = "restarted"
    for number in range(3):
        history.job.batch({EVERYWHERE[1 - key_bucket]: Row(200 + number)})
    assert JANE in history.job.models[-1]
    before = files_with(TEXT, history.tmp / "root")
    with pytest.raises(UsageError, match="newest state"):
        history.erase()
    assert files_with(TEXT, history.tmp / "root") == before


def test_lineages_of_rewritten_files_still_show_which_run_came_first(history: History) -> None:
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    history.batches(4)
    key_bucket = bucket_of(JANE, BUCKETS)
    history.job.run_id = "went back"
    history.batch(at=5)
    for number in range(2):
        history.job.batch({EVERYWHERE[1 - key_bucket]: Row(100 + number)})
    history.job.run_id = "restarted"
    for number in range(3):
        history.job.batch({EVERYWHERE[1 - key_bucket]: Row(200 + number)})
    assert JANE not in history.job.models[-1]
    assert history.erase().receipt.absent
    history.check_no_batch_has_key()
    for unproven in (False, True):
        with open_state(history.job.root, hold=False, unproven=unproven) as state:
            assert state_of(state) == drop_key(history.job.models[state.batch])
            assert state.batch == (9 if unproven else 4)


def test_no_line_is_skipped_if_tasks_do_not_know_their_batch(tmp_path: Path) -> None:
    history = History(tmp_path, knows_batch=False)
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(4)
    history.back_to(4)
    with pytest.raises(UsageError, match="newest state"):
        history.erase()
    history.batches(2)
    with pytest.raises(UsageError, match="newest state"):
        history.erase()
    # The result is the same if modification times do not show the order of the files.
    for path in (tmp_path / "root").rglob("*.arrow"):
        os.utime(path, (1, 1))
    with pytest.raises(UsageError, match="newest state"):
        history.erase()
    history.batch({JANE: None})
    history.batches(8)
    assert history.erase().receipt.absent
    history.check_no_batch_has_key()
    history.job.close()


def test_each_backend_with_rewritten_files_shows_the_state_of_the_last_run(history: History) -> None:
    """Each backend has rewritten files and the record of epochs."""
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    history.batches(2)
    history.batch({JANE: Row(2)})
    history.batches(1)
    # The youngest of the rewritten files is of the line that the query gives up next.
    history.batch({JANE: None})
    history.batches(1)
    history.back_to(4, {JANE: None})
    history.batches(2)
    second_root = history.tmp / "second"
    shutil.copytree(history.job.root, second_root)
    roots, newest = (Path(history.job.root), second_root), history.made[-2][1]

    def check_all_roots() -> None:
        for root in roots:
            with open_state(root, hold=False) as state:
                assert state_of(state) == newest

    check_all_roots()
    assert history.erase(backends=[Backend(str(second_root))]).files > 1
    assert files_with(TEXT, *roots) == []
    check_all_roots()


def test_a_query_that_went_back_twice_has_the_state_of_the_last_run(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewritten files are younger than those of the last run, and this must not matter."""
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    # This line, which is given up as well, still has the key, and has the highest versions.
    history.back_to(4)
    history.batches(6)
    history.back_to(4, {JANE: None})
    history.batches(2)
    newest = history.made[-2][1]
    with open_state(history.job.root, hold=False) as state:
        assert state_of(state) == newest == drop_key(newest)
    history.erase()
    assert main(["verify", str(history.job.root)]) == 0
    assert "unknown" not in capsys.readouterr().out
    history.check_no_batch_has_key()
    with open_state(history.job.root, hold=False) as state:
        assert state_of(state) == newest
    assert history.erase().files == 0
    history.back_to(4, {JANE: Row(3)})
    history.batches(2)
    with open_state(history.job.root, hold=False) as state:
        assert state_of(state) == history.made[-2][1]
    with pytest.raises(UsageError, match="newest state"):
        history.erase()


def test_no_line_gets_the_key_back_if_erasing_is_stopped_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are no snapshots, so restoring reads the tombstones and the rows that they hide.
    history = History(tmp_path, cadence=SnapshotCadence(20, 20))
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batch({JANE: Row(2)})
    history.batch({JANE: None})
    history.batch({JANE: Row(3)})
    history.back_to(4)
    history.batch({JANE: Row(4)})
    history.batches(3)
    history.back_to(4, {JANE: None})
    history.batches(2)
    root = tmp_path / "root"
    shutil.copytree(root, tmp_path / "as it was")
    faults, rewrite_steps = Faults(monkeypatch), []

    def note_and_rewrite(*args: Any) -> int:
        rewrite_steps.append((1 << 40) - faults.left)
        return rewrite(*args)

    monkeypatch.setattr(erasing, "rewrite", note_and_rewrite)
    faults.left = 1 << 40
    history.erase()
    steps, partly = (1 << 40) - faults.left, 0
    assert len(rewrite_steps) == 6
    # Steps before and after these are listings and reads, which change nothing.
    first, last = rewrite_steps[0] - 30, min(steps, rewrite_steps[-1] + 30)
    for step in (first + offset for offset in sample_steps(last - first)[:: 1 if SOAK else 2]):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "as it was", root)
        faults.hit, faults.left = False, step
        with pytest.raises((StorageError, OSError)):
            history.erase()
        assert faults.hit
        faults.left = -1
        partly += 0 < len(files_with(TEXT, root)) < 7
        for pointers, model in history.made:
            assert history.restore(pointers) in (model, drop_key(model)), f"step {step}"
        with open_state(history.job.root, hold=False) as state:
            assert state_of(state) == history.made[-2][1], f"step {step}"
        # Remove the lease, as if it had lapsed.
        shutil.rmtree(Path(history.job.folder.root) / "lease")
        history.erase()
        history.check_no_batch_has_key()
    assert partly > 2
    history.job.close()


def test_a_damaged_record_of_epochs_is_reported(history: History) -> None:
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.back_to(2)
    history.batches(2)
    (*_, path) = sorted((Path(history.job.folder.root) / "epochs").iterdir())
    path.write_text(path.read_text().replace('"run ', '"ran '))
    with pytest.raises(CorruptFileError, match=r"epochs/.*json fails its checksum.*Bring it back"):
        open_state(history.job.root)
    with pytest.raises(CorruptFileError, match=r"epochs/"):
        history.erase()
