"""What to do about a failure of a file system, as far as the failure tells."""

from __future__ import annotations

import errno
import re
from typing import Any

from spark_state_ext.worker.retry import causes_of, is_retriable, status_of

__all__ = ["advice_on", "extra_for"]

_MUST_BE = "A root must be a folder that every executor can make, write to and read"
_BUCKET = "The bucket or container of a root must exist: make it, or correct the root"
_RIGHTS = (
    "Give rights to list, read, write and delete there: by credentials in storage_options, or where the file system's "
    "library looks for them on each executor"
)
_RENEW = "renew the credentials and start again: no state is lost (docs/operating/credentials.md)"
_EXPIRED = f"The credentials have expired: {_RENEW}"
_MAYBE_EXPIRED = f"S3 answers so, without a reason, where temporary credentials have expired: if so, {_RENEW}"
_NETWORK = (
    "The store did not answer: see to the network, and to the endpoint and region in storage_options, then start the "
    "query again"
)
_OPTION = "Most likely storage_options has an option that this file system does not take"
_ELSE = "See that each executor can reach and use the root, then start the query again: no state is lost"
# How stores and their clients say that credentials were good once: codes of S3 and STS, Azure's sentences about a
# signature and about a token of Entra ID, Google's code and what its library says of a refresh token.
_SAID_EXPIRED = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|ACCESS_TOKEN_EXPIRED|AuthenticationExpired|invalid_grant"
    r"|Signature not valid in the specified time frame|Lifetime validation failed"
    r"|\b(token|credentials?|session|signature)\b[^\n]{0,80}\bexpired\b",
    re.IGNORECASE,
)
# In names of errors about credentials that have no status: botocore's, azure-identity's, google-auth's RefreshError.
_ABOUT_CREDENTIALS = ("Credential", "Refresh", "SSO", "Authentication")
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR})

# The extra of this package that brings a protocol's file system.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
}


def extra_for(root: str) -> str:
    """What to install so that a root can be opened, as the end of a sentence; empty if no extra brings it."""
    extra = _EXTRAS.get(root.partition("://")[0])
    return f": pip install 'spark_state_ext[{extra}]', on the client and where the workers run" if extra else ""


def advice_on(error: BaseException, local: bool) -> str:
    """A sentence that says what to do, without a full stop."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        # Some file systems hand on whatever they are given, and complain when they first connect.
        return _OPTION
    if local:
        return _MUST_BE if number in _REFUSED or isinstance(error, FileNotFoundError) else _ELSE
    # Clients of object stores have errors of their own, which this package must not import.
    status, names = status_of(error), " ".join(type(cause).__name__ for cause in causes_of(error))
    denied = isinstance(error, PermissionError) or status in (401, 403)
    denied = denied or any(word in names for word in _ABOUT_CREDENTIALS)
    if (denied or status == 400) and any(_SAID_EXPIRED.search(_said(cause)) for cause in causes_of(error)):
        return _EXPIRED
    if denied:
        return _RIGHTS
    if status == 400 and any(getattr(cause, "operation_name", "") == "HeadObject" for cause in causes_of(error)):
        return _MAYBE_EXPIRED
    if isinstance(error, FileNotFoundError):
        return _BUCKET
    if number in _REFUSED:
        return _MUST_BE
    return _NETWORK if is_retriable(error) else _ELSE


def _said(error: BaseException) -> str:
    """What an error says, with the code that the server gave."""
    code: Any = getattr(error, "error_code", None)  # azure-core
    return f"{code or ''} {error}"
