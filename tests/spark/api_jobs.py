"""Jobs whose function takes Arrow tables, plain rows or pandas frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from jobs import COUNTS, Job, count, ddl, keyed
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from streams import read

from spark_state_ext import ArrowState, StateBatch

EVENT_TIME = GroupStateTimeout.EventTimeTimeout
PROCESSING_TIME = GroupStateTimeout.ProcessingTimeTimeout
DATA_ONLY = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
EVERYWHERE = pytest.mark.parametrize(
    "session", ["classic", pytest.param("connect", marks=pytest.mark.connect)], indirect=True
)
# Runs on Connect in the soak only.
CLASSIC_FIRST = pytest.mark.parametrize(
    "session",
    ["classic", pytest.param("connect", marks=[pytest.mark.connect, pytest.mark.soak])],
    indirect=True,
)
HOUR_MS = 3_600_000


@dataclass
class ApiJob(Job):
    """A job on Arrow state; `api` says what its function takes: `arrow`, `rows` or `pandas`."""

    api: str = "arrow"
    output: Any = COUNTS

    def planned(self) -> Any:
        events = read(self.session, str(self.folder / "in"), ddl(self.schema))
        if self.watermark is not None:
            events = events.withWatermark(*self.watermark)
        options = {"buckets": 3, "lease_ms": 1_000, "local_dir": str(self.folder / "local"), **self.options}
        state = ArrowState(str(self.folder / "root"), "tested", **options)
        methods: dict[str, Callable[..., Any]] = {
            "arrow": state.apply_in_arrow_with_state,
            "rows": state.apply_rows_with_state,
            "pandas": state.apply_in_pandas_with_state,
        }
        apply = methods[self.api]
        arguments: Any = self.before(events), list(self.keys), self.function, self.output, self.state
        return self.after(apply(*arguments, self.mode, self.timeout))


def count_arrow(batch: StateBatch) -> Any:
    n = pc.add(pc.fill_null(batch.state["n"], 0), batch.counts)
    batch.update({"n": n})
    return batch.keys.append_column("n", n)


def count_rows(key: Any, rows: list[Any], state: GroupState) -> list[tuple[Any, ...]]:
    n = (state.getOption or (0,))[0] + len(rows)
    state.update((n,))
    return [(key.key, n)]


COUNTERS: dict[str, Callable[..., Any]] = {"arrow": count_arrow, "rows": count_rows, "pandas": count}


def random_batches(number: int) -> list[Any]:
    generator = np.random.default_rng(number)
    names = [None, *(f"key {i}" for i in range(20))]
    return [keyed(*[names[i] for i in generator.integers(21, size=30)]) for _ in range(number)]
