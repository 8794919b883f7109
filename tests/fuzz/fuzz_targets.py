"""One fuzz target for each decoder: where it starts from, and what must hold for any bytes.

A decoder raises `StateError`, or gives a value that survives being written and read again. Formats with a checksum
have a second target, ``<name>-signed``, in which the fuzzer alters what is *under* the checksum: it is made right again
before the decoder sees it.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import random
import re
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
from fuzz_json import changed_json, changed_pointer

from arrow_schemas.lineage import (
    BODY_KEY,
    BODY_PLACEHOLDER,
    DELTA,
    HEADER_KEY,
    SNAPSHOT,
    BodyRecord,
    CheckpointRef,
    LineageHeader,
    Writer,
    file_name,
    parse_file_name,
)
from arrow_schemas.operator import OperatorFile
from arrow_schemas.partitions import PartitionAssignment
from arrow_schemas.peers import PeerQuestion, PeerSecret
from arrow_schemas.pointer import BOTH, V1, V2, InlineDelta, LineageEntry, Pointer, ReplicationStatus
from arrow_schemas.row import RowSchema
from arrow_schemas.standby import BucketKey, MemberRecord, StandbySettings
from spark_state_ext.errors import LineageError, StateError
from spark_state_ext.files.checkpoint import read_checkpoint, read_header, write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_record import LeaseRecord, RunIdentity
from spark_state_ext.spark.shuffle import payload
from spark_state_ext.store.runs import Chunk, Run
from spark_state_ext.timeline.records import decode_epochs, encode_epochs

__all__ = ["PLANTED", "TARGETS", "Target"]

Mutate = Callable[[bytes], bytes]

_GOLDEN = Path(__file__).parent.parent / "golden"
_CRC_BYTES = 4
_BODY = re.compile(rb"length=([0-9a-f]{16}) (rows=[0-9a-f]{16} tombstones=[0-9a-f]{16}) blake2b=[0-9a-f]{32}")
_SCRATCH = Path(tempfile.gettempdir())
_REFS = tuple(CheckpointRef(version, f"{version:032x}") for version in range(1, 5))
_SCHEMA = RowSchema((pa.field("name", pa.string()),), (pa.field("count", pa.int64()),))
_HEADER = LineageHeader(
    DELTA, "counts", 3, _REFS[2], _REFS[1], _REFS[:2], 0, Writer("query", "run", 5, "host"), "0.1.0"
)


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Parameters
    ----------
    check
        Decodes some bytes; what it raises other than `StateError` is a finding.
    seeds
        Makes the inputs to begin with. All of them decode.
    change
        Makes another input of one, by a format's own structure. None: by its bytes.
    """

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    change: Callable[[bytes, random.Random, Mutate], bytes] | None = None

    def __call__(self, data: bytes) -> None:
        """One execution."""
        try:
            self.check(data)
        except StateError:
            return


def _golden(pattern: str) -> list[bytes]:
    return _golden_beside(f"format-*/{pattern}")


def _golden_beside(pattern: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted(_GOLDEN.glob(pattern))]
    assert found, f"no golden file is called {pattern}"
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- pointer ----------------------------------------------------------------------------------------


def _pointer(data: bytes) -> None:
    encoded = Pointer.decode(data).encode()
    assert Pointer.decode(encoded).encode() == encoded


def _pointer_signed(data: bytes) -> None:
    _pointer(data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))


def _pointers() -> list[bytes]:
    lineage = tuple(LineageEntry(ref, 100 * ref.version, ref.version) for ref in _REFS)
    made = [
        Pointer("counts", 0, 1, 0, -1, None),
        Pointer("counts", 3, 8, 1, 4, 5_000, "home", lineage[2:], 9, 1, 2, 3, _REFS[2], 9, 8, 1),
        Pointer(
            "c",
            3,
            8,
            1,
            4,
            None,
            lineage=lineage,
            replication={"a": ReplicationStatus(_REFS[1], _REFS[0])},
            partitioning=("r", 2),
        ),
    ]
    inline = replace(
        made[-1], markers={"a": {"b": "c"}}, inline=tuple(InlineDelta(ref, b"12", 9, 3) for ref in _REFS[1:])
    )
    both = [pointer.encode(write) for pointer in made for write in (V1, BOTH, V2)]
    return [*_golden("pointer.bin"), inline.encode(), *both]


# -- checkpoint files -------------------------------------------------------------------------------


def _header(data: bytes) -> None:
    """The header's text and its checksum, one after the other."""
    text, _, checksum = data.rpartition(b"\n")
    header = LineageHeader.decode({HEADER_KEY: text, HEADER_KEY + b"_checksum": checksum}, "file")
    encoded = header.encode()
    assert LineageHeader.decode(encoded, "file").encode() == encoded


def _header_signed(data: bytes) -> None:
    _header(data + b"\n" + _digest(data).encode())


def _header_texts() -> list[bytes]:
    golden = [pa.ipc.open_file(data).schema.metadata[HEADER_KEY] for data in _golden("3/*.arrow")]
    bare = LineageHeader(SNAPSHOT, "counts", 0, _REFS[0], None, (), 0, Writer("", "", -1, ""), "0.1.0")
    return [*golden, bare.encode()[HEADER_KEY], _HEADER.encode()[HEADER_KEY]]


def _body_record(data: bytes) -> None:
    assert BodyRecord.find(data, "file").encode() in data


def _checkpoint_files() -> list[bytes]:
    """Small ones: the fuzzer gets through more of them."""
    batch = pa.record_batch(
        [[1, 2, 3], ["a", None, "ü"], [1, None, 3], [None, 5, None], [True, False, True], [False, True, False]],
        schema=_SCHEMA.arrow,
    )
    made = []
    for batches in ([], [batch], [batch.slice(0, 1), batch.slice(1)]):
        file = io.BytesIO()
        write_checkpoint(file, _HEADER, _SCHEMA, batches)
        made.append(file.getvalue())
    return made


def _put(data: bytes) -> Folder:
    files = Folder("memory://fuzz")
    files.put(file_name(_HEADER.ref, DELTA), data)
    return files


def _checkpoint(data: bytes) -> None:
    found = read_checkpoint(_put(data), _HEADER.ref, DELTA, _SCHEMA, _SCRATCH)
    assert (found.header.ref, found.header.kind) == (_HEADER.ref, DELTA)
    for batch in found.batches:
        assert batch.schema.equals(_SCHEMA.arrow)
        if _sound(batch):
            assert len(batch.to_pylist()) == batch.num_rows


def _sound(batch: pa.RecordBatch) -> bool:
    """Whether values may be looked at: under a right checksum may be offsets that lead anywhere."""
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _read_header(data: bytes) -> None:
    """Under another checkpoint's name a file is refused, so it is read under that of each seed."""
    names = _names()
    for at, (ref, kind) in enumerate(names):
        files = Folder("memory://fuzz")
        files.put(file_name(ref, kind), data)
        try:
            encoded = read_header(files, ref, kind).encode()
        except LineageError:
            if at + 1 == len(names):
                raise
        else:
            assert LineageHeader.decode(encoded, "file").encode() == encoded
            return


@functools.cache
def _names() -> list[tuple[CheckpointRef, str]]:
    golden = [parsed for path in sorted(_GOLDEN.glob("format-*/3/*.arrow")) if (parsed := parse_file_name(path.name))]
    return [(_HEADER.ref, DELTA), *dict.fromkeys(golden)]


def _checkpoint_signed(data: bytes) -> None:
    """The body's checksum is right, whatever Arrow finds in the body."""
    for match in list(_BODY.finditer(data))[-1:]:  # the first one is the placeholder
        body = data[: int(match[1], 16)]
        record = b"length=%016x %s blake2b=%s" % (len(body), match[2], _digest(body).encode())
        data = data[: match.start()] + record + data[match.end() :]
    _checkpoint(data)


def _checkpoint_header_signed(data: bytes) -> None:
    """Any text as the header of a file that is whole: what `read_checkpoint` makes of it."""
    metadata = {HEADER_KEY: data, HEADER_KEY + b"_checksum": _digest(data).encode(), BODY_KEY: BODY_PLACEHOLDER}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA.arrow.with_metadata(metadata)) as writer:
        writer.write_batch(_SCHEMA.empty())
    file = sink.getvalue().to_pybytes()
    length = file.index(b"\xff\xff\xff\xff\0\0\0\0")
    record = BodyRecord(length, 0, 0, _digest(file[:length])).encode()
    footer = file[length:].replace(BODY_PLACEHOLDER, record)
    _checkpoint(file[:length] + footer)


# -- JSON files -------------------------------------------------------------------------------------


def _json_signed(data: bytes) -> bytes:
    """A JSON object with the checksum that operator files have; other bytes as they are."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(fields, dict):
        return data
    fields.pop("checksum", None)
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps({**fields, "checksum": _digest(text)}).encode()
    except (ValueError, RecursionError):
        return data


def _operator(data: bytes) -> None:
    file = OperatorFile.decode(data, "operator_0.json")
    assert OperatorFile.decode(file.encode(), "operator_0.json").encode() == file.encode()


def _operator_signed(data: bytes) -> None:
    _operator(_json_signed(data))


def _partitions(data: bytes) -> None:
    encoded = PartitionAssignment.decode(data, "partitions_0.json").encode()
    assert PartitionAssignment.decode(encoded, "partitions_0.json").encode() == encoded


def _partitions_signed(data: bytes) -> None:
    _partitions(_json_signed(data))


def _member(data: bytes) -> None:
    encoded = MemberRecord.decode(data, "it").encode()
    assert MemberRecord.decode(encoded, "it").encode() == encoded


def _member_signed(data: bytes) -> None:
    _member(_json_signed(data))


def _standby_settings_signed(data: bytes) -> None:
    encoded = StandbySettings.decode(_json_signed(data), "settings.json").encode()
    assert StandbySettings.decode(encoded, "settings.json").encode() == encoded


_SECRET = PeerSecret.of("the secret of fuzzing")
_BUCKET = BucketKey("counts", "query", 3)


def _peer_question_proven(data: bytes) -> None:
    question = PeerQuestion.decode(_SECRET.proof(b"a question", data) + data, _SECRET)
    assert PeerQuestion.decode(question.encode(_SECRET), _SECRET) == question


def _peer_questions() -> list[bytes]:
    ranges = (((0, 1),), ((5, 9), (0, 256)))
    return [PeerQuestion(_BUCKET, _REFS[0], "0" * 32, it, bytes(16)).encode(_SECRET)[16:] for it in ranges]


def _lease(data: bytes) -> None:
    encoded = LeaseRecord.decode(data, "lease.json").encode()
    assert LeaseRecord.decode(encoded, "lease.json").encode() == encoded


def _lease_signed(data: bytes) -> None:
    _lease(_json_signed(data))


def _leases() -> list[bytes]:
    owner = RunIdentity("app-1", "plan-2", "query", "host", "boot", 4_711, "98765")
    return [LeaseRecord(owner, 1_700_000_000_000, 10_000, replaced).encode() for replaced in ((), ("plan-1", "plan-0"))]


def _epochs_signed(data: bytes) -> None:
    encoded = encode_epochs(decode_epochs(_json_signed(data), "1.json"))
    assert encode_epochs(decode_epochs(encoded, "1.json")) == encoded


def _run(data: bytes) -> None:
    encoded = Run.decode(data).encode()
    assert Run.decode(encoded).encode() == encoded


def _runs() -> list[bytes]:
    chunk = Chunk(3, 400, 12_345, 1, 2**64 - 1, 5, 7, 1)
    return [
        Run("0" * 32, _REFS[3], _REFS[1], _REFS[0], False, 6, 2, (chunk, chunk)).encode(),
        Run("0" * 32, _REFS[1], _REFS[1], None, True, 0, 0, ()).encode(),
    ]


# -- the rest ---------------------------------------------------------------------------------------


def _file_name(data: bytes) -> None:
    name = data.decode("utf-8", "replace")
    parsed = parse_file_name(name)
    assert parsed is None or file_name(*parsed) == name


def _payload(data: bytes) -> None:
    """A payload has no checksum: any exception will do, but rows that pass Arrow's own checks must be readable."""
    stored = _payloads()[0]
    try:
        batches = list(payload.decode(data, lambda name, offset, length: stored[offset : offset + length]))
    except Exception:
        return
    for batch in filter(_sound, batches):
        assert len(batch.to_pylist()) == batch.num_rows


def _payloads() -> list[bytes]:
    batch = pa.record_batch({"c0": ["a", None, "ü"], "c1": [[1], [], None], "__hash": [1, -2, 3]})
    inline = payload.encode(batch)
    return [
        inline,
        payload.encode(batch.slice(1, 0)),
        payload.encode_spill_reference("spill/7/x.payloads", 0, len(inline)),
    ]


def _planted(data: bytes) -> None:
    """A mistake that takes a right checksum, a whole pointer, and one value of another type than is ever written."""
    pointer = Pointer.decode(data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
    if not isinstance(pointer.snapshots_missed, int):
        raise ZeroDivisionError


TARGETS: dict[str, Target] = {
    "pointer": Target(_pointer, _pointers),
    "pointer-signed": Target(_pointer_signed, lambda: [data[:-_CRC_BYTES] for data in _pointers()], changed_pointer),
    "header": Target(_header, lambda: [text + b"\n" + _digest(text).encode() for text in _header_texts()]),
    "header-signed": Target(_header_signed, _header_texts, changed_json),
    "body-record": Target(_body_record, lambda: [BodyRecord(500, 3, 1, _digest(b"")).encode()]),
    "file-name": Target(_file_name, lambda: [file_name(_REFS[0], kind).encode() for kind in (DELTA, SNAPSHOT)]),
    "operator-file": Target(_operator, lambda: _golden("operator_0.json"), changed_json),
    "operator-file-signed": Target(_operator_signed, lambda: _golden("operator_0.json"), changed_json),
    "operator-file-map": Target(_operator_signed, lambda: _golden_beside("operator-format-3*.json"), changed_json),
    "partitions": Target(_partitions, lambda: _golden_beside("partitions-format-1.json"), changed_json),
    "partitions-signed": Target(_partitions_signed, lambda: _golden_beside("partitions-format-1.json"), changed_json),
    "member": Target(_member, lambda: _golden_beside("member-format-2.json"), changed_json),
    "member-signed": Target(_member_signed, lambda: _golden_beside("member-format-2.json"), changed_json),
    "standby-settings-signed": Target(
        _standby_settings_signed, lambda: _golden_beside("standby-settings-format-1.json"), changed_json
    ),
    "peer-question-proven": Target(_peer_question_proven, _peer_questions, changed_json),
    "lease": Target(_lease, _leases, changed_json),
    "lease-signed": Target(_lease_signed, _leases, changed_json),
    "epochs-signed": Target(_epochs_signed, lambda: _golden_beside("epochs-format-1.json"), changed_json),
    "run": Target(_run, _runs, changed_json),
    "checkpoint": Target(_checkpoint, _checkpoint_files),
    "checkpoint-signed": Target(_checkpoint_signed, _checkpoint_files),
    "checkpoint-header-signed": Target(_checkpoint_header_signed, lambda: [_HEADER.encode()[HEADER_KEY]], changed_json),
    "read-header": Target(_read_header, lambda: [*_checkpoint_files(), *_golden("3/*.arrow")]),
    "payload": Target(_payload, _payloads),
}
# What the fuzzer must find, or it finds nothing at all.
PLANTED: dict[str, Target] = {
    "planted": Target(_planted, lambda: [data[:-_CRC_BYTES] for data in _pointers()], changed_pointer)
}
