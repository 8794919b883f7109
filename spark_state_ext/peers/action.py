"""The two messages of Arrow Flight that peers use, in the bytes of Protocol Buffers: an action and a result."""

from __future__ import annotations

from arrow_schemas.errors import CorruptFileError

__all__ = ["decode_action", "encode_result"]

# Fields of `arrow.flight.protocol.Action` and `Result`, with the wire type of bytes with a length.
_ACTION_TYPE, _ACTION_BODY, _RESULT_BODY = b"\x0a", b"\x12", b"\x0a"
_VARINT_BYTES_MAX = 5


def decode_action(data: bytes) -> tuple[str, bytes]:
    """The type and the body of an action."""
    found = {_ACTION_TYPE: b"", _ACTION_BODY: b""}
    at = 0
    while at < len(data):
        field = data[at : at + 1]
        size, start = _varint(data, at + 1)
        at = start + size
        if field not in found or at > len(data):
            raise CorruptFileError("a message of a peer is no action of Arrow Flight")
        found[field] = data[start:at]
    # Types that nobody has are refused, whatever bytes they have.
    return found[_ACTION_TYPE].decode(errors="replace"), found[_ACTION_BODY]


def encode_result(body: bytes) -> bytes:
    """The message of a result."""
    size, length = len(body), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((_RESULT_BODY, length, body))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise CorruptFileError("a message of a peer is no action of Arrow Flight")
