"""What the cluster computes, and the same as a batch computation: running sums of keys, and sessions that time out."""

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

__all__ = ["GAP_MS", "KEYS", "Outputs", "differences", "emitted", "expected", "tables", "write_input"]

KEYS, ROWS = 48, 160
# The times of a file's rows, and when a session ends that gets no row.
STEP_MS, GAP_MS = 10_000, 12_000
# In the last file: its row is so late that all sessions of other keys have ended.
_LAST_KEY, _LATE_MS = -1, 3_600_000


@dataclass
class Outputs:
    """What a query emitted.

    Parameters
    ----------
    totals
        For each file, each of its keys with its number of rows and their sum so far.
    sessions
        How often each session was emitted: key, first and last time, number of rows.
    repeated
        What is wrong with rows of a batch that ran again.
    """

    totals: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    sessions: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    repeated: list[str] = field(default_factory=list)


def tables(files: int, seed: int) -> list[pa.Table]:
    """The input, one table a file; the same for the same seed."""
    draw = random.Random(seed)
    made = []
    for at in range(files):
        last = at == files - 1
        # A few keys are in every file, and most now and then, so that sessions of some end.
        among = sorted(draw.sample(range(KEYS), KEYS // 4))
        keys = [_LAST_KEY] if last else [draw.choice(among) for _ in range(ROWS)]
        times = [_LATE_MS if last else at * STEP_MS + draw.randrange(1, STEP_MS) for _ in keys]
        made.append(
            pa.table(
                {
                    "at": pa.array([at] * len(keys), pa.int32()),
                    "key": pa.array(keys, pa.int64()),
                    "value": pa.array([draw.randrange(1000) for _ in keys], pa.int64()),
                    "time": pa.array([1000 * it for it in times], pa.timestamp("us", "UTC")),
                }
            )
        )
    return made


def write_input(folder: Path, made: Sequence[pa.Table]) -> None:
    """One file a table, in the order of their ages, which is the order that Spark reads them in."""
    folder.mkdir(parents=True)
    for at, table in enumerate(made):
        path = folder / f"{at:04}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_000_000 + at, 1_000_000 + at))


def expected(made: Sequence[pa.Table]) -> Outputs:
    """The batch computation."""
    totals: dict[int, dict[int, tuple[int, int]]] = {}
    times: dict[int, list[int]] = {}
    sums: dict[int, tuple[int, int]] = {}
    for at, table in enumerate(made):
        for row in table.to_pylist():
            n, total = sums.get(row["key"], (0, 0))
            sums[row["key"]] = (n + 1, total + row["value"])
            times.setdefault(row["key"], []).append(int(row["time"].timestamp() * 1000 + 0.5))
        totals[at] = {key: sums[key] for key in set(table.column("key").to_pylist())}
    sessions: Counter[tuple[int, int, int, int]] = Counter()
    for key, found in times.items():
        found.sort()
        begins = [i for i, it in enumerate(found) if i == 0 or it - found[i - 1] > GAP_MS]
        for begin, end in zip(begins, [*begins[1:], len(found)], strict=True):
            if key != _LAST_KEY:
                sessions[key, found[begin], found[end - 1], end - begin] += 1
    return Outputs(totals, sessions)


def emitted(folder: Path) -> Outputs:
    """What the query's sink has written: a file a batch."""
    found = Outputs()
    found.repeated += [f"a batch that ran again gave other rows: {path.name}" for path in folder.glob("differs-*")]
    for path in sorted(folder.glob("*.json")):
        for kind, key, at, n, total, first, last in json.loads(path.read_text()):
            if kind == "session":
                found.sessions[key, first, last, n] += 1
            elif key in found.totals.setdefault(at, {}):
                found.repeated.append(f"key {key} was emitted twice for file {at}")
            else:
                found.totals[at][key] = (n, total)
    return found


def differences(should: Outputs, found: Outputs) -> list[str]:
    """Where the query is not the batch computation; empty where it is."""
    told = []
    for at in sorted(should.totals.keys() | found.totals.keys()):
        if different := _different(should.totals.get(at, {}), found.totals.get(at, {})):
            told.append(f"file {at}: {different}")
    if found.sessions != should.sessions:
        lost, more = should.sessions - found.sessions, found.sessions - should.sessions
        told.append(f"sessions lost: {dict(lost)}, not expected: {dict(more)}")
    return told


def _different(should: Mapping[int, Any], found: Mapping[int, Any]) -> list[str]:
    keys = sorted(key for key in should.keys() | found.keys() if should.get(key) != found.get(key))
    return [f"key {key} should be {should.get(key)} and is {found.get(key)}" for key in keys]
