"""How a process stands to a lease, and how a request about it stands. No I/O and no clock: `lease` has these."""

from __future__ import annotations

import enum

from spark_state_ext.worker.states import Transitions

__all__ = ["LEASE", "REQUEST", "LeaseEvent", "LeaseState", "RequestEvent", "RequestState"]


class LeaseState(enum.Enum):
    """How a process stands to the lease of its run."""

    NEW = "it has not asked yet"
    NEW_ASIDE = "it has not asked yet, and works for another run on the same folder by now"
    HELD = "its run holds the lease, as far as it knows"
    HELD_ASIDE = "the same, and it works for another run by now: it does not renew it any more"
    LOST = "another run has it"

    @property
    def asked(self) -> bool:
        """Whether the process has asked for it."""
        return self not in (LeaseState.NEW, LeaseState.NEW_ASIDE)


class LeaseEvent(enum.Enum):
    """What a process finds out about the lease of its run."""

    KNOWN = "the newest record is its run's: it has taken or renewed it, or another process of the run has"
    SET_ASIDE = "it works for another run on the same folder from now on"
    SUPERSEDED = "the newest record is another run's"


LEASE = Transitions(
    "a lease",
    "cannot be",
    {
        (LeaseState.NEW, LeaseEvent.KNOWN): LeaseState.HELD,
        (LeaseState.NEW, LeaseEvent.SET_ASIDE): LeaseState.NEW_ASIDE,
        (LeaseState.NEW, LeaseEvent.SUPERSEDED): LeaseState.LOST,
        (LeaseState.NEW_ASIDE, LeaseEvent.KNOWN): LeaseState.HELD_ASIDE,
        (LeaseState.NEW_ASIDE, LeaseEvent.SUPERSEDED): LeaseState.LOST,
        (LeaseState.HELD, LeaseEvent.KNOWN): LeaseState.HELD,
        (LeaseState.HELD, LeaseEvent.SET_ASIDE): LeaseState.HELD_ASIDE,
        (LeaseState.HELD, LeaseEvent.SUPERSEDED): LeaseState.LOST,
        (LeaseState.HELD_ASIDE, LeaseEvent.KNOWN): LeaseState.HELD_ASIDE,
        (LeaseState.HELD_ASIDE, LeaseEvent.SUPERSEDED): LeaseState.LOST,
        # A renewal that was under way when another thread saw that it is lost: a run that was replaced stays so.
        (LeaseState.LOST, LeaseEvent.KNOWN): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.SET_ASIDE): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.SUPERSEDED): LeaseState.LOST,
    },
)


class RequestState(enum.Enum):
    """How a request to the lease's store stands, which a thread of its own makes."""

    UNDER_WAY = "the store has not answered yet"
    HUNG = "nobody counts on an answer any more; one more thread stands in for the one that waits"
    OVER = "the store has answered, or there was no thread"


class RequestEvent(enum.Enum):
    """What happens to a request."""

    WRITE_OFF = "it has taken as long as the lease lasts"
    END = "it is over"


REQUEST = Transitions(
    "a request",
    "cannot",
    {
        (RequestState.UNDER_WAY, RequestEvent.WRITE_OFF): RequestState.HUNG,
        (RequestState.UNDER_WAY, RequestEvent.END): RequestState.OVER,
        # Two calls may write off one request.
        (RequestState.HUNG, RequestEvent.WRITE_OFF): RequestState.HUNG,
        (RequestState.HUNG, RequestEvent.END): RequestState.OVER,
        # It ended just now.
        (RequestState.OVER, RequestEvent.WRITE_OFF): RequestState.OVER,
    },
)
