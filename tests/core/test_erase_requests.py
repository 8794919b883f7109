"""Erase requests: their numbers, which are new to a bucket, which rows they name, and when they are done and removed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from core_support import first_pointer
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas import CheckpointRef, LineageEntry, OperatorFile, Pointer, RowSchema
from arrow_schemas.erase import EraseDone, EraseMark, EraseRequest, format_done_name, format_request_name
from spark_state_ext import erase_keys, erase_status
from spark_state_ext.engine.erase_requests import EraseWatch, HandledRequests, find_new_requests, mark_pointer
from spark_state_ext.engine.erased_rows import find_matching
from spark_state_ext.errors import (
    CorruptFileError,
    LiveRunError,
    MissingCheckpointError,
    StateValueError,
    UsageError,
    VersionSkewError,
)
from spark_state_ext.files.erase_requests import EraseFolder, EraseNumbers, decode_request, encode_request
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.horizon import recent_heartbeats

ROOT = Path(__file__).parent.parent.parent
SCHEMA = RowSchema((pa.field("name", pa.string()),), (pa.field("n", pa.int64()),))
KEYS = pa.record_batch({"name": ["Jane Doe", None]})
OPERATOR_JSON = '{"type":"struct","fields":[{"name":"%s","type":"%s","nullable":true,"metadata":{}}]}'


IDS = [f"{number:032x}" for number in range(100)]


def make_request(keys: pa.RecordBatch = KEYS, request_id: str | None = None) -> EraseRequest:
    return EraseRequest(request_id or uuid.uuid4().hex, "count", 1, keys, "0.1.0")


def make_mark(through: int, heartbeat: int, settled: int = 0) -> EraseMark:
    return EraseMark(through, heartbeat, settled, IDS[through])


def handle_through(before: Pointer, through: int) -> HandledRequests | None:
    """Return the requests that a call handles, up to number *through*; None if none of them is new."""
    new = through > (before.erased.through if before.erased is not None else 0)
    return HandledRequests(through, IDS[through], before.erased) if new else None


def make_root(tmp_path: Path, *folders: str, key: str = "string") -> str:
    """Make a root in which queries have state, and return its path."""
    for folder in folders:
        file = OperatorFile("count", folder, 4, OPERATOR_JSON % ("name", key), OPERATOR_JSON % ("n", "long"))
        Folder(str(tmp_path)).child("count", folder).put("operator_0.json", file.encode())
    return str(tmp_path)


# -- the file ----------------------------------------------------------------------------------------


def test_every_damaged_byte_of_a_request_is_detected_or_has_no_effect() -> None:
    original = make_request()
    data = encode_request(original)
    ignored = 0
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x40
        try:
            decoded = decode_request(bytes(damaged), "a file")
        except (CorruptFileError, VersionSkewError):
            continue
        # The byte is in a part of the footer that is not read.
        assert (decoded.id, decoded.keys) == (original.id, original.keys)
        ignored += 1
    assert ignored < len(data) / 2
    for length in range(0, len(data), 7):
        with pytest.raises(CorruptFileError):
            decode_request(data[:length], "a file")


def test_a_request_of_a_newer_release_is_not_reported_as_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrow_schemas.erase.ERASE_FORMAT", 2)
    data = encode_request(make_request())
    monkeypatch.undo()
    with pytest.raises(VersionSkewError, match="format 2"):
        decode_request(data, "a file")


def test_keys_of_other_types_are_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"int64.*the operator's are.*string"):
        make_request(pa.record_batch({"name": [1]})).columns(SCHEMA.keys, "a file")


# -- adding requests ---------------------------------------------------------------------------------


def test_a_request_is_added_to_each_query_folder_and_is_in_its_status(tmp_path: Path) -> None:
    root = make_root(tmp_path, "a", "b")
    (tmp_path / "count" / "starting").mkdir()
    added = erase_keys(root, ["Jane Doe", None], operator="count")
    assert [(request.query_folder, request.number, request.keys) for request in added] == [("a", 1, 2), ("b", 1, 2)]
    assert erase_keys(root, {"name": ["x"]}, operator="count", query_folder="b")[0].number == 2
    statuses = [
        (status.query_folder, status.number, status.keys, status.state, status.kept)
        for status in erase_status(root, operator="count")
    ]
    assert statuses == [("a", 1, 2, "waiting", True), ("b", 1, 2, "waiting", True), ("b", 2, 1, "waiting", True)]
    stored = EraseFolder(Folder(root).child("count", "a")).request(1)
    assert stored.keys.to_pydict() == {"name": ["Jane Doe", None]}


def test_keys_are_stored_in_normal_form(tmp_path: Path) -> None:
    root = make_root(tmp_path, "a", key="float")
    erase_keys(root, [-0.0, 1.5, float("nan")], operator="count")
    column = EraseFolder(Folder(root).child("count", "a")).request(1).keys.column(0)
    assert column.type == pa.float32()
    assert str(column.to_pylist()) == "[0.0, 1.5, nan]"


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ("Jane Doe", StateValueError, "given keys of type str.*a list of values"),
        ([{"a": 1}], StateValueError, "key column 'name'"),
        ([1, "x"], StateValueError, "of several types"),
        ({"names": ["x"]}, StateValueError, "operator's key columns are name"),
        ({"name": ["x"], "more": [1]}, StateValueError, "pass exactly these"),
        ([], UsageError, "no key"),
        (7, StateValueError, "given keys of type int"),
    ],
)
def test_keys_that_do_not_fit_the_operator_are_refused(
    tmp_path: Path, keys: Any, error: type[Exception], says: str
) -> None:
    root = make_root(tmp_path, "a")
    with pytest.raises(error, match=says):
        erase_keys(root, keys, operator="count")
    assert not (tmp_path / "count" / "a" / "erase").exists()


def test_text_is_not_converted_to_a_number(tmp_path: Path) -> None:
    with pytest.raises(StateValueError, match="key column 'name': values of type string are not converted to int64"):
        erase_keys(make_root(tmp_path, "a", key="long"), ["7"], operator="count")


def test_unknown_operators_query_folders_and_relative_roots_are_refused(tmp_path: Path) -> None:
    root = make_root(tmp_path, "a")
    with pytest.raises(UsageError, match="no operator 'state'; it has: count"):
        erase_keys(root, ["x"])
    with pytest.raises(UsageError, match="no query folder 'c'; it has: a"):
        erase_keys(root, ["x"], operator="count", query_folder="c")
    with pytest.raises(UsageError, match="absolute path"):
        erase_keys("here", ["x"])
    (tmp_path / "empty" / "q").mkdir(parents=True)
    with pytest.raises(UsageError, match="no operator file"):
        erase_status(root, operator="empty")


def test_concurrent_requests_get_different_numbers(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    with ThreadPoolExecutor(8) as pool:
        added = list(pool.map(lambda _: folder.add(make_request()), range(40)))
    assert sorted(added) == list(range(1, 41))
    assert len({folder.request(number).id for number in added}) == 40


def test_numbers_of_done_or_removed_requests_are_not_used_again(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    assert folder.add(make_request()) == 1
    folder.note_done(1, EraseDone("a" * 32, 1, 1, 2, 3, 4))
    folder.drop(1)
    assert folder.add(make_request()) == 2
    # The number of a request that a user removed is not used again. An empty request fills the gap, because later
    # requests would wait for it.
    assert folder.add(make_request()) == 3
    folder.files.remove(format_request_name(2))
    assert folder.numbers().through(0) == 1
    assert folder.add(make_request()) == 4
    assert folder.numbers().through(0) == 4
    assert folder.request(2).keys.num_rows == 0


# -- what is new to a bucket -------------------------------------------------------------------------


def make_pointer(erased: EraseMark | None = None, heartbeats: int = 0, state: bool = True) -> Pointer:
    lineage = (LineageEntry(CheckpointRef(1, "a" * 32), 10),) if state else ()
    return replace(first_pointer(), lineage=lineage, erased=erased, heartbeats=heartbeats)


def make_numbers(*requests: int, done: Sequence[int] = ()) -> EraseNumbers:
    return EraseNumbers(frozenset(requests), frozenset(done))


def test_requests_are_handled_in_order_up_to_the_first_gap() -> None:
    assert find_new_requests(make_numbers(), make_pointer(), "a folder").numbers == ()
    new = find_new_requests(make_numbers(1, 2, 4), make_pointer(), "a folder")
    assert (new.numbers, new.through) == ((1, 2), 2)
    new = find_new_requests(make_numbers(1, 2, 3, 4, done=[1]), make_pointer(make_mark(2, 7)), "a folder")
    assert (new.numbers, new.through) == ((3, 4), 4)
    # Requests before the mark may have been removed.
    new = find_new_requests(make_numbers(3, done=[1, 2]), make_pointer(make_mark(2, 7)), "a folder")
    assert (new.numbers, new.through) == ((3,), 3)


def test_state_older_than_a_removed_request_is_refused() -> None:
    listed = make_numbers(3, done=[1, 2, 3])
    with pytest.raises(MissingCheckpointError, match=r"before erase request 2.*Go back to a later batch"):
        find_new_requests(listed, make_pointer(make_mark(1, 7)), "a folder")
    # A bucket without state has no rows to remove.
    new = find_new_requests(listed, make_pointer(state=False), "a folder")
    assert (new.numbers, new.through) == ((3,), 3)


def test_marks_show_which_requests_every_bucket_has_handled() -> None:
    def mark_after(before: Pointer, through: int) -> EraseMark:
        erased = mark_pointer(before, handle_through(before, through)).erased
        assert erased is not None
        return erased

    first = mark_after(make_pointer(heartbeats=5), 2)
    assert first == make_mark(2, 5)
    assert [first.done(heartbeats) for heartbeats in (5, 6)] == [0, 2]
    # With a request in every batch, the mark still shows the earlier ones that every bucket has handled.
    later = mark_after(make_pointer(first, heartbeats=6), 3)
    assert later == make_mark(3, 6, 2)
    assert [later.done(heartbeats) for heartbeats in (6, 7)] == [2, 3]
    # In a call without a heartbeat, not every bucket was called.
    without_heartbeat = mark_after(make_pointer(later, heartbeats=6), 4)
    assert without_heartbeat == make_mark(4, 6, 2)
    assert mark_after(make_pointer(without_heartbeat, heartbeats=9), 4) is without_heartbeat
    # A mark of other requests proves nothing about these.
    assert mark_pointer(
        make_pointer(without_heartbeat, heartbeats=9), HandledRequests(1, IDS[1], None)
    ).erased == make_mark(1, 9)


def test_a_heartbeat_without_a_listing_proves_nothing() -> None:
    before = make_mark(2, 5, 1)
    assert before.passed(5, 5) == before
    # The first batch after the mark's does not list requests, and neither does the next.
    assert before.passed(5, 6).passed(6, 7) == make_mark(2, 7, 1)
    assert [before.passed(5, 6).done(heartbeats) for heartbeats in (6, 7)] == [1, 2]
    # The requests that were known to be handled stay known.
    assert before.passed(6, 7) == before


@dataclass
class Bucket:
    """The committed state of one bucket: its mark."""

    mark: EraseMark | None = None
    keys: dict[int, bool] = field(default_factory=dict)


@given(data=st.data())
@settings(max_examples=300)
def test_a_request_is_never_done_before_every_bucket_has_handled_it(data: st.DataObject) -> None:
    """Requests arrive at any time, timeouts call only some buckets, batches fail, and some runs list no requests."""
    buckets, heartbeats, requested = [Bucket() for _ in range(3)], 0, 0
    for _ in range(data.draw(st.integers(1, 12))):
        has_heartbeat, lists = data.draw(st.booleans()), data.draw(st.booleans())
        called = list(range(3)) if has_heartbeat else data.draw(st.lists(st.integers(0, 2), unique=True))
        marks = []
        for number in called:
            if data.draw(st.booleans()):
                requested += 1
            before = make_pointer(buckets[number].mark, heartbeats)
            listed = make_numbers(*range(1, requested + 1))
            done = 0 if before.erased is None else before.erased.done(heartbeats)
            assert all((0 if bucket.mark is None else bucket.mark.through) >= done for bucket in buckets)
            now = replace(before, heartbeats=heartbeats + has_heartbeat)
            if lists:
                erased = mark_pointer(
                    now, handle_through(before, find_new_requests(listed, before, "a folder").through)
                ).erased
            else:
                erased = None if before.erased is None else before.erased.passed(heartbeats, now.heartbeats)
            marks.append((number, erased))
        if data.draw(st.booleans()):
            heartbeats += has_heartbeat
            for number, erased in marks:
                buckets[number].mark = erased


# -- which rows --------------------------------------------------------------------------------------


_VALUES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.string(), ["a", "b", "", None]),
    (pa.int32(), [0, -1, 7, None]),
    (pa.float64(), [0.0, 1.5, float("nan"), None]),
    (pa.decimal128(10, 2), [Decimal("1.00"), Decimal("2.50"), None]),
    (pa.timestamp("us", "UTC"), [0, 10**15, None]),
    (pa.binary(), [b"\xff", b"", None]),
    (pa.bool_(), [True, False, None]),
    (pa.date32(), [0, 19_000, None]),
    (pa.list_(pa.int64()), [[1, None], [], None]),
    (pa.struct([("a", pa.int64()), ("b", pa.float64())]), [{"a": 1, "b": float("nan")}, {"a": None, "b": 1.0}, None]),
]


@given(data=st.data())
@settings(max_examples=300)
def test_rows_match_by_value(data: st.DataObject) -> None:
    """Values are equal as for Spark's grouping: NULL equals NULL and NaN equals NaN, at every depth."""
    columns = data.draw(st.lists(st.sampled_from(_VALUES), min_size=1, max_size=3))
    rows = st.tuples(*(st.sampled_from(values) for _, values in columns))
    stored = data.draw(st.lists(rows, max_size=12, unique_by=repr))
    wanted = data.draw(st.lists(rows, min_size=1, max_size=6))

    def make_arrays(rows: Sequence[tuple[Any, ...]]) -> list[pa.Array]:
        return [pa.array([row[at] for row in rows], kind) for at, (kind, _) in enumerate(columns)]

    reprs = {repr(row) for row in wanted}
    assert find_matching(make_arrays(stored), make_arrays(wanted)).tolist() == [repr(row) in reprs for row in stored]


# -- what a process remembers, and what the first bucket does -----------------------------------------


def test_a_process_lists_requests_once_a_batch_and_reads_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, watch = Folder(str(tmp_path)), EraseWatch()
    listings: list[str] = []
    list_names = Folder.names

    def note_and_list(folder: Folder) -> list[str]:
        listings.append(folder.root)
        return list_names(folder)

    monkeypatch.setattr(Folder, "names", note_and_list)
    assert watch.list_requests(files, "batch 1") == make_numbers()
    EraseFolder(files).add(make_request())
    listings.clear()
    assert watch.list_requests(files, "batch 1") == make_numbers(), "a request waits for the next batch"
    assert not listings
    assert watch.list_requests(files, "batch 2") == watch.list_requests(files, "batch 2") == make_numbers(1)
    assert listings == [str(tmp_path / "erase")]
    assert watch.read_request(files, 1).keys == KEYS
    (tmp_path / "erase" / format_request_name(1)).unlink()
    assert watch.read_request(files, 1).keys == KEYS
    with pytest.raises(MissingCheckpointError):
        EraseWatch().read_request(files, 1)
    # A user may have put another request there.
    assert watch.list_requests(files, "batch 3") == make_numbers()
    with pytest.raises(MissingCheckpointError):
        watch.read_request(files, 1)


def update_and_list(
    tmp_path: Path, committed: Pointer, drops: bool = True, still_ours: Callable[[], None] = lambda: None
) -> list[str]:
    files, watch = Folder(str(tmp_path)), EraseWatch()
    watch.update_requests(files, watch.list_requests(files, 1), committed, lambda: drops, still_ours)
    return sorted(path.name for path in (tmp_path / "erase").iterdir())


def test_a_request_is_done_after_a_heartbeat_and_removed_after_the_retention_horizon(tmp_path: Path) -> None:
    folder, added = EraseFolder(Folder(str(tmp_path))), make_request(request_id=IDS[1])
    folder.add(added)
    request_only = [format_request_name(1)]
    both = [format_done_name(1), format_request_name(1)]
    committed = replace(make_pointer(make_mark(1, 7)), retained=2, batch=30)
    assert update_and_list(tmp_path, committed) == request_only, "other buckets may not have handled it"
    assert update_and_list(tmp_path, replace(committed, heartbeats=7)) == request_only
    assert update_and_list(tmp_path, replace(committed, heartbeats=8)) == both
    record = folder.done(1)
    assert record is not None
    assert record == EraseDone(added.id, 2, 1, record.done_ms, 8, 30)
    # Spark may still hand out a pointer from before the request.
    last_heartbeat = 8 + recent_heartbeats(2)
    assert update_and_list(tmp_path, replace(committed, heartbeats=last_heartbeat)) == both
    assert update_and_list(tmp_path, replace(committed, heartbeats=last_heartbeat + 1), drops=False) == both
    assert update_and_list(tmp_path, replace(committed, heartbeats=last_heartbeat + 1)) == [format_done_name(1)]


def test_a_request_is_carried_out_again_after_the_query_goes_back(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    folder.add(make_request(request_id=IDS[1]))
    earlier, later = make_pointer(None, 3), make_pointer(make_mark(1, 4), 5)
    assert format_done_name(1) in update_and_list(tmp_path, later)
    assert update_and_list(tmp_path, earlier) == [format_request_name(1)]
    assert find_new_requests(folder.numbers(), earlier, "a folder").numbers == (1,)
    assert format_done_name(1) in update_and_list(tmp_path, later)


def test_a_request_is_not_done_after_the_query_goes_back_to_the_batch_of_the_mark(tmp_path: Path) -> None:
    EraseFolder(Folder(str(tmp_path))).add(make_request(request_id=IDS[1]))
    assert format_done_name(1) in update_and_list(tmp_path, make_pointer(make_mark(1, 4), 5))
    assert update_and_list(tmp_path, make_pointer(make_mark(1, 4), 4)) == [format_request_name(1)]
    assert format_done_name(1) in update_and_list(tmp_path, make_pointer(make_mark(1, 4), 5))


def test_a_request_is_not_removed_because_of_a_remembered_older_done_record(tmp_path: Path) -> None:
    files, watch = Folder(str(tmp_path)), EraseWatch()
    folder = EraseFolder(files)
    folder.add(make_request(request_id=IDS[1]))
    folder.note_done(1, EraseDone(IDS[1], 2, 1, 2, 5, 5))

    def update_at(heartbeats: int) -> list[str]:
        committed = replace(make_pointer(make_mark(1, 4), heartbeats), retained=1)
        watch.update_requests(files, watch.list_requests(files, heartbeats), committed, lambda: True, lambda: None)
        return folder.files.names()

    both = [format_done_name(1), format_request_name(1)]
    assert update_at(6) == both
    # The query went back and did not list requests for long. Now another process records that the request is done.
    folder.take_back(1)
    folder.note_done(1, EraseDone(IDS[1], 2, 1, 3, 20, 20))
    assert update_at(20 + recent_heartbeats(1)) == both
    assert update_at(21 + recent_heartbeats(1)) == [format_done_name(1)]


def test_an_unreadable_request_and_all_later_ones_are_not_done(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    for number in (1, 2, 3):
        folder.add(make_request(request_id=IDS[number]))
    path = tmp_path / "erase" / format_request_name(2)
    path.write_bytes(path.read_bytes()[:-40])
    requests = [format_request_name(number) for number in (1, 2, 3)]
    # The first bucket had read request 2 before; other buckets wait for it, and so for request 3.
    assert update_and_list(tmp_path, make_pointer(make_mark(3, 4), 9)) == [format_done_name(1), *requests]


def test_a_run_that_lost_its_lease_writes_nothing(tmp_path: Path) -> None:
    EraseFolder(Folder(str(tmp_path))).add(make_request(request_id=IDS[1]))

    def fail_as_replaced() -> None:
        raise LiveRunError("another one")

    with pytest.raises(LiveRunError):
        update_and_list(tmp_path, make_pointer(make_mark(1, 4), 5), still_ours=fail_as_replaced)
    assert update_and_list(tmp_path, make_pointer(make_mark(1, 4), 4), still_ours=fail_as_replaced) == [
        format_request_name(1)
    ]


def test_the_status_shows_that_a_request_is_done_and_later_removed(tmp_path: Path) -> None:
    root = make_root(tmp_path, "a")
    EraseFolder(Folder(root).child("count", "a")).add(make_request(KEYS.slice(0, 1), IDS[1]))
    update_and_list(tmp_path / "count" / "a", replace(make_pointer(make_mark(1, 4), 5), batch=9))
    (status,) = erase_status(root, operator="count")
    assert (status.state, status.batch, status.keys, status.kept) == ("done", 9, 1, True)
    EraseFolder(Folder(root).child("count", "a")).drop(1)
    (status,) = erase_status(root, operator="count")
    assert (status.state, status.kept) == ("done", False)
