"""The bucket of each source partition: mappings, assignments and tables, compared with a model of a producer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas.bucket_map import BY_PARTITION, BY_STREAM_AND_PARTITION, BucketMap
from arrow_schemas.checksum import compute_checksum
from arrow_schemas.errors import CorruptFileError, PartitionsChangedError, UsageError, VersionSkewError
from arrow_schemas.partitions import (
    PARTITIONS_FORMAT,
    BeforeExpansion,
    PartitionAssignment,
    StreamPartitions,
    parse_partitions_name,
    partition_before_expansion,
    partitions_name,
)
from spark_state_ext.engine.options import StateOptions
from spark_state_ext.engine.source_partition import SourcePartition
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.partition_files import (
    newest_assignment,
    record_assignment,
    record_growth,
    refuse_assignment,
)
from tests.helpers.soak import examples

# No deadline: machines may be slow.
_EXAMPLES = settings(max_examples=examples(100))
# A first number of partitions, and the numbers that the source grows to.
_GROWTH = st.tuples(st.integers(1, 12), st.lists(st.integers(2, 4), max_size=3)).map(
    lambda pair: [pair[0] * int(np.prod(pair[1][:at])) for at in range(len(pair[1]) + 1)]
)
_NAMES = st.text(min_size=1, max_size=3)
_HASHES = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60)


def by_halves(current_index: int, current_count: int, initial_count: int) -> int:
    """Mapping of a producer that splits partitions: it began with 0 and 1, and new partitions have keys of partition
    1."""
    return min(current_index, initial_count - 1)


def to_itself(current_index: int, current_count: int, initial_count: int) -> int:
    """A wrong mapping: a new partition becomes a bucket of its own."""
    return current_index


def by_count(current_index: int, current_count: int, initial_count: int) -> int:
    """A mapping that depends on the current number of partitions, which rows do not show."""
    return current_index if current_index < initial_count else current_count % initial_count


def _raises(current_index: int, current_count: int, initial_count: int) -> int:
    raise ValueError("no such partition")


def _not_whole(current_index: int, current_count: int, initial_count: int) -> object:
    return "0"


def _moves_the_first(current_index: int, current_count: int, initial_count: int) -> int:
    return (current_index + 1) % initial_count


HERE = "tests.core.test_partitions"


# -- a producer ------------------------------------------------------------------------------------


def count_by_bucket(rows: Sequence[tuple[int, int]], bucket_of: Callable[[int], int]) -> list[int]:
    """Return how often each row's key has come so far, counted with state by bucket."""
    state: dict[tuple[int, int], int] = {}
    counts = []
    for key, partition in rows:
        place = bucket_of(partition), key
        state[place] = state.get(place, 0) + 1
        counts.append(state[place])
    return counts


def produce_rows(counts: Sequence[int], hashes: Sequence[int]) -> list[tuple[int, int]]:
    """Return key and partition of all keys, written once for each number of partitions."""
    return [(key, key % count) for count in counts for key in hashes]


@_EXAMPLES
@given(_GROWTH, _HASHES)
def test_a_key_keeps_its_state_when_the_source_grows(counts: list[int], hashes: list[int]) -> None:
    hashes = sorted(set(hashes))
    source = SourcePartition("partition", counts)
    rows = produce_rows(counts, hashes)
    table = source.assignment.streams[0].buckets
    expected = [at + 1 for at in range(len(counts)) for _ in hashes]
    assert count_by_bucket(rows, lambda partition: table[partition]) == expected
    assert source.bucket_map.buckets == counts[0]


def test_wrong_mappings_lose_counts() -> None:
    """The model detects wrong mappings, here with the example of Samza's proposal: 2 partitions to 4."""
    rows = produce_rows([2, 4], range(8))
    assert count_by_bucket(rows, lambda partition: partition)[8:] == [2, 2, 1, 1, 2, 2, 1, 1]
    assert set(count_by_bucket(rows, lambda partition: min(partition, 1))[8:]) == {1, 2}
    assert set(count_by_bucket(rows, lambda partition: partition % 2)[8:]) == {2}
    # 3 is not a multiple of 2, and no mapping helps.
    grown = produce_rows([2, 3], range(6))
    for table in ((0, 1, 0), (0, 1, 1)):
        assert set(count_by_bucket(grown, table.__getitem__)[6:]) == {1, 2}
    with pytest.raises(UsageError, match="3, which is not a multiple of the first number, 2"):
        SourcePartition("partition", [2, 3])


@_EXAMPLES
@given(st.integers(1, 4), st.lists(st.integers(1, 40), max_size=6, unique=True).map(sorted), _HASHES)
def test_counts_stay_right_for_each_size_that_is_not_refused(first: int, grown: list[int], hashes: list[int]) -> None:
    """Offsets allow only sizes that can be followed, and rows prove only sizes that the source has had."""
    counts = [first, *(first * times for times in (2, 4, 8))]
    source = SourcePartition("p", counts, checkpoint_location="/checkpoint")
    table, known = source.assignment.streams[0].buckets, source.assignment
    state: Counter[tuple[int, int]] = Counter()
    for times, count in enumerate([first, *(size for size in grown if first < size <= counts[-1])], 1):
        partitions = [key % count for key in set(hashes)]
        _, new = source.buckets_of(pa.chunked_array([pa.array(partitions, pa.int64())]), None)
        try:
            known = known.reached_by(new)
            assert max(partitions) < known.streams[0].reached <= count
        except PartitionsChangedError:
            assert max(partitions) + 1 not in counts
        if count % first:
            with pytest.raises(PartitionsChangedError, match="cannot be followed"):
                source.refuse_counts({"topic": count}, False, "offsets/0")
            break
        source.refuse_counts({"topic": count}, False, "offsets/0")
        state.update((key, table[key % count]) for key in set(hashes))
        assert set(state.values()) == {times}


# -- assignments and tables ------------------------------------------------------------------------


@_EXAMPLES
@given(st.dictionaries(_NAMES, _GROWTH, min_size=1, max_size=4), st.sampled_from([BY_PARTITION, "s"]), st.data())
def test_rows_are_assigned_to_the_buckets_of_their_partitions(
    counts: dict[str, list[int]], group_by: str, data: st.DataObject
) -> None:
    group_by = BY_PARTITION if group_by == BY_PARTITION else BY_STREAM_AND_PARTITION
    if group_by == BY_PARTITION:
        # The streams began with the same number of partitions, and have grown independently.
        began = next(iter(counts.values()))[0]
        counts = {name: [began * count // mine[0] for count in mine] for name, mine in counts.items()}
    source = SourcePartition("p", counts, stream="s", group_by=group_by)
    names, first = sorted(counts), 0
    model: dict[tuple[str, int], int] = {}
    for name in names:
        for index in range(counts[name][-1]):
            before = partition_before_expansion(index, counts[name][-1], counts[name][0])
            model[name, index] = before if group_by == BY_PARTITION else first + before
        first += counts[name][0]
    rows = data.draw(st.lists(st.sampled_from(sorted(model)), max_size=50))
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    partitions = pa.chunked_array([pa.array([index for _, index in half], pa.int64()) for half in halves])
    streams = pa.chunked_array([pa.array([name for name, _ in half], pa.string()) for half in halves])
    buckets, new = source.buckets_of(partitions, streams)
    assert buckets.tolist() == [model[row] for row in rows]
    largest = {name: max([index for stream, index in rows if stream == name], default=-1) for name in names}
    assert new == {name: index for name, index in largest.items() if index >= counts[name][0]}
    carried = StateOptions.from_plain(StateOptions(root="/state", bucket_by=source).to_plain())
    assert carried.source_partition is not None
    assert carried.source_partition.buckets_of(partitions, streams)[0].tolist() == [model[row] for row in rows]
    assert carried.bucket_map == source.bucket_map
    assert carried.buckets == (max if group_by == BY_PARTITION else sum)(of_stream[0] for of_stream in counts.values())


@_EXAMPLES
@given(st.dictionaries(_NAMES, _GROWTH, min_size=1, max_size=3))
def test_assignments_round_trip(counts: dict[str, list[int]]) -> None:
    reached = {name: mine[-1] for name, mine in list(counts.items())[1:]}
    options: dict[str, Any] = {"stream": "s", "group_by": BY_STREAM_AND_PARTITION, "reached": reached}
    assignment = SourcePartition("p", counts, **options).assignment
    data = assignment.encode()
    assert PartitionAssignment.decode(data, "partitions_0.json") == assignment
    assert SourcePartition("p", dict(reversed(counts.items())), **options).assignment.encode() == data
    assert PartitionAssignment.from_plain(json.loads(json.dumps(assignment.to_plain()))) == assignment


@_EXAMPLES
@given(_GROWTH, st.data())
def test_growth_gives_the_same_assignment_in_one_step_and_in_many(counts: list[int], data: st.DataObject) -> None:
    def assign(some: Sequence[int]) -> PartitionAssignment:
        return SourcePartition("p", list(some)).assignment

    recorded = assign(counts[:1])
    for at in range(len(counts)):
        # A plan may omit sizes that the source had in between.
        between = data.draw(st.sets(st.sampled_from(counts[: at + 1])))
        recorded = recorded.grown_to(assign(sorted({counts[0], *between, counts[at]})))
        assert recorded.streams[0].buckets == assign(counts[: at + 1]).streams[0].buckets
        assert recorded.grown_to(assign(sorted({counts[0], counts[at]}))) is recorded
        if at:
            with pytest.raises(PartitionsChangedError, match=f"{counts[at]} partitions"):
                recorded.grown_to(assign(counts[:at]))
    assert recorded == assign(sorted(recorded.streams[0].counts))


def test_a_partition_never_goes_to_another_bucket() -> None:
    by_modulo = SourcePartition("p", [2, 4]).assignment
    by_function = SourcePartition("p", [2, 4], before_expansion=f"{HERE}:by_halves").assignment
    with pytest.raises(PartitionsChangedError, match=r"partition 2 has its keys in bucket 0, but .* in bucket 1"):
        by_modulo.grown_to(by_function)
    with pytest.raises(PartitionsChangedError, match="streams and first counts"):
        by_modulo.grown_to(SourcePartition("p", 4).assignment)
    assert by_function.grown_to(SourcePartition("p", [2, 5], before_expansion=f"{HERE}:by_halves").assignment) == (
        SourcePartition("p", [2, 4, 5], before_expansion=f"{HERE}:by_halves").assignment
    )


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "function", "text"),
    [
        (
            [2, 3],
            None,
            r"has 3, which is not a multiple of the first number, 2: .* already has 3 partitions, it cannot be followed",
        ),
        ([2, 4, 7], None, "has 7, which is not a multiple of the first number, 2"),
        ([4, 2], None, "ascend"),
        ([2, 2], None, "ascend"),
        ([], None, "a number of partitions"),
        (0, None, "1 or more"),
        ([2, 1 << 18], None, "from 1 to 131072"),
        (True, None, "a number of partitions"),
        ("2", None, "a number of partitions"),
        ([2, 4.0], None, "a number of partitions"),
        ({"a": 2}, None, "if stream is set"),
        ([2, 4], "to_itself", r"before_expansion\(2, 4, 2\) is 2, but must be a whole number from 0 to 1"),
        ([2, 4, 7], "by_count", r"before_expansion\(2, 7, 2\) is 1, but for a smaller count it was 0"),
        ([2, 4], "_not_whole", "is '0'"),
        ([2, 4], "_moves_the_first", r"before_expansion\(0, 2, 2\) is 1, but must be 0"),
        ([2, 4], "_raises", r"before_expansion\(0, 2, 2\) raised ValueError: no such partition"),
        ([2, 4], "nobody", "cannot be imported here"),
        ([2, 4], "HERE", "which is not a function"),
    ],
)
def test_invalid_counts_and_mappings_are_refused(counts: object, function: str | None, text: str) -> None:
    path = None if function is None else f"{HERE}:{function}"
    with pytest.raises(UsageError, match=text):
        SourcePartition("p", counts, before_expansion=path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"column": ""}, "name of a column"),
        ({"stream": ""}, "name of a column"),
        ({"stream": "s"}, "if stream is set"),
        ({"stream": "s", "counts": {}}, "names of the streams"),
        ({"stream": "s", "counts": {"": 2}}, "names of the streams"),
        (
            {"stream": "s", "counts": {"a": [2, 3]}},
            "counts of stream 'a' has 3, which is not a multiple of the first number, 2",
        ),
        (
            {"stream": "s", "counts": {"a": 2, "b": 2, "c": 4}},
            "stream 'a' began with 2 partitions and stream 'c' with 4, .* two states",
        ),
        ({"stream": "s", "counts": {"a": [2, 4], "b": [4, 8]}, "before_expansion": f"{HERE}:by_halves"}, "two states"),
        ({"reached": 4}, r"reached must be one of counts=\[2\]"),
        ({"reached": True, "counts": 1}, r"reached must be one of counts=\[1\]"),
        (
            {"reached": {"a": 2}},
            "reached must be (a dict by stream, such as|one number, because counts is for one stream)",
        ),
        (
            {"stream": "s", "counts": {"a": [2, 4]}, "reached": 4},
            "reached must be (a dict by stream, such as|one number, because counts is for one stream)",
        ),
        (
            {"stream": "s", "counts": {"a": [2, 4]}, "reached": {"b": 4}},
            "reached names the stream 'b', which counts does not name: it names a",
        ),
        ({"checkpoint_location": ""}, "the query's checkpointLocation"),
        ({"checkpoint_location": "checkpoint"}, "checkpoint_location must be a URL or an absolute path"),
        ({"group_by": "task"}, "group_by must be"),
        ({"before_expansion": "nothing"}, "an import path"),
        ({"before_expansion": len}, "an import path"),
        ({"before_expansion": "no_such_package:f"}, "cannot be imported here"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        SourcePartition(**{"column": "p", "counts": 2, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partitions", "streams", "error", "text"),
    [
        (
            [0, 3, 4],
            ["a", "a", "a"],
            PartitionsChangedError,
            r"partition 4 of stream 'a'.* counts=\[2, 4, 8\] of stream",
        ),
        ([0, 3, 9], ["a", "a", "a"], PartitionsChangedError, r"counts=\[2, 4, 12\]"),
        ([0, 1], ["a", "b"], PartitionsChangedError, r"partition 1 of stream 'b'.* counts=\[1, 2\]"),
        ([0, 0], ["a", "c"], PartitionsChangedError, "stream 'c', but the plan declares a, b"),
        ([0, -1], ["a", "a"], UsageError, "'p' has -1"),
        ([0, None], ["a", "a"], UsageError, "'p' is NULL in 1 rows"),
        ([0, 0], ["a", None], UsageError, "'s' is NULL in 1 rows"),
    ],
)
def test_rows_with_unknown_partitions_or_streams_are_refused(
    partitions: list[int | None], streams: list[str | None], error: type[Exception], text: str
) -> None:
    source = SourcePartition("p", {"a": [2, 4], "b": 1}, stream="s", group_by=BY_STREAM_AND_PARTITION)
    with pytest.raises(error, match=text):
        source.buckets_of(
            pa.chunked_array([pa.array(partitions, pa.int64())]), pa.chunked_array([pa.array(streams, pa.string())])
        )


_GROWN = StreamPartitions("", (2, 4, 8), (0, 1) * 4)


@pytest.mark.parametrize(
    ("reached", "largest", "proven"),
    [(2, 1, 2), (2, 3, 4), (4, 0, 4), (4, 3, 4), (2, 7, 8), (8, 6, 8), (2, 2, None), (2, 4, None), (4, 6, None)],
)
def test_rows_of_the_last_partition_prove_the_number_of_partitions(
    reached: int, largest: int, proven: int | None
) -> None:
    before = PartitionAssignment((replace(_GROWN, reached=reached),))
    if proven is not None:
        after = before.reached_by({"": largest})
        assert after.streams[0].reached == proven
        assert (after is before) == (proven == reached)
        return
    count = 4 if largest < 4 else 8
    with pytest.raises(
        PartitionsChangedError,
        match=f"from partition {largest}, but not from partition {count - 1}: .* grown from {reached} .* "
        f"reached={count}.* multiple of 2, .*cannot be followed",
    ):
        before.reached_by({"": largest})


@pytest.mark.parametrize(
    ("topics", "error", "text"),
    [
        ({"t": 2}, None, ""),
        ({"t": 4, "u": 8}, None, ""),
        # Valid without being declared: its rows go to the buckets of their keys.
        ({"t": 6}, None, ""),
        (
            {"t": 3},
            PartitionsChangedError,
            "'t' has 3 partitions now, .* 3 is not a multiple of 2, so it cannot be follow",
        ),
        ({"t": 2, "u": 5}, PartitionsChangedError, "topic 'u' has 5 partitions now"),
        ({"t": 1}, PartitionsChangedError, "1 is not a multiple of 2"),
        ({"t": 10}, PartitionsChangedError, r"Start the query again with counts=\[2, 4, 8, 10\]"),
        ({}, UsageError, "does not name the source's partitions.*Omit checkpoint_location"),
    ],
)
def test_the_sources_number_of_partitions_is_compared_with_the_plan(
    topics: dict[str, int], error: type[Exception] | None, text: str
) -> None:
    source = SourcePartition("p", [2, 4, 8], checkpoint_location="file:/checkpoint/")
    assert source.checkpoint_location == "/checkpoint"
    source.refuse_counts({}, True, "offsets/7")
    if error is None:
        source.refuse_counts(topics, False, "offsets/7")
        return
    with pytest.raises(error, match=text) as caught:
        source.refuse_counts(topics, False, "offsets/7")
    assert "offsets/7" in str(caught.value)


def test_the_number_of_partitions_is_compared_for_each_stream() -> None:
    source = SourcePartition("p", {"a": [3, 6], "b": 3}, stream="s", checkpoint_location="/checkpoint")
    source.refuse_counts({"a": 6, "b": 3, "of another source": 5}, False, "offsets/7")
    source.refuse_counts({"a": 6}, True, "offsets/7")
    with pytest.raises(PartitionsChangedError, match=r"Start the query again with counts=\[3, 6\] of stream 'b'"):
        source.refuse_counts({"a": 3, "b": 6}, False, "offsets/7")
    with pytest.raises(UsageError, match=r"does not name a stream 'b', .* Kafka topics: a, c\. .* column 'topic'"):
        source.refuse_counts({"a": 3, "c": 3}, False, "offsets/7")
    # Only the function knows which other numbers are valid.
    by_halves = SourcePartition("p", [2, 5], before_expansion=f"{HERE}:by_halves", checkpoint_location="/checkpoint")
    by_halves.refuse_counts({"t": 5}, False, "offsets/7")
    with pytest.raises(PartitionsChangedError, match=r"If before_expansion is right for 4, .*counts=\[2, 4, 5\]"):
        by_halves.refuse_counts({"t": 4}, False, "offsets/7")


def test_bucket_by_must_be_a_bucket_map_or_a_source_partition() -> None:
    with pytest.raises(UsageError, match="a BucketMap of hashes, or a SourcePartition"):
        StateOptions(root="/state", bucket_by=BucketMap.of_partitions({"": 2}))
    with pytest.raises(UsageError, match="a BucketMap of hashes, or a SourcePartition"):
        StateOptions(root="/state", bucket_by="partition")  # type: ignore[arg-type]


# -- files -----------------------------------------------------------------------------------------


def test_damaged_assignment_files_are_refused() -> None:
    counts: dict[str, int | list[int]] = {"a": [2, 4], "b": 3}
    reached = {"a": 4}
    source = SourcePartition("p", counts, stream="s", group_by=BY_STREAM_AND_PARTITION, reached=reached)
    data = source.assignment.encode()
    for at in range(len(data)):
        for bit in (0x01, 0x20):
            damaged = bytearray(data)
            damaged[at] ^= bit
            try:
                decoded = PartitionAssignment.decode(bytes(damaged), "partitions_0.json")
            except (CorruptFileError, VersionSkewError):
                continue
            assert decoded.encode() == data
    for end in range(len(data)):
        with pytest.raises(CorruptFileError):
            PartitionAssignment.decode(data[:end], "partitions_0.json")


@pytest.mark.parametrize(
    "streams",
    [
        {},
        {"": {"counts": [], "buckets": [0, 1]}},
        {"": {"counts": [2, 4], "buckets": [0, 1]}},
        {"": {"counts": [4, 2], "buckets": [0, 1]}},
        {"": {"counts": [2], "buckets": [0, -1]}},
        {"": {"counts": [2], "buckets": [0, "1"]}},
        {"": {"counts": [True], "buckets": [0]}},
        {"": {"buckets": [0]}},
        {"": {"counts": [2], "buckets": [0, 1], "reached": 4}},
        {"": {"counts": [1], "buckets": [0], "reached": True}},
        {"b": {"counts": [1], "buckets": [0]}, "a": {"counts": [1], "buckets": [0]}},
        [],
    ],
)
def test_files_without_a_valid_assignment_are_refused(streams: object) -> None:
    fields = {"format": PARTITIONS_FORMAT, "streams": streams}
    data = json.dumps({**fields, "checksum": compute_checksum(fields)}).encode()
    with pytest.raises(CorruptFileError, match="partitions_0"):
        PartitionAssignment.decode(data, "partitions_0.json")


def test_names_of_assignment_files_are_parsed() -> None:
    assert [parse_partitions_name(partitions_name(number)) for number in (0, 1, 10, 999_999_999)] == [
        *(0, 1, 10, 999_999_999)
    ]
    for name in (
        "partitions_01.json",
        "partitions_-1.json",
        "partitions_.json",
        "partitions_1.json.tmp",
        "operator_0.json",
    ):
        assert parse_partitions_name(name) is None


def make_assignment(*counts: int, function: BeforeExpansion | None = None) -> PartitionAssignment:
    return PartitionAssignment.declared(BucketMap.of_partitions({"": counts[0]}), {"": counts}, function)


def test_each_change_of_the_assignment_writes_a_new_file(tmp_path: Path) -> None:
    files = Folder(str(tmp_path))
    assert newest_assignment(files) is None
    with pytest.raises(PartitionsChangedError, match=r"but partitions_0\.json"):
        record_assignment(files, make_assignment(2), has_state=True)
    assert list(tmp_path.iterdir()) == []
    assert record_assignment(files, make_assignment(2), has_state=False) == make_assignment(2)
    # Another process of the first batch finds the file that it would have written.
    assert record_assignment(files, make_assignment(2), has_state=False) == make_assignment(2)
    assert record_assignment(files, make_assignment(2, 4), has_state=True) == make_assignment(2, 4)
    assert record_assignment(files, make_assignment(2, 8), has_state=True) == make_assignment(2, 4, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"partitions_{n}.json" for n in range(3)]
    for refused in (make_assignment(2, 4), make_assignment(2), make_assignment(2, 8, function=by_halves)):
        for check in (refuse_assignment, lambda *arguments: record_assignment(*arguments, has_state=True)):
            with pytest.raises(PartitionsChangedError):
                check(files, refused)
    # The operator file checks another first number of partitions.
    refuse_assignment(files, make_assignment(4))
    with pytest.raises(PartitionsChangedError, match="streams and first counts"):
        record_assignment(files, make_assignment(4, 8), has_state=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"partitions_{n}.json" for n in range(3)]
    # Growth that rows prove is recorded once, and stays in force for every later plan.
    for _ in range(2):
        assert record_growth(files, {"": 3}).streams[0].reached == 4
    with pytest.raises(PartitionsChangedError, match="from partition 4, but not from partition 7"):
        record_growth(files, {"": 4})
    assert record_assignment(files, make_assignment(2, 8), has_state=True).streams[0].reached == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"partitions_{n}.json" for n in range(4)]
    (tmp_path / "partitions_3.json").unlink()
    (tmp_path / "partitions_2.json").write_bytes(b"{}")
    with pytest.raises(CorruptFileError, match=r"partitions_2.json is not a valid assignment .* Bring it back"):
        newest_assignment(files)


def test_concurrent_writers_merge_their_assignments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes its assignment first, and it is compared with this one."""
    files, create = Folder(str(tmp_path)), Folder.create
    others: list[PartitionAssignment] = [make_assignment(2, 4)]

    def create_after_other(self: Folder, name: str, data: bytes) -> bool:
        if others:
            create(self, name, others.pop().encode())
        return create(self, name, data)

    monkeypatch.setattr(Folder, "create", create_after_other)
    assert record_assignment(files, make_assignment(2, 8), has_state=False) == make_assignment(2, 4, 8)
    others.append(make_assignment(2, 4, 8, 16))
    with pytest.raises(PartitionsChangedError, match="up to 16 partitions"):
        record_assignment(files, make_assignment(2, 4, 8, 12, function=lambda at, _, first: at % first), has_state=True)


def test_invalid_assignments_of_streams_are_refused() -> None:
    stream = StreamPartitions("a", (2,), (0, 1))
    with pytest.raises(UsageError, match="ascend by name"):
        PartitionAssignment((stream, stream))
    with pytest.raises(UsageError, match="cannot be in buckets"):
        replace(stream, buckets=(0,))
    with pytest.raises(UsageError, match="cannot be assigned to 2 buckets"):
        PartitionAssignment.declared(BucketMap(2), {"": [2]}, None)


def test_the_package_exports_source_partition() -> None:
    import spark_state_ext

    assert spark_state_ext.SourcePartition is SourcePartition
    assert spark_state_ext.partition_before_expansion is partition_before_expansion
    counts: Mapping[str, int] = {"clicks": 3, "orders": 3}
    assert repr(SourcePartition("p", counts, stream="s")) == (
        "SourcePartition(column='p', counts={'clicks': (3,), 'orders': (3,)}, stream='s', group_by='partition', "
        "before_expansion=None, reached=None, checkpoint_location=None)"
    )
