"""Which call of a task waits for the uploads of all its calls."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arrow_schemas import Pointer
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.engine import deferral
from spark_state_ext.engine.deferral import Partitioning, TaskEnd, TaskEnds
from spark_state_ext.errors import StorageError
from spark_state_ext.files.folder import Folder

BUCKETS = 7
RUN = "run-1"


@pytest.fixture
def query_folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "home"))


def _pointer(bucket: int, partitioning: tuple[str, int] | None = None) -> Pointer:
    return Pointer("counts", bucket, BUCKETS, 0, 3, None, partitioning=partitioning)


@pytest.mark.parametrize("given", [1, 2, 3, 4, 6, 7, 8, 200])
@pytest.mark.parametrize("real", [1, 2, 3, 4, 6, 7, 8, 200])
def test_expected_calls_are_exactly_the_real_calls_or_none(given: int, real: int, query_folder: Folder) -> None:
    """The number of partitions that tasks are given may be right or wrong."""
    run = f"run-{uuid.uuid4()}"
    tasks = {partition: [b for b in range(BUCKETS) if b % real == partition] for partition in range(real)}
    # In the first batch each call compares; the next batch uses the result.
    noted = {
        bucket: Partitioning(run, given, partition, BUCKETS).noted(bucket, query_folder)
        for partition, buckets in tasks.items()
        for bucket in buckets
    }
    right = all(bucket % given == bucket % real for bucket in range(BUCKETS))
    assert ("spread-" + run in query_folder.names()) == (not right)
    for partition, buckets in tasks.items():
        for bucket in buckets:
            # Use another process than the one that found a difference.
            expected = Partitioning(run, given, partition, BUCKETS).expected(
                _pointer(bucket, noted[bucket]), query_folder
            )
            assert expected == (frozenset(buckets) if right else frozenset())


def test_the_last_call_of_a_task_is_recognised_by_its_buckets() -> None:
    partitioning = Partitioning(RUN, 2, 1, BUCKETS)
    assert not partitioning.is_last({1, 3})
    assert partitioning.is_last({5, 3, 1})
    # These tasks do not know the number of partitions.
    assert not Partitioning("", None, 1, BUCKETS).is_last(range(BUCKETS))


def test_no_calls_are_expected_before_a_batch_has_compared(query_folder: Folder) -> None:
    partitioning = Partitioning(RUN, 2, 0, BUCKETS)
    assert partitioning.expected(_pointer(0), query_folder) == frozenset()
    assert partitioning.expected(_pointer(0, ("another run", 2)), query_folder) == frozenset()
    assert partitioning.expected(_pointer(0, (RUN, 3)), query_folder) == frozenset()
    assert partitioning.expected(_pointer(0, (RUN, 2)), query_folder) == {0, 2, 4, 6}
    # Tasks that do not know their run or the number of partitions expect no calls.
    for unknown in (replace(partitioning, run_id=""), replace(partitioning, partitions=None)):
        assert unknown.noted(0, query_folder) is None
        assert unknown.expected(_pointer(0, (RUN, 2)), query_folder) == frozenset()
    assert query_folder.names() == []


def test_another_number_of_partitions_within_one_run_is_compared_again(query_folder: Folder) -> None:
    """This happens if Spark repartitions the state of a stopped query that is then started from the same plan."""
    before = {bucket: _pointer(bucket, (RUN, 2)) for bucket in range(BUCKETS)}
    differences = deferral.Differences()
    for partitions in (5, 1, 2):
        tasks = {at: Partitioning(RUN, partitions, at, BUCKETS, differences) for at in range(partitions)}
        for bucket, pointer in before.items():
            assert tasks[bucket % partitions].expected(pointer, query_folder) == frozenset()
        before = {
            bucket: _pointer(bucket, tasks[bucket % partitions].noted(bucket, query_folder))
            for bucket in range(BUCKETS)
        }
        for bucket, pointer in before.items():
            expected = tasks[bucket % partitions].expected(pointer, query_folder)
            assert expected == set(range(bucket % partitions, BUCKETS, partitions))
    assert query_folder.names() == []


class UploadsRecorder:
    """Records the uploads that a call waits for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []


def test_the_last_call_waits_for_the_uploads_that_other_calls_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[list[str]] = []
    monkeypatch.setattr(deferral, "await_all", lambda left, *args, **kwargs: waited.append(list(left)))
    uploads: Any = UploadsRecorder()
    expected = frozenset({1, 3, 5})
    ends = TaskEnds()
    end = ends.of(4711)
    left: Any
    for bucket, left in ((1, ["a"]), (3, [])):
        assert end.may_leave(bucket, expected)
        end.over(bucket, left, expected, uploads, CommitOptions())
        assert waited == []
        assert ends.of(4711) is end
    assert not end.may_leave(5, expected), "no call comes after it"
    left = ["b"]
    end.over(5, left, expected, uploads, CommitOptions())
    assert waited == [["a", "b"]]
    # A call that was not expected waits for its own uploads and those of the others.
    other = ends.of(4712)
    left = ["c"]
    other.over(1, left, expected, uploads, CommitOptions())
    assert not other.may_leave(2, expected)
    left = ["d"]
    other.over(2, left, frozenset(), uploads, CommitOptions())
    assert waited[1:] == [["c", "d"]]
    # Attempts do not see each other, and for a task that does not know its attempt no state is kept.
    assert ends.of(4713).left == []
    assert ends.of(None) is not ends.of(None)


def test_a_failed_upload_that_another_call_left_fails_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_failed(*args: Any, **kwargs: Any) -> None:
        raise StorageError("the upload of bucket 1 failed")

    monkeypatch.setattr(deferral, "await_all", raise_failed)
    uploads: Any = UploadsRecorder()
    end = TaskEnd()
    left: Any = ["a"]
    end.over(1, left, frozenset({1, 2}), uploads, CommitOptions())
    with pytest.raises(StorageError, match="of bucket 1"):
        end.over(2, [], frozenset({1, 2}), uploads, CommitOptions())


def test_no_calls_are_expected_while_the_store_fails_and_the_next_call_asks_again(
    query_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker may have found a difference."""
    run = f"run-{uuid.uuid4()}"
    assert Partitioning(run, 2, 0, BUCKETS).noted(3, query_folder) is None
    # Each Partitioning has its own process's differences.

    def raise_reset(*args: object, **kwargs: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    partitioning, pointer = Partitioning(run, 2, 0, BUCKETS), _pointer(0, (run, 2))
    with monkeypatch.context() as patch:
        patch.setattr(type(query_folder._fs), "info", raise_reset)
        assert partitioning.expected(pointer, query_folder) == frozenset()
        assert not len(partitioning.differences)
    assert partitioning.expected(pointer, query_folder) == frozenset()
    assert list(partitioning.differences._differs.values()) == [True]
