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

from spark_state_ext.worker.states import Transitions

__all__ = ["UPLOAD", "UploadEvent", "UploadState"]


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


UPLOAD = Transitions(
    "an upload",
    "cannot",
    {
        (UploadState.QUEUED, UploadEvent.BEGIN): UploadState.SENDING,
        (UploadState.QUEUED, UploadEvent.GIVE_UP): UploadState.DROPPED,
        (UploadState.QUEUED, UploadEvent.DROP): UploadState.DROPPED,
        (UploadState.SENDING, UploadEvent.CONFIRM): UploadState.CONFIRMED,
        (UploadState.SENDING, UploadEvent.FAIL): UploadState.FAILED,
        (UploadState.SENDING, UploadEvent.GIVE_UP): UploadState.ABANDONED,
        # Late, and noted all the same where the backend has it.
        (UploadState.ABANDONED, UploadEvent.CONFIRM): UploadState.CONFIRMED,
        (UploadState.ABANDONED, UploadEvent.FAIL): UploadState.FAILED,
    },
)
