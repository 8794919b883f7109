"""The input and the expected output of the cluster's query: running sums of keys, and sessions that time out."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = [
    "GAP_MS",
    "KEYS",
    "Outputs",
    "compute_output",
    "find_differences",
    "make_tables",
    "read_output",
    "write_input",
]

KEYS, ROWS = 48, 160
# The range of times of a file's rows, and the time without a row after which a session ends.
STEP_MS, GAP_MS = 10_000, 12_000
# The last file has one row of this key, which is so late that all sessions of other keys have ended.
_LAST_KEY, _LATE_MS = -1, 3_600_000


@dataclass
class Outputs:
    """The output of a query.

    Parameters
    ----------
    totals
        For each file, the number of rows and their sum so far of each of its keys.
    sessions
        The count of each emitted session: key, first and last time, number of rows.
    repeated
        Errors in the rows of batches that ran again.
    """

    totals: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    sessions: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    repeated: list[str] = field(default_factory=list)


def make_tables(files: int, seed: int) -> list[pa.Table]:
    """Return the input, one table for each file; it is the same for the same seed."""
    draw = random.Random(seed)
    tables = []
    for at in range(files):
        last = at == files - 1
        # Each file has a few keys, so that sessions of other keys end.
        file_keys = sorted(draw.sample(range(KEYS), KEYS // 4))
        keys = [_LAST_KEY] if last else [draw.choice(file_keys) for _ in range(ROWS)]
        times = [_LATE_MS if last else at * STEP_MS + draw.randrange(1, STEP_MS) for _ in keys]
        tables.append(
            pa.table(
                {
                    "at": pa.array([at] * len(keys), pa.int32()),
                    "key": pa.array(keys, pa.int64()),
                    "value": pa.array([draw.randrange(1000) for _ in keys], pa.int64()),
                    "time": pa.array([1000 * time for time in times], pa.timestamp("us", "UTC")),
                }
            )
        )
    return tables


def write_input(folder: Path, tables: Sequence[pa.Table]) -> None:
    """Write one file for each table, with modification times in the order in which Spark reads them."""
    folder.mkdir(parents=True)
    for at, table in enumerate(tables):
        path = folder / f"{at:04}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_000_000 + at, 1_000_000 + at))


def compute_output(tables: Sequence[pa.Table]) -> Outputs:
    """Return the output of the batch computation."""
    totals: dict[int, dict[int, tuple[int, int]]] = {}
    times: dict[int, list[int]] = {}
    sums: dict[int, tuple[int, int]] = {}
    for at, table in enumerate(tables):
        for row in table.to_pylist():
            n, total = sums.get(row["key"], (0, 0))
            sums[row["key"]] = (n + 1, total + row["value"])
            times.setdefault(row["key"], []).append(int(row["time"].timestamp() * 1000 + 0.5))
        totals[at] = {key: sums[key] for key in set(table.column("key").to_pylist())}
    sessions: Counter[tuple[int, int, int, int]] = Counter()
    for key, key_times in times.items():
        key_times.sort()
        begins = [i for i, time in enumerate(key_times) if i == 0 or time - key_times[i - 1] > GAP_MS]
        for begin, end in zip(begins, [*begins[1:], len(key_times)], strict=True):
            if key != _LAST_KEY:
                sessions[key, key_times[begin], key_times[end - 1], end - begin] += 1
    return Outputs(totals, sessions)


def read_output(folder: Path) -> Outputs:
    """Return the output from the files that the query's sink has written for each batch."""
    outputs = Outputs()
    outputs.repeated += [f"a batch that ran again gave other rows: {path.name}" for path in folder.glob("differs-*")]
    for path in sorted(folder.glob("*.json")):
        for kind, key, at, n, total, first, last in json.loads(path.read_text()):
            if kind == "session":
                outputs.sessions[key, first, last, n] += 1
            elif key in outputs.totals.setdefault(at, {}):
                outputs.repeated.append(f"key {key} was emitted twice for file {at}")
            else:
                outputs.totals[at][key] = (n, total)
    return outputs


def find_differences(expected: Outputs, actual: Outputs) -> list[str]:
    """Return the differences between the query's output and the batch computation."""
    differences = []
    for at in sorted(expected.totals.keys() | actual.totals.keys()):
        if different := compare_keys(expected.totals.get(at, {}), actual.totals.get(at, {})):
            differences.append(f"file {at}: {different}")
    if actual.sessions != expected.sessions:
        lost, more = expected.sessions - actual.sessions, actual.sessions - expected.sessions
        differences.append(f"sessions lost: {dict(lost)}, not expected: {dict(more)}")
    return differences


def compare_keys(expected: Mapping[int, Any], actual: Mapping[int, Any]) -> list[str]:
    keys = sorted(key for key in expected.keys() | actual.keys() if expected.get(key) != actual.get(key))
    return [f"key {key} should be {expected.get(key)} and is {actual.get(key)}" for key in keys]
