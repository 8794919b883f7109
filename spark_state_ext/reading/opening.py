"""`open_state`: from a path to the state of an operator as of one batch."""

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
from spark_state_ext.reading.committed import BATCH, Timeline, may_be_renamed, timeline
from spark_state_ext.reading.finding import find_state
from spark_state_ext.reading.holding import ReaderHold
from spark_state_ext.reading.loading import pointer_to
from spark_state_ext.reading.state import AsOf, OpenState, StateFiles
from spark_state_ext.rescale.parents import origins_in
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.timeline.records import epochs_of

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
    """Open the state of an operator for reading: without Spark, without the job, and without its code.

    The job may run meanwhile. What is read is the state after a batch that is committed for certain, of all buckets
    after the same one. Files tell of a batch only once a later one has changed the bucket, so that is mostly the last
    batch but one; a bucket that did not change for long holds the others back (see ``unproven``). `open_committed` has
    Spark say what is committed, and reads the last batch exactly.

    Parameters
    ----------
    path
        A root, as `ArrowState` has it; a query folder, ``<root>/<operator>/<query folder>``; or a savepoint.
    operator
        Name of the operator, where there are several.
    batch
        After which batch; by default the newest that files tell of.
    query_folder
        Name of the query folder, where the operator has several; by default the one that was written last.
    unproven
        Read also what files do not prove to be committed: the state after the last batch but one that any bucket has a
        file of. A bucket's newest file may then be of an attempt that failed, and what it changed last may not be in a
        file yet. The state that is read may be that of no single batch.
    hold
        Keep the query's clean-up away from the files while the state is open; that writes a small file to the query
        folder.
    memory_map
        Map files that lie on a local disk. False where that disk may go away, as network disks do: then the process
        would end where it now gets an error.
    local_dir
        Local folder for copies of large files that lie elsewhere; by default as for `ArrowState`.
    storage_options
        Options for the path's fsspec file system.

    Returns
    -------
    OpenState
        To be closed, as a context manager does.

    Raises
    ------
    UsageError
        When there is no state at the path, or several, and none is named.
    MissingCheckpointError
        When nothing is known to be committed, or the files do not reach to the batch; it names those that can be read.
    CannotHoldError
        When no hold can be written, as on a root that may only be read: open with ``hold=False``.
    CorruptFileError, VersionSkewError, StorageError
        When a file cannot be read.

    Examples
    --------
    >>> from spark_state_ext import open_state
    >>> with open_state("/state", operator="clicks") as state:  # doctest: +SKIP
    ...     print(state.batch, state.get("ada").to_pylist())
    41 [{'user': 'ada', 'clicks': 7, 'timeout_ms': None}]
    """
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int)):
        raise UsageError(f"batch must be the number of a batch, not {batch!r}")
    found = find_state(Folder(os.fspath(path), storage_options), operator, query_folder)
    scratch = Scratch(local_dir, memory_map)
    if found.operator is None:
        return _savepoint(found.folder, operator, batch, scratch)
    # Before anything is listed: what is there from then on stays.
    held = ReaderHold(found.folder) if hold else None
    try:
        return _query_folder(found.folder, found.operator, batch, unproven, held, scratch)
    except BaseException:
        if held is not None:
            held.release()
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
    """Open the state at pointers that Spark has told, with what is inline in them."""
    none = Pointer(operator.operator, 0, operator.buckets, operator.schema_id, batch, None)
    whole = {bucket: pointers.get(bucket, replace(none, bucket=bucket)) for bucket in range(operator.buckets)}
    oldest, newest = retained or (batch, batch)
    as_of = AsOf(batch, BATCH, newest, lambda: oldest, newest)
    return OpenState(StateFiles(query_folder, operator, whole, saved=saved or {}), as_of, hold, scratch or Scratch())


def _query_folder(
    folder: Folder,
    operator: OperatorFile,
    batch: int | None,
    unproven: bool,
    hold: ReaderHold | None,
    scratch: Scratch,
) -> OpenState:
    listed = [BucketFiles.listed(folder, bucket) for bucket in range(operator.buckets)]
    found = timeline(
        listed, folder.name, epochs_of(folder), origins_in(folder, operator.bucket_map), may_be_renamed(folder)
    )
    newest = found.newest(unproven)
    begun = found.since if found.begun is None else found.begun
    if newest is None or begun is None:
        raise MissingCheckpointError(_nothing(folder, found, unproven))
    wanted = newest if batch is None else batch
    if wanted > newest:
        raise _unreadable(folder, found, wanted, newest)
    try:
        refs = found.state_at(wanted, unproven)
        pointers = {
            line.files.bucket: pointer_to(line.files, refs[line.files.bucket], operator, line.origin)
            for line in found.lines
        }
        if batch is not None and wanted < found.oldest():
            raise _unreadable(folder, found, wanted, newest)
    except MissingCheckpointError as error:
        if batch is None:
            raise
        raise _unreadable(folder, found, wanted, newest) from error
    as_of = AsOf(wanted, found.clock.unit, newest, found.oldest, begun, not unproven)
    files = StateFiles(folder, operator, pointers, {it.bucket: it for it in listed})
    return OpenState(files, as_of, hold, scratch)


def _nothing(folder: Folder, found: Timeline, unproven: bool) -> str:
    if found.begun is None:
        return f"there is no checkpoint file in {folder.root}: no batch has changed the state, or none was uploaded yet"
    return (
        f"the files in {folder.root} do not prove that a batch is committed: they tell that of a bucket once a later "
        f"batch has changed it, and a bucket with one file holds the others back. The newest that has left a file is "
        f"{found.clock.unit} {found.begun}. Wait for a batch that changes every bucket, or have Spark say what is "
        # Unproven is the batch before the newest one: of a first batch there is none.
        f"committed, with open_committed (--checkpoint){'' if unproven else ', or read with unproven=True'}"
    )


def _unreadable(folder: Folder, found: Timeline, wanted: int, newest: int) -> MissingCheckpointError:
    try:
        oldest: object = found.oldest()
    except StateError as error:
        oldest = f"one that is not known ({error})"
    return MissingCheckpointError(
        f"{found.clock.unit} {wanted} of {folder.root} cannot be read: the files tell of {found.clock.unit} {oldest} "
        f"to {newest}. Choose one of these; later ones may be committed already, which only Spark knows: "
        "open_committed (--checkpoint) asks it."
        + (
            f" The query was rescaled after {found.clock.unit} {found.since}: those before are in the folder that it "
            "was rescaled from, as long as that is there (query_folder=…)."
            if found.since is not None and wanted < found.since
            else ""
        )
    )


def _savepoint(folder: Folder, operator: str | None, batch: int | None, scratch: Scratch) -> OpenState:
    from spark_state_ext.savepoints.reading import operator_named

    manifest = read_manifest(folder)
    name = operator_named(manifest, operator, folder.root)
    saved = manifest.header.batch
    if batch is not None and batch != saved:
        raise MissingCheckpointError(
            f"batch {batch} of the savepoint at {folder.root} cannot be read: it has the state after batch {saved} only"
        )
    here = folder.child(name)
    buckets = [it for it in manifest.buckets if it.operator == name]
    pointers, files = {it.bucket: it.pointer for it in buckets}, {it.bucket: it.files for it in buckets}
    return open_pointers(here, manifest.header.operators[name], pointers, saved, scratch=scratch, saved=files)
