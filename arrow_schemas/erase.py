"""Erase requests: keys that a user wants removed from a query's state, and what pointers and folders record of them.

A request is an immutable Arrow file in the query folder: the keys, in normal form, and a header. The erase mark in a
bucket's pointer has the number of a request: the bucket's state has no keys of requests up to that one. When a request
is done, a record without keys says so. `docs/format.md` gives every byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from arrow_schemas.checksum import open_document, refuse_newer, report_damage, seal_document
from arrow_schemas.damage import describe_damage
from arrow_schemas.errors import CorruptFileError, CorruptPointerError, StateError
from arrow_schemas.headers import encode_header, read_header
from arrow_schemas.lineage import BODY_KEY, BODY_PLACEHOLDER

__all__ = [
    "DONE_FORMAT",
    "ERASE_FOLDER",
    "ERASE_FORMAT",
    "EraseDone",
    "EraseMark",
    "EraseRequest",
    "format_done_name",
    "parse_erase_name",
    "format_request_name",
]

ERASE_FORMAT, DONE_FORMAT = 1, 1
ERASE_FOLDER = "erase"
_KEY = b"spark_state_ext.erase"
_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(\d{8})\.(keys\.arrow|done\.json)")
_MEND = "Withdraw it (withdraw_erasure), then request the erasure of its keys again; do not remove the file"


def format_request_name(number: int) -> str:
    """Return the name of a request's file."""
    return f"{number:08d}.keys.arrow"


def format_done_name(number: int) -> str:
    """Return the name of the record that a request is done."""
    return f"{number:08d}.done.json"


def parse_erase_name(name: str) -> tuple[int, bool] | None:
    """Return a request's number, and True if the file records that it is done; None for any other file."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2] == "done.json")


@dataclass(frozen=True)
class EraseMark:
    """The erase requests that a bucket has dealt with; a part of its pointer.

    Parameters
    ----------
    through
        The bucket's state has no keys of requests up to this number, except in rows that arrived later.
    heartbeat
        `Pointer.heartbeats` of the call that dealt with the last of these requests, or of a later call that did not
        look for requests.
    settled
        Requests up to this number were dealt with before that heartbeat.
    id
        Id of request `through`. If the folder has no request of that number, or one with another id, the mark is about
        other requests than the ones in the folder.
    """

    through: int
    heartbeat: int
    settled: int
    id: str

    def __post_init__(self) -> None:
        if not 0 <= self.settled <= self.through:
            raise CorruptPointerError(
                f"an erase mark must have 0 <= settled <= through, not settled={self.settled}, through={self.through}"
            )
        if not _ID.fullmatch(self.id):
            raise CorruptPointerError(f"an erase mark has an invalid request id: {self.id!r}")

    def raised(self, through: int, heartbeat: int, request_id: str) -> EraseMark:
        """Return the mark of a call that has dealt with more requests."""
        settled = self.through if heartbeat > self.heartbeat else self.settled
        return EraseMark(through, heartbeat, settled, request_id)

    def passed(self, before: int, heartbeats: int) -> EraseMark:
        """Return the mark of a call that did not look for requests.

        If the calls of the next heartbeat do not look for requests, that heartbeat does not prove that the other
        buckets have dealt with this one's requests. So the mark counts from the later heartbeat.
        """
        return replace(self, heartbeat=heartbeats) if before <= self.heartbeat else self

    def done(self, heartbeats: int) -> int:
        """Return the last request that *every* bucket has dealt with, judged by this mark of a committed pointer."""
        return self.through if heartbeats > self.heartbeat else self.settled


@dataclass(frozen=True)
class EraseRequest:
    """Keys that must be removed from an operator's state.

    Parameters
    ----------
    id
        32 random hexadecimal digits: if two processes write the same number, each sees which file won.
    operator
        Name of the operator.
    asked_ms
        When the request was made: wall-clock time, milliseconds since 1970. For people only.
    keys
        The keys: columns with the operator's names, in normal form (`RowSchema.normalise_keys`).
    package_version
        Version of this package that made the request.
    """

    id: str
    operator: str
    asked_ms: int
    keys: pa.RecordBatch
    package_version: str

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise CorruptFileError(f"an erase request has an invalid id: {self.id!r}")

    def schema(self) -> pa.Schema:
        """Return the schema of the file, with its header."""
        fields = {
            "format": ERASE_FORMAT,
            "id": self.id,
            "operator": self.operator,
            "asked_ms": self.asked_ms,
            "package_version": self.package_version,
        }
        return self.keys.schema.with_metadata({**encode_header(_KEY, fields), BODY_KEY: BODY_PLACEHOLDER})

    @staticmethod
    def of(schema: pa.Schema, batches: Iterable[pa.RecordBatch], where: str) -> EraseRequest:
        """Decode a request from the schema and batches of its file."""
        text = read_header(schema.metadata, _KEY, where, "header of an erase request", _MEND)
        try:
            fields: Mapping[str, Any] = json.loads(text)
            refuse_newer(fields["format"], ERASE_FORMAT, where)
            plain = schema.remove_metadata()
            table = pa.Table.from_batches([batch.replace_schema_metadata(None) for batch in batches], plain)
            table.validate(full=True)
            rows = table.combine_chunks().to_batches()
            empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in plain], schema=plain)
            return EraseRequest(
                str(fields["id"]),
                str(fields["operator"]),
                int(fields["asked_ms"]),
                rows[0] if rows else empty,
                str(fields["package_version"]),
            )
        except StateError:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise CorruptFileError(f"{where} cannot be read: {describe_damage(error)}. {_MEND}.") from error

    def emptied(self, request_id: str | None = None) -> EraseRequest:
        """Return this request without keys, and with `request_id` if it is given."""
        return replace(self, id=request_id or self.id, keys=self.keys.slice(0, 0))

    def columns(self, fields: Sequence[pa.Field], where: str) -> list[pa.Array]:
        """Return the key columns; raise `CorruptFileError` unless they have the types of an operator's key fields."""
        types, expected = [column.type for column in self.keys.columns], [field.type for field in fields]
        if types != expected:
            raise CorruptFileError(f"{where} has keys of types {types}, but the operator's are {expected}. {_MEND}.")
        return list(self.keys.columns)


@dataclass(frozen=True)
class EraseDone:
    """The record that no bucket's committed state has a request's keys. The record does not hold the keys.

    Parameters
    ----------
    id
        The request's id.
    keys
        How many keys the request had.
    asked_ms, done_ms
        When the request was made, and when it was known to be done: milliseconds since 1970. For people only.
    heartbeat
        `Pointer.heartbeats` of the committed pointer that proved it.
    batch
        The batch that wrote that pointer.
    """

    id: str
    keys: int
    asked_ms: int
    done_ms: int
    heartbeat: int
    batch: int

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return seal_document({"format": DONE_FORMAT, **asdict(self)})

    @staticmethod
    def decode(data: bytes, where: str) -> EraseDone:
        """Decode the bytes of a record."""
        with report_damage(where, "record of an erase request"):
            fields = open_document(data, where, DONE_FORMAT)
            return EraseDone(
                str(fields["id"]),
                int(fields["keys"]),
                int(fields["asked_ms"]),
                int(fields["done_ms"]),
                int(fields["heartbeat"]),
                int(fields["batch"]),
            )
        raise AssertionError("unreachable: readable raises what it catches")
