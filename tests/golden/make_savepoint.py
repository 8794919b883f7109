"""Writes a folder such as `savepoint-1/`: savepoints, in both forms, that every later release has to read and to start jobs from.

They are made once, by the first release that has the format, and never again; run this only to add a format. A job on
real Spark makes the state, and `expected` is what a batch computation says of it. Files tell which machine wrote them,
so give it a name that none has: ``unshare --uts sh -c 'hostname golden; python tests/golden/make_savepoint.py'``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).parent
OPERATOR, BUCKETS = "golden", 2
INPUT = "name string, day date, at timestamp, price double"
OUTPUT = "name string, day date, n bigint, total double, tags array<string>, gone boolean"
STATE = "n bigint, total double, last timestamp, tags array<string>"
# A key is forgotten when it has been quiet for so long.
QUIET_S = 3_600
Row = tuple[str | None, date, int, float]


def rows(keys: Iterable[int], second: int) -> list[Row]:
    return [(None if key == 5 else f"key {key} ü", date(2024, 2, 1 + key % 3), second + key, key / 4) for key in keys]


# A batch each: name, day, second of the event, price.
BATCHES: list[list[Row]] = [rows(range(12), 100), rows(range(4, 9), 200), rows([0, 5, 20], 300)]


def watched_totals(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """How often each key came, its sum and its newest events; it is forgotten when it was quiet for `QUIET_S`."""
    n, total, last, tags = state.getOption or (0, 0.0, pd.Timestamp(0).to_pydatetime(), [])
    if state.hasTimedOut:
        state.remove()
    else:
        for pdf in pdfs:
            n, total = n + len(pdf), total + float(pdf["price"].sum())
            last = max(last, pdf["at"].max().to_pydatetime())
            tags = [*tags, *(f"{price:g}" for price in pdf["price"])][-2:]
        state.update((n, total, last, tags))
        state.setTimeoutTimestamp(int(last.replace(tzinfo=timezone.utc).timestamp() * 1000) + QUIET_S * 1000)
    yield pd.DataFrame(
        {"name": [key[0]], "day": [key[1]], "n": [n], "total": [total], "tags": [tags], "gone": [state.hasTimedOut]}
    )


def expected(batches: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """The state after batches, by key, as a table has it and JSON shows it."""
    state: dict[tuple[str | None, date], dict[str, Any]] = {}
    for name, day, second, price in (row for batch in batches for row in batch):
        it = state.setdefault((name, day), {"n": 0, "total": 0.0, "last": 0, "tags": []})
        it.update(n=it["n"] + 1, total=it["total"] + price, last=max(it["last"], second))
        it["tags"] = [*it["tags"], f"{price:g}"][-2:]
    found = [
        {
            "name": name,
            "day": str(day),
            **it,
            "last": str(datetime.fromtimestamp(it["last"], timezone.utc)),
            "timeout_ms": (it["last"] + QUIET_S) * 1000,
        }
        for (name, day), it in state.items()
    ]
    return sorted(found, key=lambda row: (row["day"], row["name"] or ""))


def feed(folder: Path, batches: Sequence[Sequence[Row]]) -> None:
    """Add files of JSON, a batch each."""
    folder.mkdir(exist_ok=True)
    first = len(list(folder.iterdir()))
    for at, batch in enumerate(batches, first):
        lines = [
            {
                "name": name,
                "day": str(day),
                "at": datetime.fromtimestamp(second, timezone.utc).isoformat(),
                "price": price,
            }
            for name, day, second, price in batch
        ]
        hidden = folder / f".{at}"
        hidden.write_text("".join(json.dumps(line) + "\n" for line in lines))
        # The file source goes by age.
        os.utime(hidden, (1_000_000 + at, 1_000_000 + at))
        hidden.rename(folder / f"{at}.json")


def run(spark: Any, folder: Path, state: Any) -> list[tuple[int, Any]]:
    """Run the job over the files in a folder, and return its rows with the numbers of their batches."""
    events = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(folder / "in"))
    out = state.apply_in_pandas_with_state(
        events.withWatermark("at", "0 seconds"),
        ["name", "day"],
        watched_totals,
        OUTPUT,
        STATE,
        "update",
        "EventTimeTimeout",
    )
    seen: list[tuple[int, Any]] = []
    query = (
        out.writeStream.outputMode("update")
        .foreachBatch(lambda df, batch: seen.extend((batch, row) for row in df.collect()))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return seen


def main(folder: Path) -> None:
    """Write the savepoints into a folder that does not exist yet."""
    from pyspark.sql import SparkSession

    from arrow_schemas.lineage import parse_file_name
    from spark_state_ext import ArrowState, take_savepoint

    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "1")
        # So that the last batch is one with rows, whose deltas are in its pointers.
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as work:
        job = Path(work)
        state = ArrowState(str(job / "root"), OPERATOR, buckets=BUCKETS, local_dir=str(job / "local"))
        feed(job / "in", BATCHES)
        run(spark, job, state)
        # As where the store has not taken them yet: then they are in the pointers only, and become files of the savepoint.
        deltas: dict[str, list[tuple[int, Path]]] = {}
        for path in (job / "root").rglob("*.delta.arrow"):
            parsed = parse_file_name(path.name)
            assert parsed is not None, path
            deltas.setdefault(path.parent.name, []).append((parsed[0].version, path))
        assert len(deltas) == BUCKETS
        gone = [max(found)[1] for found in deltas.values()]
        for path in gone:
            path.unlink()
        for form in ("native", "canonical"):
            take_savepoint(spark, str(folder / form), str(job / "checkpoint"), state, form=form)
        there = {path.name for path in (folder / "native").rglob("*.delta.arrow")}
        assert there.issuperset(path.name for path in gone), "an inline delta has become a file"
    text = json.dumps(expected(BATCHES), indent=1, ensure_ascii=False)
    (folder / "expected.json").write_text(text + "\n")
    spark.stop()


if __name__ == "__main__":
    main(HERE / (sys.argv[1] if len(sys.argv) > 1 else "savepoint-1"))
