"""Headers of our Arrow files: JSON in the schema's metadata, with a checksum of its own beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from arrow_schemas.errors import CorruptFileError

__all__ = ["header_metadata", "header_text"]


def header_metadata(key: bytes, fields: dict[str, Any]) -> dict[bytes, bytes]:
    """Schema metadata with a header: its JSON under the key, and the checksum under ``<key>_checksum``."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return {key: text, _checksum_key(key): _digest(text)}


def header_text(metadata: Mapping[bytes, bytes] | None, key: bytes, where: str, header: str, lacking: str) -> bytes:
    """The JSON of a header whose checksum is right."""
    text = (metadata or {}).get(key)
    if text is None:
        raise CorruptFileError(f"{where} has no {header}: {lacking}")
    if (metadata or {}).get(_checksum_key(key)) != _digest(text):
        raise CorruptFileError(f"the {header} of {where} fails its checksum")
    return text


def _checksum_key(key: bytes) -> bytes:
    return key + b"_checksum"


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()
