"""Payloads: rows of one bucket as Arrow IPC bytes, on their way through Spark's shuffle.

Packing keeps every value as it is; Spark's own path to pandas would turn a bucket's nullable integers into floats. A
payload is ``b"A"`` and an LZ4-compressed Arrow IPC stream, or ``b"S"`` and JSON naming a spill file, its offset and
length, with the CRC-32 of these in between: damaged Arrow bytes can crash a process. Or it is ``b"H"`` and 16 bytes
that no other packing stage has, the same for all buckets: the heartbeat that makes Spark call every bucket in every
batch with data. Or it is ``b"P"``, checksum and JSON: the largest source partition of each stream that a packing task
has rows of, for every bucket (`partitions_seen`). Output of functions that give Arrow goes on as ``b"O"``, checksum and
an Arrow IPC stream (`output`).
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
    "partitions_seen",
    "payload_bytes_max",
    "seen_partitions",
    "spilled",
    "stored_payload",
]

HASH_COLUMN = "__hash"
# Behind the hash, where a row's bucket is told by its source's partition; packing takes them off.
PARTITION_COLUMN, STREAM_COLUMN = "__partition", "__stream"
PAYLOAD_SCHEMA = "bucket int, payload binary, event_time timestamp, __others int"
# `records_per_batch` where Spark is told no limit.
NO_ROW_LIMIT = 2**31 - 1
_PAYLOAD_BYTES_MAX = 1 << 20
_INLINE, _SPILLED, _OUTPUT, _HEARTBEAT, _PARTITIONS = b"A", b"S", b"O", b"H", b"P"
# What the operator gives, and the payloads in it that are numbers for Spark's progress (`observed`).
OUTPUT_COLUMN = "payload"
NUMBERS = b"N"
_CRC = struct.Struct("<I")
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


def payload_bytes_max(records_per_batch: int) -> int:
    """Target size of a payload.

    Spark sends up to `records_per_batch` payloads in one Arrow batch, whose binary column must stay below 2 GiB; a
    quarter of that keeps the JVM's buffers, which double as they grow, within an ordinary executor's memory.

    Without a limit, smaller payloads would not make that batch smaller: it has all that there is.
    """
    if records_per_batch >= NO_ROW_LIMIT:
        return _PAYLOAD_BYTES_MAX
    return max(4 << 10, min(_PAYLOAD_BYTES_MAX, (512 << 20) // max(1, records_per_batch)))


def heartbeat(origin: str) -> bytes:
    """The heartbeat of a packing stage."""
    return _HEARTBEAT + hashlib.blake2b(origin.encode(), digest_size=16).digest()


def heartbeat_nonce(payload: bytes) -> bytes | None:
    """The number that came with a heartbeat; None for any other payload."""
    return payload[1:] if payload[:1] == _HEARTBEAT else None


def partitions_seen(largest: Mapping[str, int]) -> bytes:
    """A payload with the largest source partition of each stream that a packing task has rows of."""
    return _signed(_PARTITIONS, json.dumps(dict(largest), sort_keys=True).encode())


def seen_partitions(payload: bytes) -> dict[str, int] | None:
    """Inverse of `partitions_seen`; None for any other payload."""
    if payload[:1] != _PARTITIONS:
        return None
    largest: dict[str, int] = json.loads(_checked(payload, _PARTITIONS).to_pybytes())
    return largest


def encode(batch: pa.RecordBatch) -> bytes:
    """Rows as an inline payload."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    return _signed(_INLINE, memoryview(sink.getvalue()))


def spilled(name: str, offset: int, length: int) -> bytes:
    """A payload that refers to `length` bytes at `offset` of a spill file, which are an inline payload."""
    return _signed(_SPILLED, json.dumps([name, offset, length]).encode())


def decode(payload: bytes, load: Callable[[str, int, int], bytes]) -> Iterator[pa.RecordBatch]:
    """Rows of a payload; `load(name, offset, length)` reads from spill files."""
    if payload[:1] in (_HEARTBEAT, _PARTITIONS):
        return
    body = stored_payload(payload, load) if payload[:1] == _SPILLED else payload
    with pa.ipc.open_stream(_checked(body, _INLINE), options=_READ_OPTIONS) as reader:
        yield from reader


def encode_output(table: pa.Table) -> bytes:
    """Output rows as bytes, for the next stage on this machine: not compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return _signed(_OUTPUT, memoryview(sink.getvalue()))


def decode_output(payload: pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Inverse of `encode_output`; the rows are views of the payload."""
    with pa.ipc.open_stream(_checked(payload, _OUTPUT), options=_READ_OPTIONS) as reader:
        yield from reader


def stored_payload(payload: bytes, load: Callable[[str, int, int], bytes]) -> bytes:
    """The inline payload that a spilled one refers to."""
    name, offset, length = json.loads(_checked(payload, _SPILLED).to_pybytes())
    data = load(name, offset, length)
    if len(data) != length:
        raise CorruptFileError(f"spill file {name} has {len(data)} of {length} bytes at {offset}")
    return data


def _signed(kind: bytes, body: bytes | memoryview) -> bytes:
    return b"".join([kind, _CRC.pack(zlib.crc32(body)), body])


def _checked(payload: bytes | pa.Buffer, kind: bytes) -> pa.Buffer:
    """What follows the checksum."""
    start = len(kind) + _CRC.size
    view = memoryview(payload)
    if bytes(view[: len(kind)]) != kind or len(view) < start:
        raise CorruptFileError(
            f"a payload of kind {bytes(view[:1])!r} arrived; client and executors need the same release"
        )
    body = pa.py_buffer(view[start:])
    if _CRC.unpack_from(view, len(kind)) != (zlib.crc32(body),):
        raise CorruptFileError("a payload fails its checksum: it was damaged on its way, or its spill file is")
    return body
