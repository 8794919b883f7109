"""The transitions of uploads, leases and lease requests: the next state for each state and event, or an error."""

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

# The next state for each state (row) and event (column); "-" means that the event cannot happen.
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


def parse_table(table: str) -> dict[tuple[str, str], str]:
    """Return the next state of a table by state and event."""
    (_, *events), *lines = (
        [" ", *line.split()] if at == 0 else line.split() for at, line in enumerate(split_lines(table))
    )
    return {
        (state, event): next_state
        for state, *next_states in lines
        for event, next_state in zip(events, next_states, strict=True)
    }


def split_lines(table: str) -> list[str]:
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
def test_each_state_and_event_leads_to_the_state_of_the_table(
    table: str, states: type[Enum], events: type[Enum], move: Callable[[Any, Any], Enum]
) -> None:
    expected = parse_table(table)
    assert set(expected) == {(state.name, event.name) for state, event in itertools.product(states, events)}
    for state, event in itertools.product(states, events):
        next_state = expected[state.name, event.name]
        if next_state == "-":
            with pytest.raises(AssertionError, match=rf"{state.name} cannot .*{event.name}"):
                move(state, event)
        else:
            assert move(state, event) is states[next_state]


def test_a_lease_was_requested_in_all_states_except_the_new_ones() -> None:
    assert {state for state in LeaseState if not state.asked} == {LeaseState.NEW, LeaseState.NEW_ASIDE}
