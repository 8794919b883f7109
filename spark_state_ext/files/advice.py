"""What to do about a failure of a file system, as far as the failure tells."""

from __future__ import annotations

import errno

from spark_state_ext.worker.retry import is_retriable, status_of

__all__ = ["advice_on"]

_MUST_BE = "A root must be a folder that every executor can make, write to and read"
_BUCKET = "The bucket or container of a root must exist: make it, or correct the root"
_RIGHTS = (
    "Give rights to list, read, write and delete there: by credentials in storage_options, or where the file system's "
    "library looks for them on each executor"
)
_NETWORK = (
    "The store did not answer: see to the network, and to the endpoint and region in storage_options, then start the "
    "query again"
)
_OPTION = "Most likely storage_options has an option that this file system does not take"
_ELSE = "See that each executor can reach and use the root, then start the query again: no state is lost"
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR})


def advice_on(error: BaseException, local: bool) -> str:
    """A sentence that says what to do, without a full stop.

    Parameters
    ----------
    error
        What a file system raised.
    local
        It is one of this machine.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        # Some file systems hand on whatever they are given, and complain when they first connect.
        return _OPTION
    if local:
        return _MUST_BE if number in _REFUSED or isinstance(error, FileNotFoundError) else _ELSE
    # Clients of object stores have errors of their own, which this package must not import.
    if isinstance(error, PermissionError) or status_of(error) in (401, 403) or "Credential" in type(error).__name__:
        return _RIGHTS
    if isinstance(error, FileNotFoundError):
        return _BUCKET
    if number in _REFUSED:
        return _MUST_BE
    return _NETWORK if is_retriable(error) else _ELSE
