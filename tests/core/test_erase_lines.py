"""Keys that are gone from the past of a query that went back: which of its lineages counts, and none brings a key back."""

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
from test_erase_history import Faults, sampled, without
from test_erase_scan import JANE, KEYS, TEXT

from arrow_schemas import Pointer
from spark_state_ext import erase_history, open_state
from spark_state_ext.__main__ import main
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.registry import Backend
from spark_state_ext.commit import cadence
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
# A key of each bucket, so that files tell of every batch.
EVERYWHERE = [next(key for key in OTHERS if bucket_of(key, BUCKETS) == bucket) for bucket in range(BUCKETS)]


@dataclass
class History:
    """A query that may go back, with every pointer that it ever handed to Spark."""

    tmp: Path
    told: bool = True
    made: list[tuple[list[Pointer], Model]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = Job(self.tmp / "root", self.tmp, buckets=BUCKETS, retained=100, told=self.told)
        self.restored = 0

    def batch(self, changes: Changes | None = None, at: int | None = None) -> None:
        number = len(self.made)
        self.job.batch({**{key: Row(number) for key in EVERYWHERE}, **(changes or {})}, at=at)
        assert not any(it.inline for it in self.job.pointers[-1])
        self.made.append((self.job.pointers[-1], self.job.models[-1]))

    def batches(self, count: int) -> None:
        for _ in range(count):
            self.batch()

    def back_to(self, batch: int, changes: Changes | None = None) -> None:
        """Another run makes this batch anew."""
        self.job.run_id = f"run {len(self.made)}"
        self.batch(changes, at=batch)

    def erase(self, **more: Any) -> ErasedHistory:
        given: dict[str, Any] = {"inline_batches": 0, **more}
        return erase_history(str(self.job.root), KEYS, operator="counts", **given)

    def at(self, pointers: list[Pointer]) -> Model:
        """The state of all buckets at some pointers, on an empty disk."""
        found: Model = {}
        for pointer in pointers:
            self.restored += 1
            place = self.tmp / f"fresh-{self.restored}"
            store = LocalStore.at(place, SCHEMA)
            replicas = sole_replica(self.job.folder.child(str(pointer.bucket)), self.tmp, "fsspec")
            bucket = Bucket(store, replicas, pointer, WRITER, CommitContext(self.tmp, batches_retained=100))
            found |= bucket.read(scan)
            bucket.close()
            store.close()
            shutil.rmtree(place)
        return found

    def is_everywhere_without(self) -> None:
        """Every batch of every line is there without the key."""
        assert files_with(TEXT, self.tmp / "root") == []
        for pointers, model in self.made:
            assert self.at(pointers) == without(model)


@pytest.fixture(autouse=True)
def _few_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "DELTAS_MIN", 2)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 3)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    made = History(tmp_path)
    yield made
    made.job.close()


def test_a_key_that_lives_on_the_committed_line_is_refused_whatever_the_given_up_line_says(history: History) -> None:
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(6)
    # From before the key was removed; the given-up line has the higher versions.
    history.back_to(4)
    history.batches(2)
    assert JANE in history.made[-1][1]
    before = files_with(TEXT, history.tmp / "root")
    with pytest.raises(UsageError, match=r"1 of the keys are or may be in the newest state.*erase_keys"):
        history.erase()
    assert files_with(TEXT, history.tmp / "root") == before


def test_a_key_that_lives_on_the_given_up_line_alone_is_erased_there_too(history: History) -> None:
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batches(6)
    history.back_to(4, {JANE: None})
    history.batches(2)
    assert JANE not in history.made[-1][1]
    done = history.erase()
    assert done.files
    assert done.receipt.absent
    history.is_everywhere_without()


def test_a_given_up_line_that_spark_may_hold_inline_is_refused_until_it_is_overwritten(history: History) -> None:
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
    history.is_everywhere_without()


@pytest.mark.parametrize("told", [True, False])
def test_tombstones_are_as_old_as_the_committed_line_says(told: bool, tmp_path: Path) -> None:
    """A given-up line has counted more batches."""
    history = History(tmp_path, told)
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    history.batches(20)
    history.back_to(6)
    with pytest.raises(UsageError, match=r"batches with data ago.*run .* more batches"):
        history.erase(inline_batches=2)
    # The given-up line has no tombstone younger than that either, and is not asked for more.
    history.batches(9)
    assert history.erase(inline_batches=2).receipt.absent
    history.is_everywhere_without()
    history.job.close()


def test_a_tombstone_of_the_given_up_line_alone_is_no_tombstone(history: History) -> None:
    """The newest state of a bucket that the new run has not changed is the one from before what it made anew."""
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(3)
    mine = bucket_of(JANE, BUCKETS)
    # Only the other bucket changes now.
    history.job.run_id = "another run"
    history.job.batch({EVERYWHERE[1 - mine]: Row(99)}, at=4)
    history.job.batch({EVERYWHERE[1 - mine]: Row(98)})
    assert JANE in history.job.models[-1]
    with pytest.raises(UsageError, match="newest state"):
        history.erase()


@pytest.mark.parametrize("touched", [True, False])
def test_a_restart_after_going_back_makes_no_given_up_line_the_committed_one(history: History, touched: bool) -> None:
    """The run that went back has changed the bucket of the key once, or never; the last run has not."""
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batches(2)
    history.batch({JANE: None})
    history.batches(3)
    mine = bucket_of(JANE, BUCKETS)
    history.job.run_id = "went back"
    kept = EVERYWHERE if touched else [EVERYWHERE[1 - mine]]
    history.job.batch({key: Row(99) for key in kept}, at=4)
    for at in range(3):
        history.job.batch({EVERYWHERE[1 - mine]: Row(100 + at)})
    history.job.run_id = "restarted"
    for at in range(3):
        history.job.batch({EVERYWHERE[1 - mine]: Row(200 + at)})
    assert JANE in history.job.models[-1]
    before = files_with(TEXT, history.tmp / "root")
    with pytest.raises(UsageError, match="newest state"):
        history.erase()
    assert files_with(TEXT, history.tmp / "root") == before


def test_after_files_were_written_anew_lineages_tell_which_run_came_first(history: History) -> None:
    history.batches(2)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    history.batches(4)
    mine = bucket_of(JANE, BUCKETS)
    history.job.run_id = "went back"
    history.batch(at=5)
    for at in range(2):
        history.job.batch({EVERYWHERE[1 - mine]: Row(100 + at)})
    history.job.run_id = "restarted"
    for at in range(3):
        history.job.batch({EVERYWHERE[1 - mine]: Row(200 + at)})
    assert JANE not in history.job.models[-1]
    assert history.erase().receipt.absent
    history.is_everywhere_without()
    for unproven in (False, True):
        with open_state(history.job.root, hold=False, unproven=unproven) as state:
            assert state_of(state) == without(history.job.models[state.batch])
            assert state.batch == (9 if unproven else 4)


def test_a_query_that_does_not_tell_its_runs_has_no_line_passed_over(tmp_path: Path) -> None:
    history = History(tmp_path, told=False)
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
    # Where files do not tell by when they were written.
    for path in (tmp_path / "root").rglob("*.arrow"):
        os.utime(path, (1, 1))
    with pytest.raises(UsageError, match="newest state"):
        history.erase()
    history.batch({JANE: None})
    history.batches(8)
    assert history.erase().receipt.absent
    history.is_everywhere_without()
    history.job.close()


def test_every_backend_is_read_by_the_last_run(history: History) -> None:
    """Each has files that were written anew, and the record of epochs."""
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    history.batches(2)
    history.batch({JANE: Row(2)})
    history.batches(1)
    # The youngest file that is written anew is of the line that is given up.
    history.batch({JANE: None})
    history.batches(1)
    history.back_to(4, {JANE: None})
    history.batches(2)
    second = history.tmp / "second"
    shutil.copytree(history.job.root, second)
    places, newest = (Path(history.job.root), second), history.made[-2][1]

    def all_read() -> None:
        for place in places:
            with open_state(place, hold=False) as state:
                assert state_of(state) == newest

    all_read()
    assert history.erase(backends=[Backend(str(second))]).files > 1
    assert files_with(TEXT, *places) == []
    all_read()


def test_who_went_back_twice_is_read_and_erased_by_the_last_run(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that were written anew are younger than the last run's, and nobody goes by that."""
    history.batches(3)
    history.batch({JANE: Row(1)})
    history.batch({JANE: None})
    # It is alive on the line that has the highest versions, and is given up as well.
    history.back_to(4)
    history.batches(6)
    history.back_to(4, {JANE: None})
    history.batches(2)
    newest = history.made[-2][1]
    with open_state(history.job.root, hold=False) as state:
        assert state_of(state) == newest == without(newest)
    history.erase()
    assert main(["verify", str(history.job.root)]) == 0
    assert "unknown" not in capsys.readouterr().out
    history.is_everywhere_without()
    with open_state(history.job.root, hold=False) as state:
        assert state_of(state) == newest
    assert history.erase().files == 0
    history.back_to(4, {JANE: Row(3)})
    history.batches(2)
    with open_state(history.job.root, hold=False) as state:
        assert state_of(state) == history.made[-2][1]
    with pytest.raises(UsageError, match="newest state"):
        history.erase()


def test_stopped_at_every_step_no_line_has_the_key_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No snapshot hides what a tombstone removes.
    monkeypatch.setattr(cadence, "DELTAS_MIN", 20)
    monkeypatch.setattr(cadence, "DELTAS_MAX", 20)
    history = History(tmp_path)
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
    faults, written = Faults(monkeypatch), []

    def noted(*given: Any) -> int:
        written.append((1 << 40) - faults.left)
        return rewrite(*given)

    monkeypatch.setattr(erasing, "rewrite", noted)
    faults.left = 1 << 40
    history.erase()
    steps, partly = (1 << 40) - faults.left, 0
    assert len(written) == 6
    # Listings and reads come before and after that, and change nothing.
    first, last = written[0] - 30, min(steps, written[-1] + 30)
    for step in (first + at for at in sampled(last - first)[:: 1 if SOAK else 2]):
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "as it was", root)
        faults.hit, faults.left = False, step
        with pytest.raises((StorageError, OSError)):
            history.erase()
        assert faults.hit
        faults.left = -1
        partly += 0 < len(files_with(TEXT, root)) < 7
        for pointers, model in history.made:
            assert history.at(pointers) in (model, without(model)), f"step {step}"
        with open_state(history.job.root, hold=False) as state:
            assert state_of(state) == history.made[-2][1], f"step {step}"
        # Its lease lapses.
        shutil.rmtree(Path(history.job.folder.root) / "lease")
        history.erase()
        history.is_everywhere_without()
    assert partly > 2
    history.job.close()


def test_a_damaged_record_of_epochs_is_told(history: History) -> None:
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
