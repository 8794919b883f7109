"""The top rows of each key over all input, as ``ROW_NUMBER() OVER (PARTITION BY … ORDER BY …) <= k``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import combine_chunks, get_field
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.arrays import (
    KeyedRows,
    Segments,
    order_within,
    sort_codes,
    sorts_before,
    take_interleaved,
    to_numbers,
)

__all__ = ["TOP", "TopK"]

# The only state column: a list of the top rows, the best first.
TOP = "top"


@dataclass(frozen=True)
class TopK:
    """The vectorised function of a top k.

    Parameters
    ----------
    k
        Number of rows that are kept per key.
    order
        Columns to sort by, each with True for descending order. Equal rows are in order of arrival.
    kept
        Columns that the state contains: all except the keys.
    output
        Columns of the output: keys or kept columns.
    rank
        Name of the output's last column: 1 for the best row.
    changed_only
        True: output only rows that are new in the top or have a new rank. False: output a changed top as a whole.
    """

    k: int
    order: tuple[tuple[str, bool], ...]
    kept: tuple[str, ...]
    output: tuple[str, ...]
    rank: str
    changed_only: bool = False

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """Return the top rows of each key whose top has changed."""
        stored = _StoredRows.of(batch)
        row_keys = to_numbers(batch.group_ids)
        candidates = self._find_candidates(batch, stored, row_keys)
        if not len(candidates):
            return None
        changed: BoolArray = np.zeros(len(batch), dtype=np.bool_)
        changed[row_keys[candidates]] = True
        # Entries: stored rows first, then the rows of the batch.
        entries = np.concatenate([np.flatnonzero(changed[stored.keys]), stored.count + candidates])
        keys = np.concatenate([stored.keys, row_keys])[entries]
        best = self._find_best(keys, lambda name, positions: _take_values(batch, stored, name, entries[positions]))
        entries, keys = entries[best], keys[best]
        columns = [_take_values(batch, stored, name, entries) for name in self.kept]
        self._update(batch, columns, changed, keys)
        return self._build_output(batch, stored, columns, entries, keys)

    def thin(self, rows: KeyedRows) -> tuple[pa.Table, IndexArray]:
        """Return the best rows of each key in order of arrival, to shuffle fewer rows."""
        if rows.single:
            return rows.by_key, np.arange(len(rows.starts))
        keys = Segments(rows.starts, rows.table.num_rows).ids
        best = np.sort(self._find_best(keys, rows.column))
        return rows.take(best), keys[best]

    # -- inside ------------------------------------------------------------------------------------

    def _find_best(self, keys: IndexArray, values: Callable[[str, IndexArray], pa.Array]) -> IndexArray:
        """Return the positions of the best rows of each key, by key, the best first.

        A column is only compared for rows that are equal in all columns before it and may be among the best. So text,
        which is slow to compare, is mostly not compared at all.
        """
        order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
        keys = keys[order]
        # Where a set of rows begins that are equal in all columns compared so far.
        begins = _find_key_starts(keys)
        for name, descending in self.order:
            sets = Segments(np.flatnonzero(begins), len(order))
            undecided = (sets.sizes > 1) & (_compute_ranks(keys)[sets.starts] <= self.k)
            positions = np.flatnonzero(undecided[sets.ids])
            if not len(positions):
                break
            codes = sort_codes(values(name, order[positions]), descending)
            sorted_positions = order_within(sets.ids[positions], codes)
            order[positions] = order[positions[sorted_positions]]
            for code in codes:
                begins[positions[1:][np.diff(code[sorted_positions]) != 0]] = True
        return order[_compute_ranks(keys) <= self.k]

    def _find_candidates(self, batch: StateBatch, stored: _StoredRows, row_keys: IndexArray) -> IndexArray:
        """Return rows that are better than the last row of their key's top, or whose key has fewer than k rows."""
        has_room = stored.sizes[row_keys] < self.k
        candidates, tied = [np.flatnonzero(has_room)], np.flatnonzero(~has_room)
        for name, descending in self.order:
            if not len(tied):
                break
            last = stored.starts[row_keys[tied]] + self.k - 1
            pairs = np.concatenate([last, stored.count + tied])
            codes = sort_codes(_take_values(batch, stored, name, pairs), descending)
            last_positions = np.arange(len(tied))
            row_positions = last_positions + len(tied)
            wins, loses = (
                sorts_before(codes, row_positions, last_positions),
                sorts_before(codes, last_positions, row_positions),
            )
            candidates.append(tied[wins])
            tied = tied[~(wins | loses)]
        return np.sort(np.concatenate(candidates))

    def _update(self, batch: StateBatch, columns: Sequence[pa.Array], changed: BoolArray, keys: IndexArray) -> None:
        list_type = batch.state.schema.field(TOP).type
        rows = pa.StructArray.from_arrays(list(columns), fields=list(list_type.value_type))
        sizes = np.bincount(keys, minlength=len(batch))[changed]
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        batch.update({TOP: pa.ListArray.from_arrays(offsets, rows, type=list_type)}, where=changed, by_key=False)

    def _build_output(
        self,
        batch: StateBatch,
        stored: _StoredRows,
        columns: Sequence[pa.Array],
        entries: IndexArray,
        keys: IndexArray,
    ) -> pa.Table:
        ranks = _compute_ranks(keys)
        columns_by_name = dict(zip(self.kept, columns, strict=True))
        if self.changed_only:
            before_ranks = np.append(_compute_ranks(stored.keys), 0)[np.minimum(entries, stored.count)]
            differ = before_ranks != ranks
            chosen = pa.array(differ)
            columns_by_name = {name: column.filter(chosen) for name, column in columns_by_name.items()}
            keys, ranks = keys[differ], ranks[differ]
        key_index = pa.array(keys)
        output_columns = [
            columns_by_name[name] if name in columns_by_name else batch.keys.column(name).take(key_index)
            for name in self.output
        ]
        return pa.table([*output_columns, pa.array(ranks, pa.int32())], names=[*self.output, self.rank])


@dataclass(frozen=True)
class _StoredRows:
    """The rows in the state.

    Parameters
    ----------
    rows
        The rows as a struct array, ordered by key.
    keys
        Key position of each row, int64 (number of rows,).
    sizes, starts
        Number of rows of each key, and where they begin, int64 (number of keys,).
    """

    rows: pa.StructArray
    keys: IndexArray
    sizes: IndexArray
    starts: IndexArray

    @staticmethod
    def of(batch: StateBatch) -> _StoredRows:
        lists = combine_chunks(batch.state.column(TOP))
        sizes = to_numbers(pc.list_value_length(lists)).astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        return _StoredRows(lists.flatten(), np.repeat(np.arange(len(batch)), sizes), sizes, starts)

    @property
    def count(self) -> int:
        return len(self.keys)

    def column(self, name: str) -> pa.Array:
        return get_field(self.rows, name)


def _take_values(batch: StateBatch, stored: _StoredRows, name: str, entries: IndexArray) -> pa.Array:
    """Return a column's values at entries; entries are stored rows, then the rows of the batch."""
    return take_interleaved([stored.column(name)], [combine_chunks(batch.rows.column(name))], entries)[0]


def _find_key_starts(keys: IndexArray) -> BoolArray:
    """Return a mask of the rows where a key begins; rows of a key must be adjacent."""
    return np.append(True, keys[1:] != keys[:-1])[: len(keys)]


def _compute_ranks(keys: IndexArray) -> IndexArray:
    """Return the rank of each row within its key, from 1; rows of a key must be adjacent."""
    places = np.arange(len(keys))
    return places - np.maximum.accumulate(np.where(_find_key_starts(keys), places, 0)) + 1
