"""What can be known about an aircraft from its departures, one departure after the other.

The data holds the departures from the three airports of New York and nothing else, so every return to New
York is unseen. Per aircraft (tail number) the state holds

- the *last airport*: where it last landed; unknown after a diversion;
- *missing legs*: how often it departed from another airport than the one where it last landed, so that at
  least one flight in between is missing from the data;
- *turnarounds*: how often it was back in the air soon. Of the time between a landing and the next departure
  an unseen return is taken to last as long as the way out; at most `SHORT_MINUTES` may remain;
- the *chained delay*: minutes of delay handed on through an unbroken chain of turnarounds. A landing that was
  late and a next departure that was late too hand on the smaller of the two delays;
- counts of flights flown, cancelled and diverted.

An aircraft without a scheduled flight for `QUIET_DAYS` has gone quiet: its state is closed with a last row.
When it comes back it starts anew.

Rows of one aircraft come in any order within a batch and are sorted here. An aircraft that comes back in the
batch that would have found it quiet is closed by its own next row, so the output does not depend on where
batches begin and end. Rows without a tail number were never flown: they are one group that only counts.
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
# Begins like a Leg. Departures at the same instant need an order too.
ORDER = ["sched_ms", "origin", "dest", "carrier", "flight"]


class Leg(NamedTuple):
    """One scheduled departure; without `dep_delay` it was cancelled, without `arr_delay` diverted."""

    sched_ms: int
    origin: str
    dest: str
    dep_delay: int | None
    arr_delay: int | None
    air_minutes: int | None


@dataclass
class Aircraft:
    """The state of one aircraft, in the order of `STATE_SCHEMA`."""

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
        """The instant at which the aircraft will have been quiet for too long."""
        return self.last_seen_ms + QUIET_DAYS * DAY_MS

    def take(self, leg: Leg) -> str:
        """Account for a departure and return its kind: flown, cancelled or diverted."""
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
        """Account for what happened between the last landing and a departure."""
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
        """Return an output row, in the order of `OUTPUT_SCHEMA`."""
        known = (self.airport, self.chained_delay, self.worst_chain, self.turnarounds, self.missing_legs)
        seq = self.flown + self.cancelled
        return (tailnum, at_ms, kind, seq, *known, self.flown, self.cancelled, self.diverted)


def follow(
    tailnum: str | None, aircraft: Aircraft | None, legs: Iterable[Leg]
) -> tuple[Aircraft | None, list[tuple[Any, ...]]]:
    """Take an aircraft through departures in order of time.

    Parameters
    ----------
    tailnum : str or None
        Which aircraft, None for departures that never got one.
    aircraft : Aircraft or None
        What is known about it; changed in place.
    legs : iterable of Leg
        Its departures in order of time.

    Returns
    -------
    tuple
        What is known after the departures, and one output row for each of them, preceded by a `quiet` row
        where the aircraft had been quiet for too long.
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
    """Follow one aircraft: a function for Spark's own ``applyInPandasWithState``, grouped by ``tailnum``."""
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
    # Lists, because for the few rows of one aircraft every operation on a frame takes longer than all of this.
    rows: list[tuple[Any, ...]] = []
    for frame in pdfs:
        order = (frame[name].tolist() for name in ORDER)
        numbers = (whole_numbers(frame[name]) for name in ("dep_delay", "arr_delay", "air_minutes"))
        rows += zip(*order, *numbers, strict=True)
    rows.sort(key=lambda row: row[: len(ORDER)])
    return [Leg(*row[:3], *row[len(ORDER) :]) for row in rows]


def whole_numbers(column: pd.Series[Any]) -> list[int | None]:
    """Return a column's numbers as Python has them; with NULLs among them pandas made it floats."""
    return [None if pd.isna(value) else int(value) for value in column.tolist()]


def output_frame(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    """Return output rows as a frame."""
    return pd.DataFrame.from_records(rows, columns=OUTPUT_COLUMNS)
