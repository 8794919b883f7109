"""The columns of a plan: keys, event time, and the packed columns with their hash. Uses only public DataFrame calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, FloatType, IntegralType, StringType, StructField, StructType

from spark_state_ext.engine.source_partition import SourcePartition
from spark_state_ext.errors import UnsupportedPlanError, UnsupportedTypeError, UsageError
from spark_state_ext.spark.shuffle.payload import HASH_COLUMN, PARTITION_COLUMN, STREAM_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "WATERMARK_KEY",
    "KeyLike",
    "find_event_time",
    "select_packed_columns",
    "select_partition_columns",
    "find_column",
    "refuse_equal_names",
    "refuse_session_windows",
    "resolve_keys",
    "parse_schema",
    "unquote",
]

KeyLike = Union[str, "Column"]

WATERMARK_KEY = "spark.watermarkDelayMs"
# Metadata of a session window, by which Spark's own aggregations know that they have to merge the windows.
_SESSION_KEY = "spark.sessionWindow"


def parse_schema(schema: StructType | str, spark: Any, name: str) -> StructType:
    """Return as a type a schema that was given as a type or as Spark's DDL."""
    if isinstance(schema, StructType):
        return schema
    if re.search(r"\b(var)?char\s*\(", str(schema), re.IGNORECASE):
        raise UnsupportedTypeError(
            f"{name} has a char or varchar column, {schema!r}: use string, as Spark's Python types do"
        )
    # Only this session's parser knows what a DDL string means, so read the schema of an empty frame.
    parsed = spark.createDataFrame([], schema).schema
    if not isinstance(parsed, StructType):
        raise UsageError(f"{name} must be a struct of named columns, not {schema!r}")
    return parsed


def refuse_equal_names(columns: StructType, what: str, case_sensitive: bool) -> None:
    """Raise a UsageError if two columns have the same name under this session's case sensitivity."""
    seen: set[str] = set()
    for name in columns.names:
        folded = name if case_sensitive else name.lower()
        if folded in seen:
            advice = "" if columns.names.count(name) > 1 else ", or set spark.sql.caseSensitive: they differ in case"
            raise UsageError(
                f"two {what} columns have the same name, {folded!r}: {', '.join(columns.names)}; rename one of them"
                f"{advice}"
            )
        seen.add(folded)


def resolve_keys(
    df: DataFrame, input_type: StructType, keys: list[KeyLike]
) -> tuple[StructType, tuple[int, ...], list[KeyLike]]:
    """Return the key columns' type, their positions among the packed columns, and keys that are not input columns."""
    selected = df.select(*keys).schema
    refuse_session_windows(selected.fields)
    if len(selected.fields) != len(keys):
        raise UsageError(f"the keys {keys!r} are {len(selected.fields)} columns: list each column separately")
    positions: list[int] = []
    extra: list[KeyLike] = []
    for key, resolved in zip(keys, selected.fields, strict=True):
        # An expression may have the name of a column, so only a plain name is taken for that column.
        name = unquote(key) if isinstance(key, str) else _find_bare_name(key)
        if name is not None and not isinstance(key, str) and not resolved.nullable and _may_be_literal(key, name):
            name = None
        position = find_column(name, input_type.names) if name == resolved.name else None
        if position is not None:
            positions.append(position)
        else:
            positions.append(len(input_type) + len(extra))
            extra.append(key)
    fields = [
        StructField(field.name, field.dataType, field.nullable, _remove_watermark(field.metadata))
        for field in selected.fields
    ]
    return StructType(fields), tuple(positions), extra


def find_column(name: str, names: Sequence[str]) -> int | None:
    """Return the position of the column that Spark finds by a name, in whatever case; None if it is missing or not
    unique."""
    if name in names:
        return names.index(name) if names.count(name) == 1 else None
    positions = [position for position, other in enumerate(names) if other.lower() == name.lower()]
    return positions[0] if len(positions) == 1 else None


def refuse_session_windows(keys: Sequence[StructField]) -> None:
    """Refuse keys that are session windows: each row would keep a session of its own."""
    for field in keys:
        if _SESSION_KEY in (field.metadata or {}):
            raise UnsupportedPlanError(
                f"the key {field.name!r} is a session window, which only sessionize merges: as a key, it would give "
                "each row a session of its own. Call sessionize with the other keys, the time column and the gap."
            )


def unquote(name: str) -> str:
    """Return a name without the backticks that may surround it."""
    quoted = re.fullmatch(r"`((?:[^`]|``)+)`", name)
    return quoted[1].replace("``", "`") if quoted else name


def _find_bare_name(column: Column) -> str | None:
    """Return the name of a column that is only a name; None for any other expression."""
    match = re.fullmatch(r"Column<'(\w+)'>", str(column))
    return match[1] if match else None


def _may_be_literal(column: Column, name: str) -> bool:
    """True if a column's text may be the text of a constant: Connect writes both without quotes. It is harmless to take
    a column for a constant: the plan then only has another copy of it."""
    return name.isdigit() or name in ("true", "false") or str(F.lit(name)) == str(column)


def _remove_watermark(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (metadata or {}).items() if name != WATERMARK_KEY}


def find_event_time(input_type: StructType) -> tuple[int, int] | None:
    """Return the position of the column with the watermark, and the watermark's delay in milliseconds."""
    event_times = [
        (position, int(field.metadata[WATERMARK_KEY]))
        for position, field in enumerate(input_type.fields)
        if WATERMARK_KEY in (field.metadata or {})
    ]
    if len(event_times) > 1:
        raise UnsupportedPlanError(
            "more than one event-time column reaches the stateful operator: "
            f"{', '.join(input_type.names[position] for position, _ in event_times)}. "
            "Drop all but one (Spark refuses this too)."
        )
    return event_times[0] if event_times else None


def select_packed_columns(
    df: DataFrame,
    input_type: StructType,
    key_type: StructType,
    positions: tuple[int, ...],
    extra: list[KeyLike],
) -> DataFrame:
    """Return the input columns, keys that are not among them, and the hash, under unique names; further columns of `df`
    follow unchanged."""
    extra_columns = [F.col(key) if isinstance(key, str) else key for key in extra]
    widened = df.select("*", *(column.alias(f"__key{number}") for number, column in enumerate(extra_columns)))
    names = [f"c{number}" for number in range(len(input_type) + len(extra))]
    trailing = df.columns[len(input_type) :]
    named = widened.toDF(*names[: len(input_type)], *trailing, *names[len(input_type) :])
    hashed = F.xxhash64(
        *(_make_hashable(names[position], field) for position, field in zip(positions, key_type.fields, strict=True))
    )
    return named.select(*names, hashed.alias(HASH_COLUMN), *trailing)


def select_partition_columns(df: DataFrame, source: SourcePartition) -> list[Column]:
    """Return the columns with a row's source partition, under the names that packing expects."""
    names = [(source.column, PARTITION_COLUMN)]
    if source.stream is not None:
        names.append((source.stream, STREAM_COLUMN))
    fields, columns = df.schema.fields, []
    for name, alias in names:
        position = find_column(name, [field.name for field in fields])
        if position is None:
            raise UsageError(
                f"bucket_by names the column {name!r}, but the input has no column of that name, or several: it has "
                f"{', '.join(field.name for field in fields)}. Select that column too; for Kafka it is 'partition'"
            )
        data_type, target = fields[position].dataType, "bigint"
        expected: type[DataType] = IntegralType
        if alias == STREAM_COLUMN:
            expected, target = StringType, "string"
        if not isinstance(data_type, expected):
            raise UsageError(
                f"bucket_by names the column {name!r}, which is {data_type.simpleString()}: it must be {target}"
                + (", or another integer type" if target == "bigint" else "")
            )
        columns.append(F.col(f"`{fields[position].name.replace('`', '``')}`").cast(target).alias(alias))
    return columns


def _make_hashable(name: str, field: StructField) -> Column:
    """Return a key column such that equal keys have equal hashes: -0.0 becomes 0.0, and each NaN the same NaN."""
    column = F.col(name)
    if isinstance(field.dataType, (FloatType, DoubleType)):
        zero = F.lit(0.0).cast(field.dataType)
        return (
            F.when(column == zero, zero)
            .when(F.isnan(column), F.lit(float("nan")).cast(field.dataType))
            .otherwise(column)
        )
    return column
