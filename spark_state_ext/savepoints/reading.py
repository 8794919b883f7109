"""A bucket's rows, read by themselves: in a local store of their own, which goes when they were read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from arrow_schemas.lineage import Writer
from arrow_schemas.pointer import Pointer, ReplicationStatus
from arrow_schemas.row import RowSchema
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.backends.replication import Replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore

__all__ = ["saved_rows", "scanned_rows"]

_NOBODY = Writer("", "", -1, "")


@contextmanager
def scanned_rows(
    pointer: Pointer, replicas: Sequence[Replica], schema: RowSchema, scratch: Path, restore_from: str | None = None
) -> Iterator[Iterator[pa.RecordBatch]]:
    """All live rows at a pointer, ascending by hash.

    Parameters
    ----------
    pointer, replicas, restore_from
        As for `Bucket`.
    schema
        Row schema of the operator file in force.
    scratch
        Local folder for the store.
    """
    with tempfile.TemporaryDirectory(prefix="savepoint-", dir=scratch) as folder:
        store = LocalStore.at(Path(folder) / "store", schema)
        bucket = Bucket(store, replicas, pointer, _NOBODY, CommitContext(Path(folder)), restore_from=restore_from)
        try:
            yield bucket.scan()
        finally:
            bucket.close()
            store.close()


def saved_rows(files: Folder, pointer: Pointer, schema: RowSchema, scratch: Path) -> Iterator[pa.RecordBatch]:
    """All live rows of a bucket of a savepoint, ascending by hash.

    Parameters
    ----------
    files
        The bucket's folder in the savepoint.
    pointer
        As the manifest has it.
    schema
        Row schema of the savepoint's operator file.
    scratch
        Local folder for temporary files.
    """
    if pointer.ref is None:
        return
    whole = replace(pointer, replication={files.root: ReplicationStatus(pointer.ref)})
    with scanned_rows(whole, sole_replica(files, scratch, files.root), schema, scratch) as rows:
        yield from rows
