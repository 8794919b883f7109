"""A small schema and a model of a local store's states in plain Python, for the contract of a local store."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas import CheckpointRef, RowSchema
from arrow_schemas.equality import HashArray
from arrow_schemas.row import DELETED, TIMEOUT_MS
from spark_state_ext.store import View
from spark_state_ext.store.runs import get_hashes, sort_by_hash

__all__ = [
    "ALL_KEYS",
    "HASHES",
    "KEYS",
    "OTHER_SPELLINGS",
    "SCHEMA",
    "Changes",
    "HashFunction",
    "Key",
    "Model",
    "Refs",
    "Row",
    "canonicalise",
    "apply_changes",
    "find_expired",
    "good_hash",
    "key_columns",
    "key_hashes",
    "look_up",
    "make_model",
    "one_hash",
    "make_run",
    "scan",
    "three_hashes",
]

SCHEMA = RowSchema(
    keys=(pa.field("name", pa.string()), pa.field("x", pa.float64())),
    state=(pa.field("count", pa.int64()), pa.field("note", pa.string())),
)

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """State of one key in the model."""

    count: int | None
    record: str | None = None
    timeout_ms: int | None = None
    defined: bool = True


Changes = Mapping[Key, "Row | None"]
Model = dict[Key, Row]
HashFunction = Callable[[Key], int]


def canonicalise(value: Any) -> Any:
    """Return a value that Python compares like Spark compares keys."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, dict):
        return tuple((name, canonicalise(v)) for name, v in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(canonicalise(v) for v in value)
    return value


def good_hash(key: Key) -> int:
    """Return a hash without collisions in practice."""
    return int.from_bytes(hashlib.blake2b(repr(canonicalise(key)).encode(), digest_size=8).digest(), "big")


def three_hashes(key: Key) -> int:
    """Return a bad hash with three values: the lowest, the highest and one in the middle."""
    return (0, 2**63, 2**64 - 1)[good_hash(key) % 3]


def one_hash(key: Key) -> int:
    """Return the worst hash, the same for all keys."""
    return 7


HASHES: tuple[HashFunction, ...] = (good_hash, three_hashes, one_hash)


def key_hashes(keys: Sequence[Key], hashed: HashFunction) -> HashArray:
    """Return the hashes of keys."""
    return np.array([hashed(key) for key in keys], dtype=np.uint64)


def key_columns(keys: Sequence[Key]) -> list[pa.Array]:
    """Return keys as columns, normalised so that equal keys have equal bytes."""
    columns = [pa.array([key[i] for key in keys], field.type) for i, field in enumerate(SCHEMA.keys)]
    return SCHEMA.normalise_keys(columns)


def make_run(changes: Changes, hashed: HashFunction = good_hash) -> pa.RecordBatch:
    """Return changed keys as the rows of a run; None deletes a key."""
    keys, rows = list(changes), list(changes.values())
    columns = [
        pa.array(key_hashes(keys, hashed), pa.uint64()),
        *key_columns(keys),
        pa.array([row.count if row else None for row in rows], pa.int64()),
        pa.array([row.record if row else None for row in rows], pa.string()),
        pa.array([row.timeout_ms if row else None for row in rows], pa.int64()),
        pa.array([row is not None and row.defined for row in rows], pa.bool_()),
        pa.array([row is None for row in rows], pa.bool_()),
    ]
    return sort_by_hash(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow))


def apply_changes(model: Model, changes: Changes) -> Model:
    """Return the model after some changes."""
    after = {canonicalise(key): row for key, row in model.items()}
    for key, row in changes.items():
        if row is None:
            after.pop(canonicalise(key), None)
        else:
            after[canonicalise(key)] = row
    return after


def make_model(batches: Iterable[pa.RecordBatch]) -> Model:
    """Return rows as a model; fail if a key occurs twice."""
    model: Model = {}
    for batch in batches:
        assert batch.schema.equals(SCHEMA.arrow)
        for row in batch.to_pylist():
            key = canonicalise((row["key.name"], row["key.x"]))
            assert key not in model, f"{key} twice"
            assert not row[DELETED]
            model[key] = Row(row["state.count"], row["state.note"], row[TIMEOUT_MS], row["defined"])
    return model


def scan(view: View) -> Model:
    """Return all rows of a view as a model; also check that they ascend by hash."""
    batches = list(view.scan())
    hashes = np.concatenate([get_hashes(batch) for batch in batches]) if batches else np.empty(0, dtype=np.uint64)
    assert (hashes[1:] >= hashes[:-1]).all(), "a scan ascends by hash"
    assert all(batch.num_rows for batch in batches)
    return make_model(batches)


def look_up(view: View, keys: Sequence[Key], hashed: HashFunction = good_hash) -> Model:
    """Return a view's rows of some keys as a model."""
    result = view.lookup(key_hashes(keys, hashed), key_columns(keys))
    rows = result.rows.to_pylist()
    index = result.index.tolist()
    model: Model = {}
    for key, position in zip(keys, index, strict=True):
        if position < 0:
            continue
        row = rows[position]
        assert canonicalise((row["key.name"], row["key.x"])) == canonicalise(key), "the row of another key"
        assert not row[DELETED]
        model[canonicalise(key)] = Row(row["state.count"], row["state.note"], row[TIMEOUT_MS], row["defined"])
    return model


class Refs:
    """Ascending checkpoint ids, so that a failing example is easy to read."""

    def __init__(self) -> None:
        self._count = 0

    def next(self, version: int) -> CheckpointRef:
        """Return the next checkpoint, with a given version."""
        self._count += 1
        return CheckpointRef(version, f"{self._count:032x}")


KEYS: list[Key] = [
    (name, x) for name in ("a", "b", "ü", "", None) for x in (0.0, 1.5, float("inf"), float("nan"), None)
]
# Equal to some of KEYS, but with different bytes.
OTHER_SPELLINGS: list[Key] = [("a", -0.0), ("b", -float("nan")), (None, -0.0)]
ALL_KEYS = [*KEYS, *OTHER_SPELLINGS]


def find_expired(model: Model, now_ms: int) -> Model:
    """Return the rows that have timed out before a moment."""
    return {key: row for key, row in model.items() if row.timeout_ms is not None and row.timeout_ms < now_ms}
