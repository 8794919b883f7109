"""Parents: copies, in the query folder, of the old buckets that a rescaled bucket begins with parts of.

`parents/` of the query folder has them like the buckets of a savepoint: files with their own names, and next to them a
record for each parent. The first call that needs a parent copies it; every call would copy the same bytes. The copies
do not depend on their source, and are never changed.
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
from arrow_schemas.checksum import open_document, report_damage, seal_document
from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavedBucket, SavedFile
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER
from spark_state_ext.files.readable import read_document
from spark_state_ext.rescale.folders import first_folder

__all__ = [
    "PARENT_FORMAT",
    "Origins",
    "Parent",
    "combine_pointers",
    "has_parents",
    "note_parent",
    "compute_origin",
    "read_origins",
    "parent_files",
    "read_parent",
    "read_parents",
    "parse_parent_name",
]

PARENT_FORMAT = 1
_NAME = re.compile(r"(0|[1-9][0-9]{0,8})\.parent\.json")


@dataclass(frozen=True)
class Parent:
    """An old bucket; new buckets begin with parts of it.

    Parameters
    ----------
    operator_file
        The operator file that was in force for it, with its bucket map.
    saved
        The bucket, as in a savepoint's manifest.
    """

    operator_file: OperatorFile
    saved: SavedBucket

    @staticmethod
    def unsaved(operator_file: OperatorFile, pointer: Pointer) -> Parent:
        """Make a parent from a pointer, without its files."""
        return Parent(operator_file, SavedBucket(pointer.operator, pointer.bucket, pointer, ()))

    @property
    def bucket(self) -> int:
        """Number of the bucket."""
        return self.saved.bucket

    @property
    def pointer(self) -> Pointer:
        """Pointer of the bucket."""
        return self.saved.pointer

    def encode(self) -> bytes:
        """Return the record's bytes, which are the same for every writer."""
        fields: dict[str, Any] = {
            "format": PARENT_FORMAT,
            "operator_file": json.loads(self.operator_file.encode()),
            "bucket": self.bucket,
            "pointer": base64.b64encode(self.pointer.encode()).decode(),
            "files": [[file.name, file.size_bytes, file.digest] for file in self.saved.files],
        }
        return seal_document(fields)

    @staticmethod
    def decode(data: bytes, where: str) -> Parent:
        """Decode a parent's record."""
        with report_damage(where, "record of a parent"):
            fields = open_document(data, where, PARENT_FORMAT)
            operator = OperatorFile.decode(json.dumps(fields["operator_file"]).encode(), where)
            pointer = Pointer.decode(base64.b64decode(fields["pointer"], validate=True))
            if (pointer.operator, pointer.bucket) != (operator.operator, fields["bucket"]):
                raise CorruptFileError(f"{where} has the pointer of bucket {pointer.bucket} of {pointer.operator!r}")
            files = tuple(SavedFile(*file) for file in fields["files"])
            return Parent(operator, SavedBucket(operator.operator, pointer.bucket, pointer, files))
        raise AssertionError("unreachable: readable raises what it catches")


def _make_record_name(bucket: int) -> str:
    return f"{bucket}.parent.json"


def parse_parent_name(name: str) -> int | None:
    """Parse the bucket number in the name of a parent's record; None: it is another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def parent_files(query_folder: Folder, bucket: int) -> Folder:
    """Return the folder of a parent's files."""
    return query_folder.child(PARENTS_FOLDER, str(bucket))


def has_parents(query_folder: Folder) -> bool:
    """True if a query was rescaled and may still need its parents."""
    return any(_NAME.fullmatch(name) for name in query_folder.child(PARENTS_FOLDER).names())


def note_parent(query_folder: Folder, parent: Parent) -> Parent:
    """Write a parent's record after its files; an existing record must be of the same state."""
    folder, name, data = query_folder.child(PARENTS_FOLDER), _make_record_name(parent.bucket), parent.encode()
    if folder.create(name, data):
        return parent
    existing = Parent.decode(folder.get(name), folder.where(name))
    same_operator = existing.operator_file.encode() == parent.operator_file.encode()
    if not same_operator or _strip_lineage(existing.pointer) != _strip_lineage(parent.pointer):
        raise LineageError(
            f"{folder.where(name)} has another state of bucket {parent.bucket} than this rescaling reads: a failed "
            "first batch began with it. Start the query again from the earlier source, or with a new "
            "checkpointLocation"
        )
    return existing


def _strip_lineage(pointer: Pointer) -> tuple[CheckpointRef | None, Pointer]:
    """Return a pointer's checkpoint, and the pointer without its lineage, for comparing states."""
    return pointer.ref, replace(pointer, lineage=())


def read_parent(query_folder: Folder, bucket: int) -> Parent | None:
    """Read a parent's record; None if there is none."""
    return read_document(query_folder.child(PARENTS_FOLDER), _make_record_name(bucket), Parent.decode)


def read_parents(query_folder: Folder, bucket_map: BucketMap, bucket: int) -> list[Parent]:
    """Read the parents of a bucket, in the order of their hashes."""
    folder = query_folder.child(PARENTS_FOLDER)
    numbers = sorted(int(match[1]) for name in folder.names() if (match := _NAME.fullmatch(name)))
    if not numbers:
        raise MissingCheckpointError(
            f"bucket {bucket} begins with parts of other buckets, but {folder.root} has none: restore the folder, or "
            "go back to a batch before the query was rescaled"
        )
    first = _read_parent(folder, numbers[0])
    needed = bucket_map.overlapping(first.operator_file.bucket_map, bucket)
    return [first if number == first.bucket else _read_parent(folder, number) for number in needed]


@dataclass(frozen=True)
class Origins:
    """The initial state of the buckets of a rescaled query.

    Parameters
    ----------
    refs
        The origin of each bucket whose parents are all there; None for a bucket that begins without state.
    batch, heartbeat
        The batch after which the parents had this state, and its heartbeat.
    in_place
        True if the query itself made that batch; False if it started from another query's snapshot.
    """

    refs: Mapping[int, CheckpointRef | None]
    batch: int
    heartbeat: int
    in_place: bool


def read_origins(query_folder: Folder, bucket_map: BucketMap) -> Origins | None:
    """Read the origins of a query's buckets; None if it has no parents."""
    folder = query_folder.child(PARENTS_FOLDER)
    parents = {
        int(match[1]): _read_parent(folder, int(match[1]))
        for name in folder.names()
        if (match := _NAME.fullmatch(name))
    }
    if not parents:
        return None
    old_map = next(iter(parents.values())).operator_file.bucket_map
    refs: dict[int, CheckpointRef | None] = {}
    for bucket in range(bucket_map.buckets):
        numbers = bucket_map.overlapping(old_map, bucket)
        if parents.keys() >= set(numbers):
            refs[bucket] = compute_origin([parents[number] for number in numbers], bucket_map, bucket)
    return Origins(
        refs,
        max(parent.pointer.batch for parent in parents.values()),
        max(parent.pointer.heartbeats for parent in parents.values()),
        query_folder.name != first_folder(query_folder.name),
    )


def _read_parent(folder: Folder, bucket: int) -> Parent:
    name = _make_record_name(bucket)
    return Parent.decode(folder.get(name), folder.where(name))


def compute_origin(parents: Sequence[Parent], bucket_map: BucketMap, bucket: int) -> CheckpointRef | None:
    """Return the checkpoint that a bucket begins with, computed from its parents; None: they have no state.

    Its version is greater than the parents' versions, and so never 1: a delta with version 1 is a complete state.
    """
    refs = [(parent.bucket, str(parent.pointer.ref)) for parent in parents if parent.pointer.ref is not None]
    if not refs:
        return None
    text = json.dumps([refs, bucket_map.range_of(bucket), bucket, bucket_map.buckets])
    version = max(parent.pointer.version for parent in parents) + 1
    return CheckpointRef(version, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def combine_pointers(operator: str, bucket_map: BucketMap, bucket: int, parents: Sequence[Parent]) -> Pointer:
    """Combine the parents' pointers to the pointer of a new bucket that has no checkpoint yet."""
    pointers = [parent.pointer for parent in parents]
    names = dict.fromkeys(name for pointer in pointers for name in (*pointer.origins, pointer.operator))
    return Pointer(
        operator=operator,
        bucket=bucket,
        buckets=bucket_map.buckets,
        schema_id=0,
        batch=-1,
        watermark_ms=max(
            (pointer.watermark_ms for pointer in pointers if pointer.watermark_ms is not None), default=None
        ),
        rows=sum(pointer.rows for pointer in pointers),
        earliest_timeout_ms=min(
            (pointer.earliest_timeout_ms for pointer in pointers if pointer.earliest_timeout_ms is not None),
            default=None,
        ),
        calls=max(pointer.calls for pointer in pointers),
        heartbeats=max(pointer.heartbeats for pointer in pointers),
        retained=max(pointer.retained for pointer in pointers),
        retained_heartbeat=max(pointer.retained_heartbeat for pointer in pointers),
        origins=tuple(name for name in names if name != operator),
    )
