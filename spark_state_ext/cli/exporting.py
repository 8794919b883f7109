"""Rows to a file of another format, batch by batch: it appears under its name when it is whole."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa

from spark_state_ext.engine.folders import scratch_folder
from spark_state_ext.errors import UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.spill import local_errors

__all__ = ["FORMS", "exported"]

# Endings of files, and what writes them.
FORMS = (".parquet", ".arrow")


def exported(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], to: str, storage_options: Mapping[str, Any], overwrite: bool
) -> int:
    """Write rows to a file, batch by batch; how many there were."""
    ending = posixpath.splitext(to)[1]
    if ending not in FORMS:
        raise UsageError(f"the name of the file says in which format: it must end in {' or '.join(FORMS)}, not {to!r}")
    above, name = posixpath.split(to)
    target = Folder(above or ".", storage_options)
    if not overwrite and target.exists(name):
        raise UsageError(f"there is a file {target.where(name)} already: --overwrite replaces it")
    scratch = scratch_folder(None)
    with local_errors(scratch), tempfile.TemporaryDirectory(prefix="export-", dir=scratch) as folder:
        path = Path(folder) / name
        rows = 0
        with _writer(path, schema, ending) as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
        target.put_file(name, path)
        return rows
    raise AssertionError("unreachable: local_errors raises what it catches")


def _writer(path: Path, schema: pa.Schema, ending: str) -> AbstractContextManager[Any]:
    if ending == ".arrow":
        made: AbstractContextManager[Any] = pa.ipc.new_file(str(path), schema)
        return made
    import pyarrow.parquet as pq

    writer: AbstractContextManager[Any] = pq.ParquetWriter(str(path), schema)
    return writer
