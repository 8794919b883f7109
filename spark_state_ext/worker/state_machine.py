"""State machines as tables of the state after each event, without I/O and clocks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Transitions"]

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


@dataclass(frozen=True)
class Transitions(Generic[S, E]):
    """The allowed transitions of a state machine.

    Parameters
    ----------
    subject, cannot
        What has the state, and a phrase that says that an event cannot happen to it; for the error.
    table
        The state after an event; an event that is missing for a state cannot happen in it.
    """

    subject: str
    cannot: str
    table: Mapping[tuple[S, E], S]

    def next_state(self, state: S, event: E) -> S:
        """Return the state after an event."""
        following = self.table.get((state, event))
        if following is None:
            raise AssertionError(f"{self.subject} that is {state.name} {self.cannot} {event.name}")
        return following
