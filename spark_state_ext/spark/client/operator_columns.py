"""Columns of built-in operators' plans: keys, orders and aggregates as users give them, checked, named and typed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from arrow_schemas.operator import EXPRESSION
from arrow_schemas.spark_types import state_fields
from spark_state_ext.errors import UnsupportedTypeError, UsageError
from spark_state_ext.operators.agg import Aggregate, kernel_of
from spark_state_ext.operators.aggregate import Bound
from spark_state_ext.operators.sketches import kind_of
from spark_state_ext.spark.client.columns import (
    WATERMARK_KEY,
    KeyLike,
    place_of,
    refuse_session_windows,
    unquoted,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "PLAIN",
    "Keys",
    "bound_to",
    "checked_aggregates",
    "column_of",
    "functions_of",
    "identity",
    "listed",
    "name_of",
    "order_text",
    "orders_of",
    "plain",
    "quoted",
    "refuse_doubles",
    "refuse_nested",
    "result_fields",
    "selected",
    "state_type_of",
    "values_of",
]

Keys = KeyLike | Sequence[KeyLike]
_NAME = re.compile(r"\w+")
_COLUMN = re.compile(r"Column<'(.+)'>")
_SORT_ORDER = re.compile(r" (ASC|DESC) NULLS (FIRST|LAST)\b")
# In place of the metadata that a column has by itself: Spark passes on that of event times.
PLAIN = {"spark_state_ext.value": True}
_SIMPLE: dict[pa.DataType, DataType] = {
    pa.int64(): LongType(),
    pa.float64(): DoubleType(),
    pa.bool_(): BooleanType(),
    pa.binary(): BinaryType(),
}


def listed(columns: Keys) -> list[Any]:
    """What may be one column or several, as several."""
    return list(columns) if isinstance(columns, (list, tuple)) else [columns]


def _refuse_no_columns(given: Sequence[Any], what: str) -> None:
    """Raise a UsageError for what is neither a column's name nor an expression."""
    for column in given:
        if not isinstance(column, str) and not hasattr(column, "alias"):
            raise UsageError(f"{what} holds {column!r}: give a column's name, or an expression")


def column_of(given: KeyLike) -> Column:
    """A column by name, or as it is."""
    return F.col(given) if isinstance(given, str) else given


def _refuse_sort_orders(orders: Sequence[KeyLike], inputs: Sequence[str]) -> None:
    """Refuse ``F.col("v").desc()``, which Spark only notices when it runs."""
    for order in orders:
        text = str(order)
        if isinstance(order, str) or text in {f"Column<'{name}'>" for name in inputs}:
            continue
        if _SORT_ORDER.search(text):
            raise UsageError(
                f"order_by of top_k has {text}, a column with an order of its own: give the column as it is, and use "
                "descending=True or False, for each of them if they differ. NULLs are the smallest."
            )


def orders_of(order_by: Keys, descending: bool | Sequence[bool], inputs: Sequence[str]) -> tuple[list[Any], list[bool]]:
    """What rows of `top_k` are ordered by, and whether the largest come first, for each."""
    orders = listed(order_by)
    _refuse_no_columns(orders, "order_by of top_k")
    given = descending if isinstance(descending, (list, tuple)) else [descending] * len(orders)
    if not all(isinstance(value, (bool, np.bool_)) for value in given):
        raise UsageError(f"descending of top_k must be True or False, or a list of these, not {descending!r}")
    downwards = [bool(value) for value in given]
    if not orders or len(orders) != len(downwards):
        raise UsageError(f"order_by of top_k has {len(orders)} columns, and descending {len(downwards)} values")
    _refuse_sort_orders(orders, inputs)
    return orders, downwards


def identity(name: str, parameters: Mapping[str, Any]) -> str:
    """A built-in operator as in `OperatorFile`."""
    return json.dumps({"name": name, "parameters": dict(parameters)}, sort_keys=True)


def functions_of(specs: Mapping[str, Aggregate], bound: Sequence[Bound], schema: StructType) -> dict[str, str]:
    """What is in each aggregate's state. Their columns may be others: a renamed column has the same values."""
    columns = {one.name: one.column for one in bound}
    return {name: _function_text(spec, columns[name], schema) for name, spec in specs.items()}


def _function_text(spec: Aggregate, column: str | None, schema: StructType) -> str:
    if spec.function == "approx_count_distinct" and column is not None:
        # Neither sketches of two sizes nor hashes of two kinds of values go together.
        return f"{spec.function} of {kind_of(arrow_type(schema[column]))} with lg_k {spec.lg_k}"
    return spec.function + (" ignoring NULLs" if spec.ignore_nulls else "")


def name_of(given: KeyLike, inputs: Sequence[str]) -> str | None:
    """The input column that is meant, however it is written, as a text or by ``F.col``; None for anything else."""
    if isinstance(given, str):
        name = unquoted(given)
    else:
        shown = _COLUMN.fullmatch(str(given))
        name = shown[1] if shown else ""
    at = place_of(name, inputs)
    return None if at is None else inputs[at]


def order_text(orders: Sequence[KeyLike], names: Sequence[str | None], downwards: Sequence[bool]) -> str:
    """An order; the text of an expression is another in other releases of Spark, and so is left out."""
    return ", ".join(
        f"{name or (order if isinstance(order, str) else EXPRESSION)} {'descending' if descending else 'ascending'}"
        for order, name, descending in zip(orders, names, downwards, strict=True)
    )


def quoted(names: Sequence[str]) -> list[Any]:
    """Names as Spark takes them for columns, whatever is in them."""
    return [name if _NAME.fullmatch(name) else f"`{name.replace('`', '``')}`" for name in names]


def refuse_doubles(names: Sequence[str], what: str) -> None:
    """Raise a UsageError when a name comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{what} have different names, and {name!r} is there more than once: use an alias")
        seen.add(name)


def plain(field: StructField) -> StructField:
    """An output column: the same, without a watermark."""
    metadata = {
        name: value for name, value in (field.metadata or {}).items() if name != WATERMARK_KEY and name not in PLAIN
    }
    return StructField(field.name, field.dataType, field.nullable, metadata)


def checked_aggregates(aggregates: Mapping[str, Aggregate], name: str) -> dict[str, Aggregate]:
    """The aggregates of an operator; raises a UsageError when they are something else."""
    known = isinstance(aggregates, Mapping) and all(isinstance(name, str) for name in aggregates)
    if not known or not aggregates or not all(isinstance(value, Aggregate) for value in aggregates.values()):
        raise UsageError(
            f"aggregates of {name} is a mapping of output columns to aggregates, such as {{'n': Agg.count()}}, not "
            f"{aggregates!r}"
        )
    for name, spec in aggregates.items():
        if spec.column is not None and not isinstance(spec.column, str) and not hasattr(spec.column, "alias"):
            raise UsageError(f"the aggregate {name!r} is of {spec.column!r}: give a column's name, or an expression")
    return dict(aggregates)


def selected(
    df: DataFrame,
    keys: Sequence[KeyLike],
    specs: Mapping[str, Aggregate],
    *more: Column,
    behind: Sequence[Column] = (),
) -> tuple[DataFrame, tuple[Bound, ...]]:
    """The keys, `more`, and the columns that are aggregated, each once, and `behind`; and the functions of these."""
    values = values_of(specs)
    columns = [column_of(column).alias(name, metadata=PLAIN) for name, column in values.values()]
    narrow = df.select(*keys, *more, *columns, *behind)
    refuse_session_windows(narrow.schema.fields[: len(keys)])
    return narrow, bound_to(specs, narrow.schema)


def values_of(specs: Mapping[str, Aggregate]) -> dict[Any, tuple[str, Any]]:
    """The columns that are aggregated, each once, by what tells them apart: their names, and the columns as given."""
    found: dict[Any, tuple[str, Any]] = {}
    for spec in specs.values():
        if spec.column is not None:
            found.setdefault(_told_by(spec.column), (f"__v{len(found)}", spec.column))
    return found


def _told_by(column: Any) -> Any:
    # Columns of Spark have no equality; the same object is the same expression.
    return column if isinstance(column, str) else id(column)


def bound_to(specs: Mapping[str, Aggregate], narrow: StructType) -> tuple[Bound, ...]:
    """The aggregates as functions of the columns that `values_of` names."""
    refuse_doubles(narrow.names, "keys")
    names = {known: name for known, (name, _) in values_of(specs).items()}
    bound = []
    for name, spec in specs.items():
        column = None if spec.column is None else names[_told_by(spec.column)]
        field = None if column is None else narrow[column]
        if field is not None and spec.function in ("min", "max", "approx_count_distinct"):
            refuse_nested(field, f"column of the aggregate {name!r}")
        bound.append(Bound(name, kernel_of(spec, None if field is None else arrow_type(field), name), column))
    return tuple(bound)


def arrow_type(field: StructField) -> pa.DataType:
    return state_fields(StructType([field]).json(), "input")[0].type


def refuse_nested(field: StructField, what: str) -> None:
    """Refuse what cannot be compared as Spark compares it."""
    collation = getattr(field.dataType, "collation", None) if isinstance(field.dataType, StringType) else None
    if collation not in (None, "UTF8_BINARY") or pa.types.is_nested(arrow_type(field)):
        raise UnsupportedTypeError(
            f"the {what} has the type {field.dataType.simpleString()}, whose values cannot be compared: "
            "use plain strings, numbers, binaries, dates or timestamps"
        )


def state_type_of(bound: Sequence[Bound], schema: StructType) -> StructType:
    """Spark's type of the aggregates' state."""
    fields = [
        StructField(name, _spark_type(data_type, one, schema))
        for one in bound
        for name, data_type in zip(one.state_names, one.state_types, strict=True)
    ]
    refuse_doubles([field.name for field in fields], "state columns of the aggregates")
    return StructType(fields)


def result_fields(bound: Sequence[Bound], schema: StructType) -> list[StructField]:
    """Output columns of the aggregates."""
    return [StructField(one.name, _spark_type(one.kernel.result, one, schema)) for one in bound]


def _spark_type(data_type: pa.DataType, bound: Bound, schema: StructType) -> DataType:
    """Spark's type of a buffer or result: that of its input, or one of the few that functions have of their own."""
    if bound.column is not None and data_type == arrow_type(schema[bound.column]):
        return schema[bound.column].dataType
    if pa.types.is_decimal(data_type):
        return DecimalType(data_type.precision, data_type.scale)
    return _SIMPLE[data_type]
