"""Rewrites a savepoint with another bucket map, without Spark: the same rows in other buckets.

The old buckets, one after the other, have their rows in ascending order of hashes, and so have the new ones. So the
rows are read once and split where new buckets begin. Each new bucket is one snapshot; its name is computed from its
parents. So a stopped run leaves only files that the next run writes again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas.bucket_map import BUCKETS_MAX, BucketMap
from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.savepoint import CANONICAL, SavedBucket, SavepointManifest
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import CorruptFileError, StorageError, UsageError
from spark_state_ext.files.folder import Folder, refuse_relative
from spark_state_ext.rescale.digests import RowsDigest
from spark_state_ext.rescale.parents import Parent, combine_pointers, compute_origin
from spark_state_ext.savepoints.file_copy import refuse_torn
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.saved_rows import choose_operator
from spark_state_ext.savepoints.writer import SavepointWriter
from spark_state_ext.store.runs import get_hashes

__all__ = [
    "RescaledOperator",
    "RescaledSavepoint",
    "Rescaling",
    "rescale_savepoint",
    "plan_rescaling",
    "write_rescaled",
]

_BITS = np.uint64(32)
_END = 1 << 32


@dataclass(frozen=True)
class RescaledOperator:
    """An operator that was rescaled.

    Parameters
    ----------
    operator
        Name of the operator.
    before, after
        Its old and new bucket map.
    rows
        Number of its keys.
    checksum
        Checksum of all rows in the order of their hashes: 32 hexadecimal digits, the same before and after.
    """

    operator: str
    before: BucketMap
    after: BucketMap
    rows: int
    checksum: str


@dataclass(frozen=True)
class RescaledSavepoint:
    """A savepoint that was rewritten with another bucket map.

    Parameters
    ----------
    path, id
        Path and id of the savepoint.
    operators
        The rescaled operators by name. Other operators are unchanged.
    """

    path: str
    id: str
    operators: Mapping[str, RescaledOperator]


@dataclass(frozen=True)
class Rescaling:
    """The plan for rescaling a savepoint.

    Parameters
    ----------
    manifest
        Manifest of the source savepoint.
    rescaled
        New operator files of the operators that are rescaled, by name.
    """

    manifest: SavepointManifest
    rescaled: Mapping[str, OperatorFile]

    @property
    def operators(self) -> dict[str, OperatorFile]:
        """All operators of the new savepoint."""
        return {**self.manifest.header.operators, **self.rescaled}

    @property
    def buckets(self) -> int:
        """Number of buckets of the new savepoint."""
        return sum(operator.buckets for operator in self.operators.values())

    def pointer_of(self, operator: str, bucket: int) -> Pointer:
        """Return the pointer of a new bucket, always with the same checkpoint; its rows are not counted yet."""
        before, bucket_map = self.manifest.header.operators[operator], self.rescaled[operator].bucket_map
        numbers = bucket_map.overlapping(before.bucket_map, bucket)
        parents = [Parent(before, self.manifest.bucket(operator, number)) for number in numbers]
        pointer = combine_pointers(operator, bucket_map, bucket, parents)
        pointer = replace(pointer, batch=max(parent.pointer.batch for parent in parents))
        origin = compute_origin(parents, bucket_map, bucket)
        if origin is None:
            return replace(pointer, rows=0, origins=())
        # The savepoint's id is included because two savepoints of one checkpoint may have different operator files.
        text = f"{self.manifest.header.id} {origin}"
        ref = CheckpointRef(origin.version, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        return replace(pointer, lineage=(LineageEntry(ref, 0, pointer.heartbeats),))

    def files(self) -> Iterator[str]:
        """Yield the paths of the new savepoint's files, except the manifest."""
        for saved in self.manifest.buckets:
            if saved.operator not in self.rescaled:
                yield from (f"{saved.operator}/{saved.bucket}/{file.name}" for file in saved.files)
        for operator, after in self.rescaled.items():
            for bucket in range(after.buckets):
                ref = self.pointer_of(operator, bucket).ref
                if ref is not None:
                    yield f"{operator}/{bucket}/{file_name(ref, SNAPSHOT)}"


def rescale_savepoint(
    savepoint: Savepoint | str | os.PathLike[str],
    path: str,
    bucket_map: BucketMap,
    *,
    operator: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_bucket: Callable[[SavedBucket], None] = lambda bucket: None,
) -> RescaledSavepoint:
    """Rewrite a savepoint with another bucket map, without Spark; a job with that map can start from the result.

    The old savepoint is not changed. The new one has the same rows, timeouts, times to live, batch, watermark and
    offsets. All rows are read back and compared before the manifest is written. If a call was stopped, repeat it with
    the same arguments: it continues in the same folder.

    Parameters
    ----------
    savepoint
        The old savepoint, or its path.
    path
        Folder of the new savepoint, which must not exist yet: any fsspec URL, or an absolute path.
    bucket_map
        The new map: ``BucketMap(buckets)``, or one with unequal ranges, such as ``BucketMap.split(4, {1: 2})``.
    operator
        Rescale only this operator and copy the others unchanged. By default all operators are rescaled, or the one
        that a `Savepoint` names.
    storage_options
        Options for the new path's fsspec file system; also for the old savepoint's, if you give only its path.
    on_bucket
        Called with each bucket of the new savepoint when its files are written.

    Returns
    -------
    RescaledSavepoint
        The new savepoint.

    Raises
    ------
    UsageError
        If the savepoint already has that map or its buckets follow source partitions; if it has no such operator; or
        if the path is not empty.
    ClaimedError
        If a query has claimed the savepoint, or keys are being erased from it.
    MissingCheckpointError, CorruptFileError, LineageError, VersionSkewError
        If there is no readable savepoint.
    StorageError
        If the storage fails, or written rows read back differently.

    Examples
    --------
    >>> rescaled = rescale_savepoint("/savepoints/monday", "/savepoints/monday-64", BucketMap(64))  # doctest: +SKIP
    >>> rescaled.operators["counts"].rows  # doctest: +SKIP
    6
    """
    if isinstance(savepoint, Savepoint):
        old = savepoint
    else:
        old = Savepoint(os.fspath(savepoint), storage_options=storage_options or {})
    refuse_relative(path, "the path of a savepoint")
    source = Folder(old.path, old.storage_options)
    target = Folder(path.rstrip("/") or path, storage_options)
    plan = plan_rescaling(source, bucket_map, operator or old.operator)
    return write_rescaled(source, target, plan, on_bucket)


def plan_rescaling(source: Folder, bucket_map: BucketMap, operator: str | None = None) -> Rescaling:
    """Plan the rescaling of a savepoint; raise `UsageError` if it cannot be rescaled to the map."""
    if not isinstance(bucket_map, BucketMap) or not bucket_map.by_hash:
        raise UsageError(f"a savepoint can only be rescaled to a BucketMap of hashes, not to {bucket_map!r}")
    if bucket_map.buckets > BUCKETS_MAX:
        raise UsageError(f"buckets must be a whole number from 1 to {BUCKETS_MAX}, not {bucket_map.buckets}")
    manifest = read_manifest(source)
    operators = manifest.header.operators
    names = sorted(operators) if operator is None else [choose_operator(manifest, operator, source.root)]
    for name in names:
        if not operators[name].bucket_map.by_hash:
            raise UsageError(
                f"operator {name!r} of the savepoint at {source.root} has {operators[name].bucket_map}: its buckets "
                "do not depend on key hashes, so it cannot be rescaled. Its job accepts new source partitions anyway"
                + ("; name another operator" if len(operators) > 1 else "")
            )
    # A query that starts from the new savepoint numbers its operator files from 0 again.
    rescaled = {
        name: replace(operators[name].with_map(bucket_map), schema_id=0)
        for name in names
        if operators[name].bucket_map != bucket_map
    }
    if not rescaled:
        raise UsageError(
            f"the savepoint at {source.root} already has {bucket_map}. Choose another number of buckets, or copy the "
            "savepoint with spark-state-ext savepoint copy"
        )
    return Rescaling(manifest, rescaled)


def write_rescaled(
    source: Folder, target: Folder, plan: Rescaling, on_bucket: Callable[[SavedBucket], None] = lambda bucket: None
) -> RescaledSavepoint:
    """Write the new savepoint; the folder may have files of a stopped run."""
    manifest = plan.manifest
    writer = SavepointWriter(source, manifest, target, plan.files())
    refuse_torn(source, manifest)
    rescaled_operators = {}
    for name in sorted(manifest.header.operators):
        if name in plan.rescaled:
            rescaled_operators[name] = _rescale(writer, plan, name, on_bucket)
            continue
        for saved in (bucket for bucket in manifest.buckets if bucket.operator == name):
            writer.copy([saved])
            on_bucket(saved)
    # Copied files keep their form.
    form = CANONICAL if len(rescaled_operators) == len(manifest.header.operators) else manifest.header.form
    writer.finish(writer.changed_header(form, plan.operators))
    return RescaledSavepoint(target.root, writer.id, rescaled_operators)


def _rescale(
    writer: SavepointWriter, plan: Rescaling, operator: str, on_bucket: Callable[[SavedBucket], None]
) -> RescaledOperator:
    """Write the new buckets of an operator, and compare their rows with the old rows."""
    before, after = plan.manifest.header.operators[operator], plan.rescaled[operator]
    schema, old, new = after.row_schema(), RowsDigest(), RowsDigest()
    with closing(_read_old_rows(writer, plan, operator, old)) as rows:
        splitter = _Splitter(rows)
        for bucket in range(after.buckets):
            _, high = after.bucket_map.range_of(bucket)
            saved = writer.write(plan.pointer_of(operator, bucket), schema, splitter.read_below(high))
            for _ in _check_rows(writer.read_back(saved, schema), writer.target, saved, after.bucket_map, new):
                pass
            on_bucket(saved)
        for _ in splitter.read_below(_END):
            pass
    if (old.rows, old.value) != (new.rows, new.value):
        raise StorageError(
            f"operator {operator!r} has {old.rows} rows with the checksum {old.value} in {writer.source.root}, but "
            f"{new.rows} rows with {new.value} in {writer.target.root}: remove the latter folder, make sure that no "
            "other process writes to it, and rescale again"
        )
    return RescaledOperator(operator, before.bucket_map, after.bucket_map, new.rows, new.value)


def _read_old_rows(
    writer: SavepointWriter, plan: Rescaling, operator: str, digest: RowsDigest
) -> Generator[pa.RecordBatch, None, None]:
    """Yield all rows of an operator by ascending hash."""
    bucket_map = plan.manifest.header.operators[operator].bucket_map
    for saved in plan.manifest.buckets:
        if saved.operator == operator:
            yield from _check_rows(writer.read(saved), writer.source, saved, bucket_map, digest)


def _check_rows(
    batches: Iterable[pa.RecordBatch], savepoint: Folder, saved: SavedBucket, bucket_map: BucketMap, digest: RowsDigest
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a bucket and add them to a digest; raise if a row is in the wrong bucket or order."""
    low, high = bucket_map.range_of(saved.bucket)
    last = low << 32
    for rows in batches:
        if not rows.num_rows:
            continue
        hashes = get_hashes(rows)
        if int(hashes[0]) < last or (hashes[1:] < hashes[:-1]).any() or int(hashes[-1]) >= high << 32:
            raise CorruptFileError(
                f"{savepoint.child(saved.operator, str(saved.bucket)).root} has rows of another bucket, or rows that "
                "are not in the order of their hashes: use another savepoint"
            )
        last = int(hashes[-1])
        digest.add(rows)
        yield rows


class _Splitter:
    """Splits rows in ascending order of hashes into consecutive ranges."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def read_below(self, high: int) -> Iterator[pa.RecordBatch]:
        """Yield the next rows, as long as the high 32 bits of their hashes are below `high`."""
        while True:
            rows = next(self._batches, None) if self._rest is None else self._rest
            self._rest = None
            if rows is None:
                return
            end = int(np.searchsorted(get_hashes(rows) >> _BITS, np.uint64(high), side="left"))
            if end < rows.num_rows:
                self._rest = rows.slice(end)
            if end:
                yield rows.slice(0, end)
            if end < rows.num_rows:
                return
