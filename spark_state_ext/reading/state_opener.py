"""`open_state`: opens the state of an operator at a path, as of one batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavedFile
from spark_state_ext.errors import MissingCheckpointError, StateError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.bodies import Scratch
from spark_state_ext.reading.committed_checkpoints import BATCH, Timeline, may_be_renamed, read_timeline
from spark_state_ext.reading.reader_hold import ReaderHold
from spark_state_ext.reading.sources import make_pointer
from spark_state_ext.reading.state import AsOf, OpenState, StateFiles
from spark_state_ext.reading.state_folder import find_state
from spark_state_ext.rescale.parents import read_origins
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.timeline.records import read_epochs

__all__ = ["open_pointers", "open_state"]


def open_state(
    path: str | os.PathLike[str],
    *,
    operator: str | None = None,
    batch: int | None = None,
    query_folder: str | None = None,
    unproven: bool = False,
    hold: bool = True,
    memory_map: bool = True,
    local_dir: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> OpenState:
    """Open the state of an operator for reading, without Spark, the job or its code.

    The job may run meanwhile. All buckets are read after the same batch, which is certainly committed. Files prove that
    a bucket's batch is committed only after a later batch has changed the bucket, so this is usually the last batch but
    one; a bucket that has not changed for long keeps it back (see ``unproven``). `open_committed` asks Spark what is
    committed, and reads exactly the last batch.

    Parameters
    ----------
    path
        The root that `ArrowState` was given; a query folder, ``<root>/<operator>/<query folder>``; or a savepoint.
    operator
        Name of the operator; needed only if there are several.
    batch
        Read the state after this batch; by default the newest that files prove to be committed.
    query_folder
        Name of the query folder, if the operator has several; by default the one that was written last.
    unproven
        Also read what files do not prove to be committed: the state after the last batch but one that has a file in any
        bucket. A bucket's newest file may then be from a failed attempt, and its last change may not be in a file yet.
        So the state may not be the state after any single batch.
    hold
        Keep the query's clean-up from deleting the files while the state is open; writes a small file to the query
        folder.
    memory_map
        Map files on a local disk. Use False if the disk may disappear, as network disks may: that would kill the
        process if files are mapped, and otherwise raises an error.
    local_dir
        Local folder for copies of large remote files; by default as for `ArrowState`.
    storage_options
        Options for the path's fsspec file system.

    Returns
    -------
    OpenState
        The open state. Close it, or use it as a context manager.

    Raises
    ------
    UsageError
        If there is no state at the path, or there are several and you did not name one.
    MissingCheckpointError
        If no batch is certainly committed, or the files do not reach back to `batch`; it names the readable batches.
    CannotHoldError
        If no hold can be written, for example to a read-only root: open with ``hold=False``.
    CorruptFileError, VersionSkewError, StorageError
        If a file cannot be read.

    Examples
    --------
    >>> from spark_state_ext import open_state
    >>> with open_state("/state", operator="clicks") as state:  # doctest: +SKIP
    ...     print(state.batch, state.get("ada").to_pylist())
    41 [{'user': 'ada', 'clicks': 7, 'timeout_ms': None}]
    """
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise UsageError(f"batch must be the number of a batch, not {batch!r}")
    state_folder = find_state(Folder(os.fspath(path), storage_options), operator, query_folder)
    scratch = Scratch(local_dir, memory_map)
    if state_folder.operator is None:
        return _open_savepoint(state_folder.folder, operator, batch, scratch)
    # Placed before files are listed, so that clean-up deletes none of the listed files.
    reader_hold = ReaderHold(state_folder.folder) if hold else None
    try:
        return _open_query_folder(state_folder.folder, state_folder.operator, batch, unproven, reader_hold, scratch)
    except BaseException:
        if reader_hold is not None:
            reader_hold.release()
        raise


def open_pointers(
    query_folder: Folder,
    operator: OperatorFile,
    pointers: Mapping[int, Pointer],
    batch: int,
    *,
    retained: tuple[int, int] | None = None,
    hold: ReaderHold | None = None,
    scratch: Scratch | None = None,
    saved: Mapping[int, Sequence[SavedFile]] | None = None,
) -> OpenState:
    """Open the state at pointers from Spark's checkpoint, with the deltas that are inline in them."""
    empty = Pointer(operator.operator, 0, operator.buckets, operator.schema_id, batch, None)
    all_pointers = {bucket: pointers.get(bucket, replace(empty, bucket=bucket)) for bucket in range(operator.buckets)}
    oldest, newest = retained or (batch, batch)
    as_of = AsOf(batch, BATCH, newest, lambda: oldest, newest)
    return OpenState(
        StateFiles(query_folder, operator, all_pointers, saved=saved or {}), as_of, hold, scratch or Scratch()
    )


def _open_query_folder(
    folder: Folder,
    operator: OperatorFile,
    batch: int | None,
    unproven: bool,
    hold: ReaderHold | None,
    scratch: Scratch,
) -> OpenState:
    listed = [BucketFiles.listed(folder, bucket) for bucket in range(operator.buckets)]
    history = read_timeline(
        listed, folder.name, read_epochs(folder), read_origins(folder, operator.bucket_map), may_be_renamed(folder)
    )
    newest = history.newest(unproven)
    newest_with_file = history.initial_batch if history.newest_with_file is None else history.newest_with_file
    if newest is None or newest_with_file is None:
        raise MissingCheckpointError(_explain_unproven(folder, history, unproven))
    as_of_batch = newest if batch is None else batch
    if as_of_batch > newest:
        raise _unreadable_error(folder, history, as_of_batch, newest)
    try:
        checkpoints = history.state_at(as_of_batch, unproven)
        pointers = {
            line.files.bucket: make_pointer(line.files, checkpoints[line.files.bucket], operator, line.origin)
            for line in history.lines
        }
        if batch is not None and as_of_batch < history.oldest():
            raise _unreadable_error(folder, history, as_of_batch, newest)
    except MissingCheckpointError as error:
        if batch is None:
            raise
        raise _unreadable_error(folder, history, as_of_batch, newest) from error
    as_of = AsOf(as_of_batch, history.clock.unit, newest, history.oldest, newest_with_file, not unproven)
    files = StateFiles(folder, operator, pointers, {bucket_files.bucket: bucket_files for bucket_files in listed})
    return OpenState(files, as_of, hold, scratch)


def _explain_unproven(folder: Folder, history: Timeline, unproven: bool) -> str:
    if history.newest_with_file is None:
        return (
            f"there is no checkpoint file in {folder.root}: no batch has changed the state, or no file was uploaded yet"
        )
    return (
        f"the files in {folder.root} do not prove that a batch is committed: a bucket's batch is proven once a later "
        f"batch has changed the bucket, and a bucket with only one file keeps all others back. The newest "
        f"{history.clock.unit} with a file is {history.newest_with_file}. Wait for a batch that changes every bucket, "
        "or read "
        # unproven=True reads the batch before the newest one, so it does not help with the first batch.
        f"what Spark committed with open_committed (--checkpoint){'' if unproven else ', or read with unproven=True'}"
    )


def _unreadable_error(folder: Folder, history: Timeline, batch: int, newest: int) -> MissingCheckpointError:
    try:
        oldest: object = history.oldest()
    except StateError as error:
        oldest = f"(unknown: {error})"
    return MissingCheckpointError(
        f"{history.clock.unit} {batch} of {folder.root} cannot be read: the files have {history.clock.unit} {oldest} "
        f"to {newest}. Choose one of these. Later ones may be committed too, but only Spark knows: read them with "
        "open_committed (--checkpoint)."
        + (
            f" The query was rescaled after {history.clock.unit} {history.initial_batch}: earlier ones are in the "
            "folder that it was rescaled from, if that still exists (query_folder=…)."
            if history.initial_batch is not None and batch < history.initial_batch
            else ""
        )
    )


def _open_savepoint(folder: Folder, operator: str | None, batch: int | None, scratch: Scratch) -> OpenState:
    from spark_state_ext.savepoints.saved_rows import choose_operator

    manifest = read_manifest(folder)
    name = choose_operator(manifest, operator, folder.root)
    saved_batch = manifest.header.batch
    if batch is not None and batch != saved_batch:
        raise MissingCheckpointError(
            f"batch {batch} of the savepoint at {folder.root} cannot be read: it has only the state after batch "
            f"{saved_batch}"
        )
    operator_folder = folder.child(name)
    buckets = [bucket for bucket in manifest.buckets if bucket.operator == name]
    pointers, files = (
        {bucket.bucket: bucket.pointer for bucket in buckets},
        {bucket.bucket: bucket.files for bucket in buckets},
    )
    return open_pointers(
        operator_folder, manifest.header.operators[name], pointers, saved_batch, scratch=scratch, saved=files
    )
