"""Reads the rows of a savepoint without Spark: from a bucket's only snapshot, or through a local store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, Writer, file_name
from arrow_schemas.pointer import Pointer, ReplicationStatus
from arrow_schemas.row import DEFINED, TIMEOUT_MS, RowSchema
from arrow_schemas.savepoint import SavedBucket, SavedFile, SavepointManifest
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Restorable
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.engine.start_from import Savepoint
from spark_state_ext.errors import UsageError
from spark_state_ext.files.checkpoint import read_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.restore.trace import check_owner
from spark_state_ext.savepoints.file_copy import refuse_other_files
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.local_folders import scratch_folder

__all__ = ["choose_operator", "read_saved_rows", "savepoint_tables", "scan_rows", "read_visible_rows"]

_NO_WRITER = Writer("", "", -1, "")


@contextmanager
def scan_rows(
    pointer: Pointer,
    replicas: Sequence[Restorable],
    schema: RowSchema,
    scratch: Path,
    restore_from: str | None = None,
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Yield all live rows at a pointer by ascending hash."""
    with tempfile.TemporaryDirectory(prefix="savepoint-", dir=scratch) as folder:
        store = LocalStore.at(Path(folder) / "store", schema)
        context = CommitContext(Path(folder))
        bucket = Bucket(store, (), pointer, _NO_WRITER, context, restore_from=restore_from, sources=replicas)
        try:
            yield bucket.scan()
        finally:
            bucket.close()
            store.close()


def read_saved_rows(
    files: Folder, pointer: Pointer, saved_files: Sequence[SavedFile], schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """Yield all live rows of a savepoint's bucket by ascending hash; `saved_files` are its files in the manifest."""
    if pointer.ref is None:
        return
    refuse_other_files(files, saved_files)
    if [file.name for file in saved_files] == [file_name(pointer.ref, SNAPSHOT)]:
        # A single snapshot file needs no local store.
        checkpoint = read_checkpoint(files, pointer.ref, SNAPSHOT, schema, scratch)
        check_owner(
            checkpoint.header, (pointer.operator, *pointer.origins), pointer.bucket, files.where(saved_files[0].name)
        )
        yield from checkpoint.batches
        return
    local_pointer = replace(pointer, replication={files.root: ReplicationStatus(pointer.ref)})
    with scan_rows(local_pointer, sole_replica(files, scratch, files.root), schema, scratch) as rows:
        yield from rows


def read_visible_rows(
    savepoint: Folder, saved_bucket: SavedBucket, schema: RowSchema, scratch: Path, with_defined: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the visible columns of a bucket's rows: keys, state, ``timeout_ms``, and ``defined`` on request."""
    visible, fields = schema.without_expiry(), _make_schema(schema)
    if with_defined:
        fields = fields.append(pa.field(DEFINED, pa.bool_()))
    files = savepoint.child(saved_bucket.operator, str(saved_bucket.bucket))
    for rows in read_saved_rows(files, saved_bucket.pointer, saved_bucket.files, schema, scratch):
        columns = [*visible.key_columns(rows), *visible.state_columns(rows), rows.column("timeout_ms")]
        columns += [rows.column(DEFINED)] if with_defined else []
        yield pa.RecordBatch.from_arrays(columns, schema=fields)


def choose_operator(manifest: SavepointManifest, name: str | None, path: str) -> str:
    """Return the name of a savepoint's operator; raise unless `name` is one, or there is only one."""
    operators = manifest.header.operators
    if name is None and len(operators) > 1:
        raise UsageError(
            f"the savepoint at {path} has the operators {', '.join(sorted(operators))}: name one, with "
            "Savepoint(path, operator=…)"
        )
    name = name or next(iter(operators))
    if name not in operators:
        raise UsageError(f"the savepoint at {path} has no operator {name!r}; it has {', '.join(sorted(operators))}")
    return name


def savepoint_tables(savepoint: Savepoint | str | os.PathLike[str]) -> Iterator[pa.Table]:
    """Yield the rows of a savepoint as Arrow tables, without Spark: one table for each bucket, read on demand.

    Parameters
    ----------
    savepoint
        The savepoint, or its path; set `Savepoint.operator` if it has several operators.

    Returns
    -------
    Iterator of pyarrow.Table
        The key columns, the state columns and ``timeout_ms``, ordered by the keys' hashes. If a key column and a state
        column have the same name, they become ``key.<name>`` and ``state.<name>``.

    Raises
    ------
    UsageError
        If the savepoint has several operators and you named none.
    MissingCheckpointError, CorruptFileError, VersionSkewError
        If there is no readable savepoint.
    StorageError
        If the storage fails.

    Examples
    --------
    >>> sum(table.num_rows for table in savepoint_tables("/savepoints/monday"))  # doctest: +SKIP
    6
    """
    chosen = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    folder = Folder(chosen.path, chosen.storage_options)
    manifest = read_manifest(folder)
    name = choose_operator(manifest, chosen.operator, chosen.path)
    schema, scratch = manifest.header.operators[name].row_schema(), scratch_folder(None)
    for bucket in manifest.buckets:
        if bucket.operator == name:
            yield pa.Table.from_batches(read_visible_rows(folder, bucket, schema, scratch), _make_schema(schema))


def _make_schema(schema: RowSchema) -> pa.Schema:
    visible = schema.without_expiry()
    columns = zip((*visible.keys, *visible.state), schema.shown_names(), strict=True)
    return pa.schema([*(field.with_name(name) for field, name in columns), pa.field(TIMEOUT_MS, pa.int64())])
