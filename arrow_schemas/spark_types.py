"""Converts Spark's JSON schemas to the Arrow types that hold their values.

Spark writes a schema as JSON (`StructType.json()`), and ``operator_<n>.json`` holds the same text. Reading it here does
not need PySpark. Arrow types have one normal form, whatever the session's settings: timestamps are microseconds, with
time zone UTC or without a time zone; strings and binaries have 32-bit offsets.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa

from arrow_schemas.errors import UnsupportedTypeError, UsageError

__all__ = ["flat_name", "key_fields", "normalise_type", "state_fields"]

_FLAT: dict[str, pa.DataType] = {
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_NAMES = {data_type: name for name, data_type in _FLAT.items()}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")
_CHARACTERS = re.compile(r"(var)?char\(\d+\)")
_COLLATIONS_KEY = "__COLLATIONS"
# Spark's names for plain byte-wise comparison.
_BINARY_COLLATIONS = frozenset({"UTF8_BINARY", "spark.UTF8_BINARY"})


def key_fields(schema_json: str) -> tuple[pa.Field, ...]:
    """Return the Arrow fields of the grouping columns.

    Parameters
    ----------
    schema_json
        `StructType.json()` of the grouping columns, in order.

    Raises
    ------
    UnsupportedTypeError
        For a map (Spark cannot group by maps), a collated string (two spellings would be one key for Spark, but two for
        this store, which compares bytes), a decimal of negative scale, or a type without a stable Arrow form.
    """
    fields = _convert_struct(json.loads(schema_json), role="key", maps=False)
    if not fields:
        raise UsageError("at least one key column is needed: groupBy() without columns has no keys to keep state for")
    return fields


def state_fields(schema_json: str, role: str = "state") -> tuple[pa.Field, ...]:
    """Return the Arrow fields of state, input or output columns; maps are allowed too, unlike in `key_fields`.

    Parameters
    ----------
    schema_json
        `StructType.json()` of the columns.
    role
        What the columns are, for the error's message.

    Raises
    ------
    UnsupportedTypeError
        For a type without a stable Arrow form, and for decimals of negative scale in state.
    """
    return _convert_struct(json.loads(schema_json), role=role, maps=True)


def normalise_type(data_type: pa.DataType) -> pa.DataType:
    """Return the stored, normal form of an Arrow type that Spark sent (see the module's docstring)."""
    types = pa.types
    if types.is_timestamp(data_type):
        return pa.timestamp("us", tz="UTC" if data_type.tz else None)
    if types.is_large_string(data_type):
        return pa.string()
    if types.is_large_binary(data_type):
        return pa.binary()
    if types.is_list(data_type) or types.is_large_list(data_type):
        return pa.list_(_normalise_field(data_type.value_field))
    if types.is_struct(data_type):
        return pa.struct([_normalise_field(data_type.field(i)) for i in range(data_type.num_fields)])
    if types.is_map(data_type):
        return pa.map_(normalise_type(data_type.key_type), _normalise_field(data_type.item_field))
    return data_type


def flat_name(data_type: pa.DataType) -> str | None:
    """Return Spark's name of a simple type; None for nested types and decimals."""
    return _NAMES.get(normalise_type(data_type))


def _normalise_field(field: pa.Field) -> pa.Field:
    return field.with_type(normalise_type(field.type)).remove_metadata()


def _convert_struct(parsed: Any, role: str, maps: bool) -> tuple[pa.Field, ...]:
    if not isinstance(parsed, dict) or parsed.get("type") != "struct":
        raise UsageError(f"the {role} schema must be a struct of named columns, not {parsed!r}")
    return tuple(
        pa.field(
            field["name"],
            _convert_type(field["type"], field["name"], role, maps, _find_collation(field)),
            nullable=bool(field.get("nullable", True)),
        )
        for field in parsed["fields"]
    )


def _find_collation(field: dict[str, Any]) -> str | None:
    collations = (field.get("metadata") or {}).get(_COLLATIONS_KEY) or {}
    return next((name for name in collations.values() if name not in _BINARY_COLLATIONS), None)


def _convert_type(spark: Any, path: str, role: str, maps: bool, collation: str | None = None) -> pa.DataType:
    if isinstance(spark, str):
        return _convert_flat_type(spark, path, role, collation)
    kind = spark.get("type")
    if kind == "array":
        element = _convert_type(spark["elementType"], f"{path}.element", role, maps, collation)
        return pa.list_(pa.field("element", element, nullable=bool(spark.get("containsNull", True))))
    if kind == "struct":
        return pa.struct(
            [
                pa.field(
                    field["name"],
                    _convert_type(field["type"], f"{path}.{field['name']}", role, maps, _find_collation(field)),
                    nullable=bool(field.get("nullable", True)),
                )
                for field in spark["fields"]
            ]
        )
    if kind == "map":
        if not maps:
            raise UnsupportedTypeError(
                f"{role} column {path!r} is or contains a map; maps have no order and cannot be compared as keys. "
                "Group by its entries as an array, or by single values of the map."
            )
        key = _convert_type(spark["keyType"], f"{path}.key", role, maps, collation)
        value = _convert_type(spark["valueType"], f"{path}.value", role, maps, collation)
        return pa.map_(key, pa.field("value", value, nullable=bool(spark.get("valueContainsNull", True))))
    raise UnsupportedTypeError(
        f"{role} column {path!r} has the type {kind!r}, which has no stable Arrow form; "
        "cast it to a plain Spark type before grouping."
    )


def _convert_flat_type(spark: str, path: str, role: str, collation: str | None) -> pa.DataType:
    # All collations of a nested column are in one list, so only strings look at it.
    if spark.startswith("string collate") or (spark == "string" and collation is not None):
        if role == "key" and spark not in ("string collate UTF8_BINARY",):
            raise UnsupportedTypeError(
                f"key column {path!r} is a string with the collation {collation or spark[15:]!r}: values that Spark "
                "calls equal differ in their bytes. Group by collate(lower(column), 'UTF8_BINARY') or another plain "
                "string."
            )
        return pa.string()
    if spark in _FLAT:
        return _FLAT[spark]
    if _CHARACTERS.fullmatch(spark):
        return pa.string()
    if match := _DECIMAL.fullmatch(spark):
        if int(match[2]) < 0 and role in ("key", "state"):
            # Arrow can neither sort nor compare decimals of negative scale.
            raise UnsupportedTypeError(
                f"{role} column {path!r} has the type {spark!r}, a decimal of negative scale, which cannot be stored: "
                f"cast it to decimal({min(38, int(match[1]) - int(match[2]))}, 0)."
            )
        return pa.decimal128(int(match[1]), int(match[2]))
    raise UnsupportedTypeError(
        f"{role} column {path!r} has the type {spark!r}, which has no stable Arrow form; "
        "cast it to a number, string, binary, date or timestamp."
    )
