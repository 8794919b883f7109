"""The bucket of a row by equal ranges, by bounds and by partition, compared with integer arithmetic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas.bucket_map import BOUNDS, BY_PARTITION, BY_STREAM_AND_PARTITION, HASH, PARTITION, BucketMap
from arrow_schemas.checksum import compute_checksum
from arrow_schemas.errors import (
    BucketCountChangedError,
    BucketMapChangedError,
    CorruptFileError,
    UsageError,
    VersionSkewError,
)
from arrow_schemas.labels import find_buckets
from arrow_schemas.operator import OPERATOR_FORMAT, OperatorFile
from tests.helpers.soak import examples

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "operator-format-3.json"
_END = 1 << 32
# Without a deadline, so that a slow machine does not fail a test.
_EXAMPLES = settings(max_examples=examples(100))
_COUNTS = st.integers(1, 600) | st.sampled_from([1 << 15, (1 << 15) - 1])
_BOUNDS = st.sets(st.integers(1, _END - 1), max_size=40).map(lambda bounds: (0, *sorted(bounds)))
_STREAMS = st.dictionaries(st.text(min_size=1), st.integers(1, 50), min_size=1, max_size=4) | st.integers(1, 50).map(
    lambda count: {"": count}
)
_BY_PARTITION = st.builds(BucketMap.of_partitions, _STREAMS, st.sampled_from([BY_PARTITION, BY_STREAM_AND_PARTITION]))
_MAPS = st.builds(BucketMap, _COUNTS) | _BOUNDS.map(BucketMap.between)


def _list_edges(of: BucketMap) -> list[int]:
    """Return the hashes where a bucket begins or ends, and those next to them."""
    bounds = [bound for bucket in range(of.buckets) for bound in of.range_of(bucket)]
    high_words = sorted({word for bound in bounds for word in (bound - 1, bound, bound + 1) if 0 <= word < _END})
    return [word << 32 | low for word in high_words for low in (0, 0xFFFFFFFF)]


@_EXAMPLES
@given(_MAPS)
def test_buckets_are_ranges_that_follow_each_other(of: BucketMap) -> None:
    ranges = [of.range_of(bucket) for bucket in range(of.buckets)]
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
    assert ranges[-1][1] == _END
    hashes = _list_edges(of)
    buckets = of.of(np.array(hashes, np.uint64))
    assert all(ranges[bucket][0] <= key >> 32 < ranges[bucket][1] for key, bucket in zip(hashes, buckets, strict=True))
    assert [of.candidates(key) for key in hashes[:50]] == [range(b, b + 1) for b in buckets[:50].tolist()]


@_EXAMPLES
@given(_COUNTS, st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_equal_ranges_agree_with_integer_arithmetic(buckets: int, hashes: list[int]) -> None:
    mapped = BucketMap(buckets).of(np.array(hashes, np.uint64)).tolist()
    assert mapped == find_buckets(np.array(hashes, np.uint64), buckets).tolist()
    assert mapped == [(key >> 32) * buckets >> 32 for key in hashes]


@_EXAMPLES
@given(_MAPS, _MAPS)
def test_overlapping_buckets_are_those_whose_ranges_intersect(mine: BucketMap, other: BucketMap) -> None:
    theirs = [other.range_of(bucket) for bucket in range(other.buckets)]
    for bucket in {0, mine.buckets // 2, mine.buckets - 1}:
        low, high = mine.range_of(bucket)
        expected = [at for at, (begins, ends) in enumerate(theirs) if begins < high and low < ends]
        assert list(mine.overlapping(other, bucket)) == expected


def test_only_the_given_buckets_are_split() -> None:
    split = BucketMap.split(4, {1: 2, 3: 3})
    assert split.kind == BOUNDS
    quarter = _END // 4
    assert [split.range_of(bucket)[0] for bucket in range(split.buckets)] == [
        *(0, quarter, quarter + quarter // 2, 2 * quarter, 3 * quarter),
        *(3 * quarter + quarter // 3, 3 * quarter + 2 * quarter // 3),
    ]
    assert BucketMap.split(4, {}) == BucketMap(4)
    assert BucketMap.split(4, dict.fromkeys(range(4), 2)) == BucketMap(8)


@_EXAMPLES
@given(st.integers(1, 40), st.dictionaries(st.integers(0, 39), st.integers(2, 7), max_size=3))
def test_the_argument_of_a_map_makes_the_same_map(buckets: int, into: dict[int, int]) -> None:
    bucket_map = BucketMap.split(buckets, {bucket: parts for bucket, parts in into.items() if bucket < buckets})
    name, text = bucket_map.argument.split("=", 1)
    assert bucket_map == (BucketMap(int(text)) if name == "buckets" else eval(text, {"BucketMap": BucketMap}))
    assert (name == "buckets") == (bucket_map.kind == HASH)


def test_a_map_without_a_short_argument_refers_to_the_previous_one() -> None:
    assert BucketMap.split(4, {2: 3}).argument == "bucket_by=BucketMap.split(4, {2: 3})"
    assert (
        BucketMap.between([0, 5, 7]).argument
        == BucketMap.of_partitions({"": 3}).argument
        == "the same bucket_by as before"
    )
    assert BucketMap.split(32_767, {1: 2}).argument == "bucket_by=BucketMap.split(32767, {1: 2})"


@pytest.mark.parametrize(
    ("make_map", "text"),
    [
        (lambda: BucketMap(0), "0 buckets"),
        (lambda: BucketMap(True), "True buckets"),
        (lambda: BucketMap(2, "other"), "'other'"),
        (lambda: BucketMap(2, BOUNDS), "0 bounds"),
        (lambda: BucketMap(2, HASH, (0, 5)), "2 bounds"),
        (lambda: BucketMap(2, BOUNDS, (0, 0)), "ascending from 0"),
        (lambda: BucketMap(2, BOUNDS, (1, 5)), "ascending from 0"),
        (lambda: BucketMap(2, BOUNDS, (0, _END)), "below 4294967296"),
        (lambda: BucketMap(3, BOUNDS, (0, 5)), "3 buckets must be 3"),
        (lambda: BucketMap.between([]), "0 buckets"),
        (lambda: BucketMap.split(4, {4: 2}), "bucket 4 of 4"),
        (lambda: BucketMap.split(4, {1: 0}), "into 0"),
        (lambda: BucketMap.split(4, [2, 3]), r"not \[2, 3\]"),  # type: ignore[arg-type]
        (lambda: BucketMap(2, PARTITION), "group_by must be"),
        (lambda: BucketMap(2, HASH, streams=(("", 2),)), "cannot have streams"),
        (lambda: BucketMap(2, BOUNDS, (0, 5), group_by="partition"), "cannot have streams"),
        (lambda: BucketMap(3, PARTITION, streams=(("", 2),), group_by="partition"), "do not make 3 buckets"),
        (lambda: BucketMap(2, PARTITION, (0, 5), (("", 2),), "partition"), "2 bounds"),
        (lambda: BucketMap(2, PARTITION, streams=(("b", 2), ("a", 2)), group_by="partition"), "ascending"),
        (lambda: BucketMap(2, PARTITION, streams=(("", 2), ("a", 2)), group_by="partition"), "ascending"),
        (lambda: BucketMap.of_partitions({}), "0 buckets"),
        (lambda: BucketMap.of_partitions({"a": 0, "b": 2}), "at least 1"),
        (lambda: BucketMap.of_partitions({"": "2"}), "0 buckets"),  # type: ignore[dict-item]
        (lambda: BucketMap.of_partitions({"": 2}, "task"), "not 'task'"),
    ],
)
def test_an_impossible_map_is_refused(make_map: object, text: str) -> None:
    assert callable(make_map)
    with pytest.raises(UsageError, match=text):
        make_map()


def test_a_map_by_partition_does_not_determine_buckets_by_hash() -> None:
    of = BucketMap.of_partitions({"": 3})
    assert of.candidates(7) == range(3)
    with pytest.raises(ValueError, match="not the hash of its key"):
        of.of(np.zeros(1, np.uint64))


@_EXAMPLES
@given(_BY_PARTITION)
def test_a_map_by_partition_has_a_bucket_for_each_partition(of: BucketMap) -> None:
    counts = dict(of.streams)
    places = [(name, of.first_of(name) + index) for name, count in of.streams for index in range(count)]
    if of.group_by == BY_STREAM_AND_PARTITION:
        assert sorted(bucket for _, bucket in places) == list(range(of.buckets))
        assert of.one_state == (len(counts) == 1)
    else:
        assert {bucket for _, bucket in places} == set(range(of.buckets)) == set(range(max(counts.values())))
        assert of.one_state
    assert BucketMap.from_plain(json.loads(json.dumps(of.to_plain(), sort_keys=True))) == of
    assert BucketMap.of_partitions(dict(reversed(of.streams)), of.group_by) == of


def _make_operator(mapped: BucketMap | None, buckets: int = 5) -> OperatorFile:
    key = '{"type":"struct","fields":[{"name":"k","type":"long","nullable":true,"metadata":{}}]}'
    state = key.replace('"k"', '"n"')
    return OperatorFile("counts", "q", buckets, key, state, mapped=mapped)


@pytest.mark.parametrize("mapped", [BucketMap.split(4, {1: 2}), BucketMap.of_partitions({"": 5})])
def test_an_operator_file_stores_its_map_and_refuses_another_one(mapped: BucketMap) -> None:
    data = _make_operator(mapped).encode()
    operator = OperatorFile.decode(data, "there")
    assert (operator.bucket_map, operator.encode()) == (mapped, data)
    assert json.loads(data)["format"] == OPERATOR_FORMAT
    with pytest.raises(BucketMapChangedError, match=f"give {re.escape(mapped.argument)}, "):
        operator.succeeded_by(_make_operator(None))
    with pytest.raises(BucketMapChangedError, match=r"with other bounds|by source partition"):
        operator.succeeded_by(_make_operator(BucketMap.split(4, {2: 2})))
    assert operator.succeeded_by(_make_operator(mapped)) is operator
    with pytest.raises(BucketCountChangedError):
        _make_operator(None).succeeded_by(_make_operator(None, 4))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        try:
            decoded = OperatorFile.decode(bytes(damaged), "operator_0.json")
        except (CorruptFileError, VersionSkewError):
            continue
        # Only white space is outside the checksum.
        assert decoded.encode() == data


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (({"": 4},), r"began with 2 partitions and the plan says 4: give counts=\[2, 4\], if"),
        (({"": 3},), r"began with 2 partitions and the plan says 3: give a list for counts that begins with 2"),
        (({"": 1},), r"began with 2 partitions and the plan says 1: give a list for counts that begins with 2"),
        (({"": 2}, BY_STREAM_AND_PARTITION), "grouped by 'partition', not 'stream_and_partition'"),
        (({"a": 2},), "its streams were unnamed and are now a"),
    ],
)
def test_an_operator_file_refuses_another_map_by_partition(arguments: tuple[object, ...], text: str) -> None:
    stored, planned = BucketMap.of_partitions({"": 2}), BucketMap.of_partitions(*arguments)  # type: ignore[arg-type]
    with pytest.raises(BucketMapChangedError, match=text):
        _make_operator(stored, 2).succeeded_by(_make_operator(planned, planned.buckets))
    with pytest.raises(BucketMapChangedError, match=r"has its state in 2 buckets and the job asks for 2 buckets by"):
        _make_operator(None, 2).succeeded_by(_make_operator(stored, 2))


def test_the_error_about_another_number_of_partitions_names_the_stream() -> None:
    stored, planned = (BucketMap.of_partitions({"clicks": 3, "orders": orders}) for orders in (3, 6))
    with pytest.raises(
        BucketMapChangedError, match=r"of stream 'orders' and the plan says 6: give counts=\[3, 6\] of s"
    ):
        _make_operator(stored, 3).succeeded_by(_make_operator(planned, 6))


@pytest.mark.parametrize("plain", [{"streams": {}}, {"streams": {"": 4}}, {"group_by": "none"}, {"kind": "bounds"}])
def test_an_operator_file_with_an_impossible_map_by_partition_is_refused(plain: dict[str, object]) -> None:
    fields = json.loads(_make_operator(BucketMap.of_partitions({"": 5})).encode())
    fields["bucket_map"] |= plain
    del fields["checksum"]
    fields["checksum"] = compute_checksum(fields)
    with pytest.raises(CorruptFileError):
        OperatorFile.decode(json.dumps(fields).encode(), "operator_0.json")


@pytest.mark.parametrize("plain", [{"buckets": 4}, {"bounds": [0, 9, 8, 10, 11]}, {"kind": "hash"}, {"kind": "other"}])
def test_an_operator_file_with_an_impossible_map_is_refused(plain: dict[str, object]) -> None:
    fields = json.loads(_make_operator(BucketMap.split(4, {1: 2})).encode())
    fields["bucket_map"] |= plain
    del fields["checksum"]
    fields["checksum"] = compute_checksum(fields)
    with pytest.raises(CorruptFileError):
        OperatorFile.decode(json.dumps(fields).encode(), "operator_0.json")


def test_a_release_without_bucket_maps_refuses_an_operator_file_with_one(tmp_path: Path) -> None:
    """Runs the code of an older wheel of the project, which knows only equal ranges."""
    (wheel,) = (ROOT / "tests" / "releases" / "part-1").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import sys; from arrow_schemas.operator import OperatorFile\n"
        "try: OperatorFile.decode(open(sys.argv[1], 'rb').read(), 'operator_0.json')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(GOLDEN)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.startswith("VersionSkewError operator_0.json has format 3")
