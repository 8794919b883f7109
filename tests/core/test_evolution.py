"""What may change between two starts of a job, and that old rows are read as new ones."""

from __future__ import annotations

import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

from arrow_schemas import OperatorFile, RowSchema, conform
from arrow_schemas.errors import BucketCountChangedError, CorruptFileError, SchemaChangedError, VersionSkewError
from arrow_schemas.operator import OPERATOR_FORMAT, operator_file_name, parse_operator_file_name


def _json(*columns: tuple[str, Any] | tuple[str, Any, bool]) -> str:
    fields = [{"name": c[0], "type": c[1], "nullable": (*c, True)[2], "metadata": {}} for c in columns]
    return json.dumps({"type": "struct", "fields": fields})


def _operator(state: str, keys: str | None = None, buckets: int = 4) -> OperatorFile:
    return OperatorFile("counts", "query", buckets, keys or _json(("k", "string")), state)


_STORED = _json(("n", "integer"), ("s", "string"))
_WITHOUT_NULLS = _json(("n", "integer", False), ("s", "string"))

_ALLOWED = [
    ("the same", _STORED, False),
    ("nullability only", _json(("n", "integer", False), ("s", "string")), False),
    ("new column at the end", _json(("n", "integer"), ("s", "string"), ("new", "double")), True),
    ("new column in front", _json(("new", "double"), ("n", "integer"), ("s", "string")), True),
    ("wider integer", _json(("n", "long"), ("s", "string")), True),
    ("integer to double", _json(("n", "double"), ("s", "string")), True),
    ("integer to decimal", _json(("n", "decimal(12,2)"), ("s", "string")), True),
]


@pytest.mark.parametrize(("asked", "changes"), [c[1:] for c in _ALLOWED], ids=[c[0] for c in _ALLOWED])
def test_allowed_changes_make_the_next_operator_file(asked: str, changes: bool) -> None:
    stored = _operator(_STORED)
    in_force = stored.succeeded_by(_operator(asked))
    assert in_force.schema_id == (1 if changes else 0)
    assert (in_force is stored) != changes
    # The next restart finds nothing new.
    assert in_force.succeeded_by(_operator(asked)) is in_force


def test_a_column_may_have_nulls_from_now_on() -> None:
    stored = _operator(_WITHOUT_NULLS)
    in_force = stored.succeeded_by(_operator(_STORED))
    assert in_force.schema_id == 1
    assert [field.nullable for field in in_force.row_schema().state] == [True, True]
    # And back: rows may have NULLs by now.
    assert in_force.succeeded_by(_operator(_WITHOUT_NULLS)) is in_force


_REFUSED = [
    ("removed", _json(("n", "integer")), "'s' was removed"),
    ("renamed", _json(("n", "integer"), ("t", "string")), "'s' was removed"),
    ("new and not nullable", _json(("n", "integer"), ("s", "string"), ("new", "long", False)), "'new'.*not nullable"),
    ("moved", _json(("s", "string"), ("n", "integer")), "'s' moved"),
    ("narrower", _json(("n", "short"), ("s", "string")), "'n' was int32 and is now int16"),
    ("float cannot hold every int", _json(("n", "float"), ("s", "string")), "'n'"),
    ("decimal too short", _json(("n", "decimal(11,2)"), ("s", "string")), "'n'"),
    ("other type", _json(("n", "integer"), ("s", "binary")), "'s' was string and is now binary"),
    ("number to string", _json(("n", "string"), ("s", "string")), "'n'"),
]


@pytest.mark.parametrize(("asked", "text"), [c[1:] for c in _REFUSED], ids=[c[0] for c in _REFUSED])
def test_refused_changes_name_the_column(asked: str, text: str) -> None:
    with pytest.raises(SchemaChangedError, match=f"'counts'.*{text}"):
        _operator(_STORED).succeeded_by(_operator(asked))


@pytest.mark.parametrize(
    ("stored", "asked", "fits"),
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
def test_widening_keeps_every_value(stored: str, asked: str, fits: bool) -> None:
    before = _operator(_json(("n", stored)))
    after = _operator(_json(("n", asked)))
    if not fits:
        with pytest.raises(SchemaChangedError, match="'n'"):
            before.succeeded_by(after)
        return
    before.succeeded_by(after)
    extreme: dict[str, list[Any]] = {
        "decimal(10,2)": [decimal.Decimal("99999999.99"), decimal.Decimal("-99999999.99")],
        "float": [3.4e38, -0.1, float("inf")],
        "short": [-(2**15), 2**15 - 1],
        "long": [-(2**63), 2**63 - 1],
        "byte": [-128, 127],
    }
    old, new = before.row_schema(), after.row_schema()
    values = pa.array([*extreme[stored], None], old.state[0].type)
    read = conform(_batch(old, [values]), new).column("state.n")
    assert read.type == new.state[0].type
    assert [None if v is None else float(v) for v in read.to_pylist()] == [
        None if v is None else float(v) for v in values.to_pylist()
    ]
    assert read.cast(values.type).equals(values), "every value comes back"


def _batch(schema: RowSchema, state: list[pa.Array], keys: list[pa.Array] | None = None) -> pa.RecordBatch:
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
    old = _operator(_STORED).row_schema()
    new = _operator(_json(("new", "double"), ("n", "long"), ("s", "string"), ("m", "string"))).row_schema()
    read = conform(_batch(old, [pa.array([1, None], pa.int32()), pa.array(["a", None])]), new)
    assert read.schema.equals(new.arrow)
    assert read.select(["state.new", "state.n", "state.s", "state.m"]).to_pylist() == [
        {"state.new": None, "state.n": 1, "state.s": "a", "state.m": None},
        {"state.new": None, "state.n": None, "state.s": None, "state.m": None},
    ]
    assert conform(read, new) is read


def _nested(nullable: bool) -> list[Any]:
    """A list, a map and a struct of each other, all with or without NULLs."""
    numbers = {"type": "array", "elementType": "integer", "containsNull": nullable}
    mapped = {"type": "map", "keyType": "string", "valueType": numbers, "valueContainsNull": nullable}
    fields = [{"name": "x", "type": numbers, "nullable": nullable, "metadata": {}}]
    return [numbers, mapped, {"type": "struct", "fields": fields}]


@pytest.mark.parametrize("at", range(3), ids=["list", "map", "struct"])
def test_what_is_nested_may_have_nulls_from_now_on(at: int) -> None:
    stored, asked = (_operator(_json(("n", _nested(nullable)[at]))) for nullable in (False, True))
    in_force = stored.succeeded_by(asked)
    assert in_force.schema_id == 1
    assert in_force.succeeded_by(asked) is in_force
    with pytest.raises(SchemaChangedError, match=r"'n' was .* is sure to fit\. Only top-level columns may be"):
        in_force.succeeded_by(stored)
    of_each: list[list[Any]] = [[[1, 2], []], [[("a", [1]), ("b", [])], []], [{"x": [1]}, {"x": []}]]
    values = of_each[at]
    old, new = stored.row_schema(), in_force.row_schema()
    read = conform(_batch(old, [pa.array([*values, None], old.state[0].type)]), new)
    assert read.schema.equals(new.arrow)
    read.validate(full=True)
    assert read.column("state.n").to_pylist() == [*values, None]


def test_nested_numbers_stay_as_wide_as_they_are() -> None:
    stored, asked = (
        _operator(_json(("n", {"type": "array", "elementType": kind, "containsNull": True})))
        for kind in ("integer", "long")
    )
    with pytest.raises(SchemaChangedError, match=r"'n' was list<.*int32> and is now list<.*int64>"):
        stored.succeeded_by(asked)


def test_keys_of_one_name_keep_their_places() -> None:
    keys = _json(("k", "string"), ("k", "string"))
    old, new = (
        _operator(_STORED, keys).row_schema(),
        _operator(_json(("n", "long"), ("s", "string")), keys).row_schema(),
    )
    state = [pa.array([1], pa.int32()), pa.array(["x"])]
    read = conform(_batch(old, state, [pa.array(["first"]), pa.array(["second"])]), new)
    assert [column.to_pylist() for column in new.key_columns(read)] == [["first"], ["second"]]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (_json(("k", "binary")), "'k' was string and is now binary"),
        (_json(("other", "string")), "'k' is now 'other'"),
        (_json(("k", "string"), ("l", "string")), "had 1 columns and now has 2"),
    ],
)
def test_keys_never_change(keys: str, text: str) -> None:
    with pytest.raises(SchemaChangedError, match=f"key of operator 'counts' changed: .*{text}"):
        _operator(_STORED).succeeded_by(_operator(_STORED, keys))


def test_the_bucket_count_never_changes() -> None:
    with pytest.raises(BucketCountChangedError, match=r"4 buckets and the job asks for 8.*buckets=4"):
        _operator(_STORED).succeeded_by(_operator(_STORED, buckets=8))


def test_operator_files_are_byte_identical_from_every_writer() -> None:
    first = _operator(_STORED)
    # Another client may write the same schema with other spaces and another order of fields' attributes.
    reordered = json.loads(_STORED)
    reordered["fields"] = [dict(reversed(field.items())) for field in reordered["fields"]]
    second = _operator(json.dumps(dict(reversed(reordered.items())), indent=3))
    assert first.encode() == second.encode()
    again = OperatorFile.decode(first.encode(), "there")
    assert again.encode() == first.encode()
    assert again.row_schema() == first.row_schema()


def test_operator_files_of_other_formats_and_damaged_ones() -> None:
    data = _operator(_STORED).encode()
    newer = json.loads(data)
    for change in ({"format": OPERATOR_FORMAT + 1}, {"hash": "other"}):
        with pytest.raises(VersionSkewError, match=r"operator_0\.json"):
            OperatorFile.decode(json.dumps({**newer, **change}).encode(), "operator_0.json")
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x01
        try:
            same = OperatorFile.decode(bytes(damaged), "operator_0.json")
        except (CorruptFileError, VersionSkewError):
            continue
        # Only white space is outside the checksum.
        assert same.encode() == data
    for cut in range(len(data) - 1):
        with pytest.raises(CorruptFileError, match=r"operator_0\.json"):
            OperatorFile.decode(data[:cut], "operator_0.json")


def test_operator_file_names() -> None:
    assert parse_operator_file_name(operator_file_name(12)) == 12
    for other in ("operator_.json", "operator_1.json.tmp", "operator_-1.json", "lease.json"):
        assert parse_operator_file_name(other) is None


def test_keys_in_another_case_are_the_same_keys_under_the_names_asked_for() -> None:
    """As in Spark, unless it tells them apart."""
    stored = _operator(_STORED, _json(("User", "string"), ("at", "long")))
    asked = _operator(_STORED, _json(("user", "string"), ("AT", "long")))
    in_force = stored.succeeded_by(asked)
    assert (in_force.schema_id, [field.name for field in in_force.row_schema().keys]) == (1, ["user", "AT"])
    assert in_force.succeeded_by(asked) is in_force
    with pytest.raises(SchemaChangedError, match="column 'User' is now 'user'"):
        stored.succeeded_by(asked, case_sensitive=True)
    with pytest.raises(SchemaChangedError, match="column 'User' was string and is now int64"):
        stored.succeeded_by(_operator(_STORED, _json(("USER", "long"), ("at", "long"))))
    values = [1, "a", 2, 3, "s", None, True, False]
    schema = stored.row_schema().arrow
    old = pa.RecordBatch.from_arrays(
        [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)], schema=schema
    )
    assert conform(old, in_force.row_schema()).columns == old.columns
