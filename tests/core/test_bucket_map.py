"""Which bucket a row belongs to: equal ranges, bounds and partitions, against arithmetic over whole numbers."""

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
# However slow the machine is.
_UNHURRIED = settings(max_examples=examples(100), deadline=None)
_COUNTS = st.integers(1, 600) | st.sampled_from([1 << 15, (1 << 15) - 1])
_BOUNDS = st.sets(st.integers(1, _END - 1), max_size=40).map(lambda them: (0, *sorted(them)))
_STREAMS = st.dictionaries(st.text(min_size=1), st.integers(1, 50), min_size=1, max_size=4) | st.integers(1, 50).map(
    lambda count: {"": count}
)
_BY_PARTITION = st.builds(BucketMap.of_partitions, _STREAMS, st.sampled_from([BY_PARTITION, BY_STREAM_AND_PARTITION]))
_MAPS = st.builds(BucketMap, _COUNTS) | _BOUNDS.map(BucketMap.between)


def _edges(of: BucketMap) -> list[int]:
    """Hashes where a bucket begins or ends, and some in the midst."""
    some = [it for bucket in range(of.buckets) for it in of.range_of(bucket)]
    high = sorted({it for at in some for it in (at - 1, at, at + 1) if 0 <= it < _END})
    return [it << 32 | low for it in high for low in (0, 0xFFFFFFFF)]


@_UNHURRIED
@given(_MAPS)
def test_buckets_are_ranges_that_follow_each_other(of: BucketMap) -> None:
    ranges = [of.range_of(bucket) for bucket in range(of.buckets)]
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
    assert ranges[-1][1] == _END
    hashes = _edges(of)
    found = of.of(np.array(hashes, np.uint64))
    assert all(ranges[bucket][0] <= it >> 32 < ranges[bucket][1] for it, bucket in zip(hashes, found, strict=True))
    assert [of.candidates(it) for it in hashes[:50]] == [range(b, b + 1) for b in found[:50].tolist()]


@_UNHURRIED
@given(_COUNTS, st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_equal_ranges_are_as_ever(buckets: int, hashes: list[int]) -> None:
    found = BucketMap(buckets).of(np.array(hashes, np.uint64)).tolist()
    assert found == find_buckets(np.array(hashes, np.uint64), buckets).tolist()
    assert found == [(it >> 32) * buckets >> 32 for it in hashes]


@_UNHURRIED
@given(_MAPS, _MAPS)
def test_overlapping_buckets(mine: BucketMap, other: BucketMap) -> None:
    theirs = [other.range_of(bucket) for bucket in range(other.buckets)]
    for bucket in {0, mine.buckets // 2, mine.buckets - 1}:
        low, high = mine.range_of(bucket)
        wanted = [at for at, (begins, ends) in enumerate(theirs) if begins < high and low < ends]
        assert list(mine.overlapping(other, bucket)) == wanted


def test_one_bucket_alone_is_split() -> None:
    split = BucketMap.split(4, {1: 2, 3: 3})
    assert split.kind == BOUNDS
    quarter = _END // 4
    assert [split.range_of(bucket)[0] for bucket in range(split.buckets)] == [
        *(0, quarter, quarter + quarter // 2, 2 * quarter, 3 * quarter),
        *(3 * quarter + quarter // 3, 3 * quarter + 2 * quarter // 3),
    ]
    assert BucketMap.split(4, {}) == BucketMap(4)
    assert BucketMap.split(4, dict.fromkeys(range(4), 2)) == BucketMap(8)


@_UNHURRIED
@given(st.integers(1, 40), st.dictionaries(st.integers(0, 39), st.integers(2, 7), max_size=3))
def test_a_map_tells_the_argument_that_makes_it(buckets: int, into: dict[int, int]) -> None:
    made = BucketMap.split(buckets, {bucket: parts for bucket, parts in into.items() if bucket < buckets})
    name, text = made.argument.split("=", 1)
    assert made == (BucketMap(int(text)) if name == "buckets" else eval(text, {"BucketMap": BucketMap}))
    assert (name == "buckets") == (made.kind == HASH)


def test_what_has_no_short_argument() -> None:
    assert BucketMap.split(4, {2: 3}).argument == "bucket_by=BucketMap.split(4, {2: 3})"
    assert (
        BucketMap.between([0, 5, 7]).argument
        == BucketMap.of_partitions({"": 3}).argument
        == "the same bucket_by as before"
    )
    assert BucketMap.split(32_767, {1: 2}).argument == "bucket_by=BucketMap.split(32767, {1: 2})"


@pytest.mark.parametrize(
    ("made", "text"),
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
def test_there_is_no_such_map(made: object, text: str) -> None:
    assert callable(made)
    with pytest.raises(UsageError, match=text):
        made()


def test_no_hash_tells_the_bucket_of_a_partition() -> None:
    of = BucketMap.of_partitions({"": 3})
    assert of.candidates(7) == range(3)
    with pytest.raises(ValueError, match="not the hash of its key"):
        of.of(np.zeros(1, np.uint64))


@_UNHURRIED
@given(_BY_PARTITION)
def test_maps_by_partition(of: BucketMap) -> None:
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


def _operator(mapped: BucketMap | None, buckets: int = 5) -> OperatorFile:
    key = '{"type":"struct","fields":[{"name":"k","type":"long","nullable":true,"metadata":{}}]}'
    state = key.replace('"k"', '"n"')
    return OperatorFile("counts", "q", buckets, key, state, mapped=mapped)


@pytest.mark.parametrize("mapped", [BucketMap.split(4, {1: 2}), BucketMap.of_partitions({"": 5})])
def test_operator_files_with_a_map(mapped: BucketMap) -> None:
    data = _operator(mapped).encode()
    found = OperatorFile.decode(data, "there")
    assert (found.bucket_map, found.encode()) == (mapped, data)
    assert json.loads(data)["format"] == OPERATOR_FORMAT
    with pytest.raises(BucketMapChangedError, match=f"give {re.escape(mapped.argument)}, "):
        found.succeeded_by(_operator(None))
    with pytest.raises(BucketMapChangedError, match=r"with other bounds|by source partition"):
        found.succeeded_by(_operator(BucketMap.split(4, {2: 2})))
    assert found.succeeded_by(_operator(mapped)) is found
    with pytest.raises(BucketCountChangedError):
        _operator(None).succeeded_by(_operator(None, 4))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x01
        try:
            same = OperatorFile.decode(bytes(damaged), "operator_0.json")
        except (CorruptFileError, VersionSkewError):
            continue
        # Only white space is outside the checksum.
        assert same.encode() == data


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (({"": 4},), r"began with 2 partitions and the plan says 4: give counts=\[2, 4\], if"),
        (({"": 3},), r"began with 2 partitions and the plan says 3: give a list for counts that begins with 2"),
        (({"": 1},), r"began with 2 partitions and the plan says 1: give a list for counts that begins with 2"),
        (({"": 2}, BY_STREAM_AND_PARTITION), "grouped by 'partition', not 'stream_and_partition'"),
        (({"a": 2},), "its streams were unnamed and are now a"),
    ],
)
def test_another_map_by_partition_is_told(asked: tuple[object, ...], text: str) -> None:
    stored, wanted = BucketMap.of_partitions({"": 2}), BucketMap.of_partitions(*asked)  # type: ignore[arg-type]
    with pytest.raises(BucketMapChangedError, match=text):
        _operator(stored, 2).succeeded_by(_operator(wanted, wanted.buckets))
    with pytest.raises(BucketMapChangedError, match=r"has its state in 2 buckets and the job asks for 2 buckets by"):
        _operator(None, 2).succeeded_by(_operator(stored, 2))


def test_a_stream_of_several_is_named() -> None:
    stored, wanted = (BucketMap.of_partitions({"clicks": 3, "orders": orders}) for orders in (3, 6))
    with pytest.raises(
        BucketMapChangedError, match=r"of stream 'orders' and the plan says 6: give counts=\[3, 6\] of s"
    ):
        _operator(stored, 3).succeeded_by(_operator(wanted, 6))


@pytest.mark.parametrize("plain", [{"streams": {}}, {"streams": {"": 4}}, {"group_by": "none"}, {"kind": "bounds"}])
def test_operator_files_with_no_such_map_by_partition(plain: dict[str, object]) -> None:
    fields = json.loads(_operator(BucketMap.of_partitions({"": 5})).encode())
    fields["bucket_map"] |= plain
    del fields["checksum"]
    fields["checksum"] = compute_checksum(fields)
    with pytest.raises(CorruptFileError):
        OperatorFile.decode(json.dumps(fields).encode(), "operator_0.json")


@pytest.mark.parametrize("plain", [{"buckets": 4}, {"bounds": [0, 9, 8, 10, 11]}, {"kind": "hash"}, {"kind": "other"}])
def test_operator_files_with_no_such_map(plain: dict[str, object]) -> None:
    fields = json.loads(_operator(BucketMap.split(4, {1: 2})).encode())
    fields["bucket_map"] |= plain
    del fields["checksum"]
    fields["checksum"] = compute_checksum(fields)
    with pytest.raises(CorruptFileError):
        OperatorFile.decode(json.dumps(fields).encode(), "operator_0.json")


def test_a_release_that_knows_no_map_refuses_it(tmp_path: Path) -> None:
    """By the code of the project's wheel from before: it knows only the name of equal ranges."""
    (wheel,) = (ROOT / "tests" / "releases" / "part-1").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path)
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
