"""Rows of a bucket grouped by key, and the interface of callers of users' functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from arrow_schemas.columns import combine_chunks
from arrow_schemas.equality import HashArray, IndexArray, group_by_key
from arrow_schemas.row import RowSchema
from spark_state_ext.errors import StateError, StorageError
from spark_state_ext.store import Lookup

__all__ = [
    "CallContext",
    "Caller",
    "Changed",
    "Groups",
    "Result",
    "describe_error",
    "is_placed",
    "mark_placed",
    "note_place",
]

_PLACED = "spark_state_ext_placed"


@dataclass(frozen=True)
class CallContext:
    """Values that are the same for all keys of a bucket in a batch.

    Parameters
    ----------
    after_key
        Callers call this after each key or group of keys.
    scan
        Returns the bucket's committed state, table by table.
    """

    bucket: int
    batch: int
    processing_time_ms: int
    watermark_ms: int
    watermark_present: bool
    timeout_conf: str
    after_key: Callable[[], None] = lambda: None
    scan: Callable[[], Iterator[pa.Table]] = lambda: iter(())

    def __str__(self) -> str:
        return f"bucket {self.bucket}, batch {self.batch}"


@dataclass(frozen=True)
class Groups:
    """Rows of a hash range, grouped by key.

    Parameters
    ----------
    rows
        Input columns; the rows of a key are adjacent, in ascending order of hashes.
    starts
        Where each key's rows begin, int64 (number of keys,).
    hashes
        Each key's hash, uint64 (number of keys,).
    raw_keys
        Key columns as in the input, one row for each key.
    keys
        Normalised key columns, one row for each key.
    """

    rows: pa.Table
    starts: IndexArray
    hashes: HashArray
    raw_keys: list[pa.Array]
    keys: list[pa.Array]

    @staticmethod
    def of(table: pa.Table, hashes: HashArray, key_positions: Sequence[int], columns: int, schema: RowSchema) -> Groups:
        """Group the rows of a table; its first `columns` columns are the input's."""
        raw = [combine_chunks(table.column(position)) for position in key_positions]
        normal = schema.normalise_keys(raw)
        order, starts = group_by_key(hashes, normal)
        firsts = pa.array(order[starts])
        rows = table.select(list(range(columns)))
        if len(starts) > 1:  # else they are in order, and may exceed what Arrow can copy at once
            try:
                rows = rows.take(pa.array(order))
            except pa.ArrowInvalid as error:
                raise StorageError(
                    "the rows of a batch that are processed together have more than 2 GiB in one column: set a smaller "
                    "memory_bytes_max, or let the source return smaller batches"
                ) from error
        return Groups(
            rows,
            starts,
            hashes[order[starts]],
            [k.take(firsts) for k in raw],
            [k.take(firsts) for k in normal],
        )

    @property
    def count(self) -> int:
        """Number of keys."""
        return len(self.starts)

    def find_keys(self, hashes: HashArray, keys: list[pa.Array]) -> IndexArray:
        """Return the position of each of some distinct keys among these, or -1; int64 (number of those keys,)."""
        positions: IndexArray = np.full(len(hashes), -1, dtype=np.int64)
        if self.count and len(hashes):
            together = [pa.concat_arrays([a, b]) for a, b in zip(self.keys, keys, strict=True)]
            order, starts = group_by_key(np.concatenate([self.hashes, hashes]), together)
            sizes = np.diff(np.append(starts, len(order)))
            # The order is stable: of two rows of one key the first is this group's.
            pairs = starts[sizes > 1]
            positions[order[pairs + 1] - self.count] = order[pairs]
        return positions


@dataclass
class Changed:
    """Rows that a call changed.

    Parameters
    ----------
    positions
        Position of each row's key among the called keys, int64 (number of rows,).
    rows
        The rows, with the schema of a run, in the order of `positions`.
    """

    positions: IndexArray
    rows: pa.RecordBatch


@dataclass
class Result:
    """Changes that calls made to the state, filled in when a call's output has been consumed.

    Parameters
    ----------
    data
        Changes of the keys with rows.
    timeouts
        Changes of the keys that timed out.
    """

    data: Changed | None = field(default=None)
    timeouts: Changed | None = field(default=None)


class Caller(Protocol):
    """Calls a user's function for many keys, without knowing where state is stored."""

    @property
    def together(self) -> bool:
        """True if one call takes both keys with rows and keys that timed out."""

    def call_data(
        self, groups: Groups, lookup: Lookup, expired: pa.RecordBatch, context: CallContext, result: Result
    ) -> Iterator[pd.DataFrame]:
        """Call for keys with rows, together with any `expired` keys; yield output frames for Spark."""

    def call_timeouts(self, expired: pa.RecordBatch, context: CallContext, result: Result) -> Iterator[pd.DataFrame]:
        """Call for keys that timed out; yield output frames for Spark."""


def note_place(error: StateError, *where: object) -> None:
    """Add where an error happened to its text.

    It stays the same error, because Spark shows the traceback of the last error only, and that must show the mistake.
    """
    error.args = (f"{error} ({', '.join(map(str, where))})", *error.args[1:])
    mark_placed(error)


def mark_placed(error: StateError) -> None:
    """Mark an error whose text says where it happened."""
    vars(error)[_PLACED] = True


def is_placed(error: StateError) -> bool:
    """Return whether an error's text says where it happened."""
    return _PLACED in vars(error)


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text; its type alone if `str` fails on it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
