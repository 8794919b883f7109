"""Rows of a bucket by key; what a caller of a user's function gets, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from arrow_schemas.columns import flat
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
    "is_placed",
    "mark_placed",
    "note_place",
    "said",
]

_PLACED = "spark_state_ext_placed"


@dataclass(frozen=True)
class CallContext:
    """What is the same for all keys of a bucket in a batch.

    Parameters
    ----------
    after_key
        To be called now and then, after each key or batch of keys.
    scan
        The bucket's committed state, table after table.
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
    """Rows of a hash range, by key.

    Parameters
    ----------
    rows
        Input columns, rows of a key adjacent, ascending by hash.
    starts
        Where each key's rows begin, int64 (number of keys,).
    hashes
        Each key's hash, uint64 (number of keys,).
    raw_keys
        Key columns as they came, one row a key.
    keys
        The same normalised.
    """

    rows: pa.Table
    starts: IndexArray
    hashes: HashArray
    raw_keys: list[pa.Array]
    keys: list[pa.Array]

    @staticmethod
    def of(table: pa.Table, hashes: HashArray, key_positions: Sequence[int], columns: int, schema: RowSchema) -> Groups:
        """Group the rows of a table; its first `columns` columns are the input's."""
        raw = [flat(table.column(position)) for position in key_positions]
        normal = schema.normalise_keys(raw)
        order, starts = group_by_key(hashes, normal)
        firsts = pa.array(order[starts])
        rows = table.select(list(range(columns)))
        if len(starts) > 1:  # else they are in order, and may be more than Arrow can copy at once
            try:
                rows = rows.take(pa.array(order))
            except pa.ArrowInvalid as error:
                raise StorageError(
                    "the rows of a batch that are handled together have more than 2 GiB in one column: set a smaller "
                    "memory_bytes_max, or let the source give smaller batches"
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

    def positions_of(self, hashes: HashArray, keys: list[pa.Array]) -> IndexArray:
        """Where some other keys (each given once) are among these, or -1; int64 (number of others,)."""
        found: IndexArray = np.full(len(hashes), -1, dtype=np.int64)
        if self.count and len(hashes):
            together = [pa.concat_arrays([a, b]) for a, b in zip(self.keys, keys, strict=True)]
            order, starts = group_by_key(np.concatenate([self.hashes, hashes]), together)
            sizes = np.diff(np.append(starts, len(order)))
            # Stable order: of two rows of one key the first is ours.
            pairs = starts[sizes > 1]
            found[order[pairs + 1] - self.count] = order[pairs]
        return found


@dataclass
class Changed:
    """Rows that a call changed.

    Parameters
    ----------
    positions
        Of which keys they are, among those that were called, int64 (number of rows,).
    rows
        The rows as of a run, in the order of `positions`.
    """

    positions: IndexArray
    rows: pa.RecordBatch


@dataclass
class Result:
    """What calls did to the state; filled in when the output of a call has been taken to its end.

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
    """Calls a user's function for many keys. It knows nothing of where state is kept."""

    @property
    def together(self) -> bool:
        """Whether keys that timed out are handed in along with those that have rows."""

    def data(
        self, groups: Groups, found: Lookup, expired: pa.RecordBatch, context: CallContext, result: Result
    ) -> Iterator[pd.DataFrame]:
        """Call for keys with rows, and for `expired` ones with them if there are any; yields what goes to Spark."""

    def timeouts(self, expired: pa.RecordBatch, context: CallContext, result: Result) -> Iterator[pd.DataFrame]:
        """Call for keys whose time is up; yields what goes to Spark."""


def note_place(error: StateError, *where: object) -> None:
    """Have an error say also where it happened. It stays the same error, as Spark shows the traceback of the last one
    only, and the mistake is to be found."""
    error.args = (f"{error} ({', '.join(map(str, where))})", *error.args[1:])
    mark_placed(error)


def mark_placed(error: StateError) -> None:
    """Note that an error's text says where it happened."""
    vars(error)[_PLACED] = True


def is_placed(error: StateError) -> bool:
    """Whether an error's text says where it happened."""
    return _PLACED in vars(error)


def said(error: BaseException) -> str:
    """What an exception of the user's says; its type alone when its text cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
