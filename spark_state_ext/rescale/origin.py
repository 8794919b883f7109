"""The origin of a rescaled bucket: its initial state as a snapshot file that is made on demand.

A load of the bucket reads the snapshot of its origin. Until a backend has a snapshot of the bucket's own, this
process makes the origin's snapshot from the parents' files, on this machine only: it has those rows of each parent
whose hashes belong to the bucket, one parent after the other. A local store takes the rows directly; other readers get
a file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.lineage import SNAPSHOT, LineageHeader, Writer, file_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import RowSchema
from spark_state_ext.backends import Checkpoint
from spark_state_ext.backends.registry import FSSPEC, Backend
from spark_state_ext.errors import (
    InterruptedRestoreError,
    LineageError,
    MissingCheckpointError,
    StateElsewhereError,
)
from spark_state_ext.files.checkpoint import CheckpointFile, make_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_file import SealedFile, SealedFiles, seal
from spark_state_ext.rescale.parents import Parent, compute_origin, has_parents, parent_files, read_parents
from spark_state_ext.restore.lazy import read_ends
from spark_state_ext.restore.part import read_part
from spark_state_ext.restore.trace import check_owner
from spark_state_ext.savepoints.file_copy import refuse_other_files
from spark_state_ext.savepoints.saved_rows import read_saved_rows
from spark_state_ext.store.runs import get_hashes
from spark_state_ext.version import __version__

__all__ = ["Origin", "list_origin", "find_origin", "read_rows_of_parent"]


class Origin:
    """A read-only backend with one file: the initial state of a rescaled bucket."""

    name = "the parents of a rescaled bucket"
    root = False

    def __init__(
        self, query_folder: Folder, pointer: Pointer, bucket_map: BucketMap, schema: RowSchema, scratch: Path
    ) -> None:
        self._query_folder = query_folder
        self._pointer = pointer
        self._bucket_map = bucket_map
        self._schema = schema
        self._scratch = scratch
        self._ref = pointer.parents
        self._file: SealedFile | None = None
        self._making = threading.Lock()
        self._closed = threading.Event()
        self._answered: Callable[[], None] = lambda: None

    @property
    def query_folder(self) -> Folder:
        """The query folder that has the parents."""
        return self._query_folder

    def is_there(self) -> bool:
        """True if the bucket has parents."""
        if self._ref is None and has_parents(self._query_folder):
            bucket = self._pointer.bucket
            self._ref = compute_origin(
                read_parents(self._query_folder, self._bucket_map, bucket), self._bucket_map, bucket
            )
        return self._ref is not None

    # -- read-only backend -------------------------------------------------------------------------

    def files(self, checkpoint: Checkpoint | None = None) -> Origin:
        """Return this object, which gives its one file by name."""
        return self

    def stop(self) -> None:
        """Stop reads."""
        self.close()

    def tell(self, answered: Callable[[], None]) -> None:
        """Call `answered` when the parents' records are read: reading the rows afterwards may take long."""
        self._answered = answered

    # -- the one file ------------------------------------------------------------------------------

    def where(self, name: str) -> str:
        """Return the description of a file for messages."""
        return f"{name}, made from the files in {parent_files(self._query_folder, 0).root.rpartition('/')[0]}"

    def size(self, name: str) -> int:
        """Return the file's size."""
        return self._make_file(name).size_bytes

    def get(self, name: str) -> bytes:
        """Return all bytes of the file."""
        return self.get_range(name, 0, self.size(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """Return a range of the file's bytes."""
        return self._make_file(name).get_range(start, end)

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """Write the file to a local path."""
        SealedFiles([self._make_file(name)], "just made").get_file(name, local_path)

    def open_local(self, name: str) -> pa.NativeFile | None:
        """Return None: the file has no lasting local path."""
        return None

    def close(self) -> None:
        """Stop reads and delete the file."""
        self._closed.set()
        with self._making:
            file, self._file = self._file, None
        if file is not None:
            file.let_go()

    def make(self, name: str, keep: Path) -> CheckpointFile | None:
        """Make the file's rows in the form that a local store takes."""
        header, rows = self._open(name)
        return make_checkpoint(header, self._schema, rows, keep)

    def _make_file(self, name: str) -> SealedFile:
        with self._making:
            if self._file is None:
                header, rows = self._open(name)
                self._file = seal(header, self._schema, rows, self._scratch)
            return self._file

    def _open(self, name: str) -> tuple[LineageHeader, Iterator[pa.RecordBatch]]:
        """Return the file's header, and an iterator that reads its rows from the parents' files."""
        if self._ref is None or name != file_name(self._ref, SNAPSHOT):
            raise MissingCheckpointError(f"reading {self.where(name)}: it does not exist")
        self._raise_if_closed()
        parents = read_parents(self._query_folder, self._bucket_map, self._pointer.bucket)
        self._answered()
        origin = compute_origin(parents, self._bucket_map, self._pointer.bucket)
        assert origin is not None, "the name of the file is known, so the bucket has an origin"
        if origin != self._ref:
            raise LineageError(
                f"bucket {self._pointer.bucket} of operator {self._pointer.operator!r} begins with "
                f"checkpoint {self._ref}, but the parents in {self._query_folder.root} make {origin}: restore the "
                "parents that it was rescaled from"
            )
        header = LineageHeader(
            kind=SNAPSHOT,
            operator=self._pointer.operator,
            bucket=self._pointer.bucket,
            ref=origin,
            parent=None,
            lineage=(),
            schema_id=self._pointer.schema_id,
            writer=Writer("", "", -1, "", max(parent.pointer.heartbeats for parent in parents)),
            package_version=__version__,
        )
        return header, self._read_rows(parents)

    def _read_rows(self, parents: list[Parent]) -> Iterator[pa.RecordBatch]:
        low, high = self._bucket_map.range_of(self._pointer.bucket)
        for parent in parents:
            files = parent_files(self._query_folder, parent.bucket)
            for rows in read_rows_of_parent(files, parent, low, high, self._schema, self._scratch):
                self._raise_if_closed()
                yield rows

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise InterruptedRestoreError(f"the restore of checkpoint {self._ref} was stopped")


def find_origin(
    backends: Sequence[Backend], pointer: Pointer, bucket_map: BucketMap, schema: RowSchema, scratch: Path
) -> Origin | None:
    """Return the origin of a rescaled bucket, in the backend that has its parents; None if it no longer needs them."""
    if pointer.parents is None:
        return None
    folders = [
        Folder(backend.root, backend.storage_options).child(pointer.operator, pointer.query_folder)
        for backend in backends
        if backend.kind == FSSPEC
    ]
    if not folders:
        raise StateElsewhereError(
            f"bucket {pointer.bucket} of operator {pointer.operator!r} was rescaled and has no snapshot of its own "
            "yet: keep the backend that has the old buckets' files until the bucket has one"
        )
    # The parents are in the backend that was the first when the query was rescaled.
    query_folder = (
        folders[0] if len(folders) == 1 else next((folder for folder in folders if has_parents(folder)), folders[0])
    )
    return Origin(query_folder, pointer, bucket_map, schema, scratch)


def list_origin(
    backends: Sequence[Backend], pointer: Pointer, bucket_map: BucketMap, schema: RowSchema, scratch: Path
) -> list[Origin]:
    """Return the origin by `find_origin` as a list, which is empty if there is none."""
    origin = find_origin(backends, pointer, bucket_map, schema, scratch)
    return [] if origin is None else [origin]


def read_rows_of_parent(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """Yield the live rows of a parent with hashes from `low` up to `high` (high 32 bits), ascending."""
    for rows in _read_around(files, parent, low, high, schema, scratch):
        hashes = get_hashes(rows) >> np.uint64(32)
        start = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        end = int(np.searchsorted(hashes, np.uint64(high), side="left"))
        if start < end:
            yield rows.slice(start, end - start)
        if end < len(hashes):
            return


def _read_around(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """Yield the live rows of a parent in a range of hashes, ascending; rows around the range may be included."""
    pointer, saved_files = parent.pointer, parent.saved.files
    if pointer.ref is not None and [file.name for file in saved_files] == [file_name(pointer.ref, SNAPSHOT)]:
        refuse_other_files(files, saved_files)
        ends = read_ends(files, pointer.ref, saved_files[0].size_bytes)
        # A file of an old format has no index.
        if ends is not None:
            check_owner(
                ends.header, (pointer.operator, *pointer.origins), pointer.bucket, files.where(saved_files[0].name)
            )
            yield from read_part(files, ends, schema, low << 32, high << 32)
            return
    yield from read_saved_rows(files, pointer, saved_files, schema, scratch)
