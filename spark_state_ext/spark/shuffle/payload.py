"""Payloads: rows of one bucket as Arrow IPC bytes, on their way through Spark's shuffle.

Packing keeps every value unchanged; Spark's own conversion to pandas would turn nullable integers into floats. There
are these kinds of payloads:

* ``b"A"``, checksum and an LZ4-compressed Arrow IPC stream: rows, an inline payload.
* ``b"S"``, checksum and JSON with the name of a spill file, an offset and a length: refers to an inline payload there.
* ``b"H"`` and 16 bytes that are the same for all buckets and unique to a packing stage: the heartbeat, by which Spark
  calls every bucket in every batch with data.
* ``b"P"``, checksum and JSON: the largest source partition of each stream in a packing task's rows, sent to every
  bucket (`encode_partitions`).
* ``b"O"``, checksum and an Arrow IPC stream: output of functions that return Arrow (`output`).

The checksum is the CRC-32 of what follows: damaged Arrow bytes can crash a process.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa

from spark_state_ext.errors import CorruptFileError

__all__ = [
    "NO_ROW_LIMIT",
    "NUMBERS",
    "OUTPUT_COLUMN",
    "PAYLOAD_SCHEMA",
    "HASH_COLUMN",
    "PARTITION_COLUMN",
    "STREAM_COLUMN",
    "decode",
    "decode_output",
    "encode",
    "encode_output",
    "heartbeat",
    "heartbeat_nonce",
    "encode_partitions",
    "payload_bytes_max",
    "decode_partitions",
    "encode_spill_reference",
    "load_spilled_payload",
]

HASH_COLUMN = "__hash"
# After the hash, if a row's bucket depends on its source partition; packing removes these columns.
PARTITION_COLUMN, STREAM_COLUMN = "__partition", "__stream"
PAYLOAD_SCHEMA = "bucket int, payload binary, event_time timestamp, __others int"
# The value of `records_per_batch` if Spark's setting is "no limit".
NO_ROW_LIMIT = 2**31 - 1
_PAYLOAD_BYTES_MAX = 1 << 20
_INLINE, _SPILLED, _OUTPUT, _HEARTBEAT, _PARTITIONS = b"A", b"S", b"O", b"H", b"P"
# Output column of the operator, and the first byte of payloads that hold numbers for Spark's progress (`observed`).
OUTPUT_COLUMN = "payload"
NUMBERS = b"N"
_CRC = struct.Struct("<I")
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


def payload_bytes_max(records_per_batch: int) -> int:
    """Return the target size of a payload.

    Spark sends up to `records_per_batch` payloads in one Arrow batch, whose binary column must stay below 2 GiB; a
    quarter of that keeps the JVM's buffers, which double as they grow, within an ordinary executor's memory.

    Without a limit smaller payloads would not make that batch smaller: it has all payloads.
    """
    if records_per_batch >= NO_ROW_LIMIT:
        return _PAYLOAD_BYTES_MAX
    return max(4 << 10, min(_PAYLOAD_BYTES_MAX, (512 << 20) // max(1, records_per_batch)))


def heartbeat(origin: str) -> bytes:
    """Return the heartbeat of a packing stage."""
    return _HEARTBEAT + hashlib.blake2b(origin.encode(), digest_size=16).digest()


def heartbeat_nonce(payload: bytes) -> bytes | None:
    """Return the number in a heartbeat; None for any other payload."""
    return payload[1:] if payload[:1] == _HEARTBEAT else None


def encode_partitions(largest: Mapping[str, int]) -> bytes:
    """Return a payload with the largest source partition of each stream in a packing task's rows."""
    return _add_checksum(_PARTITIONS, json.dumps(dict(largest), sort_keys=True).encode())


def decode_partitions(payload: bytes) -> dict[str, int] | None:
    """Decode a payload of `encode_partitions`; None for any other payload."""
    if payload[:1] != _PARTITIONS:
        return None
    largest: dict[str, int] = json.loads(_check_body(payload, _PARTITIONS).to_pybytes())
    return largest


def encode(batch: pa.RecordBatch) -> bytes:
    """Return rows as an inline payload."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    return _add_checksum(_INLINE, memoryview(sink.getvalue()))


def encode_spill_reference(name: str, offset: int, length: int) -> bytes:
    """Return a payload that refers to an inline payload in a spill file: `length` bytes at `offset`."""
    return _add_checksum(_SPILLED, json.dumps([name, offset, length]).encode())


def decode(payload: bytes, load: Callable[[str, int, int], bytes]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a payload; `load(name, offset, length)` reads from spill files."""
    if payload[:1] in (_HEARTBEAT, _PARTITIONS):
        return
    body = load_spilled_payload(payload, load) if payload[:1] == _SPILLED else payload
    with pa.ipc.open_stream(_check_body(body, _INLINE), options=_READ_OPTIONS) as reader:
        yield from reader


def encode_output(table: pa.Table) -> bytes:
    """Return output rows as bytes, not compressed, for the next stage on this machine."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return _add_checksum(_OUTPUT, memoryview(sink.getvalue()))


def decode_output(payload: pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Decode a payload of `encode_output`; the rows are views of the payload."""
    with pa.ipc.open_stream(_check_body(payload, _OUTPUT), options=_READ_OPTIONS) as reader:
        yield from reader


def load_spilled_payload(payload: bytes, load: Callable[[str, int, int], bytes]) -> bytes:
    """Load the inline payload that a spilled payload refers to."""
    name, offset, length = json.loads(_check_body(payload, _SPILLED).to_pybytes())
    data = load(name, offset, length)
    if len(data) != length:
        raise CorruptFileError(f"spill file {name} has only {len(data)} of {length} bytes at {offset}")
    return data


def _add_checksum(kind: bytes, body: bytes | memoryview) -> bytes:
    return b"".join([kind, _CRC.pack(zlib.crc32(body)), body])


def _check_body(payload: bytes | pa.Buffer, kind: bytes) -> pa.Buffer:
    """Return the bytes after the checksum; raise if the kind or the checksum is wrong."""
    start = len(kind) + _CRC.size
    view = memoryview(payload)
    if bytes(view[: len(kind)]) != kind or len(view) < start:
        raise CorruptFileError(
            f"a payload of unexpected kind {bytes(view[:1])!r} arrived: client and executors need the same release"
        )
    body = pa.py_buffer(view[start:])
    if _CRC.unpack_from(view, len(kind)) != (zlib.crc32(body),):
        raise CorruptFileError("the checksum of a payload is wrong: it was damaged on its way, or in its spill file")
    return body
