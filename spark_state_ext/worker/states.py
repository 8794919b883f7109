"""State machines as tables: where each event leads. No I/O and no clock; who has these asks a table what comes next."""

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
    """What may become of something.

    Parameters
    ----------
    subject, cannot
        What it is, and how to say that an event cannot happen to it.
    table
        The state after an event; what is not there cannot happen.
    """

    subject: str
    cannot: str
    table: Mapping[tuple[S, E], S]

    def next_state(self, state: S, event: E) -> S:
        """How it stands after an event."""
        found = self.table.get((state, event))
        if found is None:
            raise AssertionError(f"{self.subject} that is {state.name} {self.cannot} {event.name}")
        return found
