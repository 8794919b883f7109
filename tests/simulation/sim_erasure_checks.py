"""What must hold of a call of the simulated query, and of a state that Spark may hand out."""

from __future__ import annotations

from sim_asking import Asking
from sim_erasure_parts import Kept, Task
from sim_parts import WrongStateError

from spark_state_ext.engine.erase_requests import HandledRequests

__all__ = ["carried_by", "check_kept", "check_mark", "waits"]


def carried_by(
    asking: Asking, task: Task, before: Kept, found: frozenset[int], dealt: HandledRequests | None
) -> frozenset[str]:
    """What a call took away is what the requests name that it has dealt with; gives what its state was without."""
    requests, mark = asking.requests, before.pointer.erased
    since = dealt.since if dealt is not None else mark
    start = since.through if since is not None else 0
    new = [requests[n] for n in range(start + 1, (dealt.through if dealt is not None else start) + 1)]
    may = frozenset[int]().union(*(it.keys for it in new))
    must = frozenset[int]().union(*(it.keys for it in new if not it.withdrawn and not it.dropped))
    if not found <= may:
        raise WrongStateError(f"batch {task.batch} loses the keys {set(found - may)}, which no request names")
    left = must & (before.rows.keys() - found)
    if left:
        raise WrongStateError(f"batch {task.batch} has the keys {set(left)} of requests that it dealt with")
    return before.carried | {it.id for it in new}


def waits(asking: Asking, task: Task, before: Kept, carried: frozenset[str]) -> bool:
    """What was asked before the batch began is carried out in it; whether one that cannot be read stops that."""
    mark = before.pointer.erased
    last = asking.requests.get(mark.through) if mark is not None else None
    if last is not None and last.spoilt and not last.dropped:
        # Without the id of its mark's, a call knows nothing of the others.
        return True
    known = mark is not None and last is not None and last.id == mark.id
    for _, asked in sorted(asking.requests.items()):
        # A mark of other requests tells nothing: all are carried out again, and so read.
        if asked.spoilt and not asked.dropped and not (known and asked.id in carried):
            return True
        if asked.id in carried:
            continue
        named = asked.keys and not asked.withdrawn and not (asked.dropped and before.pointer.ref is None)
        if named and asked.at < task.began:
            raise WrongStateError(f"request {asked.number} was made before batch {task.batch}, which passes it by")
    return False


def check_mark(asking: Asking, kept: Kept) -> None:
    """A mark covers no request of the folder that its state was not without once."""
    mark = kept.pointer.erased
    asked = asking.requests.get(mark.through) if mark is not None else None
    if mark is None or asked is None or asked.id != mark.id:
        return
    for number, it in asking.requests.items():
        if number <= mark.through and it.keys and not it.withdrawn and it.id not in kept.carried:
            raise WrongStateError(f"a mark covers request {number}, which bucket {kept.pointer.bucket} passed by")


def check_kept(asking: Asking, batch: int, kept: Kept, said: set[int], told: int) -> None:
    """A state that Spark may hand out has no key that is said to be erased, and needs no request that is gone.

    Parameters
    ----------
    asking
        The folder.
    batch, kept
        The state, and after which batch it is handed out.
    said
        Requests that are said to be done.
    told
        The one that is said to be done just now; 0: none.
    """
    unreadable = any(it.spoilt and n not in asking.records for n, it in asking.requests.items() if n < told)
    for number, asked in asking.requests.items():
        if asked.withdrawn:
            continue
        if asked.dropped and kept.pointer.ref is not None and asked.id not in kept.carried:
            raise WrongStateError(f"request {number} is gone, and bucket {kept.pointer.bucket} of {batch} needs it")
        excused = kept.late or (kept.waits and not (unreadable and number == told))
        if number in said and not excused:
            had = [key for key in asked.keys if kept.rows.get(key, asked.at) < asked.at]
            if had:
                raise WrongStateError(f"request {number} is done, and batch {batch} has the keys {had}")
