"""Which schema changes are allowed between two starts of a job, and how old rows are read with the new schema."""

from __future__ import annotations

import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

from arrow_schemas import OperatorFile, RowSchema, conform
from arrow_schemas.errors import BucketCountChangedError, CorruptFileError, SchemaChangedError, VersionSkewError
from arrow_schemas.operator import OPERATOR_FORMAT, operator_file_name, parse_operator_file_name


def _schema_json(*columns: tuple[str, Any] | tuple[str, Any, bool]) -> str:
    fields = [
        {"name": column[0], "type": column[1], "nullable": (*column, True)[2], "metadata": {}} for column in columns
    ]
    return json.dumps({"type": "struct", "fields": fields})


def _make_operator_file(state: str, keys: str | None = None, buckets: int = 4) -> OperatorFile:
    return OperatorFile("counts", "query", buckets, keys or _schema_json(("k", "string")), state)


_STORED = _schema_json(("n", "integer"), ("s", "string"))
_WITHOUT_NULLS = _schema_json(("n", "integer", False), ("s", "string"))

_ALLOWED = [
    ("the same", _STORED, False),
    ("nullability only", _schema_json(("n", "integer", False), ("s", "string")), False),
    ("new column at the end", _schema_json(("n", "integer"), ("s", "string"), ("new", "double")), True),
    ("new column in front", _schema_json(("new", "double"), ("n", "integer"), ("s", "string")), True),
    ("wider integer", _schema_json(("n", "long"), ("s", "string")), True),
    ("integer to double", _schema_json(("n", "double"), ("s", "string")), True),
    ("integer to decimal", _schema_json(("n", "decimal(12,2)"), ("s", "string")), True),
]


@pytest.mark.parametrize(("requested", "changes"), [case[1:] for case in _ALLOWED], ids=[case[0] for case in _ALLOWED])
def test_an_allowed_change_makes_the_next_operator_file(requested: str, changes: bool) -> None:
    stored = _make_operator_file(_STORED)
    current = stored.succeeded_by(_make_operator_file(requested))
    assert current.schema_id == (1 if changes else 0)
    assert (current is stored) != changes
    # The next restart finds no change.
    assert current.succeeded_by(_make_operator_file(requested)) is current


def test_a_column_can_become_nullable() -> None:
    stored = _make_operator_file(_WITHOUT_NULLS)
    current = stored.succeeded_by(_make_operator_file(_STORED))
    assert current.schema_id == 1
    assert [field.nullable for field in current.row_schema().state] == [True, True]
    # The column stays nullable, because rows may have NULLs now.
    assert current.succeeded_by(_make_operator_file(_WITHOUT_NULLS)) is current


_REFUSED = [
    ("removed", _schema_json(("n", "integer")), "'s' was removed"),
    ("renamed", _schema_json(("n", "integer"), ("t", "string")), "'s' was removed"),
    (
        "new and not nullable",
        _schema_json(("n", "integer"), ("s", "string"), ("new", "long", False)),
        "'new'.*not nullable",
    ),
    ("moved", _schema_json(("s", "string"), ("n", "integer")), "'s' moved"),
    ("narrower", _schema_json(("n", "short"), ("s", "string")), "'n' was int32 and is now int16"),
    ("float cannot hold every int", _schema_json(("n", "float"), ("s", "string")), "'n'"),
    ("decimal too short", _schema_json(("n", "decimal(11,2)"), ("s", "string")), "'n'"),
    ("other type", _schema_json(("n", "integer"), ("s", "binary")), "'s' was string and is now binary"),
    ("number to string", _schema_json(("n", "string"), ("s", "string")), "'n'"),
]


@pytest.mark.parametrize(("requested", "text"), [case[1:] for case in _REFUSED], ids=[case[0] for case in _REFUSED])
def test_refused_changes_raise_an_error_that_names_the_column(requested: str, text: str) -> None:
    with pytest.raises(SchemaChangedError, match=f"'counts'.*{text}"):
        _make_operator_file(_STORED).succeeded_by(_make_operator_file(requested))


@pytest.mark.parametrize(
    ("stored", "requested", "fits"),
    [
        ("decimal(10,2)", "decimal(12,4)", True),
        ("decimal(10,2)", "decimal(11,4)", False),
        ("decimal(10,2)", "decimal(12,1)", False),
        ("float", "double", True),
        ("double", "float", False),
        ("short", "float", True),
        ("long", "double", False),
        ("long", "decimal(19,0)", True),
        ("byte", "decimal(3,0)", True),
        ("date", "timestamp", False),
    ],
)
def test_a_column_can_be_widened_only_if_every_value_fits(stored: str, requested: str, fits: bool) -> None:
    before = _make_operator_file(_schema_json(("n", stored)))
    after = _make_operator_file(_schema_json(("n", requested)))
    if not fits:
        with pytest.raises(SchemaChangedError, match="'n'"):
            before.succeeded_by(after)
        return
    before.succeeded_by(after)
    extremes: dict[str, list[Any]] = {
        "decimal(10,2)": [decimal.Decimal("99999999.99"), decimal.Decimal("-99999999.99")],
        "float": [3.4e38, -0.1, float("inf")],
        "short": [-(2**15), 2**15 - 1],
        "long": [-(2**63), 2**63 - 1],
        "byte": [-128, 127],
    }
    old, new = before.row_schema(), after.row_schema()
    values = pa.array([*extremes[stored], None], old.state[0].type)
    converted = conform(_make_batch(old, [values]), new).column("state.n")
    assert converted.type == new.state[0].type
    assert [None if value is None else float(value) for value in converted.to_pylist()] == [
        None if value is None else float(value) for value in values.to_pylist()
    ]
    assert converted.cast(values.type).equals(values), "every value is unchanged after a cast back"


def _make_batch(schema: RowSchema, state: list[pa.Array], keys: list[pa.Array] | None = None) -> pa.RecordBatch:
    n = len(state[0])
    columns = [
        pa.array(range(n), pa.uint64()),
        *(keys or [pa.array([f"k{i}" for i in range(n)])]),
        *state,
        pa.nulls(n, pa.int64()),
        pa.array([True] * n),
        pa.array([False] * n),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow)


def test_old_rows_get_null_in_new_columns() -> None:
    old = _make_operator_file(_STORED).row_schema()
    new = _make_operator_file(
        _schema_json(("new", "double"), ("n", "long"), ("s", "string"), ("m", "string"))
    ).row_schema()
    converted = conform(_make_batch(old, [pa.array([1, None], pa.int32()), pa.array(["a", None])]), new)
    assert converted.schema.equals(new.arrow)
    assert converted.select(["state.new", "state.n", "state.s", "state.m"]).to_pylist() == [
        {"state.new": None, "state.n": 1, "state.s": "a", "state.m": None},
        {"state.new": None, "state.n": None, "state.s": None, "state.m": None},
    ]
    assert conform(converted, new) is converted


def _nested_types(nullable: bool) -> list[Any]:
    """Return types of a list, a map of lists and a struct of lists, all with or without NULLs."""
    numbers = {"type": "array", "elementType": "integer", "containsNull": nullable}
    mapped = {"type": "map", "keyType": "string", "valueType": numbers, "valueContainsNull": nullable}
    fields = [{"name": "x", "type": numbers, "nullable": nullable, "metadata": {}}]
    return [numbers, mapped, {"type": "struct", "fields": fields}]


@pytest.mark.parametrize("kind", range(3), ids=["list", "map", "struct"])
def test_a_nested_column_can_become_nullable(kind: int) -> None:
    stored, requested = (
        _make_operator_file(_schema_json(("n", _nested_types(nullable)[kind]))) for nullable in (False, True)
    )
    current = stored.succeeded_by(requested)
    assert current.schema_id == 1
    assert current.succeeded_by(requested) is current
    with pytest.raises(SchemaChangedError, match=r"'n' was .* is sure to fit\. Only top-level columns may be"):
        current.succeeded_by(stored)
    values_by_kind: list[list[Any]] = [[[1, 2], []], [[("a", [1]), ("b", [])], []], [{"x": [1]}, {"x": []}]]
    values = values_by_kind[kind]
    old, new = stored.row_schema(), current.row_schema()
    converted = conform(_make_batch(old, [pa.array([*values, None], old.state[0].type)]), new)
    assert converted.schema.equals(new.arrow)
    converted.validate(full=True)
    assert converted.column("state.n").to_pylist() == [*values, None]


def test_nested_numbers_cannot_be_widened() -> None:
    stored, requested = (
        _make_operator_file(_schema_json(("n", {"type": "array", "elementType": kind, "containsNull": True})))
        for kind in ("integer", "long")
    )
    with pytest.raises(SchemaChangedError, match=r"'n' was list<.*int32> and is now list<.*int64>"):
        stored.succeeded_by(requested)


def test_key_columns_of_one_name_keep_their_order() -> None:
    keys = _schema_json(("k", "string"), ("k", "string"))
    old, new = (
        _make_operator_file(_STORED, keys).row_schema(),
        _make_operator_file(_schema_json(("n", "long"), ("s", "string")), keys).row_schema(),
    )
    state = [pa.array([1], pa.int32()), pa.array(["x"])]
    converted = conform(_make_batch(old, state, [pa.array(["first"]), pa.array(["second"])]), new)
    assert [column.to_pylist() for column in new.key_columns(converted)] == [["first"], ["second"]]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (_schema_json(("k", "binary")), "'k' was string and is now binary"),
        (_schema_json(("other", "string")), "'k' is now 'other'"),
        (_schema_json(("k", "string"), ("l", "string")), "had 1 columns and now has 2"),
    ],
)
def test_changes_of_the_key_are_refused(keys: str, text: str) -> None:
    with pytest.raises(SchemaChangedError, match=f"key of operator 'counts' changed: .*{text}"):
        _make_operator_file(_STORED).succeeded_by(_make_operator_file(_STORED, keys))


def test_a_change_of_the_bucket_count_is_refused() -> None:
    with pytest.raises(BucketCountChangedError, match=r"4 buckets and the job asks for 8.*buckets=4"):
        _make_operator_file(_STORED).succeeded_by(_make_operator_file(_STORED, buckets=8))


def test_operator_files_are_byte_identical_from_every_writer() -> None:
    first = _make_operator_file(_STORED)
    # Another client may write the same schema with other spaces, and with the attributes of fields in another order.
    reordered = json.loads(_STORED)
    reordered["fields"] = [dict(reversed(field.items())) for field in reordered["fields"]]
    second = _make_operator_file(json.dumps(dict(reversed(reordered.items())), indent=3))
    assert first.encode() == second.encode()
    decoded = OperatorFile.decode(first.encode(), "a file")
    assert decoded.encode() == first.encode()
    assert decoded.row_schema() == first.row_schema()


def test_operator_files_of_other_formats_and_damaged_ones_are_refused() -> None:
    data = _make_operator_file(_STORED).encode()
    newer = json.loads(data)
    for change in ({"format": OPERATOR_FORMAT + 1}, {"hash": "other"}):
        with pytest.raises(VersionSkewError, match=r"operator_0\.json"):
            OperatorFile.decode(json.dumps({**newer, **change}).encode(), "operator_0.json")
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        try:
            decoded = OperatorFile.decode(bytes(damaged), "operator_0.json")
        except (CorruptFileError, VersionSkewError):
            continue
        # Only white space is not covered by the checksum.
        assert decoded.encode() == data
    for length in range(len(data) - 1):
        with pytest.raises(CorruptFileError, match=r"operator_0\.json"):
            OperatorFile.decode(data[:length], "operator_0.json")


def test_operator_file_names_are_parsed_and_other_names_are_not() -> None:
    assert parse_operator_file_name(operator_file_name(12)) == 12
    for other in ("operator_.json", "operator_1.json.tmp", "operator_-1.json", "lease.json"):
        assert parse_operator_file_name(other) is None


def test_keys_that_differ_only_in_case_are_the_same_and_get_the_requested_names() -> None:
    """Spark does not distinguish case either, unless it is configured to."""
    stored = _make_operator_file(_STORED, _schema_json(("User", "string"), ("at", "long")))
    requested = _make_operator_file(_STORED, _schema_json(("user", "string"), ("AT", "long")))
    current = stored.succeeded_by(requested)
    assert (current.schema_id, [field.name for field in current.row_schema().keys]) == (1, ["user", "AT"])
    assert current.succeeded_by(requested) is current
    with pytest.raises(SchemaChangedError, match="column 'User' is now 'user'"):
        stored.succeeded_by(requested, case_sensitive=True)
    with pytest.raises(SchemaChangedError, match="column 'User' was string and is now int64"):
        stored.succeeded_by(_make_operator_file(_STORED, _schema_json(("USER", "long"), ("at", "long"))))
    values = [1, "a", 2, 3, "s", None, True, False]
    schema = stored.row_schema().arrow
    old = pa.RecordBatch.from_arrays(
        [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)], schema=schema
    )
    assert conform(old, current.row_schema()).columns == old.columns
