"""A job in a process of its own, whose state another process reads, and a model of its state after each batch.

As a script it runs the given number of batches or until it is killed, and continues from its last batch when it is started
again. Every 40 batches it loses its local stores.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql.types import LongType, StructField, StructType

from spark_state_ext import ArrowState, StateBatch
from spark_state_ext.engine.job import ARROW, Job
from spark_state_ext.spark.executor.key_work import Times
from spark_state_ext.testing.buckets import Buckets
from tests.helpers.jobs import job_of

OPERATOR, BUCKETS, KEYS = "asked-for", 3, 60
_ROWS = 12
_KEY = StructType([StructField("k", LongType())])
_INPUT = StructType([StructField("k", LongType()), StructField("batch", LongType())])
_STATE = StructType([StructField("n", LongType()), StructField("last", LongType())])

State = dict[int, tuple[int, int]]


def keys_of(batch: int) -> list[int]:
    """Return the keys with a row in a batch."""
    return random.Random(batch).sample(range(KEYS), _ROWS)


def is_removed(key: int, batch: int) -> bool:
    return (key + batch) % 4 == 0


_states: list[State] = []


def state_after(batch: int) -> State:
    """Return the state after a batch; it is empty after batch -1."""
    while len(_states) <= batch:
        number = len(_states)
        state = dict(_states[-1]) if _states else {}
        for key in keys_of(number):
            if is_removed(key, number):
                state.pop(key, None)
            else:
                state[key] = state.get(key, (0, 0))[0] + 1, number
        _states.append(state)
    return _states[batch] if batch >= 0 else {}


def counted(batch: StateBatch) -> None:
    """Update the state as `state_after` does."""
    keys, numbers = batch.keys["k"].to_numpy(), batch.rows["batch"].to_numpy()
    removed = (keys + numbers) % 4 == 0
    n = batch.state["n"].fill_null(0).to_numpy() + 1
    batch.update({"n": n, "last": numbers}, where=~removed)
    batch.remove(removed)


def job(folder: Path) -> Job:
    """Return the job, with its files and local stores in a folder."""
    options = ArrowState(folder / "root", OPERATOR, buckets=BUCKETS, local_dir=folder / "local").options
    return job_of(
        options,
        key_schema=_KEY.json(),
        state_schema=_STATE.json(),
        columns=("k", "batch"),
        api=ARROW,
        input_schema=_INPUT.json(),
        output_schema=_INPUT.json(),
        local_mode=True,
    )


def rows_of(batch: int) -> pa.Table:
    keys = keys_of(batch)
    return pa.table({"k": pa.array(keys, pa.int64()), "batch": pa.array(np.full(len(keys), batch), pa.int64())})


def work(folder: Path, batches: float) -> None:
    (folder / "local").mkdir(parents=True, exist_ok=True)
    pointers_file = folder / "pointers.json"
    buckets, batch = Buckets(job(folder), counted), 0
    if pointers_file.exists():
        saved = json.loads(pointers_file.read_text())
        batch = saved["batch"] + 1
        buckets.hold([base64.b64decode(pointer) for pointer in saved["pointers"]])
    end = batch + batches
    while batch < end:
        if batch % 40 == 39:
            buckets.restart()
        buckets.batch(batch, rows_of(batch), Times(1_000 * batch, -1, False))
        pointers = [base64.b64encode(pointer).decode() for pointer in buckets.list_pointers()]
        new_file = pointers_file.with_suffix(".new")
        new_file.write_text(json.dumps({"batch": batch, "pointers": pointers}))
        new_file.replace(pointers_file)
        batch += 1
    buckets.close()


if __name__ == "__main__":
    work(Path(sys.argv[1]), float(sys.argv[2]))
