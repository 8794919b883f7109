"""What differs between two states, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from arrow_schemas.equality import group_by_key, rows_equal
from spark_state_ext.errors import UsageError
from spark_state_ext.reading.state import OpenState

__all__ = ["ADDED", "CHANGED", "REMOVED", "Compared", "compared"]

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
_HASH, _TIMEOUT, _DEFINED = "key_hash", "timeout_ms", "defined"


@dataclass(frozen=True)
class Compared:
    """How two states are compared.

    Parameters
    ----------
    schema
        Of the differences: ``change``, the key columns, and ``before`` and ``after``.
    only_first, only_second
        State columns that only one has, or that have different types: they are not compared.
    differences
        The differences, in the order of the keys' hashes.
    """

    schema: pa.Schema
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    differences: Iterator[pa.RecordBatch]


def compared(first: OpenState, second: OpenState, columns: Sequence[str] | None = None) -> Compared:
    """Compare two states by key."""
    keys = [field.name for field in first.key_schema]
    if not first.key_schema.equals(second.key_schema):
        raise UsageError(
            f"keys with the columns {_told(first.key_schema)} and with {_told(second.key_schema)} cannot be compared"
        )
    if first.bucket_map != second.bucket_map and not (first.bucket_map.one_state and second.bucket_map.one_state):
        raise UsageError(
            f"{first.bucket_map} and {second.bucket_map} cannot be compared: in one of them a key has a state for each "
            "stream"
        )
    here, there = set(map(_pair, first.state_schema)), set(map(_pair, second.state_schema))
    both = [field.with_nullable(True) for field in first.state_schema if _pair(field) in there]
    both.append(pa.field(_TIMEOUT, pa.int64()))
    values = pa.struct(both if columns is None else _named(both, columns))
    schema = pa.schema([("change", pa.string()), *first.key_schema, ("before", values), ("after", values)])
    names = [*keys, *(field.name for field in values), _DEFINED, _HASH]

    def differences() -> Iterator[pa.RecordBatch]:
        # By one bucket map, a key is in the same bucket of both.
        same = first.bucket_map == second.bucket_map
        for buckets in [[n] for n in range(first.buckets)] if same else [None]:
            tables = [it.scan(names, buckets=buckets).read_all() for it in (first, second)]
            yield from _differing(tables, keys, schema)

    only_first, only_second = (
        tuple(name for name, _ in sorted(only) if columns is None) for only in (here - there, there - here)
    )
    return Compared(schema, only_first, only_second, differences())


def _named(fields: Sequence[pa.Field], names: Sequence[str]) -> list[pa.Field]:
    by_name = {field.name: field for field in fields}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UsageError(f"there is no column {unknown[0]!r} to compare in both states; there are {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)]


def _pair(field: pa.Field) -> tuple[str, str]:
    return field.name, str(field.type)


def _told(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _differing(tables: Sequence[pa.Table], keys: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    rows = pa.concat_tables(tables).combine_chunks()
    if not rows.num_rows:
        return
    columns = {name: _whole(rows.column(name)) for name in rows.column_names}
    order, starts = group_by_key(columns[_HASH].to_numpy(), [columns[name] for name in keys])
    sizes = np.diff(np.append(starts, len(order)))
    firsts = order[starts]
    twice = sizes == 2
    # Rows of a key are in their order: before, and after.
    seconds = np.where(twice, order[np.minimum(starts + 1, len(order) - 1)], firsts)
    is_before = firsts < tables[0].num_rows
    value_names = [field.name for field in schema.field("before").type]
    differs = ~twice
    differs |= ~_equal([columns[name] for name in (*value_names, _DEFINED)], firsts, seconds)
    if not differs.any():
        return
    change = np.where(twice, CHANGED, np.where(is_before, REMOVED, ADDED))[differs]
    at_first, at_second = pa.array(firsts[differs]), pa.array(seconds[differs])
    struct = schema.field("before").type
    made = [
        pa.StructArray.from_arrays(
            [columns[name].take(at) for name in value_names], fields=list(struct), mask=pa.array(change == missing)
        )
        for at, missing in ((at_first, ADDED), (at_second, REMOVED))
    ]
    key_columns = [columns[name].take(at_first) for name in keys]
    yield pa.RecordBatch.from_arrays([pa.array(change.astype(object), pa.string()), *key_columns, *made], schema=schema)


def _equal(columns: Sequence[pa.Array], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Row by row, whether values are equal; maps, which Arrow does not compare, by their pairs in order."""
    at, to = pa.array(left), pa.array(right)
    plain = [column for column in columns if not _has_map(column.type)]
    equal = rows_equal([it.take(at) for it in plain], [it.take(to) for it in plain])
    for column in columns:
        if _has_map(column.type):
            values = column.to_pylist()
            equal &= np.fromiter(
                (values[a] == values[b] for a, b in zip(left, right, strict=True)), np.bool_, len(left)
            )
    return equal


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    if pa.types.is_list(kind):
        return _has_map(kind.value_type)
    return bool(pa.types.is_struct(kind)) and any(_has_map(field.type) for field in kind)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
