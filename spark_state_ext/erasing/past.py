"""What a bucket's files tell of some keys, checkpoint by checkpoint; and the same files without them."""

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
from spark_state_ext.engine.erasing import matching, places_of
from spark_state_ext.files.checkpoint import open_body
from spark_state_ext.files.folder import Entry, Folder
from spark_state_ext.files.sealed_body import SealedBody, write_sealed
from spark_state_ext.store.runs import CHUNK_ROWS, cut
from spark_state_ext.worker.removal import remove_file
from spark_state_ext.worker.spill import local_errors

__all__ = ["BucketPast", "FilePast", "read_past", "rewrite"]


@dataclass(frozen=True)
class FilePast:
    """A checkpoint file.

    Parameters
    ----------
    files, entry
        The bucket's folder in one of the backends, and the file as it was listed.
    ref, kind
        What it is.
    header
        What it says of itself.
    rows
        Which of the keys it has, by their numbers: True where the key lives, False for a tombstone.
    """

    files: Folder
    entry: Entry
    ref: CheckpointRef
    kind: str
    header: LineageHeader
    rows: dict[int, bool]

    @property
    def name(self) -> str:
        """Its name."""
        return self.entry.name


@dataclass
class BucketPast:
    """A bucket's files, in all backends."""

    files: list[FilePast] = field(default_factory=list)

    def with_keys(self) -> list[FilePast]:
        """The files to write anew, in the order in which to: what removes a key comes after all that it removes.

        At every moment, and in every checkpoint, a key is then as it was or gone.
        """
        return sorted((it for it in self.files if it.rows), key=lambda it: (it.ref.version, it.kind == SNAPSHOT))

    @property
    def headers(self) -> dict[CheckpointRef, LineageHeader]:
        """What the files say of their checkpoints: deltas, where there is one."""
        return {it.ref: it.header for it in sorted(self.files, key=lambda it: it.kind == DELTA)}


def read_past(
    files: Folder, entry: Entry, schema: RowSchema, keys: Sequence[pa.Array], scratch: Path
) -> FilePast | None:
    """What a checkpoint file tells of some keys; None for a file that is none."""
    name = entry.name
    parsed = parse_file_name(name)
    if parsed is None or entry.folder:
        return None
    rows: dict[int, bool] = {}
    with open_body(files, name, scratch) as body:
        header = LineageHeader.decode(body.reader.schema.metadata, files.where(name))
        for batch in body.reader:
            written = conform(batch.replace_schema_metadata(None), schema)
            at = places_of(keys, schema.key_columns(written))
            deleted = written.column(DELETED)
            rows |= {int(key): not deleted[int(at[key])].as_py() for key in np.flatnonzero(at >= 0)}
    return FilePast(files, entry, *parsed, header, rows)


def rewrite(
    past: FilePast, schema: RowSchema, keys: Sequence[pa.Array], scratch: Path, allowed: Callable[[], None]
) -> int:
    """Put a file in its own place without the rows of some keys; gives how many there were."""
    made, removed = scratch / "rewritten", 0

    def others(body: SealedBody) -> Iterator[pa.RecordBatch]:
        nonlocal removed
        for batch in body.reader:
            plain = batch.replace_schema_metadata(None)
            gone: BoolArray = matching(schema.key_columns(conform(plain, schema)), keys)
            removed += int(gone.sum())
            yield plain.filter(pa.array(~gone)) if gone.any() else plain

    try:
        with open_body(past.files, past.name, scratch) as body, local_errors(scratch), made.open("wb") as target:
            # Of the stream's schema: it has the header as it was, and the placeholder of the body record.
            batches: Iterable[pa.RecordBatch] = (it for it in others(body) if it.num_rows)
            if body.record.algorithm == BLOCKCRC:
                batches = cut(batches, CHUNK_ROWS)
            write_sealed(target, body.reader.schema, batches, body.record.algorithm, _tombstones)
            target.flush()
            os.fsync(target.fileno())
        allowed()
        past.files.put_file(past.name, made)
    finally:
        remove_file(made, missing_ok=True)
    return removed


def _tombstones(batch: pa.RecordBatch) -> int:
    return int(batch.column(DELETED).true_count)
