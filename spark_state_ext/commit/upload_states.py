"""The states of an upload and the events between them. No I/O and no clock: these are in `uploads`.

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

from spark_state_ext.worker.state_machine import Transitions

__all__ = ["UPLOAD", "UploadEvent", "UploadState"]


class UploadState(enum.Enum):
    """The state of an upload in its process."""

    QUEUED = "it waits for earlier uploads of its bucket"
    SENDING = "it was handed to its backend"
    ABANDONED = "the commit no longer waits for it, but its backend may still be working"
    CONFIRMED = "its backend has the file"
    FAILED = "its backend could not store the file"
    DROPPED = "it was not sent, because it or an earlier upload took too long, or an earlier one failed"


class UploadEvent(enum.Enum):
    """An event of an upload."""

    BEGIN = "it is the first of its queue"
    CONFIRM = "its backend has confirmed the file"
    FAIL = "its backend reported an error"
    GIVE_UP = "the commit has waited long enough"
    DROP = "an earlier upload failed or was given up"


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
        # Late, but still noted.
        (UploadState.ABANDONED, UploadEvent.CONFIRM): UploadState.CONFIRMED,
        (UploadState.ABANDONED, UploadEvent.FAIL): UploadState.FAILED,
    },
)
