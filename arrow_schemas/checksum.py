"""The checksum of small JSON documents: operator files and leases."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["checksum_of"]


def checksum_of(fields: dict[str, Any]) -> str:
    """BLAKE2b, 16 bytes, of the fields as JSON with sorted keys and no white space, as hexadecimal digits."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()
