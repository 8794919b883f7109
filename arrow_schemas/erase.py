"""Erase requests: keys that a user wants gone from a query's state, and what pointers and folders say of them.

A request is an Arrow file in the query folder: the keys, in normal form, and a header. It is immutable. A bucket's
pointer has a mark: up to which request its state is without the keys. A record without keys tells when a request was
done. `docs/format.md` gives every byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from arrow_schemas.checksum import opened_document, readable, refuse_newer, sealed_document
from arrow_schemas.damage import damage_in
from arrow_schemas.errors import CorruptFileError, CorruptPointerError, StateError
from arrow_schemas.headers import header_metadata, header_text
from arrow_schemas.lineage import BODY_KEY, BODY_PLACEHOLDER

__all__ = [
    "DONE_FORMAT",
    "ERASE_FOLDER",
    "ERASE_FORMAT",
    "EraseDone",
    "EraseMark",
    "EraseRequest",
    "done_name",
    "parse_erase_name",
    "request_name",
]

ERASE_FORMAT, DONE_FORMAT = 1, 1
ERASE_FOLDER = "erase"
_KEY = b"spark_state_ext.erase"
_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(\d{8})\.(keys\.arrow|done\.json)")
_MEND = "Withdraw it (withdraw_erasure), and ask for the erasure of its keys again; do not remove the file"


def request_name(number: int) -> str:
    """Name of a request's file."""
    return f"{number:08d}.keys.arrow"


def done_name(number: int) -> str:
    """Name of the record that a request is done."""
    return f"{number:08d}.done.json"


def parse_erase_name(name: str) -> tuple[int, bool] | None:
    """Number of a request, and whether the file is its record of being done; None for another file."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2] == "done.json")


@dataclass(frozen=True)
class EraseMark:
    """What a bucket's pointer says of erase requests.

    Parameters
    ----------
    through
        Its state is without the keys of requests up to this number, but for rows that came since.
    heartbeat
        `Pointer.heartbeats` of the call that dealt with the last of them, or of a later one that did not look.
    settled
        Requests up to this number were dealt with at an earlier heartbeat.
    id
        Id of the request `through`. Where the folder has another of that number, or none, the mark is of other
        requests: it says nothing of those that are there.
    """

    through: int
    heartbeat: int
    settled: int
    id: str

    def __post_init__(self) -> None:
        if not 0 <= self.settled <= self.through:
            raise CorruptPointerError(f"an erase mark has dealt with requests up to {self.through} and {self.settled}")
        if not _ID.fullmatch(self.id):
            raise CorruptPointerError(f"an erase mark names the request {self.id!r}")

    def raised(self, through: int, heartbeat: int, request_id: str) -> EraseMark:
        """The mark of a call that has dealt with more requests."""
        settled = self.through if heartbeat > self.heartbeat else self.settled
        return EraseMark(through, heartbeat, settled, request_id)

    def passed(self, before: int, heartbeats: int) -> EraseMark:
        """The mark of a call that did not look for requests.

        Where the calls of the next heartbeat do not look, that heartbeat does not tell that the other buckets have
        dealt with what this one has. So the mark is as if this one had done so then.
        """
        return replace(self, heartbeat=heartbeats) if before <= self.heartbeat else self

    def done(self, heartbeats: int) -> int:
        """Up to which request *every* bucket has dealt with them, told by the mark of a committed pointer."""
        return self.through if heartbeats > self.heartbeat else self.settled


@dataclass(frozen=True)
class EraseRequest:
    """Keys that are to be gone from an operator's state.

    Parameters
    ----------
    id
        32 hexadecimal digits, random: of two who write the same number, each sees whose file is there.
    operator
        The operator.
    asked_ms
        When it was made: wall-clock time, milliseconds since 1970. For people.
    keys
        The keys: columns named as the operator's, in normal form (`RowSchema.normalise_keys`).
    package_version
        Version of this package that made it.
    """

    id: str
    operator: str
    asked_ms: int
    keys: pa.RecordBatch
    package_version: str

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise CorruptFileError(f"no erase request: id {self.id!r}")

    def schema(self) -> pa.Schema:
        """Schema of the file, with its header."""
        fields = {
            "format": ERASE_FORMAT,
            "id": self.id,
            "operator": self.operator,
            "asked_ms": self.asked_ms,
            "package_version": self.package_version,
        }
        return self.keys.schema.with_metadata({**header_metadata(_KEY, fields), BODY_KEY: BODY_PLACEHOLDER})

    @staticmethod
    def of(schema: pa.Schema, batches: Iterable[pa.RecordBatch], where: str) -> EraseRequest:
        """A request as it is read."""
        text = header_text(schema.metadata, _KEY, where, "header of an erase request", _MEND)
        try:
            fields: Mapping[str, Any] = json.loads(text)
            refuse_newer(fields["format"], ERASE_FORMAT, where)
            plain = schema.remove_metadata()
            table = pa.Table.from_batches([batch.replace_schema_metadata(None) for batch in batches], plain)
            table.validate(full=True)
            rows = table.combine_chunks().to_batches()
            none = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in plain], schema=plain)
            return EraseRequest(
                str(fields["id"]),
                str(fields["operator"]),
                int(fields["asked_ms"]),
                rows[0] if rows else none,
                str(fields["package_version"]),
            )
        except StateError:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise CorruptFileError(f"{where} cannot be read: {damage_in(error)}. {_MEND}.") from error

    def emptied(self, request_id: str | None = None) -> EraseRequest:
        """The same without keys; of another id where one is given."""
        return replace(self, id=request_id or self.id, keys=self.keys.slice(0, 0))

    def columns(self, fields: Sequence[pa.Field], where: str) -> list[pa.Array]:
        """The key columns, where they are those of an operator."""
        found, wanted = [column.type for column in self.keys.columns], [field.type for field in fields]
        if found != wanted:
            raise CorruptFileError(f"{where} has keys of the types {found}, and the operator's are {wanted}. {_MEND}.")
        return list(self.keys.columns)


@dataclass(frozen=True)
class EraseDone:
    """That every bucket's committed state is without a request's keys. It has none of them.

    Parameters
    ----------
    id
        Of the request.
    keys
        How many keys it had.
    asked_ms, done_ms
        When it was made, and when it was known to be done: milliseconds since 1970. For people.
    heartbeat
        `Pointer.heartbeats` of the committed pointer that told.
    batch
        The batch that made that pointer.
    """

    id: str
    keys: int
    asked_ms: int
    done_ms: int
    heartbeat: int
    batch: int

    def encode(self) -> bytes:
        """The file's bytes."""
        return sealed_document({"format": DONE_FORMAT, **asdict(self)})

    @staticmethod
    def decode(data: bytes, where: str) -> EraseDone:
        """Read a record."""
        with readable(where, "record of an erase request"):
            fields = opened_document(data, where, DONE_FORMAT)
            return EraseDone(
                str(fields["id"]),
                int(fields["keys"]),
                int(fields["asked_ms"]),
                int(fields["done_ms"]),
                int(fields["heartbeat"]),
                int(fields["batch"]),
            )
        raise AssertionError("unreachable: readable raises what it catches")
