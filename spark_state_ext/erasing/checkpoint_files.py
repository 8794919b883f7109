"""Finds keys in a bucket's checkpoint files, and rewrites the files without them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from arrow_schemas.equality import BoolArray
from arrow_schemas.evolution import conform
from arrow_schemas.lineage import BLOCKCRC, DELTA, SNAPSHOT, CheckpointRef, LineageHeader, parse_file_name
from arrow_schemas.row import DELETED, RowSchema
from spark_state_ext.engine.erased_rows import find_matching, find_positions
from spark_state_ext.files.checkpoint import open_body
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.sealed_body import SealedBody, write_sealed
from spark_state_ext.store.runs import CHUNK_ROWS, split_batches
from spark_state_ext.worker.removal import remove_file
from spark_state_ext.worker.spill import translate_local_errors

__all__ = ["BucketPast", "FilePast", "read_past", "rewrite"]


@dataclass(frozen=True)
class FilePast:
    """A checkpoint file, and the searched keys in it.

    Parameters
    ----------
    files, entry
        The bucket's folder in one of the backends, and the file's entry there.
    ref, kind
        Checkpoint and kind of the file.
    header
        Header of the file.
    rows
        The searched keys in the file, by their numbers: True for a live row, False for a tombstone.
    """

    files: Folder
    entry: Entry
    ref: CheckpointRef
    kind: str
    header: LineageHeader
    rows: dict[int, bool]

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.entry.name


@dataclass
class BucketPast:
    """The files of a bucket in all backends."""

    files: list[FilePast] = field(default_factory=list)

    def list_with_keys(self) -> list[FilePast]:
        """Return the files to rewrite, in this order: a tombstone's file comes after the files whose rows it removes.

        So at every moment, in every checkpoint, a key is either unchanged or gone.
        """
        return sorted(
            (file for file in self.files if file.rows), key=lambda file: (file.ref.version, file.kind == SNAPSHOT)
        )

    @property
    def headers(self) -> dict[CheckpointRef, LineageHeader]:
        """Header of each checkpoint: the delta's header if there is a delta file."""
        return {file.ref: file.header for file in sorted(self.files, key=lambda file: file.kind == DELTA)}


def read_past(
    files: Folder, entry: Entry, schema: RowSchema, keys: Sequence[pa.Array], scratch: Path
) -> FilePast | None:
    """Search a checkpoint file for keys; return None if it is not a checkpoint file."""
    name = entry.name
    parsed = parse_file_name(name)
    if parsed is None or entry.folder:
        return None
    rows: dict[int, bool] = {}
    with open_body(files, name, scratch) as body:
        header = LineageHeader.decode(body.reader.schema.metadata, files.where(name))
        for batch in body.reader:
            stored = conform(batch.replace_schema_metadata(None), schema)
            positions = find_positions(keys, schema.key_columns(stored))
            deleted = stored.column(DELETED)
            rows |= {int(key): not deleted[int(positions[key])].as_py() for key in np.flatnonzero(positions >= 0)}
    return FilePast(files, entry, *parsed, header, rows)


def rewrite(
    past: FilePast, schema: RowSchema, keys: Sequence[pa.Array], scratch: Path, check_allowed: Callable[[], None]
) -> int:
    """Rewrite a file without the rows of some keys, in one step; return the number of removed rows."""
    rewritten, removed = scratch / "rewritten", 0

    def keep_others(body: SealedBody) -> Iterator[pa.RecordBatch]:
        nonlocal removed
        for batch in body.reader:
            plain = batch.replace_schema_metadata(None)
            erased: BoolArray = find_matching(schema.key_columns(conform(plain, schema)), keys)
            removed += int(erased.sum())
            yield plain.filter(pa.array(~erased)) if erased.any() else plain

    try:
        with (
            open_body(past.files, past.name, scratch) as body,
            translate_local_errors(scratch),
            rewritten.open("wb") as target,
        ):
            # The stream's schema has the unchanged header, and the placeholder of the body record.
            batches: Iterable[pa.RecordBatch] = (batch for batch in keep_others(body) if batch.num_rows)
            if body.record.algorithm == BLOCKCRC:
                batches = split_batches(batches, CHUNK_ROWS)
            write_sealed(target, body.reader.schema, batches, body.record.algorithm, _count_tombstones)
            target.flush()
            os.fsync(target.fileno())
        check_allowed()
        past.files.put_file(past.name, rewritten)
    finally:
        remove_file(rewritten, missing_ok=True)
    return removed


def _count_tombstones(batch: pa.RecordBatch) -> int:
    return int(batch.column(DELETED).true_count)
