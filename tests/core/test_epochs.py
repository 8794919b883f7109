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

RUN, OTHER = (f"6f1d7f0e-0000-4000-8000-00000000000{it}" for it in (1, 2))
NONE = Pointer("counts", 0, 1, 0, -1, None)


def at(batch: int, query_id: str = "query") -> Position:
    return Position(query_id, batch, batch + 1)


def start(plan_id: str, after: int, epoch: int, batch: int | None = None, run_id: str = "") -> Start:
    """A call of the batch after one, whose input is of an epoch and batch."""
    return Start(plan_id, parse_run_id(run_id), at(after), MadeAt(epoch, at(after if batch is None else batch)))


def begun(*starts: Start) -> Epochs:
    epochs = Epochs()
    for it in starts:
        epochs, _ = begin_epoch(epochs, it)
    return epochs


def test_a_run_that_goes_back_gives_up_what_came_after() -> None:
    epochs = begun(start("a", -1, 0), start("b", 3, 1))
    assert [(it.number, it.parents) for it in epochs.entries] == [(1, (0,)), (2, (1,))]
    assert epochs.judge(MadeAt(1, at(3))) is Verdict.COUNTS
    assert epochs.judge(MadeAt(1, at(4))) is Verdict.GIVEN_UP
    assert epochs.judge(MadeAt(2, at(4))) is Verdict.COUNTS


def test_a_call_of_a_known_run_changes_nothing() -> None:
    epochs = begun(start("a", -1, 0), start("b", 3, 1))
    assert begin_epoch(epochs, start("b", 7, 2)) == (epochs, 2)
    # A bucket that rested has an older input.
    assert begin_epoch(epochs, start("b", 7, 1, batch=2)) == (epochs, 2)


def test_who_returns_to_what_was_given_up_is_on_that_line() -> None:
    epochs = begun(start("a", -1, 0), start("b", 3, 1), start("c", 9, 1))
    assert epochs.entries[-1].parents == (1,)
    assert epochs.judge(MadeAt(1, at(8))) is Verdict.COUNTS
    assert epochs.judge(MadeAt(2, at(4))) is Verdict.GIVEN_UP


def test_runs_that_cannot_have_made_the_input_leave_room_for_those_that_can() -> None:
    # Run b made batch 2. Runs c, d and e went back to batch 0; run f goes on from a copy of b's checkpoint, and its first
    # call is of a bucket that has rested since batch 1.
    epochs = begun(start("a", -1, 0), start("b", 1, 1), *(start(plan, 0, 1) for plan in "cde"))
    epochs, _ = begin_epoch(epochs, start("f", 2, 1, batch=1))
    assert epochs.entries[-1].parents == (2, 1)
    assert epochs.judge(MadeAt(2, at(2))) is Verdict.UNKNOWN


def test_an_old_input_leaves_open_what_was_gone_on_from_until_one_tells() -> None:
    before = begun(start("a", -1, 0), start("b", 3, 1))
    open_yet, _ = begin_epoch(before, start("c", 9, 1, batch=2))
    assert open_yet.entries[-1].parents == (2, 1)
    assert open_yet.judge(MadeAt(2, at(8))) is open_yet.judge(MadeAt(1, at(8))) is Verdict.UNKNOWN
    assert open_yet.judge(MadeAt(1, at(3))) is Verdict.COUNTS
    told, _ = begin_epoch(open_yet, start("c", 9, 2))
    assert (told.entries[-1].parents, told.judge(MadeAt(1, at(8)))) == ((2,), Verdict.GIVEN_UP)
    told, _ = begin_epoch(open_yet, start("c", 9, 1))
    assert (told.entries[-1].parents, told.judge(MadeAt(2, at(8)))) == ((1,), Verdict.GIVEN_UP)


def test_one_plan_started_twice_is_told_by_sparks_run_id() -> None:
    epochs = begun(start("a", -1, 0, run_id=RUN))
    again, number = begin_epoch(epochs, start("a", 3, 1, run_id=OTHER))
    assert (number, again.entries[-1].same_plan) == (2, True)
    # User code may have changed the id: then both are one run, and the batch may have been made by either.
    assert again.judge(MadeAt(1, at(4))) is Verdict.UNKNOWN
    assert again.judge(MadeAt(1, at(5))) is Verdict.GIVEN_UP
    # Ids that come back, and what is no id of Spark's, tell nothing.
    for run_id in (RUN, "", "my job group"):
        assert begin_epoch(again, start("a", 4, 2, run_id=run_id)) == (again, 2)
    # A task of the run before that was late writes on its own line.
    late = Start("a", RUN, at(9), MadeAt(1, at(8)))
    assert begin_epoch(again, late) == (again, 1)


def test_a_number_is_never_given_twice() -> None:
    # Somebody removed the records.
    epochs, number = begin_epoch(Epochs(), start("c", 9, 7))
    assert number > 7
    assert epochs.entries[-1].parents == (0,)
    assert epochs.judge(MadeAt(7, at(9))) is Verdict.UNRECORDED
    # Perhaps they were removed under a running query.
    assert epochs.judge(MadeAt(7, at(10))) is Verdict.UNKNOWN
    # What has this number, and was made before, is of another epoch, once there is a newer one.
    later, _ = begin_epoch(epochs, start("d", 12, number))
    assert later.judge(MadeAt(number, at(9))) is Verdict.UNRECORDED
    assert later.judge(MadeAt(number, at(12))) is Verdict.COUNTS
    # The record lacks an epoch that has left files: it is not the newest.
    assert epochs.judge(MadeAt(number + 1, at(12))) is Verdict.UNKNOWN


def test_two_runs_that_find_no_records_after_the_same_batch_have_different_numbers() -> None:
    _, number = begin_epoch(Epochs(), start("c", 9, 7))
    _, other = begin_epoch(Epochs(), start("d", 9, 7))
    assert number != other
    # A run that begins later has a higher number than both.
    assert begin_epoch(Epochs(), start("e", 10, 7))[1] > max(number, other)


def test_heartbeats_count_between_queries() -> None:
    """A query that claims a folder counts its batches from 0."""
    claimed = Start("b", "", Position("new", -1, 5), MadeAt(1, Position("query", 4, 5)))
    epochs = begun(start("a", -1, 0), claimed)
    assert epochs.judge(MadeAt(1, Position("query", 4, 5), quiet=False)) is Verdict.COUNTS
    # A batch without data has the heartbeat of the one before.
    assert epochs.judge(MadeAt(1, Position("query", 5, 5))) is Verdict.UNKNOWN
    assert epochs.judge(MadeAt(1, Position("query", 5, 6))) is Verdict.GIVEN_UP
    assert epochs.judge(MadeAt(2, Position("new", 0, 6))) is Verdict.COUNTS


def test_copies_of_another_querys_files_are_none_of_the_own_epochs() -> None:
    epochs = begun(start("a", -1, 0), start("b", 3, 1))
    for number in (1, 2, 9):
        assert epochs.judge(MadeAt(number, Position("copied from", 40, 0))) is Verdict.UNRECORDED


def test_who_fails_again_and_again_before_a_commit_leaves_no_choice() -> None:
    epochs = begun(start("a", -1, 0))
    batch, epoch = 3, 1
    for number in range(40):
        # Some fail, and go on; the others are started once more from the same batch.
        epochs, mine = begin_epoch(epochs, start(f"plan {number}", batch, epoch))
        if number % 5 == 4:
            batch, epoch = batch + 4, mine
    assert {it.parents for it in epochs.entries} <= {(1 + 5 * it,) for it in range(9)} | {(0,)}
    assert epochs.line_is_known
    assert epochs.judge(MadeAt(1, at(3))) is Verdict.COUNTS
    assert epochs.judge(MadeAt(5, at(4))) is Verdict.GIVEN_UP


def test_where_heartbeats_are_compared_the_newest_runs_files_count_whatever_failed_before() -> None:
    def untold(heartbeat: int) -> Position:
        return Position("query", heartbeat - 1, heartbeat, told=False)

    epochs = begun(Start("a", "", untold(0), None))
    for number in range(30):
        epochs, mine = begin_epoch(epochs, Start(f"plan {number}", "", untold(3), MadeAt(1, untold(3))))
    assert epochs.judge(MadeAt(mine, untold(4), quiet=False)) is Verdict.COUNTS
    assert epochs.judge(MadeAt(1, untold(3), quiet=False)) is Verdict.COUNTS
    assert epochs.judge(MadeAt(1, untold(4), quiet=False)) is Verdict.GIVEN_UP


def test_a_folder_of_a_release_without_epochs_is_claimed_after_a_batch() -> None:
    """What its query made of the next batch has the same heartbeat, where that batch had no data."""
    pointer = replace(NONE, heartbeats=1, batch=0)
    claim = Start.of("b", "", Position("new", -1, 1), pointer, Epochs(), ("query", 0))
    epochs, _ = begin_epoch(Epochs(), claim)
    assert epochs.judge(MadeAt(0, Position("query", 0, 1))) is Verdict.UNRECORDED
    assert epochs.judge(MadeAt(0, Position("query", 1, 1))) is Verdict.GIVEN_UP


def test_old_epochs_are_forgotten() -> None:
    epochs = begun(*(start(f"plan {it}", it, it) for it in range(EPOCHS_MAX + 10)))
    assert len(epochs.entries) == EPOCHS_MAX
    assert epochs.judge(MadeAt(3, at(3))) is Verdict.UNRECORDED
    assert epochs.judge(MadeAt(EPOCHS_MAX, at(EPOCHS_MAX))) is Verdict.COUNTS


def test_epochs_ascend() -> None:
    one = Epoch(1, (0,), "a", "", at(0))
    with pytest.raises(ValueError, match="ascend"):
        Epochs((one, one))


# -- records --------------------------------------------------------------------------------------


def call(plan_id: str, after: int, pointer: Pointer | None = None) -> RunStart:
    return RunStart(plan_id, "", at(after), pointer)


def test_processes_of_a_run_have_one_epoch_and_every_place_a_copy(tmp_path: Path) -> None:
    places = [Folder(str(tmp_path / name)) for name in ("root", "backend")]
    assert EpochRegistry().of(places, call("a", -1), lambda: None) == 1
    assert EpochRegistry().of(places, call("a", -1), lambda: None) == 1
    assert read_epochs(places[0]) == read_epochs(places[1]) != Epochs()
    # A place that is new, or lost what it had, gets the record before a file is written there.
    more = [*places, Folder(str(tmp_path / "new"))]
    assert EpochRegistry().of(more, call("b", 3, replace(NONE, batch=3, epoch=1)), lambda: None) == 2
    assert {read_epochs(it) for it in more} == {read_epochs(places[0])}
    # Few are kept.
    for number in range(2, 9):
        EpochRegistry().of(places, call(f"plan {number}", number), lambda: None)
    assert len(places[0].child("epochs").names()) == 2


def test_a_run_that_was_replaced_begins_no_epoch(tmp_path: Path) -> None:
    def lost() -> None:
        raise LiveRunError("taken over")

    place = Folder(str(tmp_path))
    with pytest.raises(LiveRunError):
        EpochRegistry().of([place], call("a", -1), lost)
    assert read_epochs(place) == Epochs()
    # What it has begun, it need not look for again.
    registry = EpochRegistry()
    assert registry.of([place], call("a", -1), lambda: None) == registry.of([place], call("a", 4), lost) == 1


def test_a_store_that_does_not_answer_stops_no_run_that_has_its_epoch() -> None:
    now_s = [0.0]
    registry = EpochRegistry(lambda: now_s[0])
    epochs = begun(start("a", -1, 0))
    assert registry.ask("folder", call("a", -1), lambda it: (epochs, 1)) == 1

    def down(it: RunStart) -> tuple[Epochs, int]:
        raise StorageError("the store is down")

    now_s[0] = 100.0
    assert registry.ask("folder", call("a", 4), down) == 1
    # Not where it has to begin one.
    with pytest.raises(StorageError):
        registry.ask("folder", call("b", 4), down)


def test_of_two_that_make_a_record_one_does(tmp_path: Path) -> None:
    place = Folder(str(tmp_path))
    made: list[bool] = []

    def another_first() -> None:
        if not made:
            made.append(EpochLog(place).append(1, begun(start("other", -1, 0))))

    assert EpochRegistry().of([place], call("a", -1), another_first) == 2
    assert [it.plan_id for it in read_epochs(place).entries] == ["other", "a"]


# -- before there were records --------------------------------------------------------------------


def file_of(run: str, batch: int, parents: tuple[int, ...] = (), bucket: int = 0) -> LineageHeader:
    """A file that says which versions it was built on; its version is its batch and one."""
    lineage = tuple(CheckpointRef(it, "a" * 32) for it in parents)
    ref = CheckpointRef(batch + 1, "a" * 32)
    writer = Writer("query", run, batch, "host", batch + 1)
    return LineageHeader(DELTA, "counts", bucket, ref, lineage[-1] if lineage else None, lineage, 0, writer, "0.1.0")


def test_a_root_without_epochs_whose_query_went_back() -> None:
    """The newest versions are all of the run that was given up."""
    files = [file_of("1", it, tuple(range(1, it + 1))) for it in range(10)]
    files += [replace(file_of("2", it, tuple(range(1, 7))), ref=CheckpointRef(it + 1, "b" * 32)) for it in (6,)]
    entries = [(Entry(file_name(it.ref, DELTA), 1, None, False), it) for it in files]
    bucket = BucketFiles.read_before(Folder("memory://epochs"), 0, entries)
    assert find_heads([bucket], Epochs())[0].certain == (CheckpointRef(7, "b" * 32),)
    # A run after that, in which the bucket rests.
    epochs, _ = begin_epoch(Epochs(), start("c", 6, 0))
    assert find_heads([bucket], epochs)[0] == Heads((CheckpointRef(7, "b" * 32),))


def test_runs_without_epochs_are_told_where_their_files_do() -> None:
    first, second = file_of("1", 0), file_of("1", 1, (1,))
    built_on, later = file_of("2", 2, (1, 2)), file_of("3", 5, bucket=1)
    runs = EarlierRuns([first, second, built_on, later], "query")
    assert {runs.judge(it) for it in (first, second, built_on, later)} == {Verdict.COUNTS}
    # The second run built on the first, and made its batch anew.
    given_up = file_of("1", 2, (1, 2), bucket=2)
    runs = EarlierRuns([first, second, built_on, given_up], "query")
    assert [runs.judge(it) for it in (second, built_on, given_up)] == [
        Verdict.COUNTS,
        Verdict.COUNTS,
        Verdict.GIVEN_UP,
    ]
    # Neither built on the other: nobody can tell.
    runs = EarlierRuns([file_of("1", 2), file_of("2", 2, bucket=1)], "query")
    assert runs.judge(file_of("1", 2)) is Verdict.UNKNOWN
    # A copy of another query's is what this one began with.
    assert EarlierRuns([], "new").judge(first) is Verdict.COUNTS
    # Unless it may be the query's own, by another name.
    assert EarlierRuns([], "new", renamed=True).judge(first) is Verdict.UNKNOWN


def test_batches_without_data_leave_open_which_of_two_untold_files_is_older() -> None:
    """Each bucket counts its own calls, and the heartbeat is that of the batch before."""

    def file_of_call(run: str, call: int, heartbeat: int, bucket: int) -> LineageHeader:
        header = file_of(run, call, bucket=bucket)
        return replace(header, writer=Writer("query", run, call, "host", heartbeat, told=False))

    first, second = file_of_call("1", 5, 3, 0), file_of_call("2", 3, 3, 1)
    runs = EarlierRuns([first, second], "query")
    assert [runs.judge(it) for it in (first, second)] == [Verdict.UNKNOWN, Verdict.UNKNOWN]
    later = file_of_call("2", 3, 4, 1)
    runs = EarlierRuns([first, later], "query")
    assert [runs.judge(it) for it in (first, later)] == [Verdict.COUNTS, Verdict.COUNTS]


def test_a_file_of_the_first_release_tells_whether_its_task_was_told_its_batch() -> None:
    def decode(query_id: str, run_id: str) -> LineageHeader:
        header = replace(file_of("1", 0), writer=Writer(query_id, run_id, 0, "host"), format=1)
        return LineageHeader.decode(header.encode(), "a file")

    assert decode("query", "run").writer.told
    # Where it was not told, the plan's id is in the place of both.
    assert not decode("plan", "plan").writer.told
