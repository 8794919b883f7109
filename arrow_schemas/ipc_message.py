"""What an Arrow IPC message says of its body, read before Arrow allocates anything for it.

Arrow decompresses a body whatever its size, and zstd makes 30,000 bytes of one: a file of a few KiB would take all
of a machine's memory. Deltas are compressed with LZ4, which gives at most 255 bytes for one, and snapshots are not
compressed: a message that says otherwise is not from this package. The layout is that of Arrow's ``Message.fbs``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from arrow_schemas.errors import CorruptFileError

__all__ = ["LZ4_FRAME", "MessageHead", "message_at", "message_head"]

LZ4_FRAME = 0
_SCHEMA, _RECORD_BATCH = 1, 3
# A schema has the metadata of the file's header in it.
_METADATA_BYTES_MAX = 64 << 20
# Positions of fields in Message, RecordBatch and BodyCompression.
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_COMPRESSION = 3
_CODEC = 0
# What a message begins with: the mark of a continuation, and the length of its metadata.
_PREFIX = struct.Struct("<ii")


@dataclass(frozen=True)
class MessageHead:
    """What a message says of its body.

    Parameters
    ----------
    body_bytes
        Size of the body.
    codec
        Number of the codec with which buffers are compressed; None: they are not.
    metadata_bytes
        Size of what comes before the body.
    """

    body_bytes: int
    codec: int | None
    metadata_bytes: int = 0


def message_at(read: Callable[[int, int], bytes], at: int, where: str) -> MessageHead:
    """Read the head of the message that begins at a byte of a file."""
    prefix = read(at, _PREFIX.size)
    continuation, metadata_bytes = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (0, 0)
    if continuation != -1 or not 0 < metadata_bytes <= _METADATA_BYTES_MAX:
        raise CorruptFileError(f"{where} has no Arrow message at byte {at}: it is damaged")
    head = message_head(read(at + _PREFIX.size, metadata_bytes), where)
    return replace(head, metadata_bytes=_PREFIX.size + metadata_bytes)


def message_head(metadata: bytes, where: str) -> MessageHead:
    """Read the metadata of a message of a schema or of a record batch."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        message = _Table(metadata, root)
        kind, body_bytes = message.number(_HEADER_TYPE, "<B"), message.number(_BODY_LENGTH, "<q")
        if kind not in (_SCHEMA, _RECORD_BATCH) or body_bytes < 0:
            raise CorruptFileError(
                f"{where} has an Arrow message of type {kind} with {body_bytes} bytes: it is damaged"
            )
        compression = message.table(_HEADER).table(_COMPRESSION) if kind == _RECORD_BATCH else None
        return MessageHead(body_bytes, None if not compression else compression.number(_CODEC, "<b"))
    except (struct.error, IndexError) as error:
        raise CorruptFileError(f"{where} has an Arrow message that cannot be read: it is damaged") from error


class _Table:
    """A table of a FlatBuffer; false if it is absent."""

    def __init__(self, data: bytes, at: int | None) -> None:
        self._data, self._at = data, at

    def __bool__(self) -> bool:
        return self._at is not None

    def number(self, field: int, form: str) -> int:
        """A field's number; absent fields are 0."""
        place = self._place(field)
        return 0 if place is None else int(struct.unpack_from(form, self._data, place)[0])

    def table(self, field: int) -> _Table:
        """A field's table."""
        place = self._place(field)
        return _Table(self._data, None if place is None else place + self._unsigned("<I", place))

    def _place(self, field: int) -> int | None:
        if self._at is None:
            raise IndexError("no table")
        names = self._at - int(struct.unpack_from("<i", self._data, self._at)[0])
        if names < 0 or 4 + 2 * field >= self._unsigned("<H", names):
            return None
        offset = self._unsigned("<H", names + 4 + 2 * field)
        return self._at + offset if offset else None

    def _unsigned(self, form: str, at: int) -> int:
        return int(struct.unpack_from(form, self._data, at)[0])
