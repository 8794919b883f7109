"""Open files: how many of them local stores may have, and what is said when the system gives no more.

A system gives a process so many open files (`ulimit -n`, often 1,024), and a store takes four. Everything else in a
worker needs some as well: connections of backends, files under way, what the user's function opens. So stores have
three quarters of the limit; of more, those used longest ago are closed, and opened again when they are wanted.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections import Counter
from pathlib import Path

from spark_state_ext.errors import TooManyOpenFilesError

__all__ = ["FILES_OF_A_STORE", "limit", "stores_max", "too_many", "used_up"]

# LMDB has its data open twice, for pages and for what must reach the disk at once, and its lock file; ours is the one
# by which we tell whether the data is still that at its path.
FILES_OF_A_STORE = 4
# With a high limit other things end first: each store also takes maps, of which Linux gives a process 65,530.
_STORES_MAX = 1024
# With fewer, threads that work side by side would close each other's all the time.
_STORES_MIN = 8
# A limit may be a thousand million; nobody has as many open.
_LOOKED_AT_MAX = 1 << 16
_UNLIMITED = 1 << 30


def limit() -> int:
    """How many files this process may have open: the soft limit, which is the one that counts."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def stores_max() -> int:
    """How many local stores this process may have open."""
    return max(_STORES_MIN, min(_STORES_MAX, limit() * 3 // 4 // FILES_OF_A_STORE))


def used_up(error: BaseException) -> bool:
    """Whether an error says that there are no more open files to be had, in this process or on the machine."""
    number = getattr(error, "errno", None)
    # LMDB's have no number.
    return number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in str(error)


def too_many(what: str) -> TooManyOpenFilesError:
    """The error for that, with the limit, and what holds the files."""
    most = limit()
    held = _held(min(most, _LOOKED_AT_MAX))
    stores = held.pop("of local stores", 0)
    told = [f"{stores} of {-(-stores // FILES_OF_A_STORE)} local stores"]
    told += [f"{count} {kind}" for kind, count in held.most_common()]
    return TooManyOpenFilesError(
        f"{what}: this worker process has too many open files. Its limit (ulimit -n) is {most}, and it has "
        f"{', '.join(told)} open. Raise the limit where executors are started, or have fewer buckets on each executor: "
        "more executors, or fewer buckets in a new query."
    )


def _held(upto: int) -> Counter[str]:
    """This process's open files by kind. It opens none, as there may be none to be had."""
    kinds: Counter[str] = Counter()
    for number in range(upto):
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
    except OSError:  # the system does not tell
        name = ""
    return "of local stores" if name in ("data.mdb", "lock.mdb") else "other files"
