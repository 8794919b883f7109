"""Parents: the buckets that a rescaled bucket begins with parts of, as the query's folder keeps them.

They lie in `parents/` of the query folder, like the buckets of a savepoint: files under their own names, and beside
them a record for each parent. Whoever comes first brings a parent; all bring the same. Nothing refers to where they
came from, and nothing writes to them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.checksum import opened_document, readable, sealed_document
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavedBucket, SavedFile
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.files.readable import document_in
from spark_state_ext.rescale.folders import first_folder

__all__ = [
    "PARENT_FORMAT",
    "Origins",
    "Parent",
    "combined_pointer",
    "has_parents",
    "note_parent",
    "origin_of",
    "origins_in",
    "parent_files",
    "parent_of",
    "parents_in",
    "parse_parent_name",
]

PARENT_FORMAT = 1
_NAME = re.compile(r"(0|[1-9][0-9]{0,8})\.parent\.json")


@dataclass(frozen=True)
class Parent:
    """A bucket that others begin with parts of.

    Parameters
    ----------
    operator_file
        The operator file in force there, which has the bucket map.
    saved
        The bucket, as a savepoint's manifest has it.
    """

    operator_file: OperatorFile
    saved: SavedBucket

    @staticmethod
    def unsaved(operator_file: OperatorFile, pointer: Pointer) -> Parent:
        """A parent whose files were not looked for."""
        return Parent(operator_file, SavedBucket(pointer.operator, pointer.bucket, pointer, ()))

    @property
    def bucket(self) -> int:
        """Its number."""
        return self.saved.bucket

    @property
    def pointer(self) -> Pointer:
        """Where it stood."""
        return self.saved.pointer

    def encode(self) -> bytes:
        """The record's bytes; the same from whoever makes them."""
        fields: dict[str, Any] = {
            "format": PARENT_FORMAT,
            "operator_file": json.loads(self.operator_file.encode()),
            "bucket": self.bucket,
            "pointer": base64.b64encode(self.pointer.encode()).decode(),
            "files": [[it.name, it.size_bytes, it.digest] for it in self.saved.files],
        }
        return sealed_document(fields)

    @staticmethod
    def decode(data: bytes, where: str) -> Parent:
        """Inverse of `encode`."""
        with readable(where, "record of a parent"):
            fields = opened_document(data, where, PARENT_FORMAT)
            operator = OperatorFile.decode(json.dumps(fields["operator_file"]).encode(), where)
            pointer = Pointer.decode(base64.b64decode(fields["pointer"], validate=True))
            if (pointer.operator, pointer.bucket) != (operator.operator, fields["bucket"]):
                raise CorruptFileError(f"{where} has the pointer of bucket {pointer.bucket} of {pointer.operator!r}")
            files = tuple(SavedFile(*file) for file in fields["files"])
            return Parent(operator, SavedBucket(operator.operator, pointer.bucket, pointer, files))
        raise AssertionError("unreachable: readable raises what it catches")


def _record_name(bucket: int) -> str:
    return f"{bucket}.parent.json"


def parse_parent_name(name: str) -> int | None:
    """The number of the bucket whose record has a name; None: it is none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def parent_files(query_folder: Folder, bucket: int) -> Folder:
    """Where a parent's files lie."""
    return query_folder.child(PARENTS_FOLDER, str(bucket))


def has_parents(query_folder: Folder) -> bool:
    """Whether a query was rescaled, and may need its parents still."""
    return any(_NAME.fullmatch(name) for name in query_folder.child(PARENTS_FOLDER).names())


def note_parent(query_folder: Folder, parent: Parent) -> Parent:
    """Write down what a parent is, once its files are there."""
    folder, name, data = query_folder.child(PARENTS_FOLDER), _record_name(parent.bucket), parent.encode()
    if folder.create(name, data):
        return parent
    there = Parent.decode(folder.get(name), folder.where(name))
    same_operator = there.operator_file.encode() == parent.operator_file.encode()
    if not same_operator or _without_lineage(there.pointer) != _without_lineage(parent.pointer):
        raise LineageError(
            f"{folder.where(name)} is of another state than bucket {parent.bucket} is to be rescaled from: a first "
            "batch that failed began with that. Start the query again from where it was, or with a new "
            "checkpointLocation"
        )
    return there


def _without_lineage(pointer: Pointer) -> tuple[CheckpointRef | None, Pointer]:
    """Where a pointer stands, whatever files lead there."""
    return pointer.ref, replace(pointer, lineage=())


def parent_of(query_folder: Folder, bucket: int) -> Parent | None:
    """A parent as it was written down; None where it was not."""
    return document_in(query_folder.child(PARENTS_FOLDER), _record_name(bucket), Parent.decode)


def parents_in(query_folder: Folder, bucket_map: BucketMap, bucket: int) -> list[Parent]:
    """The parents of a bucket, in the order of their hashes."""
    folder = query_folder.child(PARENTS_FOLDER)
    numbers = sorted(int(match[1]) for name in folder.names() if (match := _NAME.fullmatch(name)))
    if not numbers:
        raise MissingCheckpointError(
            f"bucket {bucket} begins with parts of other buckets, and {folder.root} has none: bring the folder back, "
            "or go back to a batch from before the query was rescaled"
        )
    first = _read(folder, numbers[0])
    wanted = bucket_map.overlapping(first.operator_file.bucket_map, bucket)
    return [first if number == first.bucket else _read(folder, number) for number in wanted]


@dataclass(frozen=True)
class Origins:
    """What the buckets of a rescaled query begin with.

    Parameters
    ----------
    refs
        The origin of each bucket whose parents are all there; None of one that begins without state.
    batch, heartbeat
        The batch after which the parents had this state, and its heartbeat.
    in_place
        Whether the query made that batch itself, and not another one whose snapshot it started from.
    """

    refs: Mapping[int, CheckpointRef | None]
    batch: int
    heartbeat: int
    in_place: bool


def origins_in(query_folder: Folder, bucket_map: BucketMap) -> Origins | None:
    """What the buckets of a query begin with; None where it has no parents."""
    folder = query_folder.child(PARENTS_FOLDER)
    parents = {
        int(match[1]): _read(folder, int(match[1])) for name in folder.names() if (match := _NAME.fullmatch(name))
    }
    if not parents:
        return None
    before = next(iter(parents.values())).operator_file.bucket_map
    refs: dict[int, CheckpointRef | None] = {}
    for bucket in range(bucket_map.buckets):
        numbers = bucket_map.overlapping(before, bucket)
        if parents.keys() >= set(numbers):
            refs[bucket] = origin_of([parents[number] for number in numbers], bucket_map, bucket)
    return Origins(
        refs,
        max(parent.pointer.batch for parent in parents.values()),
        max(parent.pointer.heartbeats for parent in parents.values()),
        query_folder.name != first_folder(query_folder.name),
    )


def _read(folder: Folder, bucket: int) -> Parent:
    name = _record_name(bucket)
    return Parent.decode(folder.get(name), folder.where(name))


def origin_of(parents: Sequence[Parent], bucket_map: BucketMap, bucket: int) -> CheckpointRef | None:
    """The checkpoint that a bucket begins with: the same whoever makes it of the same parents.

    Its version is beyond those of the parents, and so never 1, which a first delta has that is a whole state.
    """
    refs = [(parent.bucket, str(parent.pointer.ref)) for parent in parents if parent.pointer.ref is not None]
    if not refs:
        return None
    text = json.dumps([refs, bucket_map.range_of(bucket), bucket, bucket_map.buckets])
    version = max(parent.pointer.version for parent in parents) + 1
    return CheckpointRef(version, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def combined_pointer(operator: str, bucket_map: BucketMap, bucket: int, parents: Sequence[Parent]) -> Pointer:
    """What a bucket that is made of parts of others knows of its past, before it has a checkpoint."""
    pointers = [parent.pointer for parent in parents]
    names = dict.fromkeys(name for it in pointers for name in (*it.origins, it.operator))
    return Pointer(
        operator=operator,
        bucket=bucket,
        buckets=bucket_map.buckets,
        schema_id=0,
        batch=-1,
        watermark_ms=max((it.watermark_ms for it in pointers if it.watermark_ms is not None), default=None),
        rows=sum(it.rows for it in pointers),
        earliest_timeout_ms=min(
            (it.earliest_timeout_ms for it in pointers if it.earliest_timeout_ms is not None), default=None
        ),
        calls=max(it.calls for it in pointers),
        heartbeats=max(it.heartbeats for it in pointers),
        retained=max(it.retained for it in pointers),
        retained_heartbeat=max(it.retained_heartbeat for it in pointers),
        origins=tuple(name for name in names if name != operator),
    )
