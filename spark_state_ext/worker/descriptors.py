"""Open files: how many of them local stores may use, and the error when the limit is reached.

The system limits the open files of a process (`ulimit -n`, often 1,024), and a store takes four. Other code in a worker
needs some as well: connections of backends, files being written, the user's function. So stores may use three quarters
of the limit; above that, stores unused for longest are closed, and opened again when needed.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections import Counter
from pathlib import Path

from spark_state_ext.errors import TooManyOpenFilesError

__all__ = ["FILES_OF_A_STORE", "open_files_max", "stores_max", "make_too_many_error", "is_limit_reached"]

# LMDB opens its data file twice (for pages, and for synchronous writes) and its lock file; we open the data file once
# more, to see whether it is still the file at its path.
FILES_OF_A_STORE = 4
# With a high limit another one is reached first: each store also takes maps, of which Linux allows a process 65,530.
_STORES_MAX = 1024
# With fewer stores, parallel threads would close each other's stores all the time.
_STORES_MIN = 8
# Highest descriptor that is examined: the limit may be a thousand million, which would take too long.
_EXAMINED_MAX = 1 << 16
_UNLIMITED = 1 << 30


def open_files_max() -> int:
    """Return how many files this process may have open: the soft limit, which is the one in force."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def stores_max() -> int:
    """Return how many local stores this process may have open."""
    return max(_STORES_MIN, min(_STORES_MAX, open_files_max() * 3 // 4 // FILES_OF_A_STORE))


def is_limit_reached(error: BaseException) -> bool:
    """True if an error says that the process or the machine has reached its limit of open files."""
    number = getattr(error, "errno", None)
    # LMDB's errors have no error number, so compare the text.
    return number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in str(error)


def make_too_many_error(what: str) -> TooManyOpenFilesError:
    """Return the error for too many open files, with the limit and the kinds of open files."""
    files_max = open_files_max()
    counts = _count_open_files(min(files_max, _EXAMINED_MAX))
    stores = counts.pop("of local stores", 0)
    texts = [f"{stores} of {-(-stores // FILES_OF_A_STORE)} local stores"]
    texts += [f"{count} {kind}" for kind, count in counts.most_common()]
    return TooManyOpenFilesError(
        f"{what}: this worker process has too many open files. Its limit (ulimit -n) is {files_max}, and it has "
        f"{', '.join(texts)} open. Raise the limit where executors are started, or have fewer buckets on each "
        "executor: use more executors, or fewer buckets in a new query."
    )


def _count_open_files(end: int) -> Counter[str]:
    """Count this process's open files by kind, without opening a file, because that might fail."""
    kinds: Counter[str] = Counter()
    for number in range(end):
        try:
            mode = os.fstat(number).st_mode
        except OSError:  # not open
            continue
        kinds[_kind(number, mode)] += 1
    return kinds


def _kind(number: int, mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return "sockets"
    if stat.S_ISFIFO(mode):
        return "pipes"
    try:
        name = Path(os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)")).name
    except OSError:  # the system does not say
        name = ""
    return "of local stores" if name in ("data.mdb", "lock.mdb") else "other files"
