"""Erase requests: their numbers, which are new to a bucket, which rows they name, and when they are done and gone."""

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


def request(keys: pa.RecordBatch = KEYS, request_id: str | None = None) -> EraseRequest:
    return EraseRequest(request_id or uuid.uuid4().hex, "count", 1, keys, "0.1.0")


def mark(through: int, heartbeat: int, settled: int = 0) -> EraseMark:
    return EraseMark(through, heartbeat, settled, IDS[through])


def dealt(before: Pointer, through: int) -> HandledRequests | None:
    """What a call has dealt with."""
    new = through > (before.erased.through if before.erased is not None else 0)
    return HandledRequests(through, IDS[through], before.erased) if new else None


def root_with(tmp_path: Path, *folders: str, key: str = "string") -> str:
    """A root in which queries have state."""
    for folder in folders:
        file = OperatorFile("count", folder, 4, OPERATOR_JSON % ("name", key), OPERATOR_JSON % ("n", "long"))
        Folder(str(tmp_path)).child("count", folder).put("operator_0.json", file.encode())
    return str(tmp_path)


# -- the file ----------------------------------------------------------------------------------------


def test_every_damaged_byte_of_a_request_is_noticed_or_has_no_effect() -> None:
    made = request()
    data = encode_request(made)
    unnoticed = 0
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x40
        try:
            found = decode_request(bytes(damaged), "it")
        except (CorruptFileError, VersionSkewError):
            continue
        # The rest of the footer, which nobody follows.
        assert (found.id, found.keys) == (made.id, made.keys)
        unnoticed += 1
    assert unnoticed < len(data) / 2
    for cut in range(0, len(data), 7):
        with pytest.raises(CorruptFileError):
            decode_request(data[:cut], "it")


def test_a_request_of_a_newer_release_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arrow_schemas.erase.ERASE_FORMAT", 2)
    data = encode_request(request())
    monkeypatch.undo()
    with pytest.raises(VersionSkewError, match="format 2"):
        decode_request(data, "it")


def test_keys_of_other_types_are_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"int64.*the operator's are.*string"):
        request(pa.record_batch({"name": [1]})).columns(SCHEMA.keys, "it")


# -- asking ------------------------------------------------------------------------------------------


def test_each_query_folder_is_asked_and_says_so(tmp_path: Path) -> None:
    root = root_with(tmp_path, "a", "b")
    (tmp_path / "count" / "starting").mkdir()
    asked = erase_keys(root, ["Jane Doe", None], operator="count")
    assert [(it.query_folder, it.number, it.keys) for it in asked] == [("a", 1, 2), ("b", 1, 2)]
    assert erase_keys(root, {"name": ["x"]}, operator="count", query_folder="b")[0].number == 2
    found = [(it.query_folder, it.number, it.keys, it.state, it.kept) for it in erase_status(root, operator="count")]
    assert found == [("a", 1, 2, "waiting", True), ("b", 1, 2, "waiting", True), ("b", 2, 1, "waiting", True)]
    stored = EraseFolder(Folder(root).child("count", "a")).request(1)
    assert stored.keys.to_pydict() == {"name": ["Jane Doe", None]}


def test_keys_are_stored_in_normal_form(tmp_path: Path) -> None:
    root = root_with(tmp_path, "a", key="float")
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
def test_keys_that_are_none_of_the_operator(tmp_path: Path, keys: Any, error: type[Exception], says: str) -> None:
    root = root_with(tmp_path, "a")
    with pytest.raises(error, match=says):
        erase_keys(root, keys, operator="count")
    assert not (tmp_path / "count" / "a" / "erase").exists()


def test_text_is_not_taken_for_a_number(tmp_path: Path) -> None:
    with pytest.raises(StateValueError, match="key column 'name': values of type string are not converted to int64"):
        erase_keys(root_with(tmp_path, "a", key="long"), ["7"], operator="count")


def test_places_where_there_is_no_such_operator(tmp_path: Path) -> None:
    root = root_with(tmp_path, "a")
    with pytest.raises(UsageError, match="no operator 'state'; it has: count"):
        erase_keys(root, ["x"])
    with pytest.raises(UsageError, match="no query folder 'c'; it has: a"):
        erase_keys(root, ["x"], operator="count", query_folder="c")
    with pytest.raises(UsageError, match="absolute path"):
        erase_keys("here", ["x"])
    (tmp_path / "empty" / "q").mkdir(parents=True)
    with pytest.raises(UsageError, match="no operator file"):
        erase_status(root, operator="empty")


def test_numbers_are_made_once_whoever_asks_at_the_same_time(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: folder.add(request()), range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert len({folder.request(number).id for number in numbers}) == 40


def test_a_number_that_was_done_is_not_used_again(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    assert folder.add(request()) == 1
    folder.note_done(1, EraseDone("a" * 32, 1, 1, 2, 3, 4))
    folder.drop(1)
    assert folder.add(request()) == 2
    # Nor that of one that somebody has removed. Its place is taken, as those after it wait for it.
    assert folder.add(request()) == 3
    folder.files.remove(format_request_name(2))
    assert folder.numbers().through(0) == 1
    assert folder.add(request()) == 4
    assert folder.numbers().through(0) == 4
    assert folder.request(2).keys.num_rows == 0


# -- what is new to a bucket -------------------------------------------------------------------------


def pointer(erased: EraseMark | None = None, heartbeats: int = 0, state: bool = True) -> Pointer:
    lineage = (LineageEntry(CheckpointRef(1, "a" * 32), 10),) if state else ()
    return replace(first_pointer(), lineage=lineage, erased=erased, heartbeats=heartbeats)


def numbers(*requests: int, done: Sequence[int] = ()) -> EraseNumbers:
    return EraseNumbers(frozenset(requests), frozenset(done))


def test_requests_are_dealt_with_in_order_and_without_gaps() -> None:
    assert find_new_requests(numbers(), pointer(), "it").numbers == ()
    found = find_new_requests(numbers(1, 2, 4), pointer(), "it")
    assert (found.numbers, found.through) == ((1, 2), 2)
    found = find_new_requests(numbers(1, 2, 3, 4, done=[1]), pointer(mark(2, 7)), "it")
    assert (found.numbers, found.through) == ((3, 4), 4)
    # Those before the mark may be gone.
    found = find_new_requests(numbers(3, done=[1, 2]), pointer(mark(2, 7)), "it")
    assert (found.numbers, found.through) == ((3,), 3)


def test_state_from_before_a_request_that_is_gone_is_refused() -> None:
    listed = numbers(3, done=[1, 2, 3])
    with pytest.raises(MissingCheckpointError, match=r"before erase request 2.*Go back to a later batch"):
        find_new_requests(listed, pointer(mark(1, 7)), "it")
    # A bucket without state has nothing to take away.
    found = find_new_requests(listed, pointer(state=False), "it")
    assert (found.numbers, found.through) == ((3,), 3)


def test_marks_tell_what_every_bucket_has_dealt_with() -> None:
    def after(before: Pointer, through: int) -> EraseMark:
        found = mark_pointer(before, dealt(before, through)).erased
        assert found is not None
        return found

    first = after(pointer(heartbeats=5), 2)
    assert first == mark(2, 5)
    assert [first.done(heartbeats) for heartbeats in (5, 6)] == [0, 2]
    # Requests in every batch: those before are known all the same.
    later = after(pointer(first, heartbeats=6), 3)
    assert later == mark(3, 6, 2)
    assert [later.done(heartbeats) for heartbeats in (6, 7)] == [2, 3]
    # A call without a heartbeat, in which not every bucket was called.
    same = after(pointer(later, heartbeats=6), 4)
    assert same == mark(4, 6, 2)
    assert after(pointer(same, heartbeats=9), 4) is same
    # A mark of other requests proves nothing of these.
    assert mark_pointer(pointer(same, heartbeats=9), HandledRequests(1, IDS[1], None)).erased == mark(1, 9)


def test_a_heartbeat_in_which_nobody_looks_proves_nothing() -> None:
    found = mark(2, 5, 1)
    assert found.passed(5, 5) == found
    # The batch after the mark's, and others like it.
    assert found.passed(5, 6).passed(6, 7) == mark(2, 7, 1)
    assert [found.passed(5, 6).done(heartbeats) for heartbeats in (6, 7)] == [1, 2]
    # What was known before stays so.
    assert found.passed(6, 7) == found


@dataclass
class Bucket:
    """What is committed of one bucket: its mark, and whether it has the key."""

    mark: EraseMark | None = None
    keys: dict[int, bool] = field(default_factory=dict)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_done_is_never_said_before_every_bucket_has_dealt_with_it(data: st.DataObject) -> None:
    """Processes list once a batch, at any time in it; timeouts call some buckets only; batches fail; runs do not look."""
    buckets, heartbeats, asked = [Bucket() for _ in range(3)], 0, 0
    for _ in range(data.draw(st.integers(1, 12))):
        beats, looks = data.draw(st.booleans()), data.draw(st.booleans())
        called = list(range(3)) if beats else data.draw(st.lists(st.integers(0, 2), unique=True))
        after = []
        for at in called:
            if data.draw(st.booleans()):
                asked += 1
            before = pointer(buckets[at].mark, heartbeats)
            listed = numbers(*range(1, asked + 1))
            done = 0 if before.erased is None else before.erased.done(heartbeats)
            assert all((0 if it.mark is None else it.mark.through) >= done for it in buckets)
            now = replace(before, heartbeats=heartbeats + beats)
            if looks:
                made = mark_pointer(now, dealt(before, find_new_requests(listed, before, "it").through)).erased
            else:
                made = None if before.erased is None else before.erased.passed(heartbeats, now.heartbeats)
            after.append((at, made))
        if data.draw(st.booleans()):
            heartbeats += beats
            for at, found in after:
                buckets[at].mark = found


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
@settings(max_examples=300, deadline=None)
def test_rows_match_by_value(data: st.DataObject) -> None:
    """As Spark groups: NULL is NULL, NaN is NaN, at every depth."""
    columns = data.draw(st.lists(st.sampled_from(_VALUES), min_size=1, max_size=3))
    row = st.tuples(*(st.sampled_from(values) for _, values in columns))
    own = data.draw(st.lists(row, max_size=12, unique_by=repr))
    wanted = data.draw(st.lists(row, min_size=1, max_size=6))

    def arrays(rows: Sequence[tuple[Any, ...]]) -> list[pa.Array]:
        return [pa.array([it[at] for it in rows], kind) for at, (kind, _) in enumerate(columns)]

    names = {repr(it) for it in wanted}
    assert find_matching(arrays(own), arrays(wanted)).tolist() == [repr(it) in names for it in own]


# -- what a process remembers, and the first bucket does ---------------------------------------------


def test_requests_are_listed_once_a_batch_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, watch = Folder(str(tmp_path)), EraseWatch()
    listings: list[str] = []
    names = Folder.names

    def listed(folder: Folder) -> list[str]:
        listings.append(folder.root)
        return names(folder)

    monkeypatch.setattr(Folder, "names", listed)
    assert watch.list_requests(files, "batch 1") == numbers()
    EraseFolder(files).add(request())
    listings.clear()
    assert watch.list_requests(files, "batch 1") == numbers(), "what is asked in a batch waits for the next one"
    assert not listings
    assert watch.list_requests(files, "batch 2") == watch.list_requests(files, "batch 2") == numbers(1)
    assert listings == [str(tmp_path / "erase")]
    assert watch.read_request(files, 1).keys == KEYS
    (tmp_path / "erase" / format_request_name(1)).unlink()
    assert watch.read_request(files, 1).keys == KEYS
    with pytest.raises(MissingCheckpointError):
        EraseWatch().read_request(files, 1)
    # Somebody may have put another one there.
    assert watch.list_requests(files, "batch 3") == numbers()
    with pytest.raises(MissingCheckpointError):
        watch.read_request(files, 1)


def in_turn(
    tmp_path: Path, committed: Pointer, drops: bool = True, still_ours: Callable[[], None] = lambda: None
) -> list[str]:
    files, watch = Folder(str(tmp_path)), EraseWatch()
    watch.update_requests(files, watch.list_requests(files, 1), committed, lambda: drops, still_ours)
    return sorted(path.name for path in (tmp_path / "erase").iterdir())


def test_a_request_from_asked_to_gone(tmp_path: Path) -> None:
    folder, made = EraseFolder(Folder(str(tmp_path))), request(request_id=IDS[1])
    folder.add(made)
    asked = [format_request_name(1)]
    both = [format_done_name(1), format_request_name(1)]
    at = replace(pointer(mark(1, 7)), retained=2, batch=30)
    assert in_turn(tmp_path, at) == asked, "other buckets may not have dealt with it"
    assert in_turn(tmp_path, replace(at, heartbeats=7)) == asked
    assert in_turn(tmp_path, replace(at, heartbeats=8)) == both
    record = folder.done(1)
    assert record is not None
    assert record == EraseDone(made.id, 2, 1, record.done_ms, 8, 30)
    # Spark may hand out a pointer from before it.
    last = 8 + recent_heartbeats(2)
    assert in_turn(tmp_path, replace(at, heartbeats=last)) == both
    assert in_turn(tmp_path, replace(at, heartbeats=last + 1), drops=False) == both
    assert in_turn(tmp_path, replace(at, heartbeats=last + 1)) == [format_done_name(1)]


def test_a_query_that_goes_back_has_requests_to_carry_out_again(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    folder.add(request(request_id=IDS[1]))
    back, again = pointer(None, 3), pointer(mark(1, 4), 5)
    assert format_done_name(1) in in_turn(tmp_path, again)
    assert in_turn(tmp_path, back) == [format_request_name(1)]
    assert find_new_requests(folder.numbers(), back, "it").numbers == (1,)
    assert format_done_name(1) in in_turn(tmp_path, again)


def test_a_query_that_goes_back_to_where_the_first_bucket_only_had_seen_it_says_so(tmp_path: Path) -> None:
    EraseFolder(Folder(str(tmp_path))).add(request(request_id=IDS[1]))
    assert format_done_name(1) in in_turn(tmp_path, pointer(mark(1, 4), 5))
    assert in_turn(tmp_path, pointer(mark(1, 4), 4)) == [format_request_name(1)]
    assert format_done_name(1) in in_turn(tmp_path, pointer(mark(1, 4), 5))


def test_a_process_that_remembers_an_older_record_removes_nothing_by_it(tmp_path: Path) -> None:
    files, watch = Folder(str(tmp_path)), EraseWatch()
    folder = EraseFolder(files)
    folder.add(request(request_id=IDS[1]))
    folder.note_done(1, EraseDone(IDS[1], 2, 1, 2, 5, 5))

    def looked_after(heartbeats: int) -> list[str]:
        at = replace(pointer(mark(1, 4), heartbeats), retained=1)
        watch.update_requests(files, watch.list_requests(files, heartbeats), at, lambda: True, lambda: None)
        return folder.files.names()

    both = [format_done_name(1), format_request_name(1)]
    assert looked_after(6) == both
    # The query went back and did not look for long; another process says that it is done now.
    folder.take_back(1)
    folder.note_done(1, EraseDone(IDS[1], 2, 1, 3, 20, 20))
    assert looked_after(20 + recent_heartbeats(1)) == both
    assert looked_after(21 + recent_heartbeats(1)) == [format_done_name(1)]


def test_no_request_is_done_before_one_that_cannot_be_read(tmp_path: Path) -> None:
    folder = EraseFolder(Folder(str(tmp_path)))
    for number in (1, 2, 3):
        folder.add(request(request_id=IDS[number]))
    path = tmp_path / "erase" / format_request_name(2)
    path.write_bytes(path.read_bytes()[:-40])
    asked = [format_request_name(number) for number in (1, 2, 3)]
    # The first bucket had read it before, and others wait for it, and for the third.
    assert in_turn(tmp_path, pointer(mark(3, 4), 9)) == [format_done_name(1), *asked]


def test_a_run_that_lost_its_lease_writes_nothing(tmp_path: Path) -> None:
    EraseFolder(Folder(str(tmp_path))).add(request(request_id=IDS[1]))

    def lost() -> None:
        raise LiveRunError("another one")

    with pytest.raises(LiveRunError):
        in_turn(tmp_path, pointer(mark(1, 4), 5), still_ours=lost)
    assert in_turn(tmp_path, pointer(mark(1, 4), 4), still_ours=lost) == [format_request_name(1)]


def test_the_status_follows(tmp_path: Path) -> None:
    root = root_with(tmp_path, "a")
    EraseFolder(Folder(root).child("count", "a")).add(request(KEYS.slice(0, 1), IDS[1]))
    in_turn(tmp_path / "count" / "a", replace(pointer(mark(1, 4), 5), batch=9))
    (status,) = erase_status(root, operator="count")
    assert (status.state, status.batch, status.keys, status.kept) == ("done", 9, 1, True)
    EraseFolder(Folder(root).child("count", "a")).drop(1)
    (status,) = erase_status(root, operator="count")
    assert (status.state, status.kept) == ("done", False)
