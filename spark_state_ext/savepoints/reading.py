"""Rows of a savepoint, without Spark: of a bucket's one snapshot, or from a local store that its files are read to."""

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
from spark_state_ext.savepoints.copying import refuse_other_files
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.local_folders import scratch_folder

__all__ = ["operator_named", "saved_rows", "savepoint_tables", "scanned_rows", "shown_rows"]

_NOBODY = Writer("", "", -1, "")


@contextmanager
def scanned_rows(
    pointer: Pointer,
    replicas: Sequence[Restorable],
    schema: RowSchema,
    scratch: Path,
    restore_from: str | None = None,
) -> Iterator[Iterator[pa.RecordBatch]]:
    """All live rows at a pointer, ascending by hash."""
    with tempfile.TemporaryDirectory(prefix="savepoint-", dir=scratch) as folder:
        store = LocalStore.at(Path(folder) / "store", schema)
        context = CommitContext(Path(folder))
        bucket = Bucket(store, (), pointer, _NOBODY, context, restore_from=restore_from, sources=replicas)
        try:
            yield bucket.scan()
        finally:
            bucket.close()
            store.close()


def saved_rows(
    files: Folder, pointer: Pointer, named: Sequence[SavedFile], schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """All live rows of a bucket of a savepoint, ascending by hash."""
    if pointer.ref is None:
        return
    refuse_other_files(files, named)
    if [file.name for file in named] == [file_name(pointer.ref, SNAPSHOT)]:
        # One file has all of it, as it is: no local store is needed.
        found = read_checkpoint(files, pointer.ref, SNAPSHOT, schema, scratch)
        check_owner(found.header, (pointer.operator, *pointer.origins), pointer.bucket, files.where(named[0].name))
        yield from found.batches
        return
    whole = replace(pointer, replication={files.root: ReplicationStatus(pointer.ref)})
    with scanned_rows(whole, sole_replica(files, scratch, files.root), schema, scratch) as rows:
        yield from rows


def shown_rows(
    savepoint: Folder, saved: SavedBucket, schema: RowSchema, scratch: Path, with_defined: bool = False
) -> Iterator[pa.RecordBatch]:
    """The rows of a bucket as they are shown: keys, state and ``timeout_ms``; no hash, marks or hidden columns."""
    shown, fields = schema.without_expiry(), _fields(schema)
    if with_defined:
        fields = fields.append(pa.field(DEFINED, pa.bool_()))
    files = savepoint.child(saved.operator, str(saved.bucket))
    for rows in saved_rows(files, saved.pointer, saved.files, schema, scratch):
        columns = [*shown.key_columns(rows), *shown.state_columns(rows), rows.column("timeout_ms")]
        columns += [rows.column(DEFINED)] if with_defined else []
        yield pa.RecordBatch.from_arrays(columns, schema=fields)


def operator_named(manifest: SavepointManifest, name: str | None, path: str) -> str:
    """The operator of a savepoint that is meant."""
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
    """The rows of a savepoint as Arrow tables, without Spark: one for each bucket, read when it is asked for.

    Parameters
    ----------
    savepoint
        The savepoint, or its path; with `Savepoint.operator` where it has several operators.

    Returns
    -------
    Iterator of pyarrow.Table
        The key columns, the state columns and ``timeout_ms``, in the order of the keys' hashes. A name that a key and
        a state column share becomes ``key.<name>`` and ``state.<name>``.

    Raises
    ------
    UsageError
        When the savepoint has several operators, and none is named.
    MissingCheckpointError, CorruptFileError, VersionSkewError
        When there is no savepoint that can be read.
    StorageError
        When the store fails.

    Examples
    --------
    >>> sum(table.num_rows for table in savepoint_tables("/savepoints/monday"))  # doctest: +SKIP
    6
    """
    given = savepoint if isinstance(savepoint, Savepoint) else Savepoint(os.fspath(savepoint))
    folder = Folder(given.path, given.storage_options)
    manifest = read_manifest(folder)
    name = operator_named(manifest, given.operator, given.path)
    schema, scratch = manifest.header.operators[name].row_schema(), scratch_folder(None)
    for bucket in manifest.buckets:
        if bucket.operator == name:
            yield pa.Table.from_batches(shown_rows(folder, bucket, schema, scratch), _fields(schema))


def _fields(schema: RowSchema) -> pa.Schema:
    shown = schema.without_expiry()
    columns = zip((*shown.keys, *shown.state), schema.shown_names(), strict=True)
    return pa.schema([*(field.with_name(name) for field, name in columns), pa.field(TIMEOUT_MS, pa.int64())])
