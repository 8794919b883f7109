"""A savepoint's manifest: the files that belong to it, and the point from which a job that starts from it goes on.

It has one row for each bucket: the bucket's pointer, without everything that names a place, and the files that loading
it needs, by their names relative to the savepoint. The header, JSON in the schema's metadata, has what all buckets
share. The idea of a snapshot that belongs to the user is Flink's (FLIP-193). `docs/format.md` gives every byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from arrow_schemas.checksum import INT64_MAX, read_whole_number
from arrow_schemas.damage import describe_damage
from arrow_schemas.errors import CorruptFileError, LineageError, StateError, VersionSkewError
from arrow_schemas.headers import encode_header, read_header
from arrow_schemas.lineage import BODY_KEY, BODY_PLACEHOLDER, CheckpointRef, parse_file_name
from arrow_schemas.operator import OperatorFile, is_operator_name
from arrow_schemas.pointer import LineageEntry, Pointer

__all__ = [
    "CANONICAL",
    "MANIFEST_NAME",
    "NATIVE",
    "SAVEPOINT_FORMAT",
    "SavedBucket",
    "SavedFile",
    "SavepointHeader",
    "SavepointManifest",
    "make_relocatable",
]

SAVEPOINT_FORMAT = 1
MANIFEST_NAME = "savepoint.arrow"
# A native savepoint has copies of the query's files, a canonical one has one compacted snapshot for each bucket.
NATIVE, CANONICAL = "native", "canonical"
_FORMS = (NATIVE, CANONICAL)
_HEADER_KEY = b"spark_state_ext.savepoint"
_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"(blake2b|blkcrcs)=[0-9a-f]{32}")
_FILE = pa.struct([("name", pa.string()), ("size_bytes", pa.int64()), ("digest", pa.string())])
_ROWS = pa.schema(
    [("operator", pa.string()), ("bucket", pa.int32()), ("pointer", pa.binary()), ("files", pa.list_(_FILE))]
)


@dataclass(frozen=True)
class SavedFile:
    """One checkpoint file of a savepoint.

    Parameters
    ----------
    name
        The file's name in the bucket's folder, ``<operator>/<bucket>/`` below the savepoint.
    size_bytes
        The file's size.
    digest
        Kind and digest of the file's body, as in its footer: ``blake2b=…`` or ``blkcrcs=…``.
    """

    name: str
    size_bytes: int
    digest: str

    def __post_init__(self) -> None:
        if parse_file_name(self.name) is None or self.size_bytes <= 0 or not _DIGEST.fullmatch(self.digest):
            raise CorruptFileError(f"not a valid checkpoint file: {self!r}")


@dataclass(frozen=True)
class SavedBucket:
    """One bucket of a savepoint.

    Parameters
    ----------
    operator, bucket
        The operator's name and the bucket's number.
    pointer
        The bucket's pointer, without what names a place (`make_relocatable`).
    files
        The files that loading the bucket needs, oldest first.
    """

    operator: str
    bucket: int
    pointer: Pointer
    files: tuple[SavedFile, ...]


@dataclass(frozen=True)
class SavepointHeader:
    """The header of a savepoint's manifest: what all buckets share.

    Parameters
    ----------
    id
        32 hexadecimal digits, random.
    form
        `NATIVE` or `CANONICAL`.
    made_ms
        When the savepoint was made: wall-clock time, milliseconds since 1970. For people only.
    operators
        Each operator's newest operator file, by the operator's name.
    query_id
        Spark's id of the query; empty if the savepoint was made from a table.
    batch
        The micro-batch after which the query had this state; -1 if the savepoint was made from a table.
    watermark_ms
        That batch's watermark; None if it had no watermark.
    offsets
        Spark's offset log of that batch, unchanged, which says where its input ended; None if there is no such log.
    package_version
        Version of this package that made the savepoint.
    """

    id: str
    form: str
    made_ms: int
    operators: Mapping[str, OperatorFile]
    package_version: str
    query_id: str = ""
    batch: int = -1
    watermark_ms: int | None = None
    offsets: str | None = None

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id) or self.form not in _FORMS:
            raise CorruptFileError(f"not a valid savepoint: id {self.id!r}, form {self.form!r}")
        for name, operator in self.operators.items():
            if not is_operator_name(name):
                # The name is also a folder's name, and deleting the savepoint deletes that folder.
                raise CorruptFileError(f"not a valid savepoint: {name!r} is not a valid operator name")
            if name != operator.operator:
                raise CorruptFileError(f"the operator file of {name!r} belongs to {operator.operator!r}")

    def encode(self) -> dict[bytes, bytes]:
        """Return schema metadata with this header, and a placeholder for the body record."""
        fields = {
            "format": SAVEPOINT_FORMAT,
            "id": self.id,
            "form": self.form,
            "made_ms": self.made_ms,
            "operators": {name: json.loads(operator.encode()) for name, operator in sorted(self.operators.items())},
            "query_id": self.query_id,
            "batch": self.batch,
            "watermark_ms": self.watermark_ms,
            "offsets": self.offsets,
            "package_version": self.package_version,
        }
        return {**encode_header(_HEADER_KEY, fields), BODY_KEY: BODY_PLACEHOLDER}

    @staticmethod
    def decode(metadata: Mapping[bytes, bytes] | None, where: str) -> SavepointHeader:
        """Decode a header from schema metadata."""
        text = read_header(
            metadata, _HEADER_KEY, where, "header of a savepoint", "it is not a savepoint of spark_state_ext"
        )
        try:
            fields = json.loads(text)
            if type(fields["format"]) is not int or fields["format"] < 1:
                raise CorruptFileError(f"{where} has format {fields['format']}, which is not a valid format")
            if fields["format"] > SAVEPOINT_FORMAT:
                raise VersionSkewError(
                    f"{where} has format {fields['format']}; this release reads savepoints up to format "
                    f"{SAVEPOINT_FORMAT}. Use spark_state_ext {fields.get('package_version', 'of its writer')} or "
                    "newer."
                )
            watermark_ms, offsets = fields["watermark_ms"], fields["offsets"]
            return SavepointHeader(
                id=fields["id"],
                form=fields["form"],
                made_ms=read_whole_number(fields, "made_ms", 0),
                operators={
                    name: OperatorFile.decode(json.dumps(operator).encode(), f"operator {name!r} of {where}")
                    for name, operator in fields["operators"].items()
                },
                package_version=str(fields["package_version"]),
                query_id=str(fields["query_id"]),
                batch=read_whole_number(fields, "batch", -1),
                watermark_ms=None if watermark_ms is None else read_whole_number(fields, "watermark_ms", -INT64_MAX),
                offsets=None if offsets is None else str(offsets),
            )
        except StateError:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise CorruptFileError(f"the header of {where} cannot be read: {describe_damage(error)}") from error


@dataclass(frozen=True)
class SavepointManifest:
    """A savepoint: its header and its buckets.

    Parameters
    ----------
    header
        What all buckets share.
    buckets
        Every bucket of every operator, ascending by operator and bucket.
    """

    header: SavepointHeader
    buckets: tuple[SavedBucket, ...]

    def __post_init__(self) -> None:
        actual = [(saved.operator, saved.bucket) for saved in self.buckets]
        expected = [
            (name, bucket) for name, file in sorted(self.header.operators.items()) for bucket in range(file.buckets)
        ]
        if actual != expected:
            missing = sorted(set(expected) - set(actual))
            raise CorruptFileError(
                f"savepoint {self.header.id} has {len(actual)} buckets instead of {len(expected)}; "
                + (f"the first missing bucket is {missing[0]}" if missing else "some are duplicates or out of order")
            )

    def bucket(self, operator: str, bucket: int) -> SavedBucket:
        """Return one bucket; raise `KeyError` if the operator or the bucket does not exist."""
        before = sum(file.buckets for name, file in self.header.operators.items() if name < operator)
        if not 0 <= bucket < self.header.operators[operator].buckets:
            raise KeyError(bucket)
        return self.buckets[before + bucket]

    def batch(self) -> pa.RecordBatch:
        """Return the rows of the manifest."""
        files = [
            [{"name": file.name, "size_bytes": file.size_bytes, "digest": file.digest} for file in saved.files]
            for saved in self.buckets
        ]
        columns = [
            pa.array([saved.operator for saved in self.buckets], pa.string()),
            pa.array([saved.bucket for saved in self.buckets], pa.int32()),
            pa.array([saved.pointer.encode() for saved in self.buckets], pa.binary()),
            pa.array(files, pa.list_(_FILE)),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema())

    def schema(self) -> pa.Schema:
        """Return the schema of the manifest's file, with its header."""
        return _ROWS.with_metadata(self.header.encode())

    @staticmethod
    def of(schema: pa.Schema, batches: Iterable[pa.RecordBatch], where: str) -> SavepointManifest:
        """Decode a manifest from the schema and batches of its file."""
        header = SavepointHeader.decode(schema.metadata, where)
        if not schema.remove_metadata().equals(_ROWS):
            raise CorruptFileError(f"{where} does not have the columns of a manifest, but {schema.names}")
        buckets: list[SavedBucket] = []
        for batch in batches:
            batch.validate(full=True)
            for row in batch.to_pylist():
                buckets.append(_decode_bucket(row, where))
        try:
            return SavepointManifest(header, tuple(buckets))
        except CorruptFileError as error:
            raise CorruptFileError(f"{where}: {error}") from error


def _decode_bucket(row: Mapping[str, Any], where: str) -> SavedBucket:
    what = f"bucket {row['bucket']} of operator {row['operator']!r} in {where}"
    if None in row.values():
        raise CorruptFileError(f"{what} has no {', '.join(name for name, value in row.items() if value is None)}")
    pointer = Pointer.decode(row["pointer"])
    if (pointer.operator, pointer.bucket) != (row["operator"], row["bucket"]):
        raise CorruptFileError(f"{what} has the pointer of bucket {pointer.bucket} of {pointer.operator!r}")
    try:
        files = tuple(SavedFile(**file) for file in row["files"])
    except (CorruptFileError, TypeError) as error:
        raise CorruptFileError(f"{what}: {error}") from error
    return SavedBucket(row["operator"], row["bucket"], pointer, files)


def make_relocatable(pointer: Pointer, lineage: Sequence[LineageEntry]) -> Pointer:
    """Return a pointer without everything that names a place, so that it can be moved and any query can use it."""
    last: CheckpointRef | None = lineage[-1].ref if lineage else None
    if last != pointer.ref:
        raise LineageError(f"the pointer of bucket {pointer.bucket} is at {pointer.ref}, but its files end at {last}")
    return replace(
        pointer,
        lineage=tuple(lineage),
        query_folder="",
        replication={},
        markers={},
        inline=(),
        partitioning=None,
        made_by=None,
        snapshots_missed=0,
        claim=None,
        # Another folder numbers its erase requests differently.
        erased=None,
        # The savepoint's files hold the whole state.
        parents=None,
    )
