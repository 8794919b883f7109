"""Headers of our Arrow files: JSON in the schema's metadata, next to a checksum of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from arrow_schemas.errors import CorruptFileError

__all__ = ["encode_header", "read_header"]


def encode_header(key: bytes, fields: dict[str, Any]) -> dict[bytes, bytes]:
    """Return schema metadata with a header: its JSON under the key, and its checksum under ``<key>_checksum``."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return {key: text, _checksum_key(key): _digest(text)}


def read_header(metadata: Mapping[bytes, bytes] | None, key: bytes, where: str, header: str, if_missing: str) -> bytes:
    """Return the JSON of a header; raise `CorruptFileError` if it is missing or fails its checksum."""
    text = (metadata or {}).get(key)
    if text is None:
        raise CorruptFileError(f"{where} has no {header}: {if_missing}")
    if (metadata or {}).get(_checksum_key(key)) != _digest(text):
        raise CorruptFileError(f"the {header} of {where} fails its checksum")
    return text


def _checksum_key(key: bytes) -> bytes:
    return key + b"_checksum"


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).hexdigest().encode()
