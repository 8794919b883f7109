"""A job in a process of its own, whose state another process asks for; and what its state is after each batch.

Run as a script it works on batch after batch until it is killed, or on as many as it is told, and goes on where it was
when it is started again. Now and then it loses its local stores.
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
    """The keys with a row in a batch."""
    return random.Random(batch).sample(range(KEYS), _ROWS)


def is_removed(key: int, batch: int) -> bool:
    return (key + batch) % 4 == 0


_states: list[State] = []


def state_after(batch: int) -> State:
    """What the state is; nothing after batch -1."""
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
    """As `state_after` has it."""
    keys, numbers = batch.keys["k"].to_numpy(), batch.rows["batch"].to_numpy()
    gone = (keys + numbers) % 4 == 0
    n = batch.state["n"].fill_null(0).to_numpy() + 1
    batch.update({"n": n, "last": numbers}, where=~gone)
    batch.remove(gone)


def job(folder: Path) -> Job:
    """The job, with its files and local stores in a folder."""
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
    kept = folder / "pointers.json"
    buckets, batch = Buckets(job(folder), counted), 0
    if kept.exists():
        told = json.loads(kept.read_text())
        batch = told["batch"] + 1
        buckets.hold([base64.b64decode(pointer) for pointer in told["pointers"]])
    upto = batch + batches
    while batch < upto:
        if batch % 40 == 39:
            buckets.restart()
        buckets.batch(batch, rows_of(batch), Times(1_000 * batch, -1, False))
        pointers = [base64.b64encode(pointer).decode() for pointer in buckets.list_pointers()]
        written = kept.with_suffix(".new")
        written.write_text(json.dumps({"batch": batch, "pointers": pointers}))
        written.replace(kept)
        batch += 1
    buckets.close()


if __name__ == "__main__":
    work(Path(sys.argv[1]), float(sys.argv[2]))
