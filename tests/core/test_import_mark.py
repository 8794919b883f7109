"""What Spark's state holds of an imported bucket until its first call."""

from __future__ import annotations

import struct
import zlib

import pytest

from arrow_schemas.errors import CorruptPointerError, VersionSkewError
from arrow_schemas.import_mark import IMPORT_MARK_FORMAT, MAGIC, ImportMark
from arrow_schemas.pointer import Pointer

MARK = ImportMark("/savepoints/monday", "0123456789abcdef" * 2)


def test_a_mark_comes_back_and_is_no_pointer() -> None:
    data = MARK.encode()

    assert ImportMark.decode(data) == MARK
    assert MARK.nonce.hex() == MARK.savepoint_id
    with pytest.raises(CorruptPointerError):
        Pointer.decode(data)
    assert ImportMark.decode(Pointer("o", 0, 1, 0, -1, None).encode()) is None
    assert ImportMark.decode(b"") is None


def test_the_bytes_are_those_that_the_format_names() -> None:
    expected = (
        b'SSEI\x01\x00T\x00\x00\x00{"savepoint":"/savepoints/monday","savepoint_id":"0123456789abcdef0123456789abcdef"}'
    )
    assert MARK.encode()[:-4] == expected


def test_every_damaged_byte_is_found() -> None:
    data = MARK.encode()
    for at in range(4, len(data)):
        with pytest.raises((CorruptPointerError, VersionSkewError)):
            ImportMark.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptPointerError):
            ImportMark.decode(data[:at])


def test_a_savepoint_of_no_id_is_refused() -> None:
    with pytest.raises(CorruptPointerError, match="invalid savepoint id"):
        ImportMark.decode(ImportMark("/s", "../x").encode())


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b"[]", b"1", b'{"savepoint": 1}', b"\xff"],
    ids=["nested", "a list", "a number", "a field too few", "no text"],
)
def test_what_is_no_mark_behind_a_checksum_that_is_right_is_refused(text: bytes) -> None:
    body = struct.pack("<4sHI", MAGIC, IMPORT_MARK_FORMAT, len(text)) + text
    with pytest.raises(CorruptPointerError, match="cannot be read"):
        ImportMark.decode(body + struct.pack("<I", zlib.crc32(body)))
