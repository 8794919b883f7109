"""The best rows of each key so far: what ``ROW_NUMBER() OVER (PARTITION BY … ORDER BY …) <= k`` gives of all input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.columns import flat
from arrow_schemas.equality import BoolArray, IndexArray
from spark_state_ext.operators.arrays import Segments, before, numbers, order_within, sort_codes
from spark_state_ext.state_batch import StateBatch

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
        codes = self._codes(batch, held)
        row_keys = numbers(batch.group_ids)
        candidates = self._candidates(held, codes, row_keys)
        if not len(candidates):
            return None
        changed: BoolArray = np.zeros(len(batch), dtype=np.bool_)
        changed[row_keys[candidates]] = True
        # Rows are counted on behind those that are held.
        entries = np.concatenate([np.flatnonzero(changed[held.keys]), held.count + candidates])
        keys = np.concatenate([held.keys, row_keys])[entries]
        order = order_within(keys, [code[entries] for code in codes])
        entries, keys = entries[order], keys[order]
        ranks = _ranks(keys)
        best = ranks <= self.k
        entries, keys, ranks = entries[best], keys[best], ranks[best]
        columns = self._columns(batch, held, entries)
        self._update(batch, columns, changed, keys)
        return self._given(batch, held, columns, entries, keys, ranks)

    def thin(self, rows: pa.Table, starts: IndexArray) -> tuple[pa.Table, IndexArray]:
        """Before the shuffle: of each key's rows the best, in the order in which they came."""
        if len(starts) == rows.num_rows:
            return rows, np.arange(len(starts))
        keys = Segments(starts, rows.num_rows).ids
        codes: list[IndexArray] = []
        for name, descending in self.order:
            codes += sort_codes(flat(rows.column(name)), descending)
        order = order_within(keys, codes)
        best = np.sort(order[_ranks(keys) <= self.k])
        return rows.take(pa.array(best)), keys[best]

    # -- inside ------------------------------------------------------------------------------------

    def _codes(self, batch: StateBatch, held: _Held) -> list[IndexArray]:
        """What to order by: of the rows that are held, and then of those that are new."""
        codes: list[IndexArray] = []
        for name, descending in self.order:
            own = flat(batch.rows.column(name))
            both = pa.concat_arrays([held.column(name), own]) if held.count else own
            codes += sort_codes(both, descending)
        return codes

    def _candidates(self, held: _Held, codes: list[IndexArray], row_keys: IndexArray) -> IndexArray:
        """Rows that are better than the last of their key's top, or find room there."""
        full = held.sizes >= self.k
        if not full.any():
            return np.arange(len(row_keys))
        last = np.where(full, held.starts + self.k - 1, 0)
        places = held.count + np.arange(len(row_keys))
        return np.flatnonzero(~full[row_keys] | before(codes, places, last[row_keys]))

    def _columns(self, batch: StateBatch, held: _Held, entries: IndexArray) -> list[pa.Array]:
        """The kept columns of some entries."""
        is_row = entries >= held.count
        rows = pa.array(entries[is_row] - held.count)
        found = [flat(batch.rows.column(name)).take(rows) for name in self.kept]
        if is_row.all():
            return found
        places = np.empty(len(entries), dtype=np.int64)
        places[~is_row] = np.arange(len(entries) - len(rows))
        places[is_row] = np.arange(len(entries) - len(rows), len(entries))
        kept = held.rows.take(pa.array(entries[~is_row]))
        at = pa.array(places)
        return [
            pa.concat_arrays([pc.struct_field(kept, name), column]).take(at)
            for name, column in zip(self.kept, found, strict=True)
        ]

    def _update(self, batch: StateBatch, columns: Sequence[pa.Array], changed: BoolArray, keys: IndexArray) -> None:
        kind = batch.state.schema.field(TOP).type
        rows = pa.StructArray.from_arrays(list(columns), fields=list(kind.value_type))
        sizes = np.bincount(keys, minlength=len(batch))[changed]
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        batch.update({TOP: pa.ListArray.from_arrays(offsets, rows, type=kind)}, where=changed)

    def _given(
        self,
        batch: StateBatch,
        held: _Held,
        columns: Sequence[pa.Array],
        entries: IndexArray,
        keys: IndexArray,
        ranks: IndexArray,
    ) -> pa.Table:
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
        return pc.struct_field(self.rows, name)


def _ranks(keys: IndexArray) -> IndexArray:
    """Place of each row among those of its key, from 1; keys ascend."""
    places = np.arange(len(keys))
    first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    return places - np.maximum.accumulate(np.where(first, places, 0)) + 1
