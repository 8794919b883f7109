"""Asking for keys to be erased from a query's state, and whether that is done.

Whoever asks writes a file into the query folder; the query carries it out in its next batch, and says when every bucket
has (`docs/design/007b-erasing.md`). So the query may run or be stopped, and Spark is not needed here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from arrow_schemas.erase import EraseRequest
from spark_state_ext.erasing.folders import keys_as_stored, query_folders_below
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
    """An erase request that was made.

    Parameters
    ----------
    operator, query_folder
        Whose keys.
    number
        Its number there.
    keys
        How many keys it names.
    """

    operator: str
    query_folder: str
    number: int
    keys: int


@dataclass(frozen=True)
class EraseStatus:
    """What has become of an erase request.

    Parameters
    ----------
    operator, query_folder, number
        Which one.
    keys
        How many keys it names; 0 where that cannot be read.
    asked_ms
        When it was made, milliseconds since 1970; 0 where that cannot be read.
    state
        ``"waiting"``; or ``"done"``: the committed state of every bucket is without these keys, but for rows that came
        since; or ``"unreadable"``: the file is damaged, or a newer release wrote it. It waits, and so do those after
        it, until you withdraw it (`withdraw_erasure`).
    done_ms
        When it was known to be done; None: it is not.
    batch
        The batch that told; None: it is not done.
    kept
        Whether the request, which holds the keys, is there still. It stays as long as Spark may go back to a batch from
        before it.
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
    """Ask for keys to be erased from an operator's state: state and timeout of each.

    The query carries it out in its next batch, before your function runs; a stopped query does once it is started
    again. Rows of such a key that come in that batch or later begin its state anew. Older files hold the keys for
    longer (`docs/operating/erasing.md`).

    Parameters
    ----------
    root, operator, storage_options
        As `ArrowState` has them. Each step of a chain is an operator of its own, and has keys of its own.
    keys
        A table with the operator's key columns (PyArrow, pandas, polars, or a dict of lists); where there is one key
        column, a list of its values will do. At most a million keys.
    query_folder
        Name of the query folder. By default all that the operator has are asked; of a rescaled query the one in force,
        whose requests the query takes along when it goes on in another one.

    Returns
    -------
    list of AskedErasure
        One for each query folder.

    Raises
    ------
    StateValueError
        When the keys are not the operator's.
    UsageError
        When there is no such operator, no key, or more than a million.
    StorageError
        When a request could not be written. Those of other folders may have been; asking again does no harm.

    Examples
    --------
    >>> erase_keys("/state", ["Jane Doe"], operator="count")  # doctest: +SKIP
    [AskedErasure(operator='count', query_folder='6f1d…', number=1, keys=1)]
    """
    folders = query_folders_below(root, operator, query_folder, storage_options)
    if query_folder is not None:
        in_force = [it.name for it in query_folders_below(root, operator, None, storage_options)]
        if query_folder not in in_force:
            raise UsageError(
                f"{folders[0].files.root} is a folder of a query that was rescaled, and the query does not go on "
                f"there, so the request would wait for ever: leave out query_folder, or name {', '.join(in_force[:5])}"
            )
    made: list[AskedErasure] = []
    while folders:
        # All are looked at before the first one is asked.
        asked = [keys_as_stored(keys, folder.schema, "erase_keys()") for folder in folders]
        if any(it.num_rows > KEYS_MAX for it in asked):
            raise UsageError(f"erase_keys() was given more than {KEYS_MAX:,} keys: ask for them in several calls")
        for folder, batch in zip(folders, asked, strict=True):
            request = EraseRequest(uuid.uuid4().hex, operator, int(time.time() * 1000), batch, __version__)
            number = EraseFolder(folder.files).add(request)
            made.append(AskedErasure(operator, folder.name, number, batch.num_rows))
        # A query that was rescaled meanwhile may have looked for requests to take along before this one was there.
        names, queries = {it.query_folder for it in made}, {first_folder(it.query_folder) for it in made}
        now = query_folders_below(root, operator, None, storage_options)
        folders = [it for it in now if it.name not in names and first_folder(it.name) in queries]
    return made


def erase_status(
    root: str,
    *,
    operator: str = "state",
    query_folder: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[EraseStatus]:
    """What has become of an operator's erase requests.

    Parameters
    ----------
    root, operator, query_folder, storage_options
        As for `erase_keys`.

    Returns
    -------
    list of EraseStatus
        By query folder and number.

    Raises
    ------
    UsageError
        When there is no such operator.
    CorruptFileError, VersionSkewError
        When an operator file cannot be read.
    StorageError
        When the store fails.

    Examples
    --------
    >>> all(it.state == "done" for it in erase_status("/state", operator="count"))  # doctest: +SKIP
    True
    """
    found = []
    for folder in query_folders_below(root, operator, query_folder, storage_options):
        requests = EraseFolder(folder.files)
        numbers = requests.numbers()
        for number in sorted(numbers.requests | numbers.done):
            status = _status(requests, number, operator, folder.name, number in numbers.requests)
            if status is not None:
                found.append(status)
    return found


def withdraw_erasure(
    root: str,
    number: int,
    *,
    operator: str = "state",
    query_folder: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Have an erase request name no key any more: one that cannot be read, is missing, or was a mistake.

    Its file stays, without keys, as those after it wait for its number. Buckets that have carried it out already stay
    without the keys.

    Parameters
    ----------
    root, operator, storage_options
        As for `erase_keys`.
    number
        The request's number, as `erase_status` gives it.
    query_folder
        Name of the query folder; needed where the operator has several.

    Raises
    ------
    UsageError
        When there is no such operator or number, or the operator has several query folders.
    VersionSkewError
        When a newer release wrote the request: let that release withdraw it.
    StorageError
        When it could not be written.

    Examples
    --------
    >>> withdraw_erasure("/state", 3, operator="count")  # doctest: +SKIP
    """
    folders = query_folders_below(root, operator, query_folder, storage_options)
    if len(folders) > 1:
        raise UsageError(
            f"operator {operator!r} has {len(folders)} query folders below {root}: name one with query_folder "
            f"({', '.join(it.name for it in folders[:5])})"
        )
    requests = EraseFolder(folders[0].files)
    numbers = requests.numbers()
    last = max(numbers.requests | numbers.done, default=0)
    if type(number) is not int or not 0 < number <= last:
        raise UsageError(f"{folders[0].files.root} has no erase request {number!r} that could be withdrawn")
    fields = [field.with_nullable(True).remove_metadata() for field in folders[0].schema.keys]
    none = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in fields], schema=pa.schema(fields))
    nothing = EraseRequest(uuid.uuid4().hex, operator, int(time.time() * 1000), none, __version__)
    requests.withdraw(number, nothing)


def _status(requests: EraseFolder, number: int, operator: str, query_folder: str, listed: bool) -> EraseStatus | None:
    """None for one that went away meanwhile: its record was taken back, and comes again."""
    try:
        done = requests.done(number)
        request = requests.request(number) if listed else None
    except MissingCheckpointError:
        return None
    except (CorruptFileError, VersionSkewError):
        return EraseStatus(operator, query_folder, number, 0, 0, UNREADABLE, None, None, listed)
    # A record of another request of that number says nothing of this one.
    if done is not None and (request is None or request.id == done.id):
        return EraseStatus(
            operator, query_folder, number, done.keys, done.asked_ms, DONE, done.done_ms, done.batch, listed
        )
    if request is None:
        return None
    return EraseStatus(
        operator, query_folder, number, request.keys.num_rows, request.asked_ms, WAITING, None, None, True
    )
