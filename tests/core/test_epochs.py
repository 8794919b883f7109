"""Epochs: what a call adds to the record of its query's runs, and what the record says of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arrow_schemas.lineage import DELTA, CheckpointRef, LineageHeader, Writer, file_name
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import LiveRunError, StorageError
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.timeline.before_epochs import EarlierRuns
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.timeline.epochs import (
    EPOCHS_MAX,
    Epoch,
    Epochs,
    MadeAt,
    Position,
    Start,
    Verdict,
    begin_epoch,
    parse_run_id,
)
from spark_state_ext.timeline.heads import Heads, find_heads
from spark_state_ext.timeline.records import EpochLog, EpochRegistry, RunStart, read_epochs

RUN, OTHER = (f"6f1d7f0e-0000-4000-8000-00000000000{digit}" for digit in (1, 2))
NONE = Pointer("counts", 0, 1, 0, -1, None)


def at(batch: int, query_id: str = "query") -> Position:
    return Position(query_id, batch, batch + 1)


def start(plan_id: str, after: int, epoch: int, batch: int | None = None, run_id: str = "") -> Start:
    """Return a call in the batch that follows batch *after*; its input was made in the epoch and batch given."""
    return Start(plan_id, parse_run_id(run_id), at(after), MadeAt(epoch, at(after if batch is None else batch)))


def begin_epochs(*starts: Start) -> Epochs:
    epochs = Epochs()
    for call in starts:
        epochs, _ = begin_epoch(epochs, call)
    return epochs


def test_a_run_that_goes_back_gives_up_the_later_batches() -> None:
    epochs = begin_epochs(start("a", -1, 0), start("b", 3, 1))
    assert [(epoch.number, epoch.parents) for epoch in epochs.entries] == [(1, (0,)), (2, (1,))]
    assert epochs.judge(MadeAt(1, at(3))) is Verdict.COUNTS
    assert epochs.judge(MadeAt(1, at(4))) is Verdict.GIVEN_UP
    assert epochs.judge(MadeAt(2, at(4))) is Verdict.COUNTS


def test_a_call_of_a_known_run_changes_nothing() -> None:
    epochs = begin_epochs(start("a", -1, 0), start("b", 3, 1))
    assert begin_epoch(epochs, start("b", 7, 2)) == (epochs, 2)
    # A bucket that was not called for some batches has an older input.
    assert begin_epoch(epochs, start("b", 7, 1, batch=2)) == (epochs, 2)


def test_a_run_that_returns_to_a_given_up_branch_continues_it() -> None:
    epochs = begin_epochs(start("a", -1, 0), start("b", 3, 1), start("c", 9, 1))
    assert epochs.entries[-1].parents == (1,)
    assert epochs.judge(MadeAt(1, at(8))) is Verdict.COUNTS
    assert epochs.judge(MadeAt(2, at(4))) is Verdict.GIVEN_UP


def test_runs_that_cannot_have_made_the_input_are_not_taken_as_parents() -> None:
    # Run b made batch 2. Runs c, d and e went back to batch 0. Run f continues from a copy of b's checkpoint, and its
    # first call is of a bucket that was last called in batch 1.
    epochs = begin_epochs(start("a", -1, 0), start("b", 1, 1), *(start(plan, 0, 1) for plan in "cde"))
    epochs, _ = begin_epoch(epochs, start("f", 2, 1, batch=1))
    assert epochs.entries[-1].parents == (2, 1)
    assert epochs.judge(MadeAt(2, at(2))) is Verdict.UNKNOWN


def test_the_parent_epoch_stays_open_until_a_call_has_a_decisive_input() -> None:
    before = begin_epochs(start("a", -1, 0), start("b", 3, 1))
    undecided, _ = begin_epoch(before, start("c", 9, 1, batch=2))
    assert undecided.entries[-1].parents == (2, 1)
    assert undecided.judge(MadeAt(2, at(8))) is undecided.judge(MadeAt(1, at(8))) is Verdict.UNKNOWN
    assert undecided.judge(MadeAt(1, at(3))) is Verdict.COUNTS
    decided, _ = begin_epoch(undecided, start("c", 9, 2))
    assert (decided.entries[-1].parents, decided.judge(MadeAt(1, at(8)))) == ((2,), Verdict.GIVEN_UP)
    decided, _ = begin_epoch(undecided, start("c", 9, 1))
    assert (decided.entries[-1].parents, decided.judge(MadeAt(2, at(8)))) == ((1,), Verdict.GIVEN_UP)


def test_two_starts_of_one_plan_are_distinguished_by_sparks_run_id() -> None:
    epochs = begin_epochs(start("a", -1, 0, run_id=RUN))
    restarted, number = begin_epoch(epochs, start("a", 3, 1, run_id=OTHER))
    assert (number, restarted.entries[-1].same_plan) == (2, True)
    # User code may have changed the id. Then both are one run, and either may have made the batch.
    assert restarted.judge(MadeAt(1, at(4))) is Verdict.UNKNOWN
    assert restarted.judge(MadeAt(1, at(5))) is Verdict.GIVEN_UP
    # An id that was seen before, and a value that is not an id of Spark's, do not begin an epoch.
    for run_id in (RUN, "", "my job group"):
        assert begin_epoch(restarted, start("a", 4, 2, run_id=run_id)) == (restarted, 2)
    # A late task of the previous run writes in its own epoch.
    late = Start("a", RUN, at(9), MadeAt(1, at(8)))
    assert begin_epoch(restarted, late) == (restarted, 1)


def test_an_epoch_number_is_never_used_twice_even_if_records_were_removed() -> None:
    # A user removed the records.
    epochs, number = begin_epoch(Epochs(), start("c", 9, 7))
    assert number > 7
    assert epochs.entries[-1].parents == (0,)
    assert epochs.judge(MadeAt(7, at(9))) is Verdict.UNRECORDED
    # They may have been removed while the query was running.
    assert epochs.judge(MadeAt(7, at(10))) is Verdict.UNKNOWN
    # Once there is a newer epoch, an older file with this number is of another epoch.
    later, _ = begin_epoch(epochs, start("d", 12, number))
    assert later.judge(MadeAt(number, at(9))) is Verdict.UNRECORDED
    assert later.judge(MadeAt(number, at(12))) is Verdict.COUNTS
    # An epoch that has files is missing in the record, so the record is not the newest.
    assert epochs.judge(MadeAt(number + 1, at(12))) is Verdict.UNKNOWN


def test_two_runs_without_records_get_different_numbers_after_the_same_batch() -> None:
    _, number = begin_epoch(Epochs(), start("c", 9, 7))
    _, other = begin_epoch(Epochs(), start("d", 9, 7))
    assert number != other
    # A run that begins later has a higher number than both.
    assert begin_epoch(Epochs(), start("e", 10, 7))[1] > max(number, other)


def test_heartbeats_order_the_batches_of_different_queries() -> None:
    """A query that claims a folder counts its batches from 0."""
    claimed = Start("b", "", Position("new", -1, 5), MadeAt(1, Position("query", 4, 5)))
    epochs = begin_epochs(start("a", -1, 0), claimed)
    assert epochs.judge(MadeAt(1, Position("query", 4, 5), quiet=False)) is Verdict.COUNTS
    # A batch without data has the heartbeat of the batch before.
    assert epochs.judge(MadeAt(1, Position("query", 5, 5))) is Verdict.UNKNOWN
    assert epochs.judge(MadeAt(1, Position("query", 5, 6))) is Verdict.GIVEN_UP
    assert epochs.judge(MadeAt(2, Position("new", 0, 6))) is Verdict.COUNTS


def test_copies_of_another_querys_files_belong_to_no_recorded_epoch() -> None:
    epochs = begin_epochs(start("a", -1, 0), start("b", 3, 1))
    for number in (1, 2, 9):
        assert epochs.judge(MadeAt(number, Position("copied from", 40, 0))) is Verdict.UNRECORDED


def test_runs_that_fail_before_they_commit_leave_the_parent_epoch_certain() -> None:
    epochs = begin_epochs(start("a", -1, 0))
    batch, epoch = 3, 1
    for number in range(40):
        # Every fifth run commits four batches. After the others, the next run starts from the same batch again.
        epochs, begun = begin_epoch(epochs, start(f"plan {number}", batch, epoch))
        if number % 5 == 4:
            batch, epoch = batch + 4, begun
    assert {entry.parents for entry in epochs.entries} <= {(1 + 5 * commit,) for commit in range(9)} | {(0,)}
    assert epochs.line_is_known
    assert epochs.judge(MadeAt(1, at(3))) is Verdict.COUNTS
    assert epochs.judge(MadeAt(5, at(4))) is Verdict.GIVEN_UP


def test_files_of_the_newest_run_count_despite_failed_runs_if_only_heartbeats_are_known() -> None:
    def at_heartbeat(heartbeat: int) -> Position:
        return Position("query", heartbeat - 1, heartbeat, told=False)

    epochs = begin_epochs(Start("a", "", at_heartbeat(0), None))
    for number in range(30):
        epochs, newest = begin_epoch(epochs, Start(f"plan {number}", "", at_heartbeat(3), MadeAt(1, at_heartbeat(3))))
    assert epochs.judge(MadeAt(newest, at_heartbeat(4), quiet=False)) is Verdict.COUNTS
    assert epochs.judge(MadeAt(1, at_heartbeat(3), quiet=False)) is Verdict.COUNTS
    assert epochs.judge(MadeAt(1, at_heartbeat(4), quiet=False)) is Verdict.GIVEN_UP


def test_a_claim_of_a_folder_without_epochs_keeps_its_files_up_to_the_claimed_batch() -> None:
    """A file of the next batch has the same heartbeat if that batch had no data."""
    pointer = replace(NONE, heartbeats=1, batch=0)
    claim = Start.of("b", "", Position("new", -1, 1), pointer, Epochs(), ("query", 0))
    epochs, _ = begin_epoch(Epochs(), claim)
    assert epochs.judge(MadeAt(0, Position("query", 0, 1))) is Verdict.UNRECORDED
    assert epochs.judge(MadeAt(0, Position("query", 1, 1))) is Verdict.GIVEN_UP


def test_only_the_newest_epochs_are_kept() -> None:
    epochs = begin_epochs(*(start(f"plan {batch}", batch, batch) for batch in range(EPOCHS_MAX + 10)))
    assert len(epochs.entries) == EPOCHS_MAX
    assert epochs.judge(MadeAt(3, at(3))) is Verdict.UNRECORDED
    assert epochs.judge(MadeAt(EPOCHS_MAX, at(EPOCHS_MAX))) is Verdict.COUNTS


def test_epochs_must_ascend() -> None:
    one = Epoch(1, (0,), "a", "", at(0))
    with pytest.raises(ValueError, match="ascend"):
        Epochs((one, one))


# -- records --------------------------------------------------------------------------------------


def call(plan_id: str, after: int, pointer: Pointer | None = None) -> RunStart:
    return RunStart(plan_id, "", at(after), pointer)


def test_processes_of_a_run_share_one_epoch_and_each_folder_has_a_copy_of_the_record(tmp_path: Path) -> None:
    folders = [Folder(str(tmp_path / name)) for name in ("root", "backend")]
    assert EpochRegistry().of(folders, call("a", -1), lambda: None) == 1
    assert EpochRegistry().of(folders, call("a", -1), lambda: None) == 1
    assert read_epochs(folders[0]) == read_epochs(folders[1]) != Epochs()
    # A folder that is new or has lost its files gets the record before another file is written there.
    more_folders = [*folders, Folder(str(tmp_path / "new"))]
    assert EpochRegistry().of(more_folders, call("b", 3, replace(NONE, batch=3, epoch=1)), lambda: None) == 2
    assert {read_epochs(folder) for folder in more_folders} == {read_epochs(folders[0])}
    # Only a few records are kept.
    for number in range(2, 9):
        EpochRegistry().of(folders, call(f"plan {number}", number), lambda: None)
    assert len(folders[0].child("epochs").names()) == 2


def test_a_run_that_was_replaced_begins_no_epoch(tmp_path: Path) -> None:
    def fail_as_replaced() -> None:
        raise LiveRunError("taken over")

    folder = Folder(str(tmp_path))
    with pytest.raises(LiveRunError):
        EpochRegistry().of([folder], call("a", -1), fail_as_replaced)
    assert read_epochs(folder) == Epochs()
    # A registry remembers the epoch that it has begun, and does not check again.
    registry = EpochRegistry()
    assert (
        registry.of([folder], call("a", -1), lambda: None) == registry.of([folder], call("a", 4), fail_as_replaced) == 1
    )


def test_an_unreachable_store_does_not_stop_a_run_that_has_its_epoch() -> None:
    now_s = [0.0]
    registry = EpochRegistry(lambda: now_s[0])
    epochs = begin_epochs(start("a", -1, 0))
    assert registry.ask("folder", call("a", -1), lambda run_start: (epochs, 1)) == 1

    def fail_as_unreachable(run_start: RunStart) -> tuple[Epochs, int]:
        raise StorageError("the store is down")

    now_s[0] = 100.0
    assert registry.ask("folder", call("a", 4), fail_as_unreachable) == 1
    # A run that has to begin an epoch fails.
    with pytest.raises(StorageError):
        registry.ask("folder", call("b", 4), fail_as_unreachable)


def test_of_two_runs_that_write_the_same_record_the_second_begins_the_next_epoch(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    appended: list[bool] = []

    def append_another_first() -> None:
        if not appended:
            appended.append(EpochLog(folder).append(1, begin_epochs(start("other", -1, 0))))

    assert EpochRegistry().of([folder], call("a", -1), append_another_first) == 2
    assert [epoch.plan_id for epoch in read_epochs(folder).entries] == ["other", "a"]


# -- folders without records ----------------------------------------------------------------------


def make_header(run: str, batch: int, parents: tuple[int, ...] = (), bucket: int = 0) -> LineageHeader:
    """Return the header of a file built on the versions *parents*; its own version is its batch plus one."""
    lineage = tuple(CheckpointRef(version, "a" * 32) for version in parents)
    ref = CheckpointRef(batch + 1, "a" * 32)
    writer = Writer("query", run, batch, "host", batch + 1)
    return LineageHeader(DELTA, "counts", bucket, ref, lineage[-1] if lineage else None, lineage, 0, writer, "0.1.0")


def test_the_head_of_a_root_without_epochs_is_on_the_newest_runs_branch() -> None:
    """The files with the highest versions are all of the run that was given up."""
    headers = [make_header("1", batch, tuple(range(1, batch + 1))) for batch in range(10)]
    headers.append(replace(make_header("2", 6, tuple(range(1, 7))), ref=CheckpointRef(7, "b" * 32)))
    entries = [(Entry(file_name(header.ref, DELTA), 1, None, False), header) for header in headers]
    bucket = BucketFiles.read_before(Folder("memory://epochs"), 0, entries)
    assert find_heads([bucket], Epochs())[0].certain == (CheckpointRef(7, "b" * 32),)
    # A later run begins, which has not called the bucket yet.
    epochs, _ = begin_epoch(Epochs(), start("c", 6, 0))
    assert find_heads([bucket], epochs)[0] == Heads((CheckpointRef(7, "b" * 32),))


def test_runs_without_epochs_are_judged_by_the_lineages_of_their_files() -> None:
    first, second = make_header("1", 0), make_header("1", 1, (1,))
    built_on, later = make_header("2", 2, (1, 2)), make_header("3", 5, bucket=1)
    runs = EarlierRuns([first, second, built_on, later], "query")
    assert {runs.judge(header) for header in (first, second, built_on, later)} == {Verdict.COUNTS}
    # The second run built on the first, and made the first run's last batch again.
    given_up = make_header("1", 2, (1, 2), bucket=2)
    runs = EarlierRuns([first, second, built_on, given_up], "query")
    assert [runs.judge(header) for header in (second, built_on, given_up)] == [
        Verdict.COUNTS,
        Verdict.COUNTS,
        Verdict.GIVEN_UP,
    ]
    # Neither run built on the other, so their order is unknown.
    runs = EarlierRuns([make_header("1", 2), make_header("2", 2, bucket=1)], "query")
    assert runs.judge(make_header("1", 2)) is Verdict.UNKNOWN
    # A copy of another query's file is the state that this query began with.
    assert EarlierRuns([], "new").judge(first) is Verdict.COUNTS
    # After a rename, the file may be the query's own.
    assert EarlierRuns([], "new", renamed=True).judge(first) is Verdict.UNKNOWN


def test_files_whose_tasks_did_not_know_their_batch_need_different_heartbeats_to_be_ordered() -> None:
    """Such tasks count their bucket's calls, and a batch without data has the heartbeat of the batch before."""

    def make_header_of_call(run: str, call: int, heartbeat: int, bucket: int) -> LineageHeader:
        header = make_header(run, call, bucket=bucket)
        return replace(header, writer=Writer("query", run, call, "host", heartbeat, told=False))

    first, second = make_header_of_call("1", 5, 3, 0), make_header_of_call("2", 3, 3, 1)
    runs = EarlierRuns([first, second], "query")
    assert [runs.judge(header) for header in (first, second)] == [Verdict.UNKNOWN, Verdict.UNKNOWN]
    later = make_header_of_call("2", 3, 4, 1)
    runs = EarlierRuns([first, later], "query")
    assert [runs.judge(header) for header in (first, later)] == [Verdict.COUNTS, Verdict.COUNTS]


def test_a_file_of_format_1_shows_whether_its_task_knew_its_batch() -> None:
    def decode(query_id: str, run_id: str) -> LineageHeader:
        header = replace(make_header("1", 0), writer=Writer(query_id, run_id, 0, "host"), format=1)
        return LineageHeader.decode(header.encode(), "a file")

    assert decode("query", "run").writer.told
    # If the task did not know its batch, both ids are the plan's id.
    assert not decode("plan", "plan").writer.told
