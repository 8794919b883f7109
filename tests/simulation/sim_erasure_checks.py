"""Invariants of a call of the simulated query, and of a state that Spark may hand out."""

from __future__ import annotations

from sim_asking import EraseUsers
from sim_erasure_parts import ErasedState, Task
from sim_parts import WrongStateError

from spark_state_ext.engine.erase_requests import HandledRequests

__all__ = ["check_removed_keys", "check_state", "check_mark", "check_requests_carried_out"]


def check_removed_keys(
    users: EraseUsers, task: Task, before: ErasedState, removed_keys: frozenset[int], handled: HandledRequests | None
) -> frozenset[str]:
    """Check that a call removed what its requests name; returns the ids of all requests that its state reflects."""
    requests, mark = users.requests, before.pointer.erased
    since = handled.since if handled is not None else mark
    start = since.through if since is not None else 0
    new_requests = [requests[n] for n in range(start + 1, (handled.through if handled is not None else start) + 1)]
    allowed = frozenset[int]().union(*(request.keys for request in new_requests))
    required = frozenset[int]().union(
        *(request.keys for request in new_requests if not request.withdrawn and not request.removed)
    )
    if not removed_keys <= allowed:
        raise WrongStateError(
            f"batch {task.batch} loses the keys {set(removed_keys - allowed)}, which no request names"
        )
    remaining = required & (before.rows.keys() - removed_keys)
    if remaining:
        raise WrongStateError(f"batch {task.batch} has the keys {set(remaining)} of requests that it carried out")
    return before.carried | {request.id for request in new_requests}


def check_requests_carried_out(users: EraseUsers, task: Task, before: ErasedState, carried: frozenset[str]) -> bool:
    """Check that a call carried out older requests; returns whether an unreadable request prevented that."""
    mark = before.pointer.erased
    last = users.requests.get(mark.through) if mark is not None else None
    if last is not None and last.damaged and not last.removed:
        # If the request of its mark cannot be read, a call cannot judge the others.
        return True
    known = mark is not None and last is not None and last.id == mark.id
    for _, request in sorted(users.requests.items()):
        # If the mark is of other requests, the call carries out all requests again, so it reads all of them.
        if request.damaged and not request.removed and not (known and request.id in carried):
            return True
        if request.id in carried:
            continue
        pending = request.keys and not request.withdrawn and not (request.removed and before.pointer.ref is None)
        if pending and request.made_at < task.began_at:
            raise WrongStateError(f"request {request.number} was made before batch {task.batch}, which skips it")
    return False


def check_mark(users: EraseUsers, state: ErasedState) -> None:
    """Check that a state's mark covers only requests of the folder that the state reflects."""
    mark = state.pointer.erased
    request = users.requests.get(mark.through) if mark is not None else None
    if mark is None or request is None or request.id != mark.id:
        return
    for number, covered in users.requests.items():
        if number <= mark.through and covered.keys and not covered.withdrawn and covered.id not in state.carried:
            raise WrongStateError(f"a mark covers request {number}, which bucket {state.pointer.bucket} skipped")


def check_state(users: EraseUsers, batch: int, state: ErasedState, done_numbers: set[int], just_done: int) -> None:
    """Check that a state that Spark may hand out has no key that counts as erased, and needs no removed request.

    Parameters
    ----------
    users
        The users and the folder.
    batch, state
        The state, and the batch after which it is handed out.
    done_numbers
        Numbers of the requests that are done according to records.
    just_done
        The number of the request whose record was just written; 0 for none.
    """
    unreadable = any(
        request.damaged and number not in users.records
        for number, request in users.requests.items()
        if number < just_done
    )
    for number, request in users.requests.items():
        if request.withdrawn:
            continue
        if request.removed and state.pointer.ref is not None and request.id not in state.carried:
            raise WrongStateError(
                f"request {number} was removed, but bucket {state.pointer.bucket} of batch {batch} needs it"
            )
        excused = state.late or (state.waits and not (unreadable and number == just_done))
        if number in done_numbers and not excused:
            remaining = [key for key in request.keys if state.rows.get(key, request.made_at) < request.made_at]
            if remaining:
                raise WrongStateError(f"request {number} is done, and batch {batch} has the keys {remaining}")
