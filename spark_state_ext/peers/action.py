"""The two Arrow Flight messages that peers use, encoded as Protocol Buffers: an action and a result."""

from __future__ import annotations

from arrow_schemas.errors import CorruptFileError

__all__ = ["decode_action", "encode_result"]

# Fields of `arrow.flight.protocol.Action` and `Result`, with the wire type for length-delimited bytes.
_ACTION_TYPE, _ACTION_BODY, _RESULT_BODY = b"\x0a", b"\x12", b"\x0a"
_VARINT_BYTES_MAX = 5


def decode_action(data: bytes) -> tuple[str, bytes]:
    """Return the type and the body of an action."""
    values = {_ACTION_TYPE: b"", _ACTION_BODY: b""}
    at = 0
    while at < len(data):
        field = data[at : at + 1]
        size, start = _read_varint(data, at + 1)
        at = start + size
        if field not in values or at > len(data):
            raise CorruptFileError("a peer's message is not an Arrow Flight action")
        values[field] = data[start:at]
    # The caller refuses unknown types, whatever bytes they have.
    return values[_ACTION_TYPE].decode(errors="replace"), values[_ACTION_BODY]


def encode_result(body: bytes) -> bytes:
    """Return the message of a result."""
    size, length = len(body), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((_RESULT_BODY, length, body))


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise CorruptFileError("a peer's message is not an Arrow Flight action")
