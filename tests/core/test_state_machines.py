"""Every state and event of an upload, of a lease, and of a request about one: where each leads, or that it cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from spark_state_ext.commit import upload_states
from spark_state_ext.commit.upload_states import UploadEvent, UploadState
from spark_state_ext.ownership import lease_states
from spark_state_ext.ownership.lease_states import (
    LeaseEvent,
    LeaseState,
    RequestEvent,
    RequestState,
)

# By state: where each event leads, in the order of the events; "-" cannot be.
UPLOAD = """
             BEGIN    CONFIRM    FAIL    GIVE_UP    DROP
QUEUED       SENDING  -          -       DROPPED    DROPPED
SENDING      -        CONFIRMED  FAILED  ABANDONED  -
ABANDONED    -        CONFIRMED  FAILED  -          -
CONFIRMED    -        -          -       -          -
FAILED       -        -          -       -          -
DROPPED      -        -          -       -          -
"""
LEASE = """
             KNOWN       SET_ASIDE   SUPERSEDED
NEW          HELD        NEW_ASIDE   LOST
NEW_ASIDE    HELD_ASIDE  -           LOST
HELD         HELD        HELD_ASIDE  LOST
HELD_ASIDE   HELD_ASIDE  -           LOST
LOST         LOST        LOST        LOST
"""
REQUEST = """
             WRITE_OFF   END
UNDER_WAY    HUNG        OVER
HUNG         HUNG        OVER
OVER         OVER        -
"""


def rows(table: str) -> dict[tuple[str, str], str]:
    """Where a table says that each state and event lead."""
    (_, *events), *lines = ([" ", *line.split()] if at == 0 else line.split() for at, line in enumerate(_lines(table)))
    return {(state, event): to for state, *found in lines for event, to in zip(events, found, strict=True)}


def _lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("table", "states", "events", "move"),
    [
        (UPLOAD, UploadState, UploadEvent, upload_states.UPLOAD.next_state),
        (LEASE, LeaseState, LeaseEvent, lease_states.LEASE.next_state),
        (REQUEST, RequestState, RequestEvent, lease_states.REQUEST.next_state),
    ],
    ids=["upload", "lease", "request"],
)
def test_every_state_and_event(
    table: str, states: type[Enum], events: type[Enum], move: Callable[[Any, Any], Enum]
) -> None:
    said = rows(table)
    assert set(said) == {(state.name, event.name) for state, event in itertools.product(states, events)}
    for state, event in itertools.product(states, events):
        to = said[state.name, event.name]
        if to == "-":
            with pytest.raises(AssertionError, match=rf"{state.name} cannot .*{event.name}"):
                move(state, event)
        else:
            assert move(state, event) is states[to]


def test_a_lease_was_asked_for_in_all_states_but_the_new_ones() -> None:
    assert {state for state in LeaseState if not state.asked} == {LeaseState.NEW, LeaseState.NEW_ASIDE}
