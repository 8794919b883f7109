"""The state that a rescaled bucket begins with, as the snapshot file that nobody has written yet.

Whoever loads the bucket asks for the snapshot of its origin. As long as the bucket has no snapshot of its own in a
backend, that is made of the parents' files where it is asked for, and lies on this machine only: the rows of each
parent whose hashes are the bucket's, one parent after the other. A local store takes these rows as they are read; who
needs a file gets one.
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
from spark_state_ext.files.sealed import SealedFile, SealedFiles, seal
from spark_state_ext.rescale.parents import Parent, has_parents, origin_of, parent_files, parents_in
from spark_state_ext.restore.lazy import read_ends
from spark_state_ext.restore.part import read_part
from spark_state_ext.restore.trace import check_owner
from spark_state_ext.savepoints.copying import refuse_other_files
from spark_state_ext.savepoints.reading import read_saved_rows
from spark_state_ext.store.runs import hashes_of
from spark_state_ext.version import __version__

__all__ = ["Origin", "origin_beside", "origin_in", "rows_of_parents"]


class Origin:
    """Where the state is that a rescaled bucket begins with: a backend of one file, to be read from only."""

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
        self._known = pointer.parents
        self._made: SealedFile | None = None
        self._making = threading.Lock()
        self._closed = threading.Event()
        self._answered: Callable[[], None] = lambda: None

    @property
    def query_folder(self) -> Folder:
        """Where its parents lie."""
        return self._query_folder

    def is_there(self) -> bool:
        """Whether the bucket has parents."""
        if self._known is None and has_parents(self._query_folder):
            bucket = self._pointer.bucket
            self._known = origin_of(parents_in(self._query_folder, self._bucket_map, bucket), self._bucket_map, bucket)
        return self._known is not None

    # -- a backend that nobody writes to -----------------------------------------------------------

    def files(self, checkpoint: Checkpoint | None = None) -> Origin:
        """Its one file, which is found by its name."""
        return self

    def stop(self) -> None:
        """Have reads end."""
        self.close()

    def tell(self, answered: Callable[[], None]) -> None:
        """Call this once the parents' records were read, as their rows may be many."""
        self._answered = answered

    # -- its one file ------------------------------------------------------------------------------

    def where(self, name: str) -> str:
        """How to call a file in messages."""
        return f"{name}, made of what lies in {parent_files(self._query_folder, 0).root.rpartition('/')[0]}"

    def size(self, name: str) -> int:
        """Its size."""
        return self._whole(name).size_bytes

    def get(self, name: str) -> bytes:
        """All of it."""
        return self.get_range(name, 0, self.size(name))

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """A part of it."""
        return self._whole(name).get_range(start, end)

    def get_file(self, name: str, local_path: str | os.PathLike[str]) -> None:
        """All of it, as a local file."""
        SealedFiles([self._whole(name)], "just made").get_file(name, local_path)

    def open_local(self, name: str) -> pa.NativeFile | None:
        """It lies on this machine only for as long as it is read."""
        return None

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed.set()
        with self._making:
            made, self._made = self._made, None
        if made is not None:
            made.let_go()

    def make(self, name: str, keep: Path) -> CheckpointFile | None:
        """Return its rows as a local store takes them."""
        header, rows = self._begin(name)
        return make_checkpoint(header, self._schema, rows, keep)

    def _whole(self, name: str) -> SealedFile:
        with self._making:
            if self._made is None:
                header, rows = self._begin(name)
                self._made = seal(header, self._schema, rows, self._scratch)
            return self._made

    def _begin(self, name: str) -> tuple[LineageHeader, Iterator[pa.RecordBatch]]:
        """Return the header of a file, and its rows, which are read from the parents' files as they are asked for."""
        if self._known is None or name != file_name(self._known, SNAPSHOT):
            raise MissingCheckpointError(f"reading {self.where(name)}: it does not exist")
        self._raise_if_closed()
        parents = parents_in(self._query_folder, self._bucket_map, self._pointer.bucket)
        self._answered()
        found = origin_of(parents, self._bucket_map, self._pointer.bucket)
        assert found is not None, "somebody asked for it by its name"
        if found != self._known:
            raise LineageError(
                f"bucket {self._pointer.bucket} of operator {self._pointer.operator!r} begins with "
                f"checkpoint {self._known}, and the parents in {self._query_folder.root} make {found}: bring back "
                "those that it was rescaled from"
            )
        header = LineageHeader(
            kind=SNAPSHOT,
            operator=self._pointer.operator,
            bucket=self._pointer.bucket,
            ref=found,
            parent=None,
            lineage=(),
            schema_id=self._pointer.schema_id,
            writer=Writer("", "", -1, "", max(parent.pointer.heartbeats for parent in parents)),
            package_version=__version__,
        )
        return header, self._rows(parents)

    def _rows(self, parents: list[Parent]) -> Iterator[pa.RecordBatch]:
        low, high = self._bucket_map.range_of(self._pointer.bucket)
        for parent in parents:
            files = parent_files(self._query_folder, parent.bucket)
            for rows in rows_of_parents(files, parent, low, high, self._schema, self._scratch):
                self._raise_if_closed()
                yield rows

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise InterruptedRestoreError(f"the restore of checkpoint {self._known} was told to stop")


def origin_in(
    backends: Sequence[Backend], pointer: Pointer, bucket_map: BucketMap, schema: RowSchema, scratch: Path
) -> Origin | None:
    """What a rescaled bucket began with, in whichever backend has its parents; None where it needs them no more."""
    if pointer.parents is None:
        return None
    folders = [
        Folder(it.root, it.storage_options).child(pointer.operator, pointer.query_folder)
        for it in backends
        if it.kind == FSSPEC
    ]
    if not folders:
        raise StateElsewhereError(
            f"bucket {pointer.bucket} of operator {pointer.operator!r} was rescaled, and has no snapshot of its own "
            "yet: keep the backend that has the old buckets' files until it has"
        )
    # They lie with the backend that came first when the query was rescaled.
    there = folders[0] if len(folders) == 1 else next((it for it in folders if has_parents(it)), folders[0])
    return Origin(there, pointer, bucket_map, schema, scratch)


def origin_beside(
    backends: Sequence[Backend], pointer: Pointer, bucket_map: BucketMap, schema: RowSchema, scratch: Path
) -> list[Origin]:
    """As `origin_in`: what a bucket can be read from beside its backends, if there is something."""
    origin = origin_in(backends, pointer, bucket_map, schema, scratch)
    return [] if origin is None else [origin]


def rows_of_parents(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """The live rows of a parent in a range of hashes, ascending."""
    for rows in _read_around(files, parent, low, high, schema, scratch):
        hashes = hashes_of(rows) >> np.uint64(32)
        begin = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        end = int(np.searchsorted(hashes, np.uint64(high), side="left"))
        if begin < end:
            yield rows.slice(begin, end - begin)
        if end < len(hashes):
            return


def _read_around(
    files: Folder, parent: Parent, low: int, high: int, schema: RowSchema, scratch: Path
) -> Iterator[pa.RecordBatch]:
    """Yield live rows of a parent, ascending: those in a range of hashes, perhaps with others around it."""
    pointer, saved = parent.pointer, parent.saved.files
    if pointer.ref is not None and [it.name for it in saved] == [file_name(pointer.ref, SNAPSHOT)]:
        refuse_other_files(files, saved)
        ends = read_ends(files, pointer.ref, saved[0].size_bytes)
        # One of an old format has no index.
        if ends is not None:
            check_owner(ends.header, (pointer.operator, *pointer.origins), pointer.bucket, files.where(saved[0].name))
            yield from read_part(files, ends, schema, low << 32, high << 32)
            return
    yield from read_saved_rows(files, pointer, saved, schema, scratch)
