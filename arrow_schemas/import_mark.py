"""What Spark's own state holds of a bucket whose state was imported, until the bucket's first call: where it lies.

A pointer takes its place with the first batch. Until then the bucket has no state of its own, so that its first call
begins with the savepoint; and as Spark has a state of it, Spark calls it in the first batch, with rows or without.

Bytes: ``b"SSEI"``, format (u16), length of the JSON (u32), the JSON, and the CRC-32 of everything before (u32); all
little-endian.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from dataclasses import dataclass

from arrow_schemas.damage import damage_in
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
        Its folder when the job was imported, for people.
    savepoint_id
        Its id, 32 hexadecimal digits.
    """

    savepoint: str
    savepoint_id: str

    @property
    def nonce(self) -> bytes:
        """A number that all buckets of the import share, and no others."""
        return bytes.fromhex(self.savepoint_id)

    def encode(self) -> bytes:
        """The mark's bytes."""
        fields = {"savepoint": self.savepoint, "savepoint_id": self.savepoint_id}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        body = _HEAD.pack(MAGIC, IMPORT_MARK_FORMAT, len(text)) + text
        return body + _CRC.pack(zlib.crc32(body))

    @staticmethod
    def decode(data: bytes) -> ImportMark | None:
        """Read a mark; None where the bytes are none, and so are a pointer."""
        if not data.startswith(MAGIC):
            return None
        if len(data) < _HEAD.size + _CRC.size:
            raise CorruptPointerError(f"the mark of an import in Spark's state is cut short: {len(data)} bytes")
        _, version, length = _HEAD.unpack_from(data)
        if version > IMPORT_MARK_FORMAT:
            raise VersionSkewError(
                f"the mark of an import of format {version} was found; this release reads up to {IMPORT_MARK_FORMAT}. "
                "Use a newer release."
            )
        (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
        if crc != zlib.crc32(data[: -_CRC.size]) or _HEAD.size + length + _CRC.size != len(data):
            raise CorruptPointerError("the mark of an import in Spark's state fails its checksum")
        try:
            fields = json.loads(data[_HEAD.size : _HEAD.size + length])
            found = ImportMark(str(fields["savepoint"]), str(fields["savepoint_id"]))
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise CorruptPointerError(
                f"the mark of an import in Spark's state cannot be read: {damage_in(error)}"
            ) from error
        if not _ID.fullmatch(found.savepoint_id):
            raise CorruptPointerError(f"the mark of an import names a savepoint of no id: {found.savepoint_id[:40]!r}")
        return found
