"""A savepoint with another bucket map: the same rows in other buckets, written anew without Spark.

The rows of the old buckets follow each other in ascending hash, and so do those of the new ones: they are read once,
and cut where the new buckets begin. Each new bucket is one snapshot, whose name follows from what it is made of. So a
run that was stopped leaves nothing but files that the next one makes, too.
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
from spark_state_ext.rescale.parents import Parent, combined_pointer, origin_of
from spark_state_ext.savepoints.copying import refuse_torn
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.reading import operator_named
from spark_state_ext.savepoints.writer import SavepointWriter
from spark_state_ext.store.runs import hashes_of

__all__ = ["RescaledOperator", "RescaledSavepoint", "Rescaling", "rescale_savepoint", "rescaling_of", "write_rescaled"]

_BITS = np.uint64(32)
_END = 1 << 32


@dataclass(frozen=True)
class RescaledOperator:
    """An operator whose state is in other buckets now.

    Parameters
    ----------
    operator
        Its name.
    before, after
        Its bucket maps.
    rows
        How many keys it has.
    checksum
        Of all its rows, in the order of their hashes: 32 hexadecimal digits. Old and new have the same.
    """

    operator: str
    before: BucketMap
    after: BucketMap
    rows: int
    checksum: str


@dataclass(frozen=True)
class RescaledSavepoint:
    """A savepoint that was written anew with another bucket map.

    Parameters
    ----------
    path, id
        Where it is, and its id.
    operators
        The operators that were rescaled, by name. Others are as they were.
    """

    path: str
    id: str
    operators: Mapping[str, RescaledOperator]


@dataclass(frozen=True)
class Rescaling:
    """What is to be made of a savepoint.

    Parameters
    ----------
    manifest
        What is in it.
    wanted
        The operators that are rescaled, by name, with the operator file that they are to have.
    """

    manifest: SavepointManifest
    wanted: Mapping[str, OperatorFile]

    @property
    def operators(self) -> dict[str, OperatorFile]:
        """All operators of the new savepoint."""
        return {**self.manifest.header.operators, **self.wanted}

    @property
    def buckets(self) -> int:
        """How many buckets the new savepoint has."""
        return sum(it.buckets for it in self.operators.values())

    def pointer_of(self, operator: str, bucket: int) -> Pointer:
        """The pointer of a new bucket, always at the same checkpoint, before its rows are counted."""
        before, bucket_map = self.manifest.header.operators[operator], self.wanted[operator].bucket_map
        numbers = bucket_map.overlapping(before.bucket_map, bucket)
        parents = [Parent(before, self.manifest.bucket(operator, number)) for number in numbers]
        pointer = combined_pointer(operator, bucket_map, bucket, parents)
        pointer = replace(pointer, batch=max(it.pointer.batch for it in parents))
        origin = origin_of(parents, bucket_map, bucket)
        if origin is None:
            return replace(pointer, rows=0, origins=())
        # An operator file may have changed between two savepoints of one checkpoint.
        text = f"{self.manifest.header.id} {origin}"
        ref = CheckpointRef(origin.version, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        return replace(pointer, lineage=(LineageEntry(ref, 0, pointer.heartbeats),))

    def files(self) -> Iterator[str]:
        """The files that the new savepoint consists of beside its manifest, by their paths in it."""
        for it in self.manifest.buckets:
            if it.operator not in self.wanted:
                yield from (f"{it.operator}/{it.bucket}/{file.name}" for file in it.files)
        for operator, after in self.wanted.items():
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
    """Write a savepoint anew with another bucket map, without Spark: a job with that map starts from it.

    The savepoint itself stays as it is. Rows, timeouts, times to live, batch, watermark and offsets are those of the
    savepoint. All rows are read back and compared before the manifest is written. A call that was stopped is repeated
    with the same arguments: it goes on in the folder that the first one has left.

    Parameters
    ----------
    savepoint
        The savepoint, or its path.
    path
        Folder of the new one, which does not exist yet: any fsspec URL, or an absolute path.
    bucket_map
        The new map: ``BucketMap(buckets)``, or one with unequal ranges, such as ``BucketMap.split(4, {1: 2})``.
    operator
        The only operator that is rescaled; others are copied as they are. By default all are, or the one that a
        `Savepoint` names.
    storage_options
        Options for the new path's fsspec file system; also for the savepoint's, where only its path is given.
    on_bucket
        Called with each bucket of the new savepoint once its files are there.

    Returns
    -------
    RescaledSavepoint
        What was made.

    Raises
    ------
    UsageError
        When the savepoint has that map already, or is divided by source partition; when it has no such operator; or
        when there is something at the path.
    ClaimedError
        When a query has claimed the savepoint, or keys are being erased from it.
    MissingCheckpointError, CorruptFileError, LineageError, VersionSkewError
        When there is no savepoint that can be read.
    StorageError
        When a store fails, or what was written reads otherwise.

    Examples
    --------
    >>> made = rescale_savepoint("/savepoints/monday", "/savepoints/monday-64", BucketMap(64))  # doctest: +SKIP
    >>> made.operators["counts"].rows  # doctest: +SKIP
    6
    """
    if isinstance(savepoint, Savepoint):
        given = savepoint
    else:
        given = Savepoint(os.fspath(savepoint), storage_options=storage_options or {})
    refuse_relative(path, "the path of a savepoint")
    source = Folder(given.path, given.storage_options)
    target = Folder(path.rstrip("/") or path, storage_options)
    wanted = rescaling_of(source, bucket_map, operator or given.operator)
    return write_rescaled(source, target, wanted, on_bucket)


def rescaling_of(source: Folder, bucket_map: BucketMap, operator: str | None = None) -> Rescaling:
    """See what is to be made of a savepoint; nothing is changed."""
    if not isinstance(bucket_map, BucketMap) or not bucket_map.by_hash:
        raise UsageError(f"a savepoint is rescaled to a BucketMap of hashes, and not to {bucket_map!r}")
    if bucket_map.buckets > BUCKETS_MAX:
        raise UsageError(f"buckets must be a whole number from 1 to {BUCKETS_MAX}, not {bucket_map.buckets}")
    manifest = read_manifest(source)
    operators = manifest.header.operators
    names = sorted(operators) if operator is None else [operator_named(manifest, operator, source.root)]
    for name in names:
        if not operators[name].bucket_map.by_hash:
            raise UsageError(
                f"operator {name!r} of the savepoint at {source.root} has {operators[name].bucket_map}: no hash tells "
                "the bucket of its keys, so it cannot be rescaled. Its job takes more source partitions as they are"
                + ("; name another operator" if len(operators) > 1 else "")
            )
    # Numbers of the query's operator files end here: who starts from it begins with one of number 0.
    wanted = {
        name: replace(operators[name].with_map(bucket_map), schema_id=0)
        for name in names
        if operators[name].bucket_map != bucket_map
    }
    if not wanted:
        raise UsageError(
            f"the savepoint at {source.root} has {bucket_map} already: there is nothing to do. Ask for another number, "
            "or copy it with spark-state-ext savepoint copy"
        )
    return Rescaling(manifest, wanted)


def write_rescaled(
    source: Folder, target: Folder, wanted: Rescaling, on_bucket: Callable[[SavedBucket], None] = lambda bucket: None
) -> RescaledSavepoint:
    """Write the new savepoint, in a folder that a run which was stopped may have left."""
    manifest = wanted.manifest
    writer = SavepointWriter(source, manifest, target, wanted.files())
    refuse_torn(source, manifest)
    done = {}
    for name in sorted(manifest.header.operators):
        if name in wanted.wanted:
            done[name] = _rescale(writer, wanted, name, on_bucket)
            continue
        for saved in (it for it in manifest.buckets if it.operator == name):
            writer.copy([saved])
            on_bucket(saved)
    # Files that were copied are as they were.
    form = CANONICAL if len(done) == len(manifest.header.operators) else manifest.header.form
    writer.finish(writer.changed_header(form, wanted.operators))
    return RescaledSavepoint(target.root, writer.id, done)


def _rescale(
    writer: SavepointWriter, wanted: Rescaling, operator: str, on_bucket: Callable[[SavedBucket], None]
) -> RescaledOperator:
    """Write the new buckets of an operator, and compare their rows with those of the old ones."""
    before, after = wanted.manifest.header.operators[operator], wanted.wanted[operator]
    schema, old, new = after.row_schema(), RowsDigest(), RowsDigest()
    with closing(_old_rows(writer, wanted, operator, old)) as rows:
        cut = _Cut(rows)
        for bucket in range(after.buckets):
            _, high = after.bucket_map.range_of(bucket)
            made = writer.write(wanted.pointer_of(operator, bucket), schema, cut.below(high))
            for _ in _note_rows(writer.read_back(made, schema), writer.target, made, after.bucket_map, new):
                pass
            on_bucket(made)
        for _ in cut.below(_END):
            pass
    if (old.rows, old.value) != (new.rows, new.value):
        raise StorageError(
            f"operator {operator!r} has {old.rows} rows with the checksum {old.value} in {writer.source.root}, and "
            f"{new.rows} rows with {new.value} in {writer.target.root}: remove that folder, see that nobody else "
            "writes to it, and rescale again"
        )
    return RescaledOperator(operator, before.bucket_map, after.bucket_map, new.rows, new.value)


def _old_rows(
    writer: SavepointWriter, wanted: Rescaling, operator: str, digest: RowsDigest
) -> Generator[pa.RecordBatch, None, None]:
    """Read all rows of an operator, ascending by hash."""
    bucket_map = wanted.manifest.header.operators[operator].bucket_map
    for saved in wanted.manifest.buckets:
        if saved.operator == operator:
            yield from _note_rows(writer.read(saved), writer.source, saved, bucket_map, digest)


def _note_rows(
    batches: Iterable[pa.RecordBatch], savepoint: Folder, saved: SavedBucket, bucket_map: BucketMap, digest: RowsDigest
) -> Iterator[pa.RecordBatch]:
    """Note rows of a bucket in a digest as they come; refuse those of another bucket, or in another order."""
    low, high = bucket_map.range_of(saved.bucket)
    last = low << 32
    for rows in batches:
        if not rows.num_rows:
            continue
        hashes = hashes_of(rows)
        if int(hashes[0]) < last or (hashes[1:] < hashes[:-1]).any() or int(hashes[-1]) >= high << 32:
            raise CorruptFileError(
                f"{savepoint.child(saved.operator, str(saved.bucket)).root} has rows that are another bucket's, or not "
                "in the order of their hashes: take another savepoint"
            )
        last = int(hashes[-1])
        digest.add(rows)
        yield rows


class _Cut:
    """Rows in ascending hash, one range after the other."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._left: pa.RecordBatch | None = None

    def below(self, high: int) -> Iterator[pa.RecordBatch]:
        """The rows that come next and whose hashes' high 32 bits are below a number."""
        while True:
            rows = next(self._batches, None) if self._left is None else self._left
            self._left = None
            if rows is None:
                return
            end = int(np.searchsorted(hashes_of(rows) >> _BITS, np.uint64(high), side="left"))
            if end < rows.num_rows:
                self._left = rows.slice(end)
            if end:
                yield rows.slice(0, end)
            if end < rows.num_rows:
                return
