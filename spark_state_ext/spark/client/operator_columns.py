"""Columns of the built-in operators' plans: the user's keys, orders and aggregates, checked, named and typed."""

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
from spark_state_ext.operators.agg import Aggregate, find_kernel
from spark_state_ext.operators.aggregate import BoundAggregate
from spark_state_ext.operators.sketches import describe_kind
from spark_state_ext.spark.client.columns import (
    WATERMARK_KEY,
    KeyLike,
    find_column,
    refuse_session_windows,
    unquote,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "VALUE_METADATA",
    "Keys",
    "bind_aggregates",
    "check_aggregates",
    "to_column",
    "describe_functions",
    "encode_identity",
    "to_list",
    "find_input_name",
    "describe_order",
    "parse_orders",
    "remove_watermark",
    "quote_names",
    "refuse_duplicate_names",
    "refuse_nested",
    "make_result_fields",
    "select_columns",
    "make_state_type",
    "name_aggregated_columns",
]

Keys = KeyLike | Sequence[KeyLike]
_NAME = re.compile(r"\w+")
_COLUMN = re.compile(r"Column<'(.+)'>")
_SORT_ORDER = re.compile(r" (ASC|DESC) NULLS (FIRST|LAST)\b")
# Replaces a column's own metadata: Spark would pass on the watermark of an event-time column.
VALUE_METADATA = {"spark_state_ext.value": True}
_SIMPLE: dict[pa.DataType, DataType] = {
    pa.int64(): LongType(),
    pa.float64(): DoubleType(),
    pa.bool_(): BooleanType(),
    pa.binary(): BinaryType(),
}


def to_list(columns: Keys) -> list[Any]:
    """Return one column, or several, as a list."""
    return list(columns) if isinstance(columns, (list, tuple)) else [columns]


def _check_columns(columns: Sequence[Any], what: str) -> None:
    """Raise a UsageError for a value that is neither a column's name nor an expression."""
    for column in columns:
        if not isinstance(column, str) and not hasattr(column, "alias"):
            raise UsageError(f"{what} must be column names or expressions, not {column!r}")


def to_column(column: KeyLike) -> Column:
    """Return the column of a name; an expression is returned unchanged."""
    return F.col(column) if isinstance(column, str) else column


def _refuse_sort_orders(orders: Sequence[KeyLike], inputs: Sequence[str]) -> None:
    """Raise for ``F.col("v").desc()``, which Spark would only refuse at run time."""
    for order in orders:
        text = str(order)
        if isinstance(order, str) or text in {f"Column<'{name}'>" for name in inputs}:
            continue
        if _SORT_ORDER.search(text):
            raise UsageError(
                f"order_by of top_k has {text}, a column with its own sort order: give the plain column, and use "
                "descending=True or False, or a list with a value for each column. NULLs are the smallest."
            )


def parse_orders(
    order_by: Keys, descending: bool | Sequence[bool], inputs: Sequence[str]
) -> tuple[list[Any], list[bool]]:
    """Return what `top_k` sorts rows by, and for each whether the largest come first."""
    orders = to_list(order_by)
    _check_columns(orders, "order_by of top_k")
    flags = descending if isinstance(descending, (list, tuple)) else [descending] * len(orders)
    if not all(isinstance(value, (bool, np.bool_)) for value in flags):
        raise UsageError(f"descending of top_k must be True or False, or a list of these, not {descending!r}")
    descending_flags = [bool(value) for value in flags]
    if not orders or len(orders) != len(descending_flags):
        raise UsageError(
            f"order_by of top_k has {len(orders)} columns, but descending has {len(descending_flags)} values"
        )
    _refuse_sort_orders(orders, inputs)
    return orders, descending_flags


def encode_identity(name: str, parameters: Mapping[str, Any]) -> str:
    """Return a built-in operator's name and parameters as JSON, as `OperatorFile` stores them."""
    return json.dumps({"name": name, "parameters": dict(parameters)}, sort_keys=True)


def describe_functions(
    specs: Mapping[str, Aggregate], bound: Sequence[BoundAggregate], schema: StructType
) -> dict[str, str]:
    """Return what each aggregate's state holds. Column names are left out: a renamed column has the same values."""
    columns = {aggregate.name: aggregate.column for aggregate in bound}
    return {name: _describe_function(spec, columns[name], schema) for name, spec in specs.items()}


def _describe_function(spec: Aggregate, column: str | None, schema: StructType) -> str:
    if spec.function == "approx_count_distinct" and column is not None:
        # Sketches of different sizes cannot be merged, nor can hashes of different types of values.
        return f"{spec.function} of {describe_kind(to_arrow_type(schema[column]))} with lg_k {spec.lg_k}"
    return spec.function + (" ignoring NULLs" if spec.ignore_nulls else "")


def find_input_name(column: KeyLike, inputs: Sequence[str]) -> str | None:
    """Return the input column that a name or ``F.col`` means; None for any other expression."""
    if isinstance(column, str):
        name = unquote(column)
    else:
        match = _COLUMN.fullmatch(str(column))
        name = match[1] if match else ""
    position = find_column(name, inputs)
    return None if position is None else inputs[position]


def describe_order(orders: Sequence[KeyLike], names: Sequence[str | None], descending_flags: Sequence[bool]) -> str:
    """Return a sort order as text. Expressions have a placeholder, as their text differs between releases of Spark."""
    return ", ".join(
        f"{name or (order if isinstance(order, str) else EXPRESSION)} {'descending' if descending else 'ascending'}"
        for order, name, descending in zip(orders, names, descending_flags, strict=True)
    )


def quote_names(names: Sequence[str]) -> list[Any]:
    """Return names as Spark reads them: in backticks if they have special characters."""
    return [name if _NAME.fullmatch(name) else f"`{name.replace('`', '``')}`" for name in names]


def refuse_duplicate_names(names: Sequence[str], what: str) -> None:
    """Raise a UsageError if a name is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{what} must have different names, and {name!r} is there more than once: use an alias")
        seen.add(name)


def remove_watermark(field: StructField) -> StructField:
    """Return an output column: the field without its watermark."""
    metadata = {
        name: value
        for name, value in (field.metadata or {}).items()
        if name != WATERMARK_KEY and name not in VALUE_METADATA
    }
    return StructField(field.name, field.dataType, field.nullable, metadata)


def check_aggregates(aggregates: Mapping[str, Aggregate], name: str) -> dict[str, Aggregate]:
    """Return an operator's aggregates as a dict; raise a UsageError if they are not aggregates."""
    is_mapping = isinstance(aggregates, Mapping) and all(isinstance(name, str) for name in aggregates)
    if not is_mapping or not aggregates or not all(isinstance(value, Aggregate) for value in aggregates.values()):
        raise UsageError(
            f"aggregates of {name} must be a mapping of output columns to aggregates, such as {{'n': Agg.count()}}, "
            f"not {aggregates!r}"
        )
    for name, spec in aggregates.items():
        if spec.column is not None and not isinstance(spec.column, str) and not hasattr(spec.column, "alias"):
            raise UsageError(f"the aggregate {name!r} must have a column name or an expression, not {spec.column!r}")
    return dict(aggregates)


def select_columns(
    df: DataFrame,
    keys: Sequence[KeyLike],
    specs: Mapping[str, Aggregate],
    *extra: Column,
    trailing: Sequence[Column] = (),
) -> tuple[DataFrame, tuple[BoundAggregate, ...]]:
    """Return `df` with keys, `extra`, each aggregated column once, and `trailing`; and the aggregates bound to it."""
    values = name_aggregated_columns(specs)
    columns = [to_column(column).alias(name, metadata=VALUE_METADATA) for name, column in values.values()]
    selected = df.select(*keys, *extra, *columns, *trailing)
    refuse_session_windows(selected.schema.fields[: len(keys)])
    return selected, bind_aggregates(specs, selected.schema)


def name_aggregated_columns(specs: Mapping[str, Aggregate]) -> dict[Any, tuple[str, Any]]:
    """Return each aggregated column once: by the column's identity, its new name and the column."""
    values: dict[Any, tuple[str, Any]] = {}
    for spec in specs.values():
        if spec.column is not None:
            values.setdefault(_identify_column(spec.column), (f"__v{len(values)}", spec.column))
    return values


def _identify_column(column: Any) -> Any:
    # Spark's columns have no equality: only the same object is the same expression.
    return column if isinstance(column, str) else id(column)


def bind_aggregates(specs: Mapping[str, Aggregate], row_type: StructType) -> tuple[BoundAggregate, ...]:
    """Return the aggregates as functions of the columns that `name_aggregated_columns` names."""
    refuse_duplicate_names(row_type.names, "keys")
    names = {identity: name for identity, (name, _) in name_aggregated_columns(specs).items()}
    bound = []
    for name, spec in specs.items():
        column = None if spec.column is None else names[_identify_column(spec.column)]
        field = None if column is None else row_type[column]
        if field is not None and spec.function in ("min", "max", "approx_count_distinct"):
            refuse_nested(field, f"column of the aggregate {name!r}")
        bound.append(
            BoundAggregate(name, find_kernel(spec, None if field is None else to_arrow_type(field), name), column)
        )
    return tuple(bound)


def to_arrow_type(field: StructField) -> pa.DataType:
    return state_fields(StructType([field]).json(), "input")[0].type


def refuse_nested(field: StructField, what: str) -> None:
    """Raise for a type whose values this package cannot compare as Spark does."""
    collation = getattr(field.dataType, "collation", None) if isinstance(field.dataType, StringType) else None
    if collation not in (None, "UTF8_BINARY") or pa.types.is_nested(to_arrow_type(field)):
        raise UnsupportedTypeError(
            f"the {what} has the type {field.dataType.simpleString()}, whose values cannot be compared: "
            "use plain strings, numbers, binaries, dates or timestamps"
        )


def make_state_type(bound: Sequence[BoundAggregate], schema: StructType) -> StructType:
    """Return Spark's type of the aggregates' state."""
    fields = [
        StructField(name, _to_spark_type(data_type, aggregate, schema))
        for aggregate in bound
        for name, data_type in zip(aggregate.state_names, aggregate.state_types, strict=True)
    ]
    refuse_duplicate_names([field.name for field in fields], "state columns of the aggregates")
    return StructType(fields)


def make_result_fields(bound: Sequence[BoundAggregate], schema: StructType) -> list[StructField]:
    """Return the output columns of the aggregates."""
    return [
        StructField(aggregate.name, _to_spark_type(aggregate.kernel.result, aggregate, schema)) for aggregate in bound
    ]


def _to_spark_type(data_type: pa.DataType, bound: BoundAggregate, schema: StructType) -> DataType:
    """Return Spark's type of a buffer or result: its input's type if the Arrow types agree, or one of a few others."""
    if bound.column is not None and data_type == to_arrow_type(schema[bound.column]):
        return schema[bound.column].dataType
    if pa.types.is_decimal(data_type):
        return DecimalType(data_type.precision, data_type.scale)
    return _SIMPLE[data_type]
