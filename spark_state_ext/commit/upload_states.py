"""How an upload stands, and what may become of it. No I/O and no clock: `uploads` has these.

::

    QUEUED ──BEGIN──▶ SENDING ──CONFIRM──▶ CONFIRMED
       │                 │ └─────FAIL────▶ FAILED
       │              GIVE_UP                 ▲
       │                 ▼                    │
       │            ABANDONED ──CONFIRM, FAIL─┘ (or CONFIRMED)
       └──GIVE_UP, DROP──▶ DROPPED
"""

from __future__ import annotations

import enum

__all__ = ["UploadEvent", "UploadState", "next_state"]


class UploadState(enum.Enum):
    """How an upload stands in its process."""

    QUEUED = "others of its bucket go before it"
    SENDING = "its backend has been asked to keep it"
    ABANDONED = "nobody waits for it any more, and its backend may still be at it"
    CONFIRMED = "its backend has it"
    FAILED = "its backend could not keep it"
    DROPPED = "it was not sent, as one before it failed or took too long"


class UploadEvent(enum.Enum):
    """What happens to an upload."""

    BEGIN = "it is the first of its queue"
    CONFIRM = "its backend says that it has it"
    FAIL = "its backend says that it could not keep it"
    GIVE_UP = "who waits for it has waited long enough"
    DROP = "one before it failed, or was given up"


_NEXT = {
    (UploadState.QUEUED, UploadEvent.BEGIN): UploadState.SENDING,
    (UploadState.QUEUED, UploadEvent.GIVE_UP): UploadState.DROPPED,
    (UploadState.QUEUED, UploadEvent.DROP): UploadState.DROPPED,
    (UploadState.SENDING, UploadEvent.CONFIRM): UploadState.CONFIRMED,
    (UploadState.SENDING, UploadEvent.FAIL): UploadState.FAILED,
    (UploadState.SENDING, UploadEvent.GIVE_UP): UploadState.ABANDONED,
    # Late, and noted all the same where the backend has it.
    (UploadState.ABANDONED, UploadEvent.CONFIRM): UploadState.CONFIRMED,
    (UploadState.ABANDONED, UploadEvent.FAIL): UploadState.FAILED,
}


def next_state(state: UploadState, event: UploadEvent) -> UploadState:
    """How an upload stands after an event.

    Parameters
    ----------
    state
        How it stands.
    event
        What happens.

    Raises
    ------
    AssertionError
        When that cannot happen to an upload that stands so.
    """
    found = _NEXT.get((state, event))
    if found is None:
        raise AssertionError(f"an upload that is {state.name} cannot {event.name}")
    return found
