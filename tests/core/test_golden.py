"""Files of each released format can be read by this release and all later ones."""

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
# The same state with snapshots of other formats; the folders in _FORMATS have snapshots of format 1.
_SNAPSHOTS = sorted(_GOLDEN.glob("snapshot-format-*"))


@pytest.fixture(params=[*_FORMATS, *_SNAPSHOTS], ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy a folder of golden files, because the files themselves must never change."""
    copy = tmp_path / "golden"
    shutil.copytree(request.param, copy)
    return copy


def _read_operator_file(golden: Path) -> OperatorFile:
    return OperatorFile.decode((golden / "operator_0.json").read_bytes(), "operator_0.json")


def _read_expected(golden: Path) -> object:
    return json.loads((golden / "expected.json").read_text("utf-8"))


def _to_json(batches: list[pa.RecordBatch]) -> object:
    rows = [row for batch in batches for row in batch.to_pylist()]
    return json.loads(json.dumps(rows, default=str))


def _is_same(actual: object, expected: object) -> bool:
    """Return whether two values are equal, where NaN equals NaN."""
    return json.dumps(actual) == json.dumps(expected)


def _read_snapshot_format(golden: Path) -> int:
    files = Folder(str(golden / "3"))
    (snapshot,) = (parsed for name in files.names() if (parsed := parse_file_name(name)) and parsed[1] == SNAPSHOT)
    return read_header(files, *snapshot).format


def test_there_are_golden_files_of_each_format_up_to_the_present_one() -> None:
    assert [path.name for path in _FORMATS] == [f"format-{number}" for number in range(1, 6)]
    written = [int.from_bytes((path / "pointer.bin").read_bytes()[4:6], "little") for path in _FORMATS]
    assert written == [1, 2, 3, 4, 5]
    assert [_read_snapshot_format(path) for path in (*_FORMATS, *_SNAPSHOTS)] == [1, 1, 1, 1, 1, 2, 3]
    assert _read_snapshot_format(_SNAPSHOTS[-1]) == FILE_FORMATS[SNAPSHOT]
    assert written[-1] == POINTER_FORMAT
    assert {
        read_header(Folder(str(path / "3")), *parsed).package_version
        for path in (*_FORMATS, *_SNAPSHOTS)
        for name in Folder(str(path / "3")).names()
        if (parsed := parse_file_name(name))
    } == {"0.1.0"}


def test_the_operator_file_is_still_written_with_the_same_bytes(golden: Path) -> None:
    assert _read_operator_file(golden).encode() == (golden / "operator_0.json").read_bytes()


@pytest.mark.parametrize("snapshot", ["whole", "lost"])
def test_the_state_at_the_pointer_is_restored(golden: Path, tmp_path: Path, snapshot: str) -> None:
    pointer = Pointer.decode((golden / "pointer.bin").read_bytes())
    assert pointer.parent == pointer.lineage[-2].ref
    assert [entry.ref.version for entry in pointer.lineage] == [2, 3, 4]
    if snapshot == "lost":
        (golden / "3" / file_name(pointer.lineage[0].ref, SNAPSHOT)).unlink()
    store = LocalStore.at(tmp_path / "local", _read_operator_file(golden).row_schema())
    files = Folder(str(golden)).child("3")
    bucket = Bucket(store, sole_replica(files, tmp_path), pointer, WRITER, CommitContext(tmp_path))
    batches = bucket.read(lambda view: list(view.scan()))
    has_heartbeats = int.from_bytes((golden / "pointer.bin").read_bytes()[4:6], "little") > 1
    # Clean-up uses these numbers; format 1 does not have them, which counts as long ago.
    assert (pointer.calls, pointer.heartbeats, pointer.lineage[-1].heartbeat) == (
        (6, 5, 4) if has_heartbeats else (0, 0, 0)
    )
    writer = read_header(files, pointer.lineage[-2].ref, DELTA).writer
    assert writer.heartbeat == (3 if has_heartbeats else 0)
    assert (pointer.retained, pointer.retained_heartbeat) == ((100, 5) if has_heartbeats else (0, 0))
    store.close()
    assert bucket.fetched_files == (3 if snapshot == "whole" else 4)
    assert _is_same(_to_json(batches), _read_expected(golden))


def test_each_checkpoint_file_can_be_read_by_any_arrow_reader(golden: Path, tmp_path: Path) -> None:
    files = Folder(str(golden)).child("3")
    kinds = []
    for name in files.names():
        parsed = parse_file_name(name)
        assert parsed is not None
        ref, kind = parsed
        checkpoint = read_checkpoint(files, ref, kind, _read_operator_file(golden).row_schema(), tmp_path)
        header = read_header(files, ref, kind)
        assert (header.operator, header.bucket, header.ref, header.kind) == ("golden", 3, ref, kind)
        with pa.ipc.open_file(golden / "3" / name) as reader:
            assert _is_same(_to_json(list(checkpoint.batches)), _to_json(reader.read_all().to_batches()))
        kinds.append(kind)
    # From format 2 on, a delta may be only in the pointer.
    pointer = Pointer.decode((golden / "pointer.bin").read_bytes())
    assert len(pointer.inline) == (pointer.replication != {})
    assert sorted(kinds) == [*[DELTA] * (4 - len(pointer.inline)), SNAPSHOT]


def test_the_expected_rows_cover_each_kind_of_row(golden: Path) -> None:
    """The rows include undefined states, timeouts, NULL and NaN; otherwise a test that reads them would show little."""
    rows = json.loads((golden / "expected.json").read_text("utf-8"))
    assert len(rows) > 20
    assert not any(row["deleted"] for row in rows)
    assert {row["defined"] for row in rows} == {True, False}
    assert any(row["timeout_ms"] for row in rows)
    assert {row["key.name"] is None for row in rows} == {True, False}
    assert {json.dumps(row["key.x"]) == "NaN" for row in rows} == {True, False}


def test_the_erase_mark_of_a_pointer_is_read() -> None:
    marks = [Pointer.decode((path / "pointer.bin").read_bytes()).erased for path in _FORMATS]
    assert marks == [None, None, None, *[EraseMark(3, 5, 2, "ab" * 16)] * 2]


def test_the_parents_of_a_pointer_are_read() -> None:
    parents = [Pointer.decode((path / "pointer.bin").read_bytes()).parents for path in _FORMATS]
    assert parents == [*[None] * 4, CheckpointRef(1, "cd" * 16)]


def test_an_erase_request_and_its_done_record_are_read() -> None:
    data = (_GOLDEN / "erase-request-format-1.keys.arrow").read_bytes()
    request = decode_request(data, "00000001.keys.arrow")
    assert (request.id, request.operator, request.asked_ms) == ("ab" * 16, "golden", 1_700_000_000_000)
    assert request.keys.schema.names == ["name", "x", "parts"]
    rows = {str(tuple(row.values())) for row in request.keys.to_pylist()}
    names = ["'key 0 ü'", "'key 1 ü'", "None", "'key 3 ü'", "'key 4 ü'", "'key 5 ü'"]
    floats, lists = ["0.0", "0.5", "1.0", "nan", "2.0", "2.5"], ["[0, None]", "[1, None]", "[2, None]", "[3, None]"]
    assert rows == {f"({', '.join(row)})" for row in zip(names, floats, [*lists, "None", "[5, None]"], strict=True)}
    encoded_again = decode_request(encode_request(request), "again")
    assert str(encoded_again.keys.to_pylist()) == str(request.keys.to_pylist())
    record = EraseDone.decode((_GOLDEN / "erase-done-format-1.json").read_bytes(), "00000001.done.json")
    assert record == EraseDone("ab" * 16, 6, 1_700_000_000_000, 1_700_000_009_000, 12, 11)
    assert record.encode() == (_GOLDEN / "erase-done-format-1.json").read_bytes()


def test_an_operator_file_of_a_built_in_operator_is_read() -> None:
    """This is format 2 of operator files."""
    data = (_GOLDEN / "operator-format-2.json").read_bytes()
    file = OperatorFile.decode(data, "operator_0.json")
    assert file.encode() == data
    assert json.loads(file.function or "") == {
        "name": "top_k",
        "parameters": {"k": 3, "order_by": "price descending, an expression ascending"},
    }


def test_an_operator_file_with_a_bucket_map_is_read() -> None:
    """This is format 3 of operator files."""
    data = (_GOLDEN / "operator-format-3.json").read_bytes()
    file = OperatorFile.decode(data, "operator_0.json")
    assert file.encode() == data
    assert file.bucket_map == BucketMap.split(6, {2: 2, 5: 2})


def test_a_parent_of_a_rescaled_bucket_is_read() -> None:
    data = (_GOLDEN / "parent-format-1.json").read_bytes()
    parent = Parent.decode(data, "0.parent.json")
    assert parent.encode() == data
    manifest = read_manifest(Folder(str(_GOLDEN / "savepoint-1" / "native")))
    assert parent.saved == manifest.bucket(parent.saved.operator, parent.bucket)
    assert parent.operator_file == manifest.header.operators[parent.saved.operator]
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        try:
            decoded = Parent.decode(bytes(damaged), "0.parent.json")
        except (CorruptError, VersionSkewError):
            continue
        # Only white space is not covered by the checksum.
        assert decoded == parent


def test_an_operator_file_with_a_bucket_map_by_partition_is_read() -> None:
    data = (_GOLDEN / "operator-format-3-partition.json").read_bytes()
    file = OperatorFile.decode(data, "operator_0.json")
    assert file.encode() == data
    assert file.bucket_map == BucketMap.of_partitions({"clicks": 3, "orders": 5}, BY_STREAM_AND_PARTITION)


def test_an_assignment_of_partitions_is_read() -> None:
    data = (_GOLDEN / "partitions-format-1.json").read_bytes()
    assignment = PartitionAssignment.decode(data, "partitions_1.json")
    assert assignment.encode() == data
    assert assignment.streams == (
        StreamPartitions("clicks", (3, 6), (0, 1, 2, 0, 1, 2)),
        StreamPartitions("orders", (5,), (3, 4, 5, 6, 7)),
    )


def test_standby_settings_and_records_of_members_are_read() -> None:
    data = (_GOLDEN / "standby-settings-format-1.json").read_bytes()
    assert StandbySettings.decode(data, "settings.json") == StandbySettings(True, 2, 5.0)
    assert StandbySettings.decode(data, "settings.json").encode() == data
    record = (_GOLDEN / "member-format-2.json").read_bytes()
    member = MemberRecord.decode(record, "a file")
    assert member.encode() == record
    assert (member.restore_bytes_per_s, member.restore_rows_per_s) == (52_000_000.5, None)
    member_1 = MemberRecord.decode((_GOLDEN / "member-format-1.json").read_bytes(), "a file")
    assert member_1 == replace(member, restore_bytes_per_s=None)
    assert member_1 == MemberRecord(
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


def test_a_record_of_epochs_is_read() -> None:
    data = (_GOLDEN / "epochs-format-1.json").read_bytes()
    epochs = decode_epochs(data, "1.json")
    assert encode_epochs(epochs) == data
    run_id = "6f1d7f0e-0000-4000-8000-00000000000{}"
    assert epochs.entries == (
        Epoch(1, (0,), "a" * 32, run_id.format(2), Position("query", -1, 0)),
        Epoch(2, (1,), "b" * 32, "", Position("query", 41, 42, told=False)),
        Epoch(4, (2, 1), "b" * 32, run_id.format(3), Position("query", 40, 41), same_plan=True),
        Epoch(5, (4,), "c" * 32, run_id.format(4), Position("another", -1, 43, before=("query", 42))),
        Epoch(6, (5,), "d" * 32, run_id.format(5), Position("another", 0, 44), withdrawn=True),
    )


def test_leases_of_all_formats_are_read() -> None:
    lease_2 = LeaseRecord.decode((_GOLDEN / "lease-format-2.json").read_bytes(), "1.json")
    data = (_GOLDEN / "lease-format-3.json").read_bytes()
    lease = LeaseRecord.decode(data, "1.json")
    assert lease.encode() == data
    assert (lease_2.format, lease.format) == (2, 3)
    assert lease_2 == replace(lease, claim=None)
    assert lease.claim == Claim("new-query", "/root/golden/new-query", 1_700_000_000_000)
    assert (lease.owner.application, lease.lease_ms, lease.replaced) == ("app-1 10.0.0.1:7001", 10_000, ("a" * 32,))
    built_data = (_GOLDEN / "lease-format-3-built.json").read_bytes()
    built_claim = Claim("new-query", "/root/golden/new-query", 1_700_000_000_000, built=True)
    assert LeaseRecord.decode(built_data, "2.json") == replace(lease, claim=built_claim)
    assert LeaseRecord.decode(built_data, "2.json").encode() == built_data
    # The wheel in `tests/releases/part-1` wrote this file.
    lease_1 = LeaseRecord.decode_format_1((_GOLDEN / "lease-format-1.json").read_bytes(), "lease.json")
    assert lease_1 is not None
    assert (lease_1.owner.application, lease_1.owner.plan[-1], lease_1.owner.host, lease_1.replaced[0][-1]) == (
        "app-1",
        "2",
        "host-1",
        "3",
    )
    # A run of this release recognises the copy that it writes in format 1, and does not read it as an old lease.
    assert LeaseRecord.decode_format_1(lease.encode_format_1(7), "lease.json") is None


def test_holds_claims_and_start_records_are_read() -> None:
    """Hold, savepoint claim, start record and detachment record, each in format 1."""
    hold_data, claim_data, start_data, detached_data = (
        (_GOLDEN / f"{name}-format-1.json").read_bytes() for name in ("hold", "claim", "start", "detached")
    )
    hold = HoldRecord.decode(hold_data, 3, "a file")
    assert hold == HoldRecord("ab" * 16, "a savepoint at /savepoints/golden", 600_000, 3)
    claim = SavepointClaim.decode(claim_data, "a file")
    assert claim == SavepointClaim("12" * 16, "/root/golden/new-query", "new-query")
    start = StartRecord.decode(start_data, "a file")
    assert start == StartRecord("savepoint", "/savepoints/golden", "12" * 16, 7, "no_claim", "gold")
    assert [hold.encode(), claim.encode(), start.encode()] == [hold_data, claim_data, start_data]
    claiming_data = (_GOLDEN / "start-format-1-claim.json").read_bytes()
    assert StartRecord.decode(claiming_data, "a file") == replace(start, mode="claim", claim="new-query")
    assert StartRecord.decode(claiming_data, "a file").encode() == claiming_data
    assert open_document(detached_data, "a file", START_FORMAT) == {"format": 1}


def test_the_note_of_a_replaced_claim_is_read_and_written(tmp_path: Path) -> None:
    data = (_GOLDEN / "claim-note-format-1.json").read_bytes()
    folder, third = Folder(str(tmp_path)), Claim("third", "/root/golden/third", 0)
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "third.after-7.json").write_bytes(data)
    replaced = Claim("new-query", "/root/golden/new-query", 1_700_000_000_000)
    assert find_replaced_claim(folder, third) == replaced
    record = LeaseRecord.decode((_GOLDEN / "lease-format-3.json").read_bytes(), "7.json")
    note_replaced_claim(folder, replace(third, id="fourth"), NumberedRecord(7, record))
    assert (tmp_path / "claims" / "fourth.after-7.json").read_bytes() == data


def test_the_note_of_left_behind_columns_is_read_and_written(tmp_path: Path) -> None:
    shutil.copy(_GOLDEN / "left-behind-format-1.json", tmp_path / LEFT_BEHIND_NAME)
    refuse_left_behind(Folder(str(tmp_path)), "gold", ["count"])
    with pytest.raises(SchemaChangedError, match="cannot get a column 'price'"):
        refuse_left_behind(Folder(str(tmp_path)), "gold", ["count", "price"])
    written = tmp_path / "written"
    note_left_behind(Folder(str(written)), {"seen", "price"})
    assert (written / LEFT_BEHIND_NAME).read_bytes() == (tmp_path / LEFT_BEHIND_NAME).read_bytes()
