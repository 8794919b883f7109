"""State exactly as of a batch whose pointers Spark told: files say where it lies, and Spark what of it is committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from arrow_schemas.operator import OperatorFile
from arrow_schemas.pointer import Pointer
from spark_state_ext.errors import ChangedJobError, CorruptFileError, MissingCheckpointError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.bodies import Scratch
from spark_state_ext.reading.finding import find_state
from spark_state_ext.reading.holding import ReaderHold
from spark_state_ext.reading.opening import open_pointers
from spark_state_ext.reading.state import OpenState
from spark_state_ext.rescale.folders import first_folder

__all__ = ["ExactBatch", "Told", "open_exact"]


@dataclass(frozen=True)
class Told:
    """What Spark told of an operator's query.

    Parameters
    ----------
    operator
        Name of the operator.
    query_folder
        Name of the query folder, as pointers have it.
    checkpoint_location
        Where Spark read it, for messages.
    """

    operator: str
    query_folder: str
    checkpoint_location: str


@dataclass(frozen=True)
class ExactBatch:
    """A committed batch, and the pointers that it made.

    Parameters
    ----------
    batch
        Its number.
    oldest, newest
        The committed batches that Spark retains.
    pointers
        By bucket.
    """

    batch: int
    oldest: int
    newest: int
    pointers: Mapping[int, Pointer]


def open_exact(
    path: str | os.PathLike[str],
    told: Told,
    read: Callable[[], ExactBatch],
    *,
    hold: bool = True,
    scratch: Scratch | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> OpenState:
    """Open the state of an operator as of a batch whose pointers are read from Spark."""
    found = find_state(Folder(os.fspath(path), storage_options), told.operator, told.query_folder)
    if found.operator is None:
        raise UsageError(
            f"{found.folder.root} is a savepoint, which is exact by itself: open it with open_state, without the "
            "checkpointLocation"
        )
    if found.folder.name != told.query_folder:
        raise UsageError(
            f"the checkpoint {told.checkpoint_location} is of the query with the folder {told.query_folder}, not of "
            f"{found.folder.root}: give the root, or the checkpointLocation of that query"
        )
    held = ReaderHold(found.folder) if hold else None
    try:
        exact = read()
        _refuse_incomplete(exact, told, found.operator)
        return open_pointers(
            found.folder,
            found.operator,
            exact.pointers,
            exact.batch,
            retained=(exact.oldest, exact.newest),
            hold=held,
            scratch=scratch,
        )
    except BaseException:
        if held is not None:
            held.release()
        raise


def _refuse_incomplete(exact: ExactBatch, told: Told, operator: OperatorFile) -> None:
    """In a batch with data Spark calls every bucket. So all have a pointer from then on, or something is wrong."""
    where = f"batch {exact.batch} of {told.checkpoint_location}"
    if not exact.pointers:
        raise MissingCheckpointError(
            f"{where} has no state of operator {told.operator!r} yet: no batch with data came before it, or the state "
            "was imported and its first batch came later. Choose a later batch"
        )
    other = {it.query_folder for it in exact.pointers.values()} - {told.query_folder}
    if any(first_folder(name) == first_folder(told.query_folder) for name in other):
        raise MissingCheckpointError(
            f"{where} has its state in {', '.join(sorted(other))}, as the query was rescaled between that batch and "
            f"those in {told.query_folder}: read one of the two at a time, with batch=…"
        )
    if other:
        raise CorruptFileError(
            f"{where} has pointers to {', '.join(sorted(other))} beside those to {told.query_folder}: a query has one "
            "folder. Look whether two queries wrote to this checkpoint"
        )
    if exact.pointers.keys() != set(range(operator.buckets)):
        raise CorruptFileError(
            f"{where} has pointers of {len(exact.pointers)} buckets, and operator {told.operator!r} has "
            f"{operator.buckets}: Spark's state is incomplete. Go back to an older batch, or start from a savepoint"
        )
    if any(it.schema_id > operator.schema_id for it in exact.pointers.values()):
        raise ChangedJobError(
            f"{where} has state of a wider schema than the operator file that was read before: the query began again "
            "meanwhile. Open it again"
        )
