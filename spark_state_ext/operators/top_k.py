"""The best rows of each key so far: what ``ROW_NUMBER() OVER (PARTITION BY … ORDER BY …) <= k`` gives of all input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import child_of, flat
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.operators.arrays import KeyedRows, Segments, before, interleaved, numbers, order_within, sort_codes

__all__ = ["TOP", "TopK"]

# The only state column: a list of the best rows, the best first.
TOP = "top"


@dataclass(frozen=True)
class TopK:
    """The vectorised function of a top k.

    Parameters
    ----------
    k
        How many rows a key keeps.
    order
        Columns to order by, each with whether the largest come first. Of equal rows those that came first are first.
    kept
        Columns that are kept: all but the keys.
    output
        Columns of the output, keys or kept ones.
    rank
        Name of the output's last column: 1 for the best row.
    changed_only
        Give only those rows of a changed top that are new, or have another rank than before.
    """

    k: int
    order: tuple[tuple[str, bool], ...]
    kept: tuple[str, ...]
    output: tuple[str, ...]
    rank: str
    changed_only: bool = False

    def __call__(self, batch: StateBatch) -> pa.Table | None:
        """The top rows of each key whose top has changed."""
        held = _Held.of(batch)
        row_keys = numbers(batch.group_ids)
        candidates = self._candidates(batch, held, row_keys)
        if not len(candidates):
            return None
        changed: BoolArray = np.zeros(len(batch), dtype=np.bool_)
        changed[row_keys[candidates]] = True
        # Rows are counted on behind those that are held.
        entries = np.concatenate([np.flatnonzero(changed[held.keys]), held.count + candidates])
        keys = np.concatenate([held.keys, row_keys])[entries]
        best = self._best(keys, lambda name, at: _values(batch, held, name, entries[at]))
        entries, keys = entries[best], keys[best]
        columns = [_values(batch, held, name, entries) for name in self.kept]
        self._update(batch, columns, changed, keys)
        return self._given(batch, held, columns, entries, keys)

    def thin(self, rows: KeyedRows) -> tuple[pa.Table, IndexArray]:
        """Before the shuffle: of each key's rows the best, in the order in which they came."""
        if rows.single:
            return rows.by_key, np.arange(len(rows.starts))
        keys = Segments(rows.starts, rows.table.num_rows).ids
        best = np.sort(self._best(keys, rows.column))
        return rows.take(best), keys[best]

    # -- inside ------------------------------------------------------------------------------------

    def _best(self, keys: IndexArray, values: Callable[[str, IndexArray], pa.Array]) -> IndexArray:
        """Of each key the best rows, the best first, by key.

        A column is looked at only where those before it leave rows equal that may be among the best: text, which takes
        longest to compare, mostly not at all.
        """
        order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
        keys = keys[order]
        # Where a set of rows begins that are equal as far as is known.
        begins = _begins(keys)
        for name, descending in self.order:
            sets = Segments(np.flatnonzero(begins), len(order))
            undecided = (sets.sizes > 1) & (_ranks(keys)[sets.starts] <= self.k)
            at = np.flatnonzero(undecided[sets.ids])
            if not len(at):
                break
            codes = sort_codes(values(name, order[at]), descending)
            within = order_within(sets.ids[at], codes)
            order[at] = order[at[within]]
            for code in codes:
                begins[at[1:][np.diff(code[within]) != 0]] = True
        return order[_ranks(keys) <= self.k]

    def _candidates(self, batch: StateBatch, held: _Held, row_keys: IndexArray) -> IndexArray:
        """Rows that are better than the last of their key's top, or find room there."""
        has_room = held.sizes[row_keys] < self.k
        found, tied = [np.flatnonzero(has_room)], np.flatnonzero(~has_room)
        for name, descending in self.order:
            if not len(tied):
                break
            last = held.starts[row_keys[tied]] + self.k - 1
            pairs = np.concatenate([last, held.count + tied])
            codes = sort_codes(_values(batch, held, name, pairs), descending)
            lasts = np.arange(len(tied))
            rows = lasts + len(tied)
            wins, loses = before(codes, rows, lasts), before(codes, lasts, rows)
            found.append(tied[wins])
            tied = tied[~(wins | loses)]
        return np.sort(np.concatenate(found))

    def _update(self, batch: StateBatch, columns: Sequence[pa.Array], changed: BoolArray, keys: IndexArray) -> None:
        kind = batch.state.schema.field(TOP).type
        rows = pa.StructArray.from_arrays(list(columns), fields=list(kind.value_type))
        sizes = np.bincount(keys, minlength=len(batch))[changed]
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        batch.update({TOP: pa.ListArray.from_arrays(offsets, rows, type=kind)}, where=changed, by_key=False)

    def _given(
        self,
        batch: StateBatch,
        held: _Held,
        columns: Sequence[pa.Array],
        entries: IndexArray,
        keys: IndexArray,
    ) -> pa.Table:
        ranks = _ranks(keys)
        named = dict(zip(self.kept, columns, strict=True))
        if self.changed_only:
            before_ranks = np.append(_ranks(held.keys), 0)[np.minimum(entries, held.count)]
            differ = before_ranks != ranks
            chosen = pa.array(differ)
            named = {name: column.filter(chosen) for name, column in named.items()}
            keys, ranks = keys[differ], ranks[differ]
        at = pa.array(keys)
        given = [named[name] if name in named else batch.keys.column(name).take(at) for name in self.output]
        return pa.table([*given, pa.array(ranks, pa.int32())], names=[*self.output, self.rank])


@dataclass(frozen=True)
class _Held:
    """The rows that are in the state.

    Parameters
    ----------
    rows
        As one struct array, by key.
    keys
        The key of each, int64 (number of rows,).
    sizes, starts
        How many each key has, and where they begin, int64 (number of keys,).
    """

    rows: pa.StructArray
    keys: IndexArray
    sizes: IndexArray
    starts: IndexArray

    @staticmethod
    def of(batch: StateBatch) -> _Held:
        lists = flat(batch.state.column(TOP))
        sizes = numbers(pc.list_value_length(lists)).astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        return _Held(lists.flatten(), np.repeat(np.arange(len(batch)), sizes), sizes, starts)

    @property
    def count(self) -> int:
        return len(self.keys)

    def column(self, name: str) -> pa.Array:
        return child_of(self.rows, name)


def _values(batch: StateBatch, held: _Held, name: str, entries: IndexArray) -> pa.Array:
    """A column at some entries: rows that are held, and behind these the rows of the batch."""
    return interleaved([held.column(name)], [flat(batch.rows.column(name))], entries)[0]


def _begins(keys: IndexArray) -> BoolArray:
    """Where each key begins; keys are adjacent."""
    return np.append(True, keys[1:] != keys[:-1])[: len(keys)]


def _ranks(keys: IndexArray) -> IndexArray:
    """Place of each row among those of its key, from 1; keys are adjacent."""
    places = np.arange(len(keys))
    return places - np.maximum.accumulate(np.where(_begins(keys), places, 0)) + 1
