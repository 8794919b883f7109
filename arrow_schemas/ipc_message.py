"""The head of an Arrow IPC message: the size and compression of its body, read before Arrow allocates memory for it.

Arrow decompresses a body whatever its size, and zstd can turn one byte into 30,000: a file of a few KiB could use up a
machine's memory. Deltas are compressed with LZ4, which expands a byte to at most 255, and snapshots are not compressed,
so a message that says otherwise is not from this package. Arrow's ``Message.fbs`` defines the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from arrow_schemas.errors import CorruptFileError

__all__ = ["LZ4_FRAME", "MessageHead", "decode_message_head", "read_message_head"]

LZ4_FRAME = 0
_SCHEMA, _RECORD_BATCH = 1, 3
# Generous, because a schema's message holds the file's header.
_METADATA_BYTES_MAX = 64 << 20
# Positions of fields in Message, RecordBatch and BodyCompression.
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_COMPRESSION = 3
_CODEC = 0
# A message begins with a continuation mark and the length of its metadata.
_PREFIX = struct.Struct("<ii")


@dataclass(frozen=True)
class MessageHead:
    """The size and the compression of a message's body.

    Parameters
    ----------
    body_bytes
        Size of the body.
    codec
        Number of the codec that compressed the buffers; None: they are not compressed.
    metadata_bytes
        Number of bytes before the body.
    """

    body_bytes: int
    codec: int | None
    metadata_bytes: int = 0


def read_message_head(read: Callable[[int, int], bytes], at: int, where: str) -> MessageHead:
    """Read the head of the message that begins at byte `at` of a file."""
    prefix = read(at, _PREFIX.size)
    continuation, metadata_bytes = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (0, 0)
    if continuation != -1 or not 0 < metadata_bytes <= _METADATA_BYTES_MAX:
        raise CorruptFileError(f"{where} has no Arrow message at byte {at}: it is damaged")
    head = decode_message_head(read(at + _PREFIX.size, metadata_bytes), where)
    return replace(head, metadata_bytes=_PREFIX.size + metadata_bytes)


def decode_message_head(metadata: bytes, where: str) -> MessageHead:
    """Decode the metadata of a schema's or record batch's message."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        message = _Table(metadata, root)
        kind, body_bytes = message.read_number(_HEADER_TYPE, "<B"), message.read_number(_BODY_LENGTH, "<q")
        if kind not in (_SCHEMA, _RECORD_BATCH) or body_bytes < 0:
            raise CorruptFileError(
                f"{where} has an Arrow message of type {kind} with {body_bytes} bytes: it is damaged"
            )
        compression = message.read_table(_HEADER).read_table(_COMPRESSION) if kind == _RECORD_BATCH else None
        return MessageHead(body_bytes, None if not compression else compression.read_number(_CODEC, "<b"))
    except (struct.error, IndexError) as error:
        raise CorruptFileError(f"{where} has an Arrow message that cannot be read: it is damaged") from error


class _Table:
    """A table of a FlatBuffer; false if the table is absent."""

    def __init__(self, data: bytes, at: int | None) -> None:
        self._data, self._at = data, at

    def __bool__(self) -> bool:
        return self._at is not None

    def read_number(self, field: int, form: str) -> int:
        """Return the number in a field; 0 if the field is absent."""
        position = self._find_field(field)
        return 0 if position is None else int(struct.unpack_from(form, self._data, position)[0])

    def read_table(self, field: int) -> _Table:
        """Return the table in a field."""
        position = self._find_field(field)
        return _Table(self._data, None if position is None else position + self._read_unsigned("<I", position))

    def _find_field(self, field: int) -> int | None:
        if self._at is None:
            raise IndexError("no table")
        vtable = self._at - int(struct.unpack_from("<i", self._data, self._at)[0])
        if vtable < 0 or 4 + 2 * field >= self._read_unsigned("<H", vtable):
            return None
        offset = self._read_unsigned("<H", vtable + 4 + 2 * field)
        return self._at + offset if offset else None

    def _read_unsigned(self, form: str, at: int) -> int:
        return int(struct.unpack_from(form, self._data, at)[0])
