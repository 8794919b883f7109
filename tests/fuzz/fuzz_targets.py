"""One fuzz target for each decoder: its seeds, and a check that must hold for any bytes.

A decoder raises `StateError`, or returns a value that is the same after it was written and read again. Formats with a
checksum have a second target, ``<name>-signed``, in which the fuzzer changes the data *under* the checksum: the target
computes the right checksum before it calls the decoder.
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
from fuzz_json import change_json, change_pointer

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
    """A decoder to fuzz.

    Parameters
    ----------
    check
        Decodes some bytes; any error other than `StateError` is a finding.
    seeds
        Returns the first inputs. All of them decode.
    change
        Makes another input from one by the format's structure; None to change its bytes.
    """

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    change: Callable[[bytes, random.Random, Mutate], bytes] | None = None

    def __call__(self, data: bytes) -> None:
        """Check some bytes, and accept a `StateError`."""
        try:
            self.check(data)
        except StateError:
            return


def read_golden_roots(pattern: str) -> list[bytes]:
    return read_golden_files(f"format-*/{pattern}")


def read_golden_files(pattern: str) -> list[bytes]:
    contents = [path.read_bytes() for path in sorted(_GOLDEN.glob(pattern))]
    assert contents, f"no golden file matches {pattern}"
    return contents


def compute_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# -- pointer ----------------------------------------------------------------------------------------


def check_pointer(data: bytes) -> None:
    encoded = Pointer.decode(data).encode()
    assert Pointer.decode(encoded).encode() == encoded


def check_signed_pointer(data: bytes) -> None:
    check_pointer(data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))


def make_pointers() -> list[bytes]:
    lineage = tuple(LineageEntry(ref, 100 * ref.version, ref.version) for ref in _REFS)
    pointers = [
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
        pointers[-1], markers={"a": {"b": "c"}}, inline=tuple(InlineDelta(ref, b"12", 9, 3) for ref in _REFS[1:])
    )
    both = [pointer.encode(write) for pointer in pointers for write in (V1, BOTH, V2)]
    return [*read_golden_roots("pointer.bin"), inline.encode(), *both]


# -- checkpoint files -------------------------------------------------------------------------------


def check_header(data: bytes) -> None:
    """Check data that are the header's text, a line break and its checksum."""
    text, _, checksum = data.rpartition(b"\n")
    header = LineageHeader.decode({HEADER_KEY: text, HEADER_KEY + b"_checksum": checksum}, "file")
    encoded = header.encode()
    assert LineageHeader.decode(encoded, "file").encode() == encoded


def check_signed_header(data: bytes) -> None:
    check_header(data + b"\n" + compute_digest(data).encode())


def make_header_texts() -> list[bytes]:
    golden = [pa.ipc.open_file(data).schema.metadata[HEADER_KEY] for data in read_golden_roots("3/*.arrow")]
    bare = LineageHeader(SNAPSHOT, "counts", 0, _REFS[0], None, (), 0, Writer("", "", -1, ""), "0.1.0")
    return [*golden, bare.encode()[HEADER_KEY], _HEADER.encode()[HEADER_KEY]]


def check_body_record(data: bytes) -> None:
    assert BodyRecord.find(data, "file").encode() in data


def make_checkpoint_files() -> list[bytes]:
    """Return small files, so that the fuzzer tries more inputs."""
    batch = pa.record_batch(
        [[1, 2, 3], ["a", None, "ü"], [1, None, 3], [None, 5, None], [True, False, True], [False, True, False]],
        schema=_SCHEMA.arrow,
    )
    files = []
    for batches in ([], [batch], [batch.slice(0, 1), batch.slice(1)]):
        file = io.BytesIO()
        write_checkpoint(file, _HEADER, _SCHEMA, batches)
        files.append(file.getvalue())
    return files


def put_delta(data: bytes) -> Folder:
    files = Folder("memory://fuzz")
    files.put(file_name(_HEADER.ref, DELTA), data)
    return files


def check_checkpoint(data: bytes) -> None:
    checkpoint = read_checkpoint(put_delta(data), _HEADER.ref, DELTA, _SCHEMA, _SCRATCH)
    assert (checkpoint.header.ref, checkpoint.header.kind) == (_HEADER.ref, DELTA)
    for batch in checkpoint.batches:
        assert batch.schema.equals(_SCHEMA.arrow)
        if is_valid(batch):
            assert len(batch.to_pylist()) == batch.num_rows


def is_valid(batch: pa.RecordBatch) -> bool:
    """Return whether values may be read: offsets under a right checksum may still be wrong."""
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        return False
    return True


def check_read_header(data: bytes) -> None:
    """Read the file under the name of each seed, because a file with another checkpoint's name is refused."""
    names = list_names()
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
def list_names() -> list[tuple[CheckpointRef, str]]:
    golden = [parsed for path in sorted(_GOLDEN.glob("format-*/3/*.arrow")) if (parsed := parse_file_name(path.name))]
    return [(_HEADER.ref, DELTA), *dict.fromkeys(golden)]


def check_signed_checkpoint(data: bytes) -> None:
    """Check a file with the right checksum of its body, so that Arrow reads any body."""
    for match in list(_BODY.finditer(data))[-1:]:  # the first one is the placeholder
        body = data[: int(match[1], 16)]
        record = b"length=%016x %s blake2b=%s" % (len(body), match[2], compute_digest(body).encode())
        data = data[: match.start()] + record + data[match.end() :]
    check_checkpoint(data)


def check_checkpoint_with_signed_header(data: bytes) -> None:
    """Check `read_checkpoint` for a complete file with any text as its header."""
    metadata = {HEADER_KEY: data, HEADER_KEY + b"_checksum": compute_digest(data).encode(), BODY_KEY: BODY_PLACEHOLDER}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA.arrow.with_metadata(metadata)) as writer:
        writer.write_batch(_SCHEMA.empty())
    file = sink.getvalue().to_pybytes()
    length = file.index(b"\xff\xff\xff\xff\0\0\0\0")
    record = BodyRecord(length, 0, 0, compute_digest(file[:length])).encode()
    footer = file[length:].replace(BODY_PLACEHOLDER, record)
    check_checkpoint(file[:length] + footer)


# -- JSON files -------------------------------------------------------------------------------------


def sign_json(data: bytes) -> bytes:
    """Return a JSON object with the checksum of operator files, and other bytes unchanged."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(fields, dict):
        return data
    fields.pop("checksum", None)
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps({**fields, "checksum": compute_digest(text)}).encode()
    except (ValueError, RecursionError):
        return data


def check_operator_file(data: bytes) -> None:
    file = OperatorFile.decode(data, "operator_0.json")
    assert OperatorFile.decode(file.encode(), "operator_0.json").encode() == file.encode()


def check_signed_operator_file(data: bytes) -> None:
    check_operator_file(sign_json(data))


def check_partitions(data: bytes) -> None:
    encoded = PartitionAssignment.decode(data, "partitions_0.json").encode()
    assert PartitionAssignment.decode(encoded, "partitions_0.json").encode() == encoded


def check_signed_partitions(data: bytes) -> None:
    check_partitions(sign_json(data))


def check_member(data: bytes) -> None:
    encoded = MemberRecord.decode(data, "it").encode()
    assert MemberRecord.decode(encoded, "it").encode() == encoded


def check_signed_member(data: bytes) -> None:
    check_member(sign_json(data))


def check_signed_standby_settings(data: bytes) -> None:
    encoded = StandbySettings.decode(sign_json(data), "settings.json").encode()
    assert StandbySettings.decode(encoded, "settings.json").encode() == encoded


_SECRET = PeerSecret.of("the secret of fuzzing")
_BUCKET = BucketKey("counts", "query", 3)


def check_proven_peer_question(data: bytes) -> None:
    question = PeerQuestion.decode(_SECRET.proof(b"a question", data) + data, _SECRET)
    assert PeerQuestion.decode(question.encode(_SECRET), _SECRET) == question


def make_peer_questions() -> list[bytes]:
    ranges = (((0, 1),), ((5, 9), (0, 256)))
    return [PeerQuestion(_BUCKET, _REFS[0], "0" * 32, pieces, bytes(16)).encode(_SECRET)[16:] for pieces in ranges]


def check_lease(data: bytes) -> None:
    encoded = LeaseRecord.decode(data, "lease.json").encode()
    assert LeaseRecord.decode(encoded, "lease.json").encode() == encoded


def check_signed_lease(data: bytes) -> None:
    check_lease(sign_json(data))


def make_leases() -> list[bytes]:
    owner = RunIdentity("app-1", "plan-2", "query", "host", "boot", 4_711, "98765")
    return [LeaseRecord(owner, 1_700_000_000_000, 10_000, replaced).encode() for replaced in ((), ("plan-1", "plan-0"))]


def check_signed_epochs(data: bytes) -> None:
    encoded = encode_epochs(decode_epochs(sign_json(data), "1.json"))
    assert encode_epochs(decode_epochs(encoded, "1.json")) == encoded


def check_run(data: bytes) -> None:
    encoded = Run.decode(data).encode()
    assert Run.decode(encoded).encode() == encoded


def make_runs() -> list[bytes]:
    chunk = Chunk(3, 400, 12_345, 1, 2**64 - 1, 5, 7, 1)
    return [
        Run("0" * 32, _REFS[3], _REFS[1], _REFS[0], False, 6, 2, (chunk, chunk)).encode(),
        Run("0" * 32, _REFS[1], _REFS[1], None, True, 0, 0, ()).encode(),
    ]


# -- other formats ----------------------------------------------------------------------------------


def check_file_name(data: bytes) -> None:
    name = data.decode("utf-8", "replace")
    parsed = parse_file_name(name)
    assert parsed is None or file_name(*parsed) == name


def check_payload(data: bytes) -> None:
    """Accept any exception, because a payload has no checksum; but rows that pass Arrow's own checks must be readable."""
    stored = make_payloads()[0]
    try:
        batches = list(payload.decode(data, lambda name, offset, length: stored[offset : offset + length]))
    except Exception:
        return
    for batch in filter(is_valid, batches):
        assert len(batch.to_pylist()) == batch.num_rows


def make_payloads() -> list[bytes]:
    batch = pa.record_batch({"c0": ["a", None, "ü"], "c1": [[1], [], None], "__hash": [1, -2, 3]})
    inline = payload.encode(batch)
    return [
        inline,
        payload.encode(batch.slice(1, 0)),
        payload.encode_spill_reference("spill/7/x.payloads", 0, len(inline)),
    ]


def check_planted_mistake(data: bytes) -> None:
    """Fail only for a valid pointer with one value of a type that is never written."""
    pointer = Pointer.decode(data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
    if not isinstance(pointer.snapshots_missed, int):
        raise ZeroDivisionError


TARGETS: dict[str, Target] = {
    "pointer": Target(check_pointer, make_pointers),
    "pointer-signed": Target(
        check_signed_pointer, lambda: [data[:-_CRC_BYTES] for data in make_pointers()], change_pointer
    ),
    "header": Target(
        check_header, lambda: [text + b"\n" + compute_digest(text).encode() for text in make_header_texts()]
    ),
    "header-signed": Target(check_signed_header, make_header_texts, change_json),
    "body-record": Target(check_body_record, lambda: [BodyRecord(500, 3, 1, compute_digest(b"")).encode()]),
    "file-name": Target(check_file_name, lambda: [file_name(_REFS[0], kind).encode() for kind in (DELTA, SNAPSHOT)]),
    "operator-file": Target(check_operator_file, lambda: read_golden_roots("operator_0.json"), change_json),
    "operator-file-signed": Target(
        check_signed_operator_file, lambda: read_golden_roots("operator_0.json"), change_json
    ),
    "operator-file-map": Target(
        check_signed_operator_file, lambda: read_golden_files("operator-format-3*.json"), change_json
    ),
    "partitions": Target(check_partitions, lambda: read_golden_files("partitions-format-1.json"), change_json),
    "partitions-signed": Target(
        check_signed_partitions, lambda: read_golden_files("partitions-format-1.json"), change_json
    ),
    "member": Target(check_member, lambda: read_golden_files("member-format-2.json"), change_json),
    "member-signed": Target(check_signed_member, lambda: read_golden_files("member-format-2.json"), change_json),
    "standby-settings-signed": Target(
        check_signed_standby_settings, lambda: read_golden_files("standby-settings-format-1.json"), change_json
    ),
    "peer-question-proven": Target(check_proven_peer_question, make_peer_questions, change_json),
    "lease": Target(check_lease, make_leases, change_json),
    "lease-signed": Target(check_signed_lease, make_leases, change_json),
    "epochs-signed": Target(check_signed_epochs, lambda: read_golden_files("epochs-format-1.json"), change_json),
    "run": Target(check_run, make_runs, change_json),
    "checkpoint": Target(check_checkpoint, make_checkpoint_files),
    "checkpoint-signed": Target(check_signed_checkpoint, make_checkpoint_files),
    "checkpoint-header-signed": Target(
        check_checkpoint_with_signed_header, lambda: [_HEADER.encode()[HEADER_KEY]], change_json
    ),
    "read-header": Target(check_read_header, lambda: [*make_checkpoint_files(), *read_golden_roots("3/*.arrow")]),
    "payload": Target(check_payload, make_payloads),
}
# The fuzzer must find this mistake; otherwise it does not work.
PLANTED: dict[str, Target] = {
    "planted": Target(check_planted_mistake, lambda: [data[:-_CRC_BYTES] for data in make_pointers()], change_pointer)
}
