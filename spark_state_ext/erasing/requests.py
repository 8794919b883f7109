"""Requests that keys are erased from a query's state, and reports whether that is done.

A request is a file in the query folder. The query carries it out in its next batch, and records when all buckets have
done so (`docs/design/007b-erasing.md`). So the query may be running or stopped, and Spark is not needed here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arrow_schemas.erase import EraseRequest
from spark_state_ext.erasing.query_folders import convert_keys, find_query_folders
from spark_state_ext.errors import CorruptFileError, MissingCheckpointError, UsageError, VersionSkewError
from spark_state_ext.files.erase_requests import EraseFolder
from spark_state_ext.rescale.folders import first_folder
from spark_state_ext.version import __version__

__all__ = ["AskedErasure", "EraseStatus", "erase_keys", "erase_status", "withdraw_erasure"]

# Each process of the query holds a request's keys in memory while it carries the request out.
KEYS_MAX = 1_000_000
WAITING, DONE, UNREADABLE = "waiting", "done", "unreadable"


@dataclass(frozen=True)
class AskedErasure:
    """A new erase request.

    Parameters
    ----------
    operator, query_folder
        The operator and query folder that have the keys.
    number
        Number of the request in the query folder.
    keys
        Number of keys in the request.
    """

    operator: str
    query_folder: str
    number: int
    keys: int


@dataclass(frozen=True)
class EraseStatus:
    """The status of an erase request.

    Parameters
    ----------
    operator, query_folder, number
        Operator, query folder and number of the request.
    keys
        Number of keys in the request; 0 if it is unreadable.
    asked_ms
        When the request was made, milliseconds since 1970; 0 if it is unreadable.
    state
        ``"waiting"``; or ``"done"``: the committed state of every bucket is without these keys, except for rows that
        came later; or ``"unreadable"``: the file is damaged, or a newer release wrote it. An unreadable request and all
        later ones wait until you withdraw it (`withdraw_erasure`).
    done_ms
        When the request was found to be done; None: it is not done.
    batch
        The batch that found this; None: it is not done.
    kept
        True if the request, which has the keys, still exists. It is kept while Spark may go back to a batch before it.
    """

    operator: str
    query_folder: str
    number: int
    keys: int
    asked_ms: int
    state: str
    done_ms: int | None
    batch: int | None
    kept: bool


def erase_keys(
    root: str,
    keys: Any,
    *,
    operator: str = "state",
    query_folder: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[AskedErasure]:
    """Request that an operator's state and timeouts of some keys are erased.

    The query erases them in its next batch, before your function runs; a stopped query does so when it is started
    again. Rows of an erased key that come in that batch or later start a new state. Older files have the keys for
    longer (`docs/operating/erasing.md`).

    Parameters
    ----------
    root, operator, storage_options
        As given to `ArrowState`. Each step of a chain is a separate operator with its own keys.
    keys
        A table with the operator's key columns (PyArrow, pandas, polars, or a dict of lists), or, if there is one key
        column, a list of its values. At most a million keys.
    query_folder
        Name of the query folder. By default the request goes to all query folders of the operator; for a rescaled
        query, to the folder in force, whose requests the query copies when it continues in another folder.

    Returns
    -------
    list of AskedErasure
        One request for each query folder.

    Raises
    ------
    StateValueError
        If the keys do not fit the operator's key columns.
    UsageError
        If there is no such operator, no key, or more than a million keys.
    StorageError
        If a request could not be written. Requests in other folders may have been written; repeat the call, which does
        no harm.

    Examples
    --------
    >>> erase_keys("/state", ["Jane Doe"], operator="count")  # doctest: +SKIP
    [AskedErasure(operator='count', query_folder='6f1d…', number=1, keys=1)]
    """
    folders = find_query_folders(root, operator, query_folder, storage_options)
    if query_folder is not None:
        in_force = [folder.name for folder in find_query_folders(root, operator, None, storage_options)]
        if query_folder not in in_force:
            raise UsageError(
                f"{folders[0].files.root} belongs to a query that was rescaled and no longer uses that folder, so the "
                f"request would wait forever: omit query_folder, or name {', '.join(in_force[:5])}"
            )
    requested: list[AskedErasure] = []
    # One id for all folders of a query, so that a request is not carried out again where the query continues.
    ids: dict[str, str] = {}
    while folders:
        # The keys are checked for all folders before the first request is written.
        batches = [convert_keys(keys, folder.schema, "erase_keys()") for folder in folders]
        if any(batch.num_rows > KEYS_MAX for batch in batches):
            raise UsageError(f"erase_keys() was given more than {KEYS_MAX:,} keys: request them in several calls")
        for folder, batch in zip(folders, batches, strict=True):
            request_id = ids.setdefault(first_folder(folder.name), uuid.uuid4().hex)
            request = EraseRequest(request_id, operator, int(time.time() * 1000), batch, __version__)
            number = EraseFolder(folder.files).add(request)
            requested.append(AskedErasure(operator, folder.name, number, batch.num_rows))
        # A query that was rescaled meanwhile may have copied its requests before this one was written.
        names, queries = (
            {erasure.query_folder for erasure in requested},
            {first_folder(erasure.query_folder) for erasure in requested},
        )
        in_force_now = find_query_folders(root, operator, None, storage_options)
        folders = [
            folder for folder in in_force_now if folder.name not in names and first_folder(folder.name) in queries
        ]
    return requested


def erase_status(
    root: str,
    *,
    operator: str = "state",
    query_folder: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[EraseStatus]:
    """Return the status of an operator's erase requests.

    Parameters
    ----------
    root, operator, query_folder, storage_options
        As for `erase_keys`.

    Returns
    -------
    list of EraseStatus
        One status for each request, ordered by query folder and number.

    Raises
    ------
    UsageError
        If there is no such operator.
    CorruptFileError, VersionSkewError
        If an operator file cannot be read.
    StorageError
        If the storage fails.

    Examples
    --------
    >>> all(request.state == "done" for request in erase_status("/state", operator="count"))  # doctest: +SKIP
    True
    """
    statuses = []
    for folder in find_query_folders(root, operator, query_folder, storage_options):
        requests = EraseFolder(folder.files)
        numbers = requests.numbers()
        for number in sorted(numbers.requests | numbers.done):
            status = _read_status(requests, number, operator, folder.name, number in numbers.requests)
            if status is not None:
                statuses.append(status)
    return statuses


def withdraw_erasure(
    root: str,
    number: int,
    *,
    operator: str = "state",
    query_folder: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Remove all keys from an erase request that is unreadable, missing or a mistake.

    The request itself stays without keys, because later requests wait for its number. Keys that a bucket has already
    erased stay erased.

    Parameters
    ----------
    root, operator, storage_options
        As for `erase_keys`.
    number
        The request's number, from `erase_status`.
    query_folder
        Name of the query folder; needed if the operator has several.

    Raises
    ------
    UsageError
        If there is no such operator or number, or the operator has several query folders.
    VersionSkewError
        If a newer release wrote the request: withdraw it with that release.
    StorageError
        If the request could not be written.

    Examples
    --------
    >>> withdraw_erasure("/state", 3, operator="count")  # doctest: +SKIP
    """
    folders = find_query_folders(root, operator, query_folder, storage_options)
    if len(folders) > 1:
        raise UsageError(
            f"operator {operator!r} has {len(folders)} query folders below {root}: name one with query_folder "
            f"({', '.join(folder.name for folder in folders[:5])})"
        )
    requests = EraseFolder(folders[0].files)
    numbers = requests.numbers()
    last = max(numbers.requests | numbers.done, default=0)
    if type(number) is not int or not 0 < number <= last:
        raise UsageError(f"{folders[0].files.root} has no erase request {number!r} to withdraw")
    fields = [field.with_nullable(True).remove_metadata() for field in folders[0].schema.keys]
    no_keys = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in fields], schema=pa.schema(fields))
    empty_request = EraseRequest(uuid.uuid4().hex, operator, int(time.time() * 1000), no_keys, __version__)
    requests.withdraw(number, empty_request)


def _read_status(
    requests: EraseFolder, number: int, operator: str, query_folder: str, listed: bool
) -> EraseStatus | None:
    """Return a request's status; None if it disappeared meanwhile: its record was withdrawn and will be rewritten."""
    try:
        record = requests.done(number)
        request = requests.request(number) if listed else None
    except MissingCheckpointError:
        return None
    except (CorruptFileError, VersionSkewError):
        return EraseStatus(operator, query_folder, number, 0, 0, UNREADABLE, None, None, listed)
    # A done record with another id belongs to an earlier request of that number.
    if record is not None and (request is None or request.id == record.id):
        return EraseStatus(
            operator,
            query_folder,
            number,
            record.keys,
            record.asked_ms,
            DONE,
            record.done_ms,
            record.batch,
            listed,
        )
    if request is None:
        return None
    return EraseStatus(
        operator, query_folder, number, request.keys.num_rows, request.asked_ms, WAITING, None, None, True
    )
