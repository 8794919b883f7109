"""Looking for keys in rows, and for their values in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from arrow_schemas.evolution import conform
from arrow_schemas.row import DELETED, RowSchema
from spark_state_ext.engine.erasing import matching

__all__ = ["Search", "Wanted"]

# Shorter values are found everywhere.
VALUE_BYTES_MIN = 4
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class Wanted:
    """Keys to look for.

    Parameters
    ----------
    keys
        The keys, in stored form.
    values
        Their values that can be searched for in bytes, each once.
    needed
        For each key that has some: which of the values it has. All have to be there.
    """

    keys: pa.RecordBatch
    values: tuple[bytes, ...]
    needed: tuple[frozenset[int], ...]

    @staticmethod
    def of(keys: pa.RecordBatch) -> Wanted:
        """Those of some keys."""
        places: dict[bytes, int] = {}
        needed: list[set[int]] = [set() for _ in range(keys.num_rows)]
        for column in keys.columns:
            for rows, texts in _texts(column, np.arange(keys.num_rows)):
                for row, text in zip(rows.tolist(), texts.to_pylist(), strict=True):
                    if text is not None and len(text) >= VALUE_BYTES_MIN:
                        needed[row].add(places.setdefault(text, len(places)))
        return Wanted(keys, tuple(places), tuple(frozenset(it) for it in needed if it))

    @property
    def by_rows_only(self) -> int:
        """How many keys have no value that can be searched for in bytes."""
        return int(self.keys.num_rows) - len(self.needed)


def _texts(column: pa.Array, rows: np.ndarray) -> Iterable[tuple[np.ndarray, pa.Array]]:
    """Text and binary values of a column at any depth, as bytes, each with the row that has it."""
    types = pa.types
    if types.is_string(column.type) or types.is_binary(column.type):
        yield rows, column.cast(pa.binary())
    elif types.is_struct(column.type):
        for child in column.flatten():
            yield from _texts(child, rows)
    elif types.is_list(column.type):
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        yield from _texts(column.flatten(), np.repeat(rows, lengths))


@dataclass
class Search:
    """What one file has of the keys.

    Parameters
    ----------
    wanted
        The keys.
    rows, compared, tombstones
        Rows of the keys; all rows; rows that only say that a key was removed.
    """

    wanted: Wanted
    rows: int = 0
    compared: int = 0
    tombstones: int = 0
    _seen: set[int] = field(default_factory=set)

    def in_rows(self, batch: pa.RecordBatch, schema: RowSchema) -> None:
        """Compare rows with the keys, and search all that they hold for the keys' values."""
        self.compared += batch.num_rows
        if batch.num_rows:
            rows = conform(batch, schema)
            found = matching(schema.key_columns(rows), self.wanted.keys.columns)
            self.rows += int(found.sum())
            self.tombstones += int((found & rows.column(DELETED).to_numpy(zero_copy_only=False)).sum())
        # Not of the rows as the schema has them: it may have lost columns.
        self.in_batch(batch)

    def in_batch(self, batch: pa.RecordBatch) -> None:
        """Search all that a batch holds for the keys' values."""
        self.in_bytes(batch.serialize().to_pybytes())

    def in_bytes(self, data: bytes) -> None:
        """Search bytes for the keys' values."""
        for at, value in enumerate(self.wanted.values):
            if at not in self._seen and value in data:
                self._seen.add(at)

    def in_file(self, read: Callable[[int, int], bytes], size: int) -> None:
        """Search a file as it is."""
        longest = max(map(len, self.wanted.values), default=0)
        for at in range(0, size, _PIECE_BYTES):
            # As far into the next piece as a value may reach.
            self.in_bytes(read(at, min(size, at + _PIECE_BYTES + longest)))

    @property
    def keys_by_bytes(self) -> int:
        """Keys of which all values were seen."""
        return sum(needed <= self._seen for needed in self.wanted.needed)

    @property
    def found(self) -> bool:
        """Whether the file has something of the keys."""
        return bool(self.rows or self.keys_by_bytes)
