"""The import mark: what Spark's own state holds for an imported bucket until its first call. It names a savepoint.

The first batch replaces it by a pointer. Until then the bucket has no state of its own, so its first call begins with
the savepoint; and because Spark holds state for the bucket, Spark calls it in the first batch even without rows.

Bytes: ``b"SSEI"``, format (u16), length of the JSON (u32), the JSON, and the CRC-32 of everything before (u32); all
little-endian.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass

from arrow_schemas.damage import describe_damage
from arrow_schemas.errors import CorruptPointerError, VersionSkewError

__all__ = ["IMPORT_MARK_FORMAT", "MAGIC", "ImportMark"]

IMPORT_MARK_FORMAT = 1
MAGIC = b"SSEI"
_HEAD = struct.Struct("<4sHI")
_CRC = struct.Struct("<I")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class ImportMark:
    """The savepoint that an imported bucket begins with.

    Parameters
    ----------
    savepoint
        The savepoint's folder when the job was imported. For people only.
    savepoint_id
        The savepoint's id, 32 hexadecimal digits.
    """

    savepoint: str
    savepoint_id: str

    @property
    def nonce(self) -> bytes:
        """The savepoint id as bytes: all buckets of one import share it, and other buckets do not."""
        return bytes.fromhex(self.savepoint_id)

    def encode(self) -> bytes:
        """Return the mark's bytes."""
        fields = {"savepoint": self.savepoint, "savepoint_id": self.savepoint_id}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        body = _HEAD.pack(MAGIC, IMPORT_MARK_FORMAT, len(text)) + text
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def decode(data: bytes) -> ImportMark | None:
        """Decode a mark; return None if the bytes are not a mark, and so must be a pointer."""
        if not data.startswith(MAGIC):
            return None
        if len(data) < _HEAD.size + _CRC.size:
            raise CorruptPointerError(f"the import mark in Spark's state is truncated: {len(data)} bytes")
        _, version, length = _HEAD.unpack_from(data)
        if version > IMPORT_MARK_FORMAT:
            raise VersionSkewError(
                f"the import mark in Spark's state has format {version}; this release reads up to "
                f"{IMPORT_MARK_FORMAT}. Use a newer release."
            )
        (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
        if crc != zlib.crc32(data[: -_CRC.size]) or _HEAD.size + length + _CRC.size != len(data):
            raise CorruptPointerError("the import mark in Spark's state fails its checksum")
        try:
            fields = json.loads(data[_HEAD.size : _HEAD.size + length])
            mark = ImportMark(str(fields["savepoint"]), str(fields["savepoint_id"]))
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise CorruptPointerError(
                f"the import mark in Spark's state cannot be read: {describe_damage(error)}"
            ) from error
        if not _ID.fullmatch(mark.savepoint_id):
            raise CorruptPointerError(f"the import mark has an invalid savepoint id: {mark.savepoint_id[:40]!r}")
        return mark
