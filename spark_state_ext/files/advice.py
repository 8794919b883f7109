"""Advice on what a user can do about a failure of a file system."""

from __future__ import annotations

import errno
import re
from typing import Any

from spark_state_ext.worker.retry import find_http_status, is_retriable, iterate_causes

__all__ = ["advice_on", "extra_for"]

_MUST_BE = "A root must be a folder that every executor can create, write to and read"
_BUCKET = "The bucket or container of a root must exist: create it, or correct the root"
_RIGHTS = (
    "Grant the rights to list, read, write and delete there: put credentials into storage_options, or where the file "
    "system's library looks for them on each executor"
)
_RENEW = "renew the credentials and start again: no state is lost (docs/operating/credentials.md)"
_EXPIRED = f"The credentials have expired: {_RENEW}"
_MAYBE_EXPIRED = f"S3 answers like this, without a reason, if temporary credentials have expired: if so, {_RENEW}"
_NETWORK = (
    "The store did not answer: check the network, and the endpoint and region in storage_options, then start the "
    "query again"
)
_OPTION = "Most likely storage_options has an option that this file system does not take"
_ELSE = "Make sure that each executor can reach and use the root, then start the query again: no state is lost"
# How stores and their clients report expired credentials: codes of S3 and STS, Azure's sentences about a signature and
# about a token of Entra ID, Google's code and the message of its library about a refresh token.
_EXPIRED_PATTERN = re.compile(
    r"ExpiredToken|TokenRefreshRequired|RequestExpired|ACCESS_TOKEN_EXPIRED|AuthenticationExpired|invalid_grant"
    r"|Signature not valid in the specified time frame|Lifetime validation failed"
    r"|\b(token|credentials?|session|signature)\b[^\n]{0,80}\bexpired\b",
    re.IGNORECASE,
)
# Parts of the class names of credential errors without a status: of botocore, azure-identity and google-auth.
_ABOUT_CREDENTIALS = ("Credential", "Refresh", "SSO", "Authentication")
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR})

# The extra of this package that installs a protocol's file system.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "azure"),
}


def extra_for(root: str) -> str:
    """Return the end of a sentence that names the extra to install for a root; empty if no extra helps."""
    extra = _EXTRAS.get(root.partition("://")[0])
    return f": pip install 'spark_state_ext[{extra}]', on the client and where the workers run" if extra else ""


def advice_on(error: BaseException, local: bool) -> str:
    """Return a sentence that says what to do about an error, without a full stop."""
    error_number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        # Some file systems pass on all options unchecked, and complain only when they first connect.
        return _OPTION
    if local:
        return _MUST_BE if error_number in _REFUSED or isinstance(error, FileNotFoundError) else _ELSE
    # Clients of object stores have their own error classes, which this package must not import.
    status, names = find_http_status(error), " ".join(type(cause).__name__ for cause in iterate_causes(error))
    denied = isinstance(error, PermissionError) or status in (401, 403)
    denied = denied or any(word in names for word in _ABOUT_CREDENTIALS)
    if (denied or status == 400) and any(_EXPIRED_PATTERN.search(_text_of(cause)) for cause in iterate_causes(error)):
        return _EXPIRED
    if denied:
        return _RIGHTS
    if status == 400 and any(getattr(cause, "operation_name", "") == "HeadObject" for cause in iterate_causes(error)):
        return _MAYBE_EXPIRED
    if isinstance(error, FileNotFoundError):
        return _BUCKET
    if error_number in _REFUSED:
        return _MUST_BE
    return _NETWORK if is_retriable(error) else _ELSE


def _text_of(error: BaseException) -> str:
    """Return an error's message after the code that the server gave."""
    code: Any = getattr(error, "error_code", None)  # azure-core
    return f"{code or ''} {error}"
