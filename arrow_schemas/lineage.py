"""Checkpoint identity, and the lineage header of every delta and snapshot file.

A checkpoint is named by a version, which counts commits of a bucket, and a fresh UUID, because Spark may run
any batch several times (SPARK-49374: a linear lineage needs ids that no retry can repeat). The header is JSON
in the Arrow schema metadata, so the first few KiB of a file tell what it is; the footer, written last, holds
what is known only then: counts and the checksum of the body. `docs/format.md` gives every byte.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from arrow_schemas.damage import damage_in
from arrow_schemas.errors import CorruptFileError, LineageError, VersionSkewError
from arrow_schemas.headers import header_metadata, header_text
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
# What is written of each kind. Files of format 1 are compressed and have one digest over all; snapshots of format 2 are
# laid out so that restoring one is copying it, and those of format 3 have an index, so that a part can be fetched.
# Snapshots of format 1 are for readers from before the first release.
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
    """A fresh checkpoint id: 32 lower-case hexadecimal digits, random."""
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
    """Ancestors have smaller versions; so a lineage has no cycle, and following it comes to an end."""
    for older, newer in pairwise(refs):
        if older.version >= newer.version:
            raise LineageError(f"{where}: its lineage has {newer} after {older}; versions must ascend")


def file_name(ref: CheckpointRef, kind: str) -> str:
    """Name of the file of a checkpoint, `kind` being `DELTA` or `SNAPSHOT`."""
    return f"{ref}.{kind}.arrow"


def parse_file_name(name: str) -> tuple[CheckpointRef, str] | None:
    """Inverse of `file_name`; None for any other name."""
    match = _FILE_NAME.fullmatch(name)
    return (CheckpointRef(int(match[1]), match[2]), match[3]) if match else None


@dataclass(frozen=True)
class Writer:
    """Who wrote a checkpoint, and when; for people and clean-up, never for what a load reads.

    Parameters
    ----------
    query_id, run_id, batch, host
        As Spark told the task.
    heartbeat
        `Pointer.heartbeats` of the pointer that this call made; 0 when not known (before the first release).
    epoch
        Number of the run, by the records of the query folder; 0 when there was none.
    told
        Whether the task was told its batch. Else `batch` counts the bucket's calls.
    quiet
        Whether the batch had no data, and so no heartbeat of its own. Files of earlier releases do not tell.
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
            raise CorruptFileError(f"a writer has numbers for batch, heartbeat and epoch, not {self}")
        if not (isinstance(self.told, bool) and isinstance(self.quiet, bool)):
            raise CorruptFileError(f"a writer is told its batch or not, which has data or not, not {self}")


@dataclass(frozen=True)
class LineageHeader:
    """What a checkpoint file says of itself.

    Parameters
    ----------
    kind
        `DELTA` or `SNAPSHOT`.
    operator, bucket
        Whose state it is.
    ref, parent
        The checkpoint, and the one it was built on (None for a bucket's first).
    lineage
        Ancestors of `ref`, oldest first, beginning with the last snapshot, which may be unconfirmed; ends with
        `parent`.
    schema_id
        Number *n* of the ``operator_<n>.json`` the rows conform to.
    writer
        Who wrote it.
    package_version
        Version of this package that wrote it.
    format
        Format of the file; that of this release when none is given.
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
            raise CorruptFileError(f"{self.kind!r} is no kind of checkpoint file")
        object.__setattr__(self, "format", self.format or FILE_FORMATS[self.kind])
        if (self.lineage[-1] if self.lineage else None) != self.parent:
            raise LineageError(f"the lineage of {self.ref} does not end with its parent {self.parent}")
        check_ascending((*self.lineage, self.ref), f"the {self.kind} of checkpoint {self.ref}")

    def encode(self) -> dict[bytes, bytes]:
        """Schema metadata holding this header and placeholders for the body record and, with an index, its record."""
        writer = asdict(self.writer)
        # Optional: files of earlier releases have none of these, and these releases do not look at them.
        optional = {"epoch": writer.pop("epoch"), "untold": not writer.pop("told"), "quiet": writer.pop("quiet")}
        fields: dict[str, Any] = {
            "format": self.format,
            "kind": self.kind,
            "operator": self.operator,
            "bucket": self.bucket,
            "version": self.ref.version,
            "id": self.ref.id,
            "parent": _pair(self.parent),
            "lineage": [_pair(ref) for ref in self.lineage],
            "schema_id": self.schema_id,
            # Not the writer's, whose fields are all that readers from before the first release take.
            "heartbeat": writer.pop("heartbeat"),
            "writer": writer,
            "package_version": self.package_version,
        }
        fields.update({name: value for name, value in optional.items() if value})
        metadata = {**header_metadata(HEADER_KEY, fields), BODY_KEY: BODY_PLACEHOLDER}
        if self.has_index:
            metadata[INDEX_KEY] = INDEX_PLACEHOLDER
        return metadata

    @property
    def digest(self) -> str:
        """Kind of the body's digest: `BLAKE2B` or `BLOCKCRC`."""
        return DIGESTS[self.format]

    @property
    def has_index(self) -> bool:
        """Whether the file has an index (`arrow_schemas.snapshot_index`)."""
        return self.format >= INDEX_FORMAT_MIN

    @staticmethod
    def decode(metadata: Mapping[bytes, bytes] | None, where: str) -> LineageHeader:
        """Read a header from schema metadata.

        Raises
        ------
        CorruptFileError
            When there is none, its checksum differs or a field is missing or wrong.
        VersionSkewError
            When a newer release wrote it.
        """
        text = header_text(
            metadata, HEADER_KEY, where, "lineage header", "it is not a checkpoint file of spark_state_ext"
        )
        try:
            fields = json.loads(text)
            # Of a whole number's type: NaN, which Python's JSON knows, is neither too small nor too large.
            if type(fields["format"]) is not int or fields["format"] < 1:
                raise CorruptFileError(f"format {fields['format']} is none")
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
                parent=_ref(fields["parent"]),
                lineage=tuple(CheckpointRef(*pair) for pair in fields["lineage"]),
                schema_id=fields["schema_id"],
                writer=_writer(fields),
                package_version=fields["package_version"],
                format=fields["format"],
            )
        except (CorruptFileError, LineageError) as error:
            raise type(error)(f"{where}: {error}") from error
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CorruptFileError(f"the lineage header of {where} cannot be read: {damage_in(error)}") from error


@dataclass(frozen=True)
class BodyRecord:
    """What the footer of a checkpoint file says of its body.

    Parameters
    ----------
    length
        Bytes of the file before its end-of-stream marker and footer.
    rows, tombstones
        Rows in the file, and how many of them are tombstones.
    digest
        Of the first `length` bytes, 32 hexadecimal digits.
    algorithm
        `BLAKE2B`: that of all bytes, 16 bytes long. `BLOCKCRC`: see `arrow_schemas.blocks`.
    """

    length: int
    rows: int
    tombstones: int
    digest: str
    algorithm: str = BLAKE2B

    def encode(self) -> bytes:
        """Fixed-width text, so that it can replace `BODY_PLACEHOLDER` in place."""
        return (
            f"length={self.length:016x} rows={self.rows:016x} tombstones={self.tombstones:016x} "
            f"{self.algorithm}={self.digest}"
        ).encode()

    @staticmethod
    def find(footer: bytes, where: str) -> BodyRecord:
        """Find the record in the bytes of a footer, before Arrow has parsed any of them."""
        match = _BODY.search(footer)
        if match is None:
            raise CorruptFileError(f"{where} has no body record in its footer: it is damaged or was not finished")
        return BodyRecord(int(match[1], 16), int(match[2], 16), int(match[3], 16), match[5].decode(), match[4].decode())


BODY_PLACEHOLDER = BodyRecord(0, 0, 0, "0" * 32).encode()


def _writer(fields: Mapping[str, Any]) -> Writer:
    query_id, run_id, batch, host = (fields["writer"][name] for name in ("query_id", "run_id", "batch", "host"))
    # Files from before the first release, all of format 1, have no heartbeat.
    heartbeat = fields["heartbeat"] if fields["format"] > 1 else fields.get("heartbeat", 0)
    # Release 0.1.0 took its plan's id for the query and for the run where it was not told its batch.
    told = fields.get("untold", fields["format"] == 1 and query_id == run_id) is False
    return Writer(query_id, run_id, batch, host, heartbeat, fields.get("epoch", 0), told, fields.get("quiet", False))


def _pair(ref: CheckpointRef | None) -> list[Any] | None:
    return None if ref is None else [ref.version, ref.id]


def _ref(pair: Any) -> CheckpointRef | None:
    return None if pair is None else CheckpointRef(*pair)
