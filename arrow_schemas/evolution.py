"""Changes of a state schema that stored rows can follow.

Allowed changes are: a new nullable column; a column that becomes nullable, also within lists, maps and structs; and a
wider number type that holds every old value exactly. The error for any other change names the column and the reason.
"""

from __future__ import annotations

import pyarrow as pa

from arrow_schemas.errors import SchemaChangedError
from arrow_schemas.row import RowSchema

__all__ = ["conform", "check_state_change"]

_INTEGER_BITS = {pa.int8(): 8, pa.int16(): 16, pa.int32(): 32, pa.int64(): 64}
_INTEGER_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
# How many bits of an integer a float holds exactly.
_EXACT_BITS = {pa.float32(): 24, pa.float64(): 53}


def check_state_change(operator: str, stored: tuple[pa.Field, ...], asked: tuple[pa.Field, ...]) -> bool:
    """Return True if the state schema changed in a way that stored rows can follow, False if it did not change.

    Raises
    ------
    SchemaChangedError
        If stored rows cannot follow the change; the message names the column.
    """

    def refuse(column: str, why: str, nested: bool = False) -> SchemaChangedError:
        allowed = "New nullable columns and wider numbers are allowed"
        if nested:
            allowed = (
                "Only top-level columns may be added or widened, not fields inside a struct, array or map: do not "
                "change this column, and add the new values as a column of their own"
            )
        return SchemaChangedError(
            f"the state of operator {operator!r} changed: column {column!r} {why}. {allowed}; or go back to the old "
            "state schema, or start from a new checkpoint location."
        )

    old = {field.name: field for field in stored}
    new = {field.name: field for field in asked}
    for field in stored:
        if field.name not in new:
            raise refuse(field.name, "was removed or renamed")
    kept = [field.name for field in asked if field.name in old]
    if kept != [field.name for field in stored]:
        moved = next(a for a, b in zip(kept, old, strict=True) if a != b)
        raise refuse(moved, "moved, but state tuples go by position")
    changed = False
    for field in asked:
        before = old.get(field.name)
        if before is None:
            if not field.nullable:
                raise refuse(field.name, "is new and not nullable, but stored rows have no value for it")
            changed = True
        elif before.type != field.type:
            if not (_widens(before.type, field.type) or _relaxes(before.type, field.type)):
                nested = pa.types.is_nested(before.type)
                fits = "is sure to fit" if nested else "fits"
                why = f"was {before.type} and is now {field.type}, but not every stored value {fits}"
                raise refuse(field.name, why, nested)
            changed = True
        elif field.nullable and not before.nullable:
            # Stored rows allow NULLs in any case; only the function would be bound by the old declaration.
            changed = True
    return changed


def conform(batch: pa.RecordBatch, schema: RowSchema) -> pa.RecordBatch:
    """Convert rows that were written under an earlier operator file to rows of `schema`.

    A column that the batch does not have becomes NULL, and a narrower number is widened. A batch that already has the
    schema is returned unchanged.
    """
    if batch.schema.equals(schema.arrow, check_metadata=False):
        return batch
    fixed = schema.key_slice.stop
    # Keys cannot change, and go by position: two keys may have the same name.
    columns = [column.cast(field.type) for column, field in zip(batch.columns[:fixed], schema.arrow, strict=False)]
    present = {name: i for i, name in enumerate(batch.schema.names)}
    for field in list(schema.arrow)[fixed:]:
        if field.name in present:
            columns.append(batch.column(present[field.name]).cast(field.type))
        else:
            columns.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow)


def _widens(before: pa.DataType, after: pa.DataType) -> bool:
    types = pa.types
    if before in _INTEGER_BITS:
        if after in _INTEGER_BITS:
            return _INTEGER_BITS[after] >= _INTEGER_BITS[before]
        if after in _EXACT_BITS:
            return _EXACT_BITS[after] >= _INTEGER_BITS[before]
        return bool(types.is_decimal(after) and after.precision - after.scale >= _INTEGER_DIGITS[before])
    if types.is_float32(before):
        return bool(types.is_float64(after))
    if types.is_decimal(before) and types.is_decimal(after):
        whole = after.precision - after.scale >= before.precision - before.scale
        return bool(whole and after.scale >= before.scale)
    return False


def _relaxes(before: pa.DataType, after: pa.DataType) -> bool:
    """Return True if a nested type differs only by allowing NULLs that it did not allow before."""
    types = pa.types
    if types.is_struct(before) and types.is_struct(after):
        pairs = list(zip(before, after, strict=False))
        if [field.name for field in before] != [field.name for field in after]:
            return False
    elif types.is_map(before) and types.is_map(after):
        pairs = [(before.key_field, after.key_field), (before.item_field, after.item_field)]
    elif types.is_list(before) and types.is_list(after):
        pairs = [(before.value_field, after.value_field)]
    else:
        return False
    return all(
        (new.nullable or not old.nullable) and (old.type == new.type or _relaxes(old.type, new.type))
        for old, new in pairs
    )
