"""Compute what is known about an aircraft from its departures, one departure after the other.

The data has only the departures from the three airports of New York, so that every return to New York is unseen. For
each aircraft (tail number) the state holds

- the *last airport*, where the aircraft last landed; it is unknown after a diversion;
- the *missing legs*: how often the aircraft departed from another airport than the one where it last landed, so that
  at least one flight in between is missing from the data;
- the *turnarounds*: how often the aircraft departed after at most `SHORT_MINUTES` on the ground. If a leg is missing,
  the unseen return is assumed to take as long as the flight out, and does not count as time on the ground;
- the *chained delay*: how many minutes of delay one flight caused for the next, added up over an unbroken chain of
  turnarounds. If an aircraft lands late and then departs late, the smaller of the two delays counts;
- the numbers of flights flown, cancelled and diverted.

An aircraft without a scheduled flight for more than `QUIET_DAYS` has gone quiet: its state is removed, and a last row
is output. If it comes back, it begins with an empty state.

The rows of an aircraft arrive in any order within a batch, and are sorted here. If an aircraft comes back in the batch
in which its timeout would have fired, its own next row closes its state. So the output does not depend on where batches
begin and end. Departures without a tail number were all cancelled; they form one group, which only counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS
QUIET_DAYS = 21
SHORT_MINUTES = 180

INPUT_SCHEMA = (
    "sched_dep timestamp, sched_ms long, tailnum string, carrier string, flight long, origin string, "
    "dest string, dep_delay long, arr_delay long, air_minutes long"
)
STATE_SCHEMA = (
    "last_seen_ms long, airport string, landed_ms long, air_minutes long, arr_delay long, "
    "chained_delay long, worst_chain long, turnarounds long, missing_legs long, flown long, "
    "cancelled long, diverted long"
)
OUTPUT_SCHEMA = (
    "tailnum string, at_ms long, kind string, seq long, airport string, chained_delay long, "
    "worst_chain long, turnarounds long, missing_legs long, flown long, cancelled long, diverted long"
)
OUTPUT_COLUMNS = [column.split()[0] for column in OUTPUT_SCHEMA.split(", ")]
# Departures are sorted by these columns, which also order those at the same instant. A `Leg` begins with three of them.
ORDER = ["sched_ms", "origin", "dest", "carrier", "flight"]


class Leg(NamedTuple):
    """A scheduled departure; it was cancelled if it has no `dep_delay`, otherwise diverted if it has no `arr_delay`."""

    sched_ms: int
    origin: str
    dest: str
    dep_delay: int | None
    arr_delay: int | None
    air_minutes: int | None


@dataclass
class Aircraft:
    """The state of an aircraft, with its fields in the order of `STATE_SCHEMA`."""

    last_seen_ms: int
    airport: str | None = None
    landed_ms: int | None = None
    air_minutes: int | None = None
    arr_delay: int | None = None
    chained_delay: int = 0
    worst_chain: int = 0
    turnarounds: int = 0
    missing_legs: int = 0
    flown: int = 0
    cancelled: int = 0
    diverted: int = 0

    @property
    def quiet_ms(self) -> int:
        """The instant at which the aircraft goes quiet if it has no scheduled flight until then."""
        return self.last_seen_ms + QUIET_DAYS * DAY_MS

    def take(self, leg: Leg) -> str:
        """Update the state with a departure, and return its kind: flown, cancelled or diverted."""
        self.last_seen_ms = leg.sched_ms
        if leg.dep_delay is None:
            self.cancelled += 1
            return "cancelled"
        departed_ms = leg.sched_ms + leg.dep_delay * MINUTE_MS
        self._turn(leg.origin, leg.dep_delay, departed_ms)
        self.flown += 1
        if leg.arr_delay is None or leg.air_minutes is None:
            self.diverted += 1
            self.airport = self.landed_ms = self.air_minutes = self.arr_delay = None
            return "diverted"
        self.airport = leg.dest
        self.landed_ms = departed_ms + leg.air_minutes * MINUTE_MS
        self.air_minutes = leg.air_minutes
        self.arr_delay = leg.arr_delay
        return "flown"

    def _turn(self, origin: str, dep_delay: int, departed_ms: int) -> None:
        """Update the state with what happened between the last landing and a departure."""
        short = False
        if self.landed_ms is not None and self.air_minutes is not None:
            ground_ms = departed_ms - self.landed_ms
            if origin != self.airport:
                self.missing_legs += 1
                ground_ms -= self.air_minutes * MINUTE_MS
            short = ground_ms <= SHORT_MINUTES * MINUTE_MS
        if short:
            self.turnarounds += 1
            self.chained_delay += max(0, min(self.arr_delay or 0, dep_delay))
            self.worst_chain = max(self.worst_chain, self.chained_delay)
        else:
            self.chained_delay = 0

    def row(self, tailnum: str | None, at_ms: int, kind: str) -> tuple[Any, ...]:
        """Return an output row in the order of `OUTPUT_SCHEMA`."""
        values = (self.airport, self.chained_delay, self.worst_chain, self.turnarounds, self.missing_legs)
        seq = self.flown + self.cancelled
        return (tailnum, at_ms, kind, seq, *values, self.flown, self.cancelled, self.diverted)


def follow(
    tailnum: str | None, aircraft: Aircraft | None, legs: Iterable[Leg]
) -> tuple[Aircraft | None, list[tuple[Any, ...]]]:
    """Update the state of an aircraft with departures, and return it with the output rows.

    Parameters
    ----------
    tailnum : str or None
        The aircraft; None for departures that never had one.
    aircraft : Aircraft or None
        Its state, which may be changed in place; None if it has none.
    legs : iterable of Leg
        Its departures in order of time.

    Returns
    -------
    tuple
        The state after the departures, and one output row for each of them. A `quiet` row precedes it if the aircraft
        had gone quiet before.
    """
    rows: list[tuple[Any, ...]] = []
    for leg in legs:
        if aircraft is not None and leg.sched_ms > aircraft.quiet_ms:
            rows.append(aircraft.row(tailnum, aircraft.quiet_ms, "quiet"))
            aircraft = None
        if aircraft is None:
            aircraft = Aircraft(leg.sched_ms)
        kind = aircraft.take(leg)
        rows.append(aircraft.row(tailnum, leg.sched_ms, kind))
    return aircraft, rows


def follow_aircraft(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Update the state of one aircraft: the function for Spark's ``applyInPandasWithState``, grouped by ``tailnum``."""
    tailnum = None if pd.isna(key[0]) else str(key[0])
    aircraft = Aircraft(*state.get) if state.exists else None
    if state.hasTimedOut:
        state.remove()
        rows = [aircraft.row(tailnum, aircraft.quiet_ms, "quiet")] if aircraft else []
    else:
        aircraft, rows = follow(tailnum, aircraft, sorted_legs(pdfs))
        if aircraft is not None:
            state.update(astuple(aircraft))
            state.setTimeoutTimestamp(aircraft.quiet_ms)
    yield output_frame(rows)


def sorted_legs(pdfs: Iterable[pd.DataFrame]) -> list[Leg]:
    """Return the departures of one aircraft in order of time."""
    # Use lists: for the few rows of one aircraft, a single operation on a frame takes longer than this whole function.
    rows: list[tuple[Any, ...]] = []
    for frame in pdfs:
        order = (frame[name].tolist() for name in ORDER)
        numbers = (whole_numbers(frame[name]) for name in ("dep_delay", "arr_delay", "air_minutes"))
        rows += zip(*order, *numbers, strict=True)
    rows.sort(key=lambda row: row[: len(ORDER)])
    return [Leg(*row[:3], *row[len(ORDER) :]) for row in rows]


def whole_numbers(column: pd.Series[Any]) -> list[int | None]:
    """Return a column's numbers as Python integers, and NULLs as None; pandas made them floats if there are NULLs."""
    return [None if pd.isna(value) else int(value) for value in column.tolist()]


def output_frame(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    """Return output rows as a data frame."""
    return pd.DataFrame.from_records(rows, columns=OUTPUT_COLUMNS)
