"""The columns of a plan: keys, event time, and the packed columns with their hash. Public DataFrame calls only."""

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
    "event_time_of",
    "packable",
    "partition_columns",
    "place_of",
    "refuse_equal_names",
    "refuse_session_windows",
    "resolve_keys",
    "struct_of",
    "unquoted",
]

KeyLike = Union[str, "Column"]

WATERMARK_KEY = "spark.watermarkDelayMs"
# By this Spark's own aggregations know that they have to merge the windows.
_SESSION_KEY = "spark.sessionWindow"


def struct_of(given: StructType | str, spark: Any, name: str) -> StructType:
    """A schema given as a type or in Spark's DDL."""
    if isinstance(given, StructType):
        return given
    if re.search(r"\b(var)?char\s*\(", str(given), re.IGNORECASE):
        raise UnsupportedTypeError(f"{name} has a char or varchar, {given!r}: use string, as Spark's Python types do")
    # A DDL string means what this session's parser makes of it; an empty frame of that schema tells.
    parsed = spark.createDataFrame([], given).schema
    if not isinstance(parsed, StructType):
        raise UsageError(f"{name} must be a struct of named columns, not {given!r}")
    return parsed


def refuse_equal_names(columns: StructType, what: str, case_sensitive: bool) -> None:
    """Raise a UsageError where two columns have one name, as this session tells names apart."""
    seen: set[str] = set()
    for name in columns.names:
        folded = name if case_sensitive else name.lower()
        if folded in seen:
            how = "" if columns.names.count(name) > 1 else ", or set spark.sql.caseSensitive, as their cases differ"
            raise UsageError(
                f"two {what} columns have one name, {folded!r}: {', '.join(columns.names)}; call one of them "
                f"otherwise{how}"
            )
        seen.add(folded)


def resolve_keys(
    df: DataFrame, input_type: StructType, keys: list[KeyLike]
) -> tuple[StructType, tuple[int, ...], list[KeyLike]]:
    """The key columns' type, their places among the packed columns, and those that are not input columns."""
    selected = df.select(*keys).schema
    refuse_session_windows(selected.fields)
    if len(selected.fields) != len(keys):
        raise UsageError(f"the keys {keys!r} are {len(selected.fields)} columns: name each by itself")
    positions: list[int] = []
    extra: list[KeyLike] = []
    for key, resolved in zip(keys, selected.fields, strict=True):
        # An expression may be named like a column, so only a bare name is taken for that column.
        bare = unquoted(key) if isinstance(key, str) else _bare_name(key)
        if bare is not None and not isinstance(key, str) and not resolved.nullable and _like_a_literal(key, bare):
            bare = None
        at = place_of(bare, input_type.names) if bare == resolved.name else None
        if at is not None:
            positions.append(at)
        else:
            positions.append(len(input_type) + len(extra))
            extra.append(key)
    fields = [StructField(f.name, f.dataType, f.nullable, _without_watermark(f.metadata)) for f in selected.fields]
    return StructType(fields), tuple(positions), extra


def place_of(name: str, names: Sequence[str]) -> int | None:
    """Place of the column that Spark has found by a name, in whatever case that is written; None where several have
    it."""
    if name in names:
        return names.index(name) if names.count(name) == 1 else None
    found = [at for at, other in enumerate(names) if other.lower() == name.lower()]
    return found[0] if len(found) == 1 else None


def refuse_session_windows(keys: Sequence[StructField]) -> None:
    """Refuse keys that are session windows: each row would stay a session of its own."""
    for field in keys:
        if _SESSION_KEY in (field.metadata or {}):
            raise UnsupportedPlanError(
                f"the key {field.name!r} is a session window, and only sessionize merges sessions: as a key, each "
                "row's would stay one of its own. Call sessionize with the other keys, the time column and the gap."
            )


def unquoted(name: str) -> str:
    """A name that may be in backticks."""
    match = re.fullmatch(r"`((?:[^`]|``)+)`", name)
    return match[1].replace("``", "`") if match else name


def _bare_name(column: Column) -> str | None:
    """The name of a column that is nothing but a name; None for any other expression."""
    match = re.fullmatch(r"Column<'(\w+)'>", str(column))
    return match[1] if match else None


def _like_a_literal(column: Column, name: str) -> bool:
    """Whether a column's text may be that of a constant: Connect writes both without quotes. A column that is taken for
    one does the same, only with another copy of it."""
    return name.isdigit() or name in ("true", "false") or str(F.lit(name)) == str(column)


def _without_watermark(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (metadata or {}).items() if name != WATERMARK_KEY}


def event_time_of(input_type: StructType) -> tuple[int, int] | None:
    """Place and delay in milliseconds of the column that has the watermark."""
    found = [
        (at, int(field.metadata[WATERMARK_KEY]))
        for at, field in enumerate(input_type.fields)
        if WATERMARK_KEY in (field.metadata or {})
    ]
    if len(found) > 1:
        raise UnsupportedPlanError(
            "more than one event-time column reaches the stateful operator: "
            f"{', '.join(input_type.names[at] for at, _ in found)}. Drop all but one (Spark refuses this too)."
        )
    return found[0] if found else None


def packable(
    df: DataFrame,
    input_type: StructType,
    key_type: StructType,
    positions: tuple[int, ...],
    extra: list[KeyLike],
) -> DataFrame:
    """Input columns, keys that are none of them, and the hash, under names that cannot clash; and what `df` has behind
    the input's columns, as it is."""
    extra_columns = [F.col(key) if isinstance(key, str) else key for key in extra]
    widened = df.select("*", *(column.alias(f"__key{i}") for i, column in enumerate(extra_columns)))
    names = [f"c{i}" for i in range(len(input_type) + len(extra))]
    behind = df.columns[len(input_type) :]
    named = widened.toDF(*names[: len(input_type)], *behind, *names[len(input_type) :])
    hashed = F.xxhash64(*(_hashable(names[at], field) for at, field in zip(positions, key_type.fields, strict=True)))
    return named.select(*names, hashed.alias(HASH_COLUMN), *behind)


def partition_columns(df: DataFrame, source: SourcePartition) -> list[Column]:
    """The columns that tell a row's partition, as packing takes them."""
    asked = [(source.column, PARTITION_COLUMN)]
    if source.stream is not None:
        asked.append((source.stream, STREAM_COLUMN))
    fields, found = df.schema.fields, []
    for name, alias in asked:
        at = place_of(name, [field.name for field in fields])
        if at is None:
            raise UsageError(
                f"bucket_by names the column {name!r}, and the input has none of that name, or several: it has "
                f"{', '.join(field.name for field in fields)}. Select it along with the others, as Kafka's 'partition'"
            )
        given, wanted = fields[at].dataType, "bigint"
        kind: type[DataType] = IntegralType
        if alias == STREAM_COLUMN:
            kind, wanted = StringType, "string"
        if not isinstance(given, kind):
            raise UsageError(
                f"bucket_by names the column {name!r}, which is {given.simpleString()}: it must be {wanted}"
                + (", or another integer type" if wanted == "bigint" else "")
            )
        found.append(F.col(f"`{fields[at].name.replace('`', '``')}`").cast(wanted).alias(alias))
    return found


def _hashable(name: str, field: StructField) -> Column:
    """A key column such that equal keys hash alike: -0.0 as 0.0, each NaN as the same NaN."""
    column = F.col(name)
    if isinstance(field.dataType, (FloatType, DoubleType)):
        zero = F.lit(0.0).cast(field.dataType)
        return (
            F.when(column == zero, zero)
            .when(F.isnan(column), F.lit(float("nan")).cast(field.dataType))
            .otherwise(column)
        )
    return column
