"""Two stateful steps on the same keys in one operator, against the same two steps written by hand in pandas."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import LongType, StructField, StructType

from spark_state_ext import ArrowState, Step, chain
from spark_state_ext.errors import UsageError
from spark_state_ext.spark.group_state import Clock, KeyState

pytestmark = pytest.mark.spark

RUNNING = StructType([StructField("total", LongType())])
PEAKS = StructType([StructField("key", LongType()), StructField("peak", LongType()), StructField("seen", LongType())])


def running_total(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Adds up; yields the total only when it is even, so that the next step has no rows in some batches."""
    (total,) = state.getOption or (0,)
    total += sum(int(pdf["value"].sum()) for pdf in pdfs)
    state.update((total,))
    if total % 2 == 0:
        yield pd.DataFrame({"total": [total]})


def peaks(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Highest total so far, and how many there were."""
    peak, seen = state.getOption or (-(2**62), 0)
    for pdf in pdfs:
        assert list(pdf.columns) == ["total"]
        peak, seen = max(peak, int(pdf["total"].max())), seen + len(pdf)
    state.update((peak, seen))
    yield pd.DataFrame({"key": [int(key[0])], "peak": [peak], "seen": [seen]})


BATCHES = [[(1, 2), (2, 1)], [(1, -4), (2, 3), (3, 5)], [(1, 1), (2, 2)], [(1, 9), (3, 1)]]


def expected() -> dict[int, tuple[int, int]]:
    totals: dict[int, int] = {}
    result: dict[int, tuple[int, int]] = {}
    for batch in BATCHES:
        for key in sorted({k for k, _ in batch}):
            totals[key] = totals.get(key, 0) + sum(v for k, v in batch if k == key)
            if totals[key] % 2 == 0:
                peak, seen = result.get(key, (-(2**62), 0))
                result[key] = (max(peak, totals[key]), seen + 1)
    return result


def test_each_step_has_its_state_and_the_next_step_its_output(spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    state = ArrowState(str(tmp_path / "root"), "chained", buckets=2, local_dir=str(tmp_path / "local"))
    state_type = StructType([StructField("peak", LongType()), StructField("seen", LongType())])
    steps = chain(Step(running_total, RUNNING, RUNNING), Step(peaks, PEAKS, state_type))
    rows: dict[int, tuple[int, int]] = {}
    for at, batch in enumerate(BATCHES):
        table = pa.table({"key": [k for k, _ in batch], "value": [v for _, v in batch]})
        pq.write_table(table, source / f"{at}.parquet")
        os.utime(source / f"{at}.parquet", (1_000_000 + at, 1_000_000 + at))
        # Started anew for each file: state of both steps goes through a restart every time.
        events = spark.readStream.schema("key long, value long").parquet(str(source))
        out = state.apply_in_pandas_with_state(
            events, "key", steps.func, steps.outputStructType, steps.stateStructType, "update", "NoTimeout"
        )
        query = (
            out.writeStream.outputMode("update")
            .foreachBatch(lambda df, _: rows.update({r.key: (r.peak, r.seen) for r in df.collect()}))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
    assert rows == expected()


def test_one_step_is_no_chain() -> None:
    with pytest.raises(UsageError, match="at least two"):
        chain(Step(running_total, RUNNING, RUNNING))


def test_a_step_takes_struct_types() -> None:
    with pytest.raises(UsageError, match="stateStructType"):
        Step(running_total, RUNNING, "total long")  # type: ignore[arg-type]


def test_a_step_that_leaves_its_input_unread_loses_nothing_of_the_step_before() -> None:
    def counts(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        (n,) = state.getOption or (0,)
        for pdf in pdfs:
            n += len(pdf)
            yield pd.DataFrame({"total": [n]})
        state.update((n,))

    def looks_at_one(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield next(iter(pdfs)).assign(key=1, peak=0)[["key", "peak"]].assign(seen=0)

    steps = chain(Step(counts, RUNNING, RUNNING), Step(looks_at_one, PEAKS, PEAKS))
    stored: Any = None
    for expected_n in (3, 6):
        state = KeyState(stored, Clock(1, -1, "NoTimeout", False, False, steps.stateStructType))
        frames = iter([pd.DataFrame({"value": [1]}), pd.DataFrame({"value": [1, 2]})])
        assert len(list(steps.func((1,), frames, state))) == 1
        stored = state.getOption
        assert stored is not None
        assert tuple(stored[0]) == (expected_n,)
