"""Small JSON documents with a format number and a checksum: leases, holds, claims, starts and operator files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from arrow_schemas.damage import describe_damage
from arrow_schemas.errors import CorruptFileError, StateError, VersionSkewError

__all__ = [
    "INT64_MAX",
    "compute_checksum",
    "open_document",
    "report_damage",
    "refuse_newer",
    "seal_document",
    "read_whole_number",
]

INT64_MAX = (1 << 63) - 1


def compute_checksum(fields: dict[str, Any]) -> str:
    """Return the 16-byte BLAKE2b of the fields as JSON (sorted keys, no white space), in hexadecimal digits."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def seal_document(fields: dict[str, Any]) -> bytes:
    """Return a document's bytes: its fields, which include `format`, and their checksum."""
    return json.dumps({**fields, "checksum": compute_checksum(fields)}).encode()


def open_document(data: bytes, where: str, known_format: int, mend: str = "") -> dict[str, Any]:
    """Return the fields of a sealed document; call this, and read the fields, inside `with readable(…)`."""
    fields: dict[str, Any] = json.loads(data)
    refuse_newer(fields["format"], known_format, where)
    if fields.pop("checksum", None) != compute_checksum(fields):
        raise CorruptFileError(f"{where} fails its checksum{'. ' if mend else ''}{mend}")
    return fields


def refuse_newer(file_format: int, known_format: int, where: str) -> None:
    """Raise `VersionSkewError` for a format that this release does not know."""
    if file_format > known_format:
        raise VersionSkewError(
            f"{where} has format {file_format}; this release reads up to {known_format}. Use a newer release."
        )


def read_whole_number(fields: Mapping[str, Any], name: str, least: int, most: int = INT64_MAX) -> int:
    """Return a field of a decoded document; raise `ValueError` unless it is a whole number within the bounds."""
    value = fields[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
    return value


@contextmanager
def report_damage(where: str, what: str, mend: str = "") -> Iterator[None]:
    """Report every error of decoding a document as damage of that document."""
    try:
        yield
    except StateError:
        raise
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{where} is not a valid {what}: {describe_damage(error)}{'. ' if mend else ''}{mend}"
        ) from error
