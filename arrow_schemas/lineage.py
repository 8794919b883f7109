"""Checkpoint identity, and the lineage header of every delta and snapshot file.

A checkpoint's name is a version, which counts the bucket's commits, and a fresh UUID, because Spark may run any batch
several times (SPARK-49374: a linear lineage needs ids that no retry can repeat). The header is JSON in the Arrow schema
metadata, so the first few KiB of a file identify it. The footer, written last, holds the counts and the checksum of the
body, which are only known then. `docs/format.md` gives every byte.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from arrow_schemas.damage import describe_damage
from arrow_schemas.errors import CorruptFileError, LineageError, VersionSkewError
from arrow_schemas.headers import encode_header, read_header
from arrow_schemas.snapshot_index import INDEX_KEY, INDEX_PLACEHOLDER

__all__ = [
    "BODY_KEY",
    "BODY_PLACEHOLDER",
    "DELTA",
    "BLAKE2B",
    "BLOCKCRC",
    "DIGESTS",
    "FILE_FORMATS",
    "HEADER_KEY",
    "SNAPSHOT",
    "BodyRecord",
    "CheckpointRef",
    "LineageHeader",
    "Writer",
    "check_ascending",
    "file_name",
    "new_checkpoint_id",
    "parse_file_name",
]

DELTA = "delta"
SNAPSHOT = "snapshot"
# The format that is written for each kind. Files of format 1 are compressed and have one digest over all bytes.
# Snapshots of format 2 can be restored by copying them. Snapshots of format 3 also have an index, so that a part can be
# fetched. Snapshots of format 1 are for readers from before the first release.
FILE_FORMATS = {DELTA: 1, SNAPSHOT: 3}
FILE_FORMAT_MAX = 3
INDEX_FORMAT_MIN = 3
BLAKE2B, BLOCKCRC = "blake2b", "blkcrcs"
DIGESTS = {1: BLAKE2B, 2: BLOCKCRC, 3: BLOCKCRC}
HEADER_KEY = b"spark_state_ext.header"
BODY_KEY = b"spark_state_ext.body"

_ID = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"([1-9][0-9]{0,18})_([0-9a-f]{32})\.(delta|snapshot)\.arrow")
_BODY = re.compile(
    rb"length=([0-9a-f]{16}) rows=([0-9a-f]{16}) tombstones=([0-9a-f]{16}) (blake2b|blkcrcs)=([0-9a-f]{32})"
)


def new_checkpoint_id() -> str:
    """Return a fresh checkpoint id: 32 random lower-case hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """One checkpoint of a bucket: its version (1, 2, …) and its id."""

    version: int
    id: str

    def __post_init__(self) -> None:
        if self.version < 1 or not _ID.fullmatch(self.id):
            raise CorruptFileError(f"not a checkpoint: version {self.version!r}, id {self.id!r}")

    def __str__(self) -> str:
        return f"{self.version}_{self.id}"


def check_ascending(refs: Sequence[CheckpointRef], where: str) -> None:
    """Raise `LineageError` unless the versions ascend: then a lineage has no cycle, and following it ends."""
    for older, newer in pairwise(refs):
        if older.version >= newer.version:
            raise LineageError(f"{where}: its lineage has {newer} after {older}, but versions must ascend")


def file_name(ref: CheckpointRef, kind: str) -> str:
    """Return the name of a checkpoint's file; `kind` is `DELTA` or `SNAPSHOT`."""
    return f"{ref}.{kind}.arrow"


def parse_file_name(name: str) -> tuple[CheckpointRef, str] | None:
    """Return the checkpoint and the kind of a file named by `file_name`; None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return (CheckpointRef(int(match[1]), match[2]), match[3]) if match else None


@dataclass(frozen=True)
class Writer:
    """The task that wrote a checkpoint. People and clean-up use this record; loading state never does.

    Parameters
    ----------
    query_id, run_id, batch, host
        What Spark reported to the task.
    heartbeat
        `Pointer.heartbeats` of the pointer that this call made; 0 if unknown (before the first release).
    epoch
        The run's epoch, by the records of the query folder; 0 if it has no record.
    told
        True if the task knew its batch. Otherwise `batch` counts the bucket's calls.
    quiet
        True if the batch had no data, and so no heartbeat of its own. Always False for files of earlier releases.
    """

    query_id: str
    run_id: str
    batch: int
    host: str
    heartbeat: int = 0
    epoch: int = 0
    told: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        if not all(isinstance(number, int) for number in (self.batch, self.heartbeat, self.epoch)):
            raise CorruptFileError(f"batch, heartbeat and epoch of a writer must be whole numbers, not {self}")
        if not (isinstance(self.told, bool) and isinstance(self.quiet, bool)):
            raise CorruptFileError(f"told and quiet of a writer must be bools, not {self}")


@dataclass(frozen=True)
class LineageHeader:
    """The header of a checkpoint file.

    Parameters
    ----------
    kind
        `DELTA` or `SNAPSHOT`.
    operator, bucket
        The operator and the bucket that the state belongs to.
    ref, parent
        The checkpoint, and the checkpoint it was built on (None for a bucket's first).
    lineage
        Ancestors of `ref`, oldest first: from the last snapshot, which may be unconfirmed, to `parent`.
    schema_id
        Number *n* of the ``operator_<n>.json`` that the rows conform to.
    writer
        The task that wrote the file.
    package_version
        Version of this package that wrote the file.
    format
        Format of the file; 0: the format that this release writes.
    """

    kind: str
    operator: str
    bucket: int
    ref: CheckpointRef
    parent: CheckpointRef | None
    lineage: tuple[CheckpointRef, ...]
    schema_id: int
    writer: Writer
    package_version: str
    format: int = 0

    def __post_init__(self) -> None:
        if self.kind not in FILE_FORMATS:
            raise CorruptFileError(f"{self.kind!r} is not a kind of checkpoint file")
        object.__setattr__(self, "format", self.format or FILE_FORMATS[self.kind])
        if (self.lineage[-1] if self.lineage else None) != self.parent:
            raise LineageError(f"the lineage of {self.ref} does not end with its parent {self.parent}")
        check_ascending((*self.lineage, self.ref), f"the {self.kind} of checkpoint {self.ref}")

    def encode(self) -> dict[bytes, bytes]:
        """Return schema metadata: this header, and placeholders for the records of the body and the index, if any."""
        writer = asdict(self.writer)
        # Optional fields: files of earlier releases do not have them, and these releases ignore them.
        optional = {"epoch": writer.pop("epoch"), "untold": not writer.pop("told"), "quiet": writer.pop("quiet")}
        fields: dict[str, Any] = {
            "format": self.format,
            "kind": self.kind,
            "operator": self.operator,
            "bucket": self.bucket,
            "version": self.ref.version,
            "id": self.ref.id,
            "parent": _to_pair(self.parent),
            "lineage": [_to_pair(ref) for ref in self.lineage],
            "schema_id": self.schema_id,
            # Outside of `writer`, in which readers from before the first release accept no further fields.
            "heartbeat": writer.pop("heartbeat"),
            "writer": writer,
            "package_version": self.package_version,
        }
        fields.update({name: value for name, value in optional.items() if value})
        metadata = {**encode_header(HEADER_KEY, fields), BODY_KEY: BODY_PLACEHOLDER}
        if self.has_index:
            metadata[INDEX_KEY] = INDEX_PLACEHOLDER
        return metadata

    @property
    def digest(self) -> str:
        """Kind of the body's digest: `BLAKE2B` or `BLOCKCRC`."""
        return DIGESTS[self.format]

    @property
    def has_index(self) -> bool:
        """True if the file has an index (`arrow_schemas.snapshot_index`)."""
        return self.format >= INDEX_FORMAT_MIN

    @staticmethod
    def decode(metadata: Mapping[bytes, bytes] | None, where: str) -> LineageHeader:
        """Decode a header from schema metadata.

        Raises
        ------
        CorruptFileError
            If the header is missing, its checksum differs, or a field is missing or wrong.
        VersionSkewError
            If a newer release wrote it.
        """
        text = read_header(
            metadata, HEADER_KEY, where, "lineage header", "it is not a checkpoint file of spark_state_ext"
        )
        try:
            fields = json.loads(text)
            # The type must be int: Python's JSON also reads NaN, which is neither too small nor too large.
            if type(fields["format"]) is not int or fields["format"] < 1:
                raise CorruptFileError(f"format {fields['format']} is not a valid format")
            if fields["format"] > FILE_FORMAT_MAX:
                raise VersionSkewError(
                    f"{where} has file format {fields['format']}; this release reads up to {FILE_FORMAT_MAX}. "
                    f"Use spark_state_ext {fields.get('package_version', 'of its writer')} or newer."
                )
            return LineageHeader(
                kind=fields["kind"],
                operator=fields["operator"],
                bucket=fields["bucket"],
                ref=CheckpointRef(fields["version"], fields["id"]),
                parent=_to_ref(fields["parent"]),
                lineage=tuple(CheckpointRef(*pair) for pair in fields["lineage"]),
                schema_id=fields["schema_id"],
                writer=_decode_writer(fields),
                package_version=fields["package_version"],
                format=fields["format"],
            )
        except (CorruptFileError, LineageError) as error:
            raise type(error)(f"{where}: {error}") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CorruptFileError(f"the lineage header of {where} cannot be read: {describe_damage(error)}") from error


@dataclass(frozen=True)
class BodyRecord:
    """The record of a checkpoint file's body, which is in the file's footer.

    Parameters
    ----------
    length
        Number of bytes before the file's end-of-stream marker and footer.
    rows, tombstones
        Number of rows in the file, and how many of them are tombstones.
    digest
        Digest of the first `length` bytes, 32 hexadecimal digits.
    algorithm
        `BLAKE2B`: one 16-byte BLAKE2b of all bytes. `BLOCKCRC`: see `arrow_schemas.blocks`.
    """

    length: int
    rows: int
    tombstones: int
    digest: str
    algorithm: str = BLAKE2B

    def encode(self) -> bytes:
        """Return the record as fixed-width text, which can replace `BODY_PLACEHOLDER` in place."""
        return (
            f"length={self.length:016x} rows={self.rows:016x} tombstones={self.tombstones:016x} "
            f"{self.algorithm}={self.digest}"
        ).encode()

    @staticmethod
    def find(footer: bytes, where: str) -> BodyRecord:
        """Find the record in the bytes of a footer that Arrow has not parsed yet."""
        match = _BODY.search(footer)
        if match is None:
            raise CorruptFileError(f"{where} has no body record in its footer: it is damaged or was not finished")
        return BodyRecord(int(match[1], 16), int(match[2], 16), int(match[3], 16), match[5].decode(), match[4].decode())


BODY_PLACEHOLDER = BodyRecord(0, 0, 0, "0" * 32).encode()


def _decode_writer(fields: Mapping[str, Any]) -> Writer:
    query_id, run_id, batch, host = (fields["writer"][name] for name in ("query_id", "run_id", "batch", "host"))
    # Files from before the first release, all of format 1, have no heartbeat.
    heartbeat = fields["heartbeat"] if fields["format"] > 1 else fields.get("heartbeat", 0)
    # If a task did not know its batch, release 0.1.0 wrote its plan's id as both query_id and run_id.
    told = fields.get("untold", fields["format"] == 1 and query_id == run_id) is False
    return Writer(query_id, run_id, batch, host, heartbeat, fields.get("epoch", 0), told, fields.get("quiet", False))


def _to_pair(ref: CheckpointRef | None) -> list[Any] | None:
    return None if ref is None else [ref.version, ref.id]


def _to_ref(pair: Any) -> CheckpointRef | None:
    return None if pair is None else CheckpointRef(*pair)
