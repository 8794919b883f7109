"""Small JSON documents with a format number and a checksum: leases, holds, claims, starts; and operator files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from arrow_schemas.damage import damage_in
from arrow_schemas.errors import CorruptFileError, StateError, VersionSkewError

__all__ = ["INT64_MAX", "checksum_of", "opened_document", "readable", "refuse_newer", "sealed_document", "whole_number"]

INT64_MAX = (1 << 63) - 1


def checksum_of(fields: dict[str, Any]) -> str:
    """BLAKE2b, 16 bytes, of the fields as JSON with sorted keys and no white space, as hexadecimal digits."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def sealed_document(fields: dict[str, Any]) -> bytes:
    """A document's bytes: its fields, `format` among them, and their checksum."""
    return json.dumps({**fields, "checksum": checksum_of(fields)}).encode()


def opened_document(data: bytes, where: str, known_format: int, mend: str = "") -> dict[str, Any]:
    """Inverse of `sealed_document`; call it, and use what it gives, within `readable`."""
    fields: dict[str, Any] = json.loads(data)
    refuse_newer(fields["format"], known_format, where)
    if fields.pop("checksum", None) != checksum_of(fields):
        raise CorruptFileError(f"{where} fails its checksum{'. ' if mend else ''}{mend}")
    return fields


def refuse_newer(found: int, known_format: int, where: str) -> None:
    """Refuse a format that this release does not know."""
    if found > known_format:
        raise VersionSkewError(
            f"{where} has format {found}; this release reads up to {known_format}. Use a newer release."
        )


def whole_number(fields: Mapping[str, Any], name: str, least: int, most: int = INT64_MAX) -> int:
    """A number of a document that was read, which must be a whole one within bounds."""
    value = fields[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return value


@contextmanager
def readable(where: str, what: str, mend: str = "") -> Iterator[None]:
    """Have what a document of another shape raises told as one that is damaged."""
    try:
        yield
    except StateError:
        raise
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{where} is no {what}: {damage_in(error)}{'. ' if mend else ''}{mend}") from error
