"""Spark's schemas as Arrow types, and the types that are refused."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from arrow_schemas import RowSchema, key_fields, normalise_type, state_fields
from arrow_schemas.errors import UnsupportedTypeError, UsageError


def make_schema(spark: Any, name: str = "col", nullable: bool = True, metadata: dict[str, Any] | None = None) -> str:
    field = {"name": name, "type": spark, "nullable": nullable, "metadata": metadata or {}}
    return json.dumps({"type": "struct", "fields": [field]})


def array_of(element: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": element, "containsNull": True}


def struct_of(**fields: Any) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in fields.items()],
    }


def map_of(key: Any, value: Any) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


_PLAIN: list[tuple[Any, pa.DataType]] = [
    ("byte", pa.int8()),
    ("short", pa.int16()),
    ("integer", pa.int32()),
    ("long", pa.int64()),
    ("float", pa.float32()),
    ("double", pa.float64()),
    ("decimal(10,2)", pa.decimal128(10, 2)),
    ("decimal(38,0)", pa.decimal128(38, 0)),
    ("string", pa.string()),
    ("char(5)", pa.string()),
    ("varchar(20)", pa.string()),
    ("binary", pa.binary()),
    ("boolean", pa.bool_()),
    ("date", pa.date32()),
    ("timestamp", pa.timestamp("us", tz="UTC")),
    ("timestamp_ntz", pa.timestamp("us")),
    (array_of("long"), pa.list_(pa.field("element", pa.int64()))),
    (struct_of(a="long", b="string"), pa.struct([("a", pa.int64()), ("b", pa.string())])),
    (
        array_of(struct_of(t="timestamp", d="decimal(3,1)")),
        pa.list_(pa.field("element", pa.struct([("t", pa.timestamp("us", tz="UTC")), ("d", pa.decimal128(3, 1))]))),
    ),
]


@pytest.mark.parametrize(("spark", "arrow"), _PLAIN, ids=lambda value: str(value)[:40])
def test_spark_types_of_keys_and_state_map_to_arrow_types(spark: Any, arrow: pa.DataType) -> None:
    for read in (key_fields, state_fields):
        (field,) = read(make_schema(spark))
        assert (field.name, field.type, field.nullable) == ("col", arrow, True)
        # The type is already in normal form, so that stored values need no further conversion.
        assert normalise_type(field.type) == field.type
    assert not state_fields(make_schema(spark, nullable=False))[0].nullable


def test_maps_are_allowed_in_state_but_not_in_keys() -> None:
    spark = map_of("string", array_of("long"))
    (field,) = state_fields(make_schema(spark))
    assert field.type == pa.map_(pa.string(), pa.list_(pa.field("element", pa.int64())))
    for nested in (spark, array_of(spark), struct_of(m=spark)):
        with pytest.raises(UnsupportedTypeError, match=r"'col.*map"):
            key_fields(make_schema(nested))


@pytest.mark.parametrize(
    "spark",
    ["variant", "interval", "interval day to second", "interval year to month", "void", "time(6)", "object",
     {"type": "udt", "pyClass": "a.B", "sqlType": "long"}],
    ids=str,
)  # fmt: skip
def test_types_without_a_stable_form_are_refused_by_name(spark: Any) -> None:
    for read, role in ((key_fields, "key"), (state_fields, "state")):
        with pytest.raises(UnsupportedTypeError, match=f"{role} column 'col'"):
            read(make_schema(spark))
        with pytest.raises(UnsupportedTypeError, match=r"'col.inner.element'"):
            read(make_schema(struct_of(inner=array_of(spark))))


@pytest.mark.parametrize(
    ("spark", "metadata"),
    [
        ("string", {"__COLLATIONS": {"col": "icu.UNICODE_CI"}}),
        ("string collate UTF8_LCASE", {}),
        (array_of("string"), {"__COLLATIONS": {"col.element": "spark.UTF8_LCASE"}}),
    ],
)
def test_collated_strings_are_refused_as_keys_and_accepted_as_state(spark: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"key column 'col.*collation"):
        key_fields(make_schema(spark, metadata=metadata))
    assert state_fields(make_schema(spark, metadata=metadata))[0].type in (
        pa.string(),
        pa.list_(pa.field("element", pa.string())),
    )


def test_a_binary_collation_is_accepted_in_keys() -> None:
    for metadata in ({"__COLLATIONS": {"col": "spark.UTF8_BINARY"}}, {"comment": "x"}):
        assert key_fields(make_schema("string", metadata=metadata))[0].type == pa.string()


def test_the_collation_of_a_maps_key_does_not_affect_its_values() -> None:
    metadata = {"__COLLATIONS": {"col.key": "icu.UNICODE_CI"}}
    (field,) = state_fields(make_schema(map_of("string", "long"), metadata=metadata))
    assert field.type == pa.map_(pa.string(), pa.int64())


def test_a_key_schema_without_columns_or_that_is_no_struct_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one key column"):
        key_fields(json.dumps({"type": "struct", "fields": []}))
    assert state_fields(json.dumps({"type": "struct", "fields": []})) == ()
    with pytest.raises(UsageError, match="must be a struct"):
        state_fields('"long"')


def test_a_row_schema_accepts_column_names_equal_to_its_own() -> None:
    names = ["key_hash", "deleted", "timeout_ms", "a b.c", "ü"]
    fields = tuple(pa.field(name, pa.int64(), nullable=False) for name in names)
    schema = RowSchema(fields, fields)
    assert len(set(schema.arrow.names)) == len(schema.arrow.names) == 2 * len(names) + 4
    batch = schema.empty()
    assert [c.type for c in schema.key_columns(batch)] == [pa.int64()] * len(names)
    assert [schema.arrow.names[schema.state_slice]] == [[f"state.{name}" for name in names]]
    # A row may be a tombstone or only a timeout: no key or state column may forbid NULL.
    assert all(field.nullable for field in list(schema.arrow)[1:-2])
