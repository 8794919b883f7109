"""Searches rows for keys, and bytes for the values of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from arrow_schemas.evolution import conform
from arrow_schemas.row import DELETED, RowSchema
from spark_state_ext.engine.erased_rows import find_matching

__all__ = ["Search", "SearchedKeys"]

# Shorter values would match everywhere.
VALUE_BYTES_MIN = 4
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class SearchedKeys:
    """The keys of a search.

    Parameters
    ----------
    keys
        The keys in stored form.
    values
        The distinct values of the keys that can be searched for in bytes.
    needed
        For each key with such values: the indices of its values, all of which must be found.
    """

    keys: pa.RecordBatch
    values: tuple[bytes, ...]
    needed: tuple[frozenset[int], ...]

    @staticmethod
    def of(keys: pa.RecordBatch) -> SearchedKeys:
        """Collect the values of some keys."""
        indices: dict[bytes, int] = {}
        needed: list[set[int]] = [set() for _ in range(keys.num_rows)]
        for column in keys.columns:
            for rows, texts in _iterate_values(column, np.arange(keys.num_rows)):
                for row, text in zip(rows.tolist(), texts.to_pylist(), strict=True):
                    if text is not None and len(text) >= VALUE_BYTES_MIN:
                        needed[row].add(indices.setdefault(text, len(indices)))
        return SearchedKeys(
            keys, tuple(indices), tuple(frozenset(value_indices) for value_indices in needed if value_indices)
        )

    @property
    def by_rows_only(self) -> int:
        """Number of keys without a value that can be searched for in bytes."""
        return int(self.keys.num_rows) - len(self.needed)


def _iterate_values(column: pa.Array, rows: np.ndarray) -> Iterable[tuple[np.ndarray, pa.Array]]:
    """Yield the string and binary values of a column at any depth, as bytes, with the numbers of their rows."""
    types = pa.types
    if types.is_string(column.type) or types.is_binary(column.type):
        yield rows, column.cast(pa.binary())
    elif types.is_struct(column.type):
        for child in column.flatten():
            yield from _iterate_values(child, rows)
    elif types.is_list(column.type):
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        yield from _iterate_values(column.flatten(), np.repeat(rows, lengths))


@dataclass
class Search:
    """The search of one file for keys.

    Parameters
    ----------
    searched
        The keys.
    rows, compared, tombstones
        Number of rows of the keys, of all compared rows, and of the keys' tombstones.
    """

    searched: SearchedKeys
    rows: int = 0
    compared: int = 0
    tombstones: int = 0
    _seen: set[int] = field(default_factory=set)

    def search_rows(self, batch: pa.RecordBatch, schema: RowSchema) -> None:
        """Compare rows with the keys, and search all columns of the rows for the keys' values."""
        self.compared += batch.num_rows
        if batch.num_rows:
            rows = conform(batch, schema)
            is_key = find_matching(schema.key_columns(rows), self.searched.keys.columns)
            self.rows += int(is_key.sum())
            self.tombstones += int((is_key & rows.column(DELETED).to_numpy(zero_copy_only=False)).sum())
        # The stored batch is searched, because the newest schema may no longer have all of its columns.
        self.search_batch(batch)

    def search_batch(self, batch: pa.RecordBatch) -> None:
        """Search all columns of a batch for the keys' values."""
        self.search_bytes(batch.serialize().to_pybytes())

    def search_bytes(self, data: bytes) -> None:
        """Search bytes for the keys' values."""
        for index, value in enumerate(self.searched.values):
            if index not in self._seen and value in data:
                self._seen.add(index)

    def search_file(self, read: Callable[[int, int], bytes], size: int) -> None:
        """Search the bytes of a file for the keys' values."""
        longest = max(map(len, self.searched.values), default=0)
        for start in range(0, size, _PIECE_BYTES):
            # Pieces overlap by the length of the longest value.
            self.search_bytes(read(start, min(size, start + _PIECE_BYTES + longest)))

    @property
    def keys_by_bytes(self) -> int:
        """Number of keys whose values were all found."""
        return sum(needed <= self._seen for needed in self.searched.needed)

    @property
    def found(self) -> bool:
        """True if the file has rows or values of the keys."""
        return bool(self.rows or self.keys_by_bytes)
