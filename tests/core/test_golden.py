"""Files of every released format are read, for ever."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from core_support import WRITER

from arrow_schemas import BucketMap, CheckpointRef, OperatorFile, PartitionAssignment, Pointer
from arrow_schemas.bucket_map import BY_STREAM_AND_PARTITION
from arrow_schemas.checksum import open_document
from arrow_schemas.erase import EraseDone, EraseMark
from arrow_schemas.lineage import DELTA, FILE_FORMATS, SNAPSHOT, file_name, parse_file_name
from arrow_schemas.partitions import StreamPartitions
from arrow_schemas.pointer import POINTER_FORMAT
from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import CorruptError, SchemaChangedError, VersionSkewError
from spark_state_ext.files.checkpoint import read_checkpoint, read_header
from spark_state_ext.files.erase_requests import decode_request, encode_request
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import LEFT_BEHIND_NAME
from spark_state_ext.files.left_columns import note_left_behind, refuse_left_behind
from spark_state_ext.ownership.claim_notes import find_replaced_claim, note_replaced_claim
from spark_state_ext.ownership.holds import HoldRecord
from spark_state_ext.ownership.lease_record import Claim, LeaseRecord, NumberedRecord
from spark_state_ext.rescale.parents import Parent
from spark_state_ext.savepoints.claims import SavepointClaim
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import START_FORMAT, StartRecord
from spark_state_ext.store import LocalStore
from spark_state_ext.timeline.epochs import Epoch, Position
from spark_state_ext.timeline.records import decode_epochs, encode_epochs

_GOLDEN = Path(__file__).parent.parent / "golden"
_FORMATS = sorted(_GOLDEN.glob("format-*"))
# The same with snapshots of other formats; those of pointers' formats have snapshots of format 1.
_SNAPSHOTS = sorted(_GOLDEN.glob("snapshot-format-*"))


@pytest.fixture(params=[*_FORMATS, *_SNAPSHOTS], ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, as nothing may ever change the files themselves."""
    copy = tmp_path / "golden"
    shutil.copytree(request.param, copy)
    return copy


def _operator(golden: Path) -> OperatorFile:
    return OperatorFile.decode((golden / "operator_0.json").read_bytes(), "operator_0.json")


def _expected(golden: Path) -> object:
    return json.loads((golden / "expected.json").read_text("utf-8"))


def _as_json(batches: list[pa.RecordBatch]) -> object:
    rows = [row for batch in batches for row in batch.to_pylist()]
    return json.loads(json.dumps(rows, default=str))


def _same(found: object, expected: object) -> bool:
    """Equality in which NaN is itself."""
    return json.dumps(found) == json.dumps(expected)


def _snapshot_format(golden: Path) -> int:
    files = Folder(str(golden / "3"))
    (found,) = (parsed for name in files.names() if (parsed := parse_file_name(name)) and parsed[1] == SNAPSHOT)
    return read_header(files, *found).format


def test_there_is_a_set_of_the_present_format() -> None:
    assert [path.name for path in _FORMATS] == [f"format-{number}" for number in range(1, 6)]
    written = [int.from_bytes((path / "pointer.bin").read_bytes()[4:6], "little") for path in _FORMATS]
    assert written == [1, 2, 3, 4, 5]
    assert [_snapshot_format(path) for path in (*_FORMATS, *_SNAPSHOTS)] == [1, 1, 1, 1, 1, 2, 3]
    assert _snapshot_format(_SNAPSHOTS[-1]) == FILE_FORMATS[SNAPSHOT]
    assert written[-1] == POINTER_FORMAT
    assert {
        read_header(Folder(str(path / "3")), *parsed).package_version
        for path in (*_FORMATS, *_SNAPSHOTS)
        for name in Folder(str(path / "3")).names()
        if (parsed := parse_file_name(name))
    } == {"0.1.0"}


def test_the_operator_file_is_written_the_same_today(golden: Path) -> None:
    assert _operator(golden).encode() == (golden / "operator_0.json").read_bytes()


@pytest.mark.parametrize("snapshot", ["whole", "lost"])
def test_state_at_the_pointer(golden: Path, tmp_path: Path, snapshot: str) -> None:
    pointer = Pointer.decode((golden / "pointer.bin").read_bytes())
    assert pointer.parent == pointer.lineage[-2].ref
    assert [entry.ref.version for entry in pointer.lineage] == [2, 3, 4]
    if snapshot == "lost":
        (golden / "3" / file_name(pointer.lineage[0].ref, SNAPSHOT)).unlink()
    store = LocalStore.at(tmp_path / "local", _operator(golden).row_schema())
    files = Folder(str(golden)).child("3")
    bucket = Bucket(store, sole_replica(files, tmp_path), pointer, WRITER, CommitContext(tmp_path))
    batches = bucket.read(lambda view: list(view.scan()))
    known = int.from_bytes((golden / "pointer.bin").read_bytes()[4:6], "little") > 1
    # Clean-up goes by these; what format 1 does not tell is long ago.
    assert (pointer.calls, pointer.heartbeats, pointer.lineage[-1].heartbeat) == ((6, 5, 4) if known else (0, 0, 0))
    writer = read_header(files, pointer.lineage[-2].ref, DELTA).writer
    assert writer.heartbeat == (3 if known else 0)
    assert (pointer.retained, pointer.retained_heartbeat) == ((100, 5) if known else (0, 0))
    store.close()
    assert bucket.fetched_files == (3 if snapshot == "whole" else 4)
    assert _same(_as_json(batches), _expected(golden))


def test_each_file_and_any_arrow_reader(golden: Path, tmp_path: Path) -> None:
    files = Folder(str(golden)).child("3")
    kinds = []
    for name in files.names():
        parsed = parse_file_name(name)
        assert parsed is not None
        ref, kind = parsed
        found = read_checkpoint(files, ref, kind, _operator(golden).row_schema(), tmp_path)
        header = read_header(files, ref, kind)
        assert (header.operator, header.bucket, header.ref, header.kind) == ("golden", 3, ref, kind)
        with pa.ipc.open_file(golden / "3" / name) as reader:
            assert _same(_as_json(list(found.batches)), _as_json(reader.read_all().to_batches()))
        kinds.append(kind)
    # In format 2, a delta may be in the pointer only.
    pointer = Pointer.decode((golden / "pointer.bin").read_bytes())
    assert len(pointer.inline) == (pointer.replication != {})
    assert sorted(kinds) == [*[DELTA] * (4 - len(pointer.inline)), SNAPSHOT]


def test_the_expected_rows_are_of_every_kind(golden: Path) -> None:
    """So that reading them means something."""
    rows = json.loads((golden / "expected.json").read_text("utf-8"))
    assert len(rows) > 20
    assert not any(row["deleted"] for row in rows)
    assert {row["defined"] for row in rows} == {True, False}
    assert any(row["timeout_ms"] for row in rows)
    assert {row["key.name"] is None for row in rows} == {True, False}
    assert {json.dumps(row["key.x"]) == "NaN" for row in rows} == {True, False}


def test_the_erase_mark_of_a_pointer() -> None:
    marks = [Pointer.decode((path / "pointer.bin").read_bytes()).erased for path in _FORMATS]
    assert marks == [None, None, None, *[EraseMark(3, 5, 2, "ab" * 16)] * 2]


def test_the_parents_of_a_pointer() -> None:
    found = [Pointer.decode((path / "pointer.bin").read_bytes()).parents for path in _FORMATS]
    assert found == [*[None] * 4, CheckpointRef(1, "cd" * 16)]


def test_an_erase_request_and_the_record_that_it_is_done() -> None:
    data = (_GOLDEN / "erase-request-format-1.keys.arrow").read_bytes()
    request = decode_request(data, "00000001.keys.arrow")
    assert (request.id, request.operator, request.asked_ms) == ("ab" * 16, "golden", 1_700_000_000_000)
    assert request.keys.schema.names == ["name", "x", "parts"]
    found = {str(tuple(row.values())) for row in request.keys.to_pylist()}
    names = ["'key 0 ü'", "'key 1 ü'", "None", "'key 3 ü'", "'key 4 ü'", "'key 5 ü'"]
    floats, lists = ["0.0", "0.5", "1.0", "nan", "2.0", "2.5"], ["[0, None]", "[1, None]", "[2, None]", "[3, None]"]
    assert found == {f"({', '.join(row)})" for row in zip(names, floats, [*lists, "None", "[5, None]"], strict=True)}
    again = decode_request(encode_request(request), "again")
    assert str(again.keys.to_pylist()) == str(request.keys.to_pylist())
    record = EraseDone.decode((_GOLDEN / "erase-done-format-1.json").read_bytes(), "00000001.done.json")
    assert record == EraseDone("ab" * 16, 6, 1_700_000_000_000, 1_700_000_009_000, 12, 11)
    assert record.encode() == (_GOLDEN / "erase-done-format-1.json").read_bytes()


def test_an_operator_file_of_a_built_in_operator() -> None:
    """Format 2 of operator files."""
    data = (_GOLDEN / "operator-format-2.json").read_bytes()
    found = OperatorFile.decode(data, "operator_0.json")
    assert found.encode() == data
    assert json.loads(found.function or "") == {
        "name": "top_k",
        "parameters": {"k": 3, "order_by": "price descending, an expression ascending"},
    }


def test_an_operator_file_with_a_bucket_map() -> None:
    """Format 3 of operator files."""
    data = (_GOLDEN / "operator-format-3.json").read_bytes()
    found = OperatorFile.decode(data, "operator_0.json")
    assert found.encode() == data
    assert found.bucket_map == BucketMap.split(6, {2: 2, 5: 2})


def test_a_parent_of_a_rescaled_bucket() -> None:
    data = (_GOLDEN / "parent-format-1.json").read_bytes()
    found = Parent.decode(data, "0.parent.json")
    assert found.encode() == data
    manifest = read_manifest(Folder(str(_GOLDEN / "savepoint-1" / "native")))
    assert found.saved == manifest.bucket(found.saved.operator, found.bucket)
    assert found.operator_file == manifest.header.operators[found.saved.operator]
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x01
        try:
            same = Parent.decode(bytes(damaged), "0.parent.json")
        except (CorruptError, VersionSkewError):
            continue
        # Only white space is outside the checksum.
        assert same == found


def test_an_operator_file_by_partition() -> None:
    data = (_GOLDEN / "operator-format-3-partition.json").read_bytes()
    found = OperatorFile.decode(data, "operator_0.json")
    assert found.encode() == data
    assert found.bucket_map == BucketMap.of_partitions({"clicks": 3, "orders": 5}, BY_STREAM_AND_PARTITION)


def test_an_assignment_of_partitions() -> None:
    data = (_GOLDEN / "partitions-format-1.json").read_bytes()
    found = PartitionAssignment.decode(data, "partitions_1.json")
    assert found.encode() == data
    assert found.streams == (
        StreamPartitions("clicks", (3, 6), (0, 1, 2, 0, 1, 2)),
        StreamPartitions("orders", (5,), (3, 4, 5, 6, 7)),
    )


def test_settings_of_standby_and_the_record_of_a_member() -> None:
    data = (_GOLDEN / "standby-settings-format-1.json").read_bytes()
    assert StandbySettings.decode(data, "settings.json") == StandbySettings(True, 2, 5.0)
    assert StandbySettings.decode(data, "settings.json").encode() == data
    record = (_GOLDEN / "member-format-2.json").read_bytes()
    found = MemberRecord.decode(record, "it")
    assert found.encode() == record
    assert (found.restore_bytes_per_s, found.restore_rows_per_s) == (52_000_000.5, None)
    before = MemberRecord.decode((_GOLDEN / "member-format-1.json").read_bytes(), "it")
    assert before == replace(found, restore_bytes_per_s=None)
    assert before == MemberRecord(
        "host-1.example",
        "rack-a",
        7,
        (
            StandbyReplica(BucketKey("counts", "q-1", 0), 41, 9_000, True, "host-2.example"),
            StandbyReplica(BucketKey("counts", "q-1", 12)),
            StandbyReplica(BucketKey("counts", "q-2", 3), 7, 100, False, "host-3.example", 2, 50, 1.5),
            StandbyReplica(BucketKey("sessions", "q-1", 1), 8, 70, True, "host-2.example"),
        ),
        {"flight": "host-1.example:8815", "http": "host-1.example:8080"},
        {BucketKey("counts", "q-1", 5): 40, BucketKey("sessions", "q-1", 0): 3},
    )


def test_records_of_epochs() -> None:
    data = (_GOLDEN / "epochs-format-1.json").read_bytes()
    found = decode_epochs(data, "1.json")
    assert encode_epochs(found) == data
    run = "6f1d7f0e-0000-4000-8000-00000000000{}"
    assert found.entries == (
        Epoch(1, (0,), "a" * 32, run.format(2), Position("query", -1, 0)),
        Epoch(2, (1,), "b" * 32, "", Position("query", 41, 42, told=False)),
        Epoch(4, (2, 1), "b" * 32, run.format(3), Position("query", 40, 41), same_plan=True),
        Epoch(5, (4,), "c" * 32, run.format(4), Position("another", -1, 43, before=("query", 42))),
        Epoch(6, (5,), "d" * 32, run.format(5), Position("another", 0, 44), withdrawn=True),
    )


def test_leases_of_all_formats() -> None:
    before = LeaseRecord.decode((_GOLDEN / "lease-format-2.json").read_bytes(), "1.json")
    data = (_GOLDEN / "lease-format-3.json").read_bytes()
    found = LeaseRecord.decode(data, "1.json")
    assert found.encode() == data
    assert (before.format, found.format) == (2, 3)
    assert before == replace(found, claim=None)
    assert found.claim == Claim("new-query", "/root/golden/new-query", 1_700_000_000_000)
    assert (found.owner.application, found.lease_ms, found.replaced) == ("app-1 10.0.0.1:7001", 10_000, ("a" * 32,))
    built = (_GOLDEN / "lease-format-3-built.json").read_bytes()
    used = Claim("new-query", "/root/golden/new-query", 1_700_000_000_000, built=True)
    assert LeaseRecord.decode(built, "2.json") == replace(found, claim=used)
    assert LeaseRecord.decode(built, "2.json").encode() == built
    # Written by the wheel in `tests/releases/part-1`.
    old = LeaseRecord.decode_format_1((_GOLDEN / "lease-format-1.json").read_bytes(), "lease.json")
    assert old is not None
    assert (old.owner.application, old.owner.plan[-1], old.owner.host, old.replaced[0][-1]) == (
        "app-1",
        "2",
        "host-1",
        "3",
    )
    # What a run of this release repeats there, it knows again.
    assert LeaseRecord.decode_format_1(found.encode_format_1(7), "lease.json") is None


def test_records_about_starts() -> None:
    """A hold, a claim to a savepoint, what a query was started from, and that it is detached: format 1 of each."""
    hold, claim, start, detached = (
        (_GOLDEN / f"{name}-format-1.json").read_bytes() for name in ("hold", "claim", "start", "detached")
    )
    held = HoldRecord.decode(hold, 3, "it")
    assert held == HoldRecord("ab" * 16, "a savepoint at /savepoints/golden", 600_000, 3)
    claimed = SavepointClaim.decode(claim, "it")
    assert claimed == SavepointClaim("12" * 16, "/root/golden/new-query", "new-query")
    started = StartRecord.decode(start, "it")
    assert started == StartRecord("savepoint", "/savepoints/golden", "12" * 16, 7, "no_claim", "gold")
    assert [held.encode(), claimed.encode(), started.encode()] == [hold, claim, start]
    claiming = (_GOLDEN / "start-format-1-claim.json").read_bytes()
    assert StartRecord.decode(claiming, "it") == replace(started, mode="claim", claim="new-query")
    assert StartRecord.decode(claiming, "it").encode() == claiming
    assert open_document(detached, "it", START_FORMAT) == {"format": 1}


def test_the_note_of_a_claim_that_was_replaced(tmp_path: Path) -> None:
    golden = (_GOLDEN / "claim-note-format-1.json").read_bytes()
    folder, third = Folder(str(tmp_path)), Claim("third", "/root/golden/third", 0)
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "third.after-7.json").write_bytes(golden)
    before = Claim("new-query", "/root/golden/new-query", 1_700_000_000_000)
    assert find_replaced_claim(folder, third) == before
    record = LeaseRecord.decode((_GOLDEN / "lease-format-3.json").read_bytes(), "7.json")
    note_replaced_claim(folder, replace(third, id="fourth"), NumberedRecord(7, record))
    assert (tmp_path / "claims" / "fourth.after-7.json").read_bytes() == golden


def test_columns_that_were_left_behind(tmp_path: Path) -> None:
    shutil.copy(_GOLDEN / "left-behind-format-1.json", tmp_path / LEFT_BEHIND_NAME)
    refuse_left_behind(Folder(str(tmp_path)), "gold", ["count"])
    with pytest.raises(SchemaChangedError, match="cannot get a column 'price'"):
        refuse_left_behind(Folder(str(tmp_path)), "gold", ["count", "price"])
    written = tmp_path / "written"
    note_left_behind(Folder(str(written)), {"seen", "price"})
    assert (written / LEFT_BEHIND_NAME).read_bytes() == (tmp_path / LEFT_BEHIND_NAME).read_bytes()
