"""Import marks: the values that Spark's state holds for imported buckets until their first call."""

from __future__ import annotations

import struct
import zlib

import pytest

from arrow_schemas.errors import CorruptPointerError, VersionSkewError
from arrow_schemas.import_mark import IMPORT_MARK_FORMAT, MAGIC, ImportMark
from arrow_schemas.pointer import Pointer

MARK = ImportMark("/savepoints/monday", "0123456789abcdef" * 2)


def test_a_decoded_mark_equals_the_encoded_one_and_is_not_a_pointer() -> None:
    data = MARK.encode()

    assert ImportMark.decode(data) == MARK
    assert MARK.nonce.hex() == MARK.savepoint_id
    with pytest.raises(CorruptPointerError):
        Pointer.decode(data)
    assert ImportMark.decode(Pointer("o", 0, 1, 0, -1, None).encode()) is None
    assert ImportMark.decode(b"") is None


def test_an_encoded_mark_has_the_bytes_of_its_format() -> None:
    expected = (
        b'SSEI\x01\x00T\x00\x00\x00{"savepoint":"/savepoints/monday","savepoint_id":"0123456789abcdef0123456789abcdef"}'
    )
    assert MARK.encode()[:-4] == expected


def test_every_damaged_byte_of_a_mark_is_detected() -> None:
    data = MARK.encode()
    for position in range(4, len(data)):
        with pytest.raises((CorruptPointerError, VersionSkewError)):
            ImportMark.decode(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CorruptPointerError):
            ImportMark.decode(data[:position])


def test_a_mark_with_an_invalid_savepoint_id_is_refused() -> None:
    with pytest.raises(CorruptPointerError, match="invalid savepoint id"):
        ImportMark.decode(ImportMark("/s", "../x").encode())


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b"[]", b"1", b'{"savepoint": 1}', b"\xff"],
    ids=["nested", "a list", "a number", "a missing field", "not text"],
)
def test_invalid_contents_with_a_correct_checksum_are_refused(text: bytes) -> None:
    body = struct.pack("<4sHI", MAGIC, IMPORT_MARK_FORMAT, len(text)) + text
    with pytest.raises(CorruptPointerError, match="cannot be read"):
        ImportMark.decode(body + struct.pack("<I", zlib.crc32(body)))
