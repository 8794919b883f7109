"""Opens the state exactly as of a batch whose pointers were read from Spark's checkpoint."""

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
from spark_state_ext.reading.reader_hold import ReaderHold
from spark_state_ext.reading.state import OpenState
from spark_state_ext.reading.state_folder import find_state
from spark_state_ext.reading.state_opener import open_pointers
from spark_state_ext.rescale.folders import first_folder

__all__ = ["ExactBatch", "QueryOfOperator", "open_exact"]


@dataclass(frozen=True)
class QueryOfOperator:
    """A query's operator, as read from Spark's checkpoint.

    Parameters
    ----------
    operator
        Name of the operator.
    query_folder
        Name of the query folder, as written in pointers.
    checkpoint_location
        The checkpoint that was read, for messages.
    """

    operator: str
    query_folder: str
    checkpoint_location: str


@dataclass(frozen=True)
class ExactBatch:
    """A committed batch and its pointers.

    Parameters
    ----------
    batch
        The batch's number.
    oldest, newest
        The oldest and the newest committed batch that Spark retains.
    pointers
        The pointer of each bucket.
    """

    batch: int
    oldest: int
    newest: int
    pointers: Mapping[int, Pointer]


def open_exact(
    path: str | os.PathLike[str],
    query: QueryOfOperator,
    read: Callable[[], ExactBatch],
    *,
    hold: bool = True,
    scratch: Scratch | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> OpenState:
    """Open the state of an operator as of a batch whose pointers are read from Spark."""
    state_folder = find_state(Folder(os.fspath(path), storage_options), query.operator, query.query_folder)
    if state_folder.operator is None:
        raise UsageError(
            f"{state_folder.folder.root} is a savepoint, which is always exact: open it with open_state, without the "
            "checkpointLocation"
        )
    if state_folder.folder.name != query.query_folder:
        raise UsageError(
            f"the checkpoint {query.checkpoint_location} belongs to the query with the folder {query.query_folder}, "
            f"not to {state_folder.folder.root}: give the root, or the checkpointLocation of that query"
        )
    reader_hold = ReaderHold(state_folder.folder) if hold else None
    try:
        exact = read()
        _refuse_incomplete(exact, query, state_folder.operator)
        return open_pointers(
            state_folder.folder,
            state_folder.operator,
            exact.pointers,
            exact.batch,
            retained=(exact.oldest, exact.newest),
            hold=reader_hold,
            scratch=scratch,
        )
    except BaseException:
        if reader_hold is not None:
            reader_hold.release()
        raise


def _refuse_incomplete(exact: ExactBatch, query: QueryOfOperator, operator: OperatorFile) -> None:
    """Raise if a bucket has no usable pointer; Spark calls every bucket in each batch with data, so each needs one."""
    where = f"batch {exact.batch} of {query.checkpoint_location}"
    if not exact.pointers:
        raise MissingCheckpointError(
            f"{where} has no state of operator {query.operator!r} yet: no earlier batch had data, or the state was "
            "imported and its first batch came later. Choose a later batch"
        )
    other_folders = {pointer.query_folder for pointer in exact.pointers.values()} - {query.query_folder}
    if any(first_folder(name) == first_folder(query.query_folder) for name in other_folders):
        raise MissingCheckpointError(
            f"the state of {where} is in {', '.join(sorted(other_folders))}, because the query was rescaled between "
            f"that batch and the batches in {query.query_folder}: read one of the two folders at a time, with batch=…"
        )
    if other_folders:
        raise CorruptFileError(
            f"{where} has pointers to {', '.join(sorted(other_folders))} and to {query.query_folder}, but a query has "
            "one folder. Check whether two queries wrote to this checkpoint"
        )
    if exact.pointers.keys() != set(range(operator.buckets)):
        raise CorruptFileError(
            f"{where} has pointers of {len(exact.pointers)} buckets, but operator {query.operator!r} has "
            f"{operator.buckets}: Spark's state is incomplete. Go back to an older batch, or start from a savepoint"
        )
    if any(pointer.schema_id > operator.schema_id for pointer in exact.pointers.values()):
        raise ChangedJobError(
            f"{where} has state with a newer schema than the operator file that was read before: the query "
            "restarted meanwhile. Open the state again"
        )
