"""States of a process's lease, and of a request to its store. No I/O and no clock: `lease` has these."""

from __future__ import annotations

import enum

from spark_state_ext.worker.state_machine import Transitions

__all__ = ["LEASE", "REQUEST", "LeaseEvent", "LeaseState", "RequestEvent", "RequestState"]


class LeaseState(enum.Enum):
    """State of a process's lease for its run."""

    NEW = "the process has not asked for the lease yet"
    NEW_ASIDE = "the process has not asked for the lease yet, and already works for another run on the same folder"
    HELD = "its run holds the lease, as far as the process knows"
    HELD_ASIDE = "its run holds the lease, but the process works for another run: it no longer renews the lease"
    LOST = "another run has the lease"

    @property
    def asked(self) -> bool:
        """True if the process has asked for the lease."""
        return self not in (LeaseState.NEW, LeaseState.NEW_ASIDE)


class LeaseEvent(enum.Enum):
    """Event that changes the state of a process's lease."""

    KNOWN = "the newest record is its run's: this process or another one of the run has taken or renewed the lease"
    SET_ASIDE = "the process works for another run on the same folder from now on"
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
        # A renewal was under way when another thread saw that the lease is lost: a replaced run stays replaced.
        (LeaseState.LOST, LeaseEvent.KNOWN): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.SET_ASIDE): LeaseState.LOST,
        (LeaseState.LOST, LeaseEvent.SUPERSEDED): LeaseState.LOST,
    },
)


class RequestState(enum.Enum):
    """State of a request to the lease's store, which is made in a separate thread."""

    UNDER_WAY = "the store has not answered yet"
    HUNG = "an answer is no longer expected; an additional thread replaces the one that waits"
    OVER = "the store has answered, or no thread could be started"


class RequestEvent(enum.Enum):
    """Event that changes the state of a request."""

    WRITE_OFF = "it has taken as long as the lease lasts"
    END = "it has ended"


REQUEST = Transitions(
    "a request",
    "cannot",
    {
        (RequestState.UNDER_WAY, RequestEvent.WRITE_OFF): RequestState.HUNG,
        (RequestState.UNDER_WAY, RequestEvent.END): RequestState.OVER,
        # Two calls may write off one request.
        (RequestState.HUNG, RequestEvent.WRITE_OFF): RequestState.HUNG,
        (RequestState.HUNG, RequestEvent.END): RequestState.OVER,
        # It ended just before it was written off.
        (RequestState.OVER, RequestEvent.WRITE_OFF): RequestState.OVER,
    },
)
