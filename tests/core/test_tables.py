"""Conversion and validation of the tables that users' functions return."""

from __future__ import annotations

import datetime as dt
import decimal
import math
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from arrow_schemas.columns import aggregate_groups
from arrow_schemas.errors import StateValueError
from spark_state_ext.functions.missing_values import to_column
from spark_state_ext.functions.tables import as_table, cast_column, conform_table, is_table, refuse_nulls

TABLE = pa.table({"k": ["a", "b"], "n": [1, None]})
FIELDS = [pa.field("k", pa.string()), pa.field("n", pa.int64())]
MOMENT = dt.datetime(2024, 5, 6, 7, 8, 9, 1, dt.timezone.utc)


class Stream:
    """An object of an unknown class that has Arrow's C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return TABLE.__arrow_c_stream__(requested_schema)


class Older:
    """A table of a library that has `to_arrow` but not Arrow's C stream interface."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def to_arrow(self) -> Any:
        return self._given


def forms() -> dict[str, Any]:
    result: dict[str, Any] = {
        "table": TABLE,
        "batch": TABLE.to_batches()[0],
        "reader": TABLE.to_reader(),
        "dict": {"k": ["a", "b"], "n": [1, None]},
        "dict of arrays": {"k": np.array(["a", "b"]), "n": pa.chunked_array([[1], [None]])},
        "ordered dict": OrderedDict(k=["a", "b"], n=[1, None]),
        "mapping": MappingProxyType({"k": ["a", "b"], "n": [1, None]}),
        "stream": Stream(),
        "older": Older(TABLE),
        "older batches": Older(TABLE.to_batches()),
        "pandas": pd.DataFrame({"k": ["a", "b"], "n": [1, None]}, index=[5, 6]),
        "pandas with a column dtype": pd.DataFrame({"k": ["a", "b"], "n": [1, None]}),
    }
    return result


@pytest.mark.parametrize("form", forms())
def test_every_form_of_table_is_accepted(form: str) -> None:
    given = forms()[form]
    assert is_table(given)
    assert conform_table(given, FIELDS, "the function gave").to_pydict() == {"k": ["a", "b"], "n": [1, None]}


def test_polars_frames_and_duckdb_relations_are_tables() -> None:
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    frame = polars.DataFrame({"n": [1, None], "k": ["a", "b"]})
    relation = duckdb.sql("SELECT * FROM (VALUES ('a', 1), ('b', NULL)) AS t(k, n)")
    for given in (frame, relation):
        assert is_table(given)
        assert conform_table(given, FIELDS, "the function gave").to_pydict() == {"k": ["a", "b"], "n": [1, None]}
    assert not is_table(polars.Series([True]))
    assert not is_table(frame.lazy())


@pytest.mark.parametrize(
    "given",
    [pa.array([1]), pa.chunked_array([[1]]), pd.Series([True]), np.array([1]), [TABLE], iter([TABLE]), "k", None, 5],
    ids=lambda given: type(given).__name__,
)
def test_other_values_are_refused_as_tables(given: Any) -> None:
    assert not is_table(given)
    with pytest.raises(StateValueError, match=rf"the function gave a value of type {type(given).__name__}: a table is"):
        as_table(given, "the function gave")


def test_a_pandas_frame_may_have_a_column_named_dtype() -> None:
    assert is_table(pd.DataFrame({"dtype": [1]}))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"k": ["a"]}, "the function gave the columns k; expected k, n"),
        ({"k": ["a"], "n": [1], "m": [1]}, "the function gave the columns k, n, m; expected k, n"),
        ({}, r"the function gave the columns \(none\); expected k, n"),
        ({"K": ["a"], "n": [1]}, "the function gave the columns K, n; expected k, n"),
        (pa.table([["a"], ["b"]], names=["k", "k"]), "the function gave the columns k, k; expected k, n"),
        ({"k": ["a"], "n": ["many"]}, "output column 'n' of type int64 cannot hold string: .*many"),
        (
            {"k": ["a"], "n": pa.array([1, 2])},
            "the function gave a dict whose columns have different lengths: 'k' has 1, 'n' has 2; give a value",
        ),
        ({"k": [object()], "n": [1]}, "the function gave something that is not a table: "),
    ],
)
def test_tables_that_do_not_match_the_fields_are_refused(given: Any, text: str) -> None:
    with pytest.raises(StateValueError, match=text):
        conform_table(given, FIELDS, "the function gave")


@pytest.mark.parametrize(
    "value",
    [
        *("alice", "a", b"a", bytearray(b"a"), 7, None, 1.5, True, MOMENT, {"x": 1}, decimal.Decimal(1)),
        *(np.int64(7), np.str_("a"), np.array(7), pd.Timestamp(0), pa.scalar("a"), pa.scalar([1])),
    ],
    ids=repr,
)
def test_a_single_value_is_refused_as_a_column(value: Any) -> None:
    """Text is iterable: if it were accepted, each letter would become a row."""
    text = r"the function gave a dict whose column 'k' is .*\): a dict holds columns, give a list for each"
    with pytest.raises(StateValueError, match=text) as raised:
        as_table({"k": value, "n": value}, "the function gave")
    assert raised.match(rf"\({type(value).__name__}\): ")


@pytest.mark.parametrize(
    "column",
    [[7], (7,), np.array([7]), pd.Series([7]), pa.array([7]), pa.chunked_array([[7]]), range(7, 8)],
    ids=lambda column: type(column).__name__,
)
def test_sequences_and_arrays_are_columns(column: Any) -> None:
    assert as_table({"n": column}, "it gave").to_pydict() == {"n": [7]}


MISSING = [pd.NA, pd.NaT, float("nan"), np.datetime64("NaT"), np.timedelta64("NaT", "s"), decimal.Decimal("NaN"), None]


@pytest.mark.parametrize(
    "form", [list, tuple, pd.Series, lambda it: np.array(it, dtype=object)], ids=["list", "tuple", "series", "array"]
)
def test_missing_values_of_pandas_and_numpy_are_null(form: Callable[[Any], Any]) -> None:
    for present, kind in (("x", pa.string()), (7, pa.int64()), (dt.date(2024, 1, 2), pa.date32()), (b"x", pa.binary())):
        for missing in MISSING:
            table = conform_table({"v": form([present, missing])}, [pa.field("v", kind)], "the function gave")
            assert table.to_pydict() == {"v": [present, None]}, (present, missing)
    nested = as_table({"v": form([["x", float("nan"), pd.NA], None])}, "the function gave")
    assert nested.to_pydict() == {"v": [["x", None, None], None]}
    # PyArrow alone converts NaT in a nested list to the first day of the year 1.
    dates = as_table({"v": form([[dt.date(2024, 1, 2), pd.NaT], None])}, "the function gave")
    assert dates.to_pydict() == {"v": [[dt.date(2024, 1, 2), None], None]}


def test_a_one_shot_iterator_loses_no_values() -> None:
    days = ["2024-01-01", "2024-01-02"]
    assert to_column(map(dt.date.fromisoformat, days)).to_pylist() == [
        dt.date(2024, 1, 1),
        dt.date(2024, 1, 2),
    ]
    first, second = to_column([{"d": dt.date(2024, 1, 1), "x": float("nan")}, {"d": pd.NaT, "x": 1.0}]).to_pylist()
    assert math.isnan(first["x"]), "a float NaN stays NaN if the same struct has a date"
    assert second == {"d": None, "x": 1.0}


def test_nan_among_numbers_stays_nan() -> None:
    column = as_table({"v": [1.5, float("nan"), None]}, "the function gave").column("v")
    assert repr(column.to_pylist()) == "[1.5, nan, None]"


def test_columns_match_by_name_and_duplicate_names_by_position() -> None:
    result = conform_table(TABLE.select(["n", "k"]), FIELDS, "it gave")
    assert result.schema == pa.schema(FIELDS)
    twice = [pa.field("k", pa.string()), pa.field("k", pa.int64())]
    given = pa.table([["a"], [1]], names=["k", "k"])
    assert [column.to_pylist() for column in conform_table(given, twice, "it gave").columns] == [["a"], [1]]


def test_a_table_without_rows_conforms_whatever_its_types() -> None:
    result = conform_table({"k": [], "n": []}, FIELDS, "it gave")
    assert result.schema == pa.schema(FIELDS)
    assert result.num_rows == 0
    assert conform_table(pa.schema(FIELDS).empty_table(), FIELDS, "it gave").num_rows == 0


CASTS: list[tuple[str, pa.Array, pa.DataType, Any]] = [
    ("a narrower number", pa.array([5], pa.int8()), pa.int64(), 5),
    ("a wider number that fits", pa.array([5]), pa.int8(), 5),
    ("a whole float", pa.array([5.0]), pa.int64(), 5),
    ("a whole decimal", pa.array([decimal.Decimal(2**62)], pa.decimal128(38, 0)), pa.int64(), 2**62),
    ("an integer for a double", pa.array([2**53]), pa.float64(), 2.0**53),
    ("large text", pa.array(["a"], pa.large_string()), pa.string(), "a"),
    ("a view of text", pa.array(["a"], pa.string_view()), pa.string(), "a"),
    ("a dictionary", pa.array(["a"]).dictionary_encode(), pa.string(), "a"),
    ("a large list", pa.array([[1]], pa.large_list(pa.int64())), pa.list_(pa.int64()), [1]),
    ("a list of fixed size", pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.list_(pa.int64()), [1, 2]),
    ("another zone", pa.array([MOMENT], pa.timestamp("us", "Asia/Tokyo")), pa.timestamp("us", "UTC"), MOMENT),
    ("coarser times", pa.array([1], pa.timestamp("s", "UTC")), pa.timestamp("us", "UTC"), MOMENT.replace(year=1970, month=1, day=1, hour=0, minute=0, second=1, microsecond=0)),
    ("NULLs of no type", pa.nulls(1), pa.list_(pa.int64()), None),
    ("a map of other numbers", pa.array([[("a", 1.0), ("b", None)]], pa.map_(pa.large_string(), pa.float64())), pa.map_(pa.string(), pa.int64()), [("a", 1), ("b", None)]),
    ("a map for a list of its entries", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), pa.list_(pa.struct([("value", pa.int64()), ("key", pa.string())])), [{"value": 1, "key": "a"}]),
    ("a struct in another order", pa.array([{"y": "a", "x": 1}]), pa.struct([("x", pa.int64()), ("y", pa.string())]), {"x": 1, "y": "a"}),
]  # fmt: skip


POINT = pa.struct([pa.field("x", pa.int32(), nullable=False), pa.field("tags", pa.list_(pa.string()))])
LINE = pa.struct([("name", pa.string()), ("points", pa.list_(POINT))])
DEEP = pa.list_(pa.list_(POINT))


@pytest.mark.parametrize("of", [pa.list_, pa.large_list], ids=["lists", "large lists"])
def test_structs_are_cast_at_any_depth_of_lists(of: Any) -> None:
    """Struct fields match by name; a missing or an additional field is an error."""
    loose = pa.struct([("tags", of(pa.large_string())), ("x", pa.int64())])
    points = [{"tags": ["a", None], "x": 1}, {"tags": None, "x": 2}]
    values: list[Any] = [
        {"points": points, "name": "two"},
        None,
        {"points": [], "name": None},
        {"points": None, "name": "none"},
        {"points": points[1:], "name": "one"},
    ]
    column = pa.array(values, pa.struct([("points", of(loose)), ("name", pa.string())]))
    for given, expected in ((column, values), (column.slice(1, 3), values[1:4]), (column.slice(4), values[4:])):
        for form in (given, pa.chunked_array([given, given])):
            result = cast_column(form, pa.field("v", LINE), "output column")
            result.validate(full=True)
            assert result.type == LINE
            assert result.to_pylist() == expected * (1 if form is given else 2)
    deep = [[points, None, []], None, [points[:1]]]
    result = cast_column(pa.array([None, *deep], of(of(loose))).slice(1), pa.field("v", DEEP), "output column")
    assert result.type == DEEP
    assert result.to_pylist() == deep
    nothing = cast_column(pa.chunked_array([], column.type), pa.field("v", LINE), "output column")
    assert nothing.type == LINE
    assert cast_column(pa.nulls(2), pa.field("v", LINE), "output column").to_pylist() == [None, None]
    for fields in ({"x": 1}, {"x": 1, "tags": [], "more": 1}, {"x": 1, "Tags": []}):
        with pytest.raises(StateValueError, match=r"output column 'v' of type .* cannot hold .*: its fields are "):
            cast_column(pa.array([{"name": "a", "points": [fields]}]), pa.field("v", LINE), "output column")


MAP = pa.map_(POINT, pa.map_(pa.string(), LINE))


@pytest.mark.parametrize("of", [pa.list_, pa.large_list], ids=["lists", "large lists"])
def test_structs_are_cast_at_any_depth_of_maps(of: Any) -> None:
    """Structs are cast in keys and values of maps that are nested in maps, lists and structs."""
    loose = pa.struct([("tags", of(pa.large_string())), ("x", pa.int64())])
    line = pa.struct([("points", of(loose)), ("name", pa.string())])
    given_type = pa.map_(loose, pa.map_(pa.large_string(), line))
    one, two = {"tags": ["a", None], "x": 1}, {"tags": None, "x": 2}
    inner = [("u", {"points": [one, two], "name": None}), ("v", None), ("w", {"points": None, "name": "w"})]
    values: list[Any] = [[(one, inner), (two, None)], None, [], [(two, [])], [(one, inner[1:])], None]
    column = pa.array(values, given_type)
    for given, expected in (
        (column, values),
        (column.slice(1, 3), values[1:4]),
        (column.slice(4), values[4:]),
        (column.slice(6), []),
    ):
        for form in (given, pa.chunked_array([given, given])):
            result = cast_column(form, pa.field("v", MAP), "output column")
            result.validate(full=True)
            assert result.type == MAP
            assert result.to_pylist() == expected * (1 if form is given else 2)
    outer, outer_given = pa.struct([("m", pa.list_(MAP))]), pa.struct([("m", of(given_type))])
    nested = [{"m": values}, None, {"m": None}, {"m": values[3:]}]
    result = cast_column(pa.array(nested, outer_given).slice(1), pa.field("v", outer), "output column")
    assert result.type == outer
    assert result.to_pylist() == nested[1:]
    assert cast_column(pa.nulls(2), pa.field("v", MAP), "output column").to_pylist() == [None, None]
    assert cast_column(pa.chunked_array([], given_type), pa.field("v", MAP), "output column").type == MAP


@pytest.mark.parametrize("fields", [{"x": 1}, {"x": 1, "tags": [], "more": 1}, {"x": 1, "Tags": []}], ids=str)
def test_a_struct_in_a_map_with_other_fields_is_refused(fields: dict[str, Any]) -> None:
    point = pa.array([fields]).type
    for kind, given_type, value in (
        (pa.map_(pa.string(), POINT), pa.map_(pa.string(), point), [("a", fields)]),
        (pa.map_(POINT, pa.string()), pa.map_(point, pa.string()), [(fields, "a")]),
        (pa.list_(pa.map_(pa.string(), POINT)), pa.list_(pa.map_(pa.string(), point)), [[("a", fields)]]),
        (
            pa.struct([("m", pa.map_(pa.string(), POINT))]),
            pa.struct([("m", pa.map_(pa.string(), point))]),
            {"m": [("a", fields)]},
        ),
        (pa.map_(pa.string(), pa.list_(POINT)), pa.map_(pa.string(), pa.list_(point)), [("a", [fields])]),
        (pa.list_(pa.struct([("key", pa.string()), ("value", POINT)])), pa.map_(pa.string(), point), [("a", fields)]),
    ):
        for column in (pa.array([value], given_type), pa.chunked_array([pa.array([None, value], given_type)])):
            with pytest.raises(StateValueError, match=r"output column 'v' of type .* cannot hold .*: its fields are "):
                cast_column(column, pa.field("v", kind), "output column")


def test_values_hidden_by_a_null_map_are_ignored() -> None:
    values = pa.array([{"x": 5.0}, {"x": 1.5}, {"x": 6.0}])
    entries = pa.StructArray.from_arrays([pa.array(["a", "b", "c"]), values], ["key", "value"])
    kind = pa.map_(pa.string(), values.type)
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(kind, 3, [pa.py_buffer(b"\x05"), offsets], -1, 0, [entries])
    wanted = pa.field("v", pa.map_(pa.string(), pa.field("value", pa.struct([("x", pa.int64())]), nullable=False)))
    result = cast_column(column, wanted, "output column")
    assert result.to_pylist() == [[("a", {"x": 5})], None, [("c", {"x": 6})]]
    refuse_nulls(result, wanted, "output column")


DAY = dt.datetime(2020, 1, 1)  # noqa: DTZ001  # like a timestamp without a time zone
REFUSED_VALUES = [
    (
        "a decimal",
        [decimal.Decimal("1.20"), decimal.Decimal("1.239")],
        pa.decimal128(5, 2),
        r"Decimal\('1.239'\), in row 1\)$",
    ),
    ("a number", [1, 2, None, 300, 301], pa.int8(), r"300, in row 3\)$"),
    ("a time of day", [DAY, DAY.replace(hour=5)], pa.date32(), r"datetime\(2020, 1, 1, 5, 0\), in row 1\)$"),
    ("no text", [b"a", b"b", b"\xff"], pa.string(), r"b'\\xff', in row 2\)$"),
    ("an element", [[1], [2, 2**40], [2**41]], pa.list_(pa.int32()), r"\[2, 1099511627776\], in row 1\)$"),
    ("the only one", [1.5], pa.int64(), r"1.5, in row 0\)$"),
]


@pytest.mark.parametrize(
    ("values", "kind", "text"), [c[1:] for c in REFUSED_VALUES], ids=[c[0] for c in REFUSED_VALUES]
)
@pytest.mark.parametrize("chunks", [0, 2])
def test_the_error_names_the_first_value_that_does_not_fit(
    values: list[Any], kind: pa.DataType, text: str, chunks: int
) -> None:
    whole = pa.array(values)
    column = whole if chunks == 0 else pa.chunked_array([whole.slice(0, 1), whole.slice(1)][:chunks])
    expected = rf"output column 'v' of type .* cannot hold .* \(the first such value is .*{text}"
    with pytest.raises(StateValueError, match=expected):
        cast_column(column, pa.field("v", kind), "output column")


@pytest.mark.parametrize(
    "kind", [pa.list_, pa.large_list, lambda item: pa.list_(item, 1)], ids=["list", "large", "fixed"]
)
def test_values_outside_a_slice_are_ignored(kind: Callable[[pa.DataType], pa.DataType]) -> None:
    values = [[2**40], [1], None, [2], [-(2**40)]]
    column = pa.array(values, kind(pa.int64())).slice(1, 3)
    result = cast_column(column, pa.field("v", pa.list_(pa.int32())), "output column")
    assert result.to_pylist() == values[1:4]


@pytest.mark.parametrize(("column", "kind", "value"), [c[1:] for c in CASTS], ids=[c[0] for c in CASTS])
def test_values_that_fit_are_cast(column: pa.Array, kind: pa.DataType, value: Any) -> None:
    if pa.types.is_string_view(column.type):
        try:
            column.cast(kind)
        except pa.ArrowException:
            # Some releases of PyArrow do not have this cast: the error then names the column.
            with pytest.raises(StateValueError, match="output column 'v' of type string cannot hold string_view"):
                cast_column(column, pa.field("v", kind), "output column")
            return
    for given in (column, pa.chunked_array([column]), pa.concat_arrays([column, column]).slice(1, 1)):
        result = cast_column(given, pa.field("v", kind), "output column")
        assert result.type == kind
        assert result.to_pylist() == [value]


VIEWS = ["list_view", "large_list_view"]


def make_views(name: str, values: list[Any], value_type: pa.DataType) -> pa.Array:
    """Make an array of list views; skip the test if the installed PyArrow does not support them."""
    if not hasattr(pa, name):
        pytest.skip(f"this PyArrow has no {name}")
    kind = getattr(pa, name)(value_type)
    try:
        pc.list_flatten(pa.nulls(1, kind))
        return pa.array(values, kind)
    except pa.ArrowException as error:
        pytest.skip(f"this PyArrow does not support {name}: {error}")


@pytest.mark.parametrize("view", VIEWS)
def test_list_views_are_cast_to_lists(view: str) -> None:
    cases: list[tuple[list[Any], pa.DataType]] = [
        ([[1, 2], None, [3], []] * 5, pa.int64()),
        ([None, [], None], pa.int64()),
        ([[[1, 2], None], None, [[], [3]]], pa.list_(pa.int64())),
        ([["a", None], None, ["b"]], pa.string()),
        ([], pa.int64()),
    ]
    for values, element in cases:
        column = make_views(view, values, element)
        for given, expected in ((column, values), (column.slice(1), values[1:]), (column.slice(1, 1), values[1:2])):
            for form in (given, pa.chunked_array([given, given])):
                result = cast_column(form, pa.field("v", pa.list_(element)), "output column")
                result.validate(full=True)
                assert result.type == pa.list_(element)
                assert result.to_pylist() == expected * (1 if form is given else 2)


@pytest.mark.parametrize("view", VIEWS)
def test_list_views_that_overlap_in_any_order_are_cast(view: str) -> None:
    column = make_views(view, [[0]], pa.int16())
    index = column.offsets.type
    mask = pa.array([False, True, False, False])
    column = type(column).from_arrays(
        pa.array([2, 0, 1, 0], index), pa.array([1, 3, 2, 2], index), pa.array([1, 2, 3], pa.int16()), mask=mask
    )
    result = cast_column(column, pa.field("v", pa.list_(pa.int64())), "output column")
    result.validate(full=True)
    assert result.to_pylist() == [[3], None, [2, 3], [1, 2]]
    with pytest.raises(StateValueError, match=r"output column 'v' of type list<.*int8> cannot hold .*list_view"):
        cast_column(make_views(view, [[300]], pa.int64()), pa.field("v", pa.list_(pa.int8())), "output column")


@pytest.mark.parametrize("view", VIEWS)
def test_list_views_nested_in_other_types_are_cast(view: str) -> None:
    lists: list[Any] = [[1, 2], None, [3], []]
    column = make_views(view, lists, pa.int64())
    kind = pa.list_(pa.int64())
    offsets = pa.array([0, 1, 1, 4], pa.int32())
    mask = pa.array([False, True, False, False])
    keys = pa.array(["a", "b", "c", "d"])
    cases: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
        (
            pa.StructArray.from_arrays([column], names=["l"]),
            pa.struct([("l", kind)]),
            [{"l": values} for values in lists],
        ),
        (pa.ListArray.from_arrays(offsets, column), pa.list_(kind), [lists[:1], [], lists[1:]]),
        (
            pa.MapArray.from_arrays(offsets, keys, column),
            pa.map_(pa.string(), kind),
            [[("a", lists[0])], [], list(zip("bcd", lists[1:], strict=True))],
        ),
        (
            pa.StructArray.from_arrays([column], names=["l"], mask=mask),
            pa.struct([("l", kind)]),
            [{"l": lists[0]}, None, *({"l": values} for values in lists[2:])],
        ),
    ]
    for given, wanted, expected in cases:
        for first in (0, 1):
            result = cast_column(given.slice(first), pa.field("v", wanted), "output column")
            result.validate(full=True)
            assert result.type == wanted
            assert result.to_pylist() == expected[first:]


def test_structs_that_are_values_of_a_map_are_cast() -> None:
    given_type = pa.map_(pa.large_string(), pa.struct([("tags", pa.large_list(pa.string())), ("x", pa.int64())]))
    values: list[Any] = [[("a", {"tags": ["t"], "x": 1}), ("b", None)], None, [], [("c", {"tags": None, "x": 2})]]
    wanted = pa.map_(pa.string(), pa.field("value", POINT))
    column = pa.array(values, given_type)
    for given, expected in ((column, values), (column.slice(1, 3), values[1:4]), (column.slice(3), values[3:])):
        result = cast_column(given, pa.field("v", wanted), "output column")
        result.validate(full=True)
        assert result.type == wanted
        assert result.to_pylist() == expected
    assert cast_column(column.slice(0, 0), pa.field("v", wanted), "output column").to_pylist() == []
    with pytest.raises(StateValueError, match=r"output column 'v' of type map<.* cannot hold .*: its fields are x"):
        cast_column(
            pa.array([[("a", {"x": 1})]], pa.map_(pa.string(), pa.struct([("x", pa.int64())]))),
            pa.field("v", wanted),
            "output column",
        )


REFUSED: list[tuple[str, pa.Array, pa.DataType]] = [
    ("a fraction", pa.array([1.5]), pa.int64()),
    ("too large", pa.array([300]), pa.int8()),
    ("not exact as a double", pa.array([2**53 + 1]), pa.float64()),
    ("too many digits", pa.array([decimal.Decimal("1.25")]), pa.decimal128(5, 1)),
    ("nanoseconds", pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
    ("text for a struct", pa.array(["a"]), pa.struct([("x", pa.int64())])),
    (
        "a fraction in a map",
        pa.array([[("a", 1.5)]], pa.map_(pa.string(), pa.float64())),
        pa.map_(pa.string(), pa.int64()),
    ),
    ("a map for text", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), pa.string()),
    ("a list for text", pa.array([["a"]]), pa.string()),
    ("bytes that are no text", pa.array([b"\xff"]), pa.string()),
]


@pytest.mark.parametrize(("column", "kind"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_values_that_do_not_fit_are_refused(column: pa.Array, kind: pa.DataType) -> None:
    with pytest.raises(StateValueError, match=r"output column 'v' of type .* cannot hold"):
        cast_column(column, pa.field("v", kind), "output column")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_number_too_large_for_a_float_is_refused(chunked: bool) -> None:
    largest = float(np.finfo(np.float32).max)
    values = [largest, None, float("inf"), float("-inf"), float("nan"), -0.0]
    cases: list[tuple[pa.Array, pa.DataType, Any]] = [
        (pa.array(values), pa.float32(), lambda value: pa.array([None, value])),
        (pa.array([values, None]), pa.list_(pa.float32()), lambda value: pa.array([None, [1.0, value]])),
        (
            pa.array([{"x": value} for value in values]),
            pa.struct([("x", pa.float32())]),
            lambda value: pa.array([{"x": value}]),
        ),
    ]
    for good, kind, bad in cases:
        form = pa.chunked_array([good, good.slice(1)]) if chunked else good
        result = cast_column(form, pa.field("v", kind), "output column")
        assert result.type == kind
        assert repr(result.to_pylist()) == repr(form.to_pylist())
        for value in (1e300, -3.5e38):
            column = pa.chunked_array([good, bad(value)]) if chunked else bad(value)
            with pytest.raises(
                StateValueError, match=r"output column 'v' .* cannot hold .*e\+?\d+ is more than it holds"
            ):
                cast_column(column, pa.field("v", kind), "output column")


def test_dictionary_arrays_are_cast_by_the_same_rules() -> None:
    late = dt.datetime(2020, 1, 1, 13, tzinfo=dt.timezone.utc)
    cases: list[tuple[pa.Array, pa.DataType]] = [
        (pa.array([1e300, 1.0]).dictionary_encode(), pa.float32()),
        (pa.array([late], INSTANT).dictionary_encode(), pa.date32()),
        (pa.array([late], INSTANT), pa.date32()),
    ]
    for column, kind in cases:
        lists = pa.ListArray.from_arrays(pa.array([0, len(column)], pa.int32()), column)
        for given, wanted in ((column, kind), (pa.chunked_array([column]), kind), (lists, pa.list_(kind))):
            with pytest.raises(StateValueError, match=r"which a date would lose|is more than it holds"):
                cast_column(given, pa.field("v", wanted), "output column")
    words = pa.array(["a", None, "a"]).dictionary_encode()
    assert cast_column(words, pa.field("v", pa.string()), "output column").to_pylist() == ["a", None, "a"]


INSTANT = pa.timestamp("us", "UTC")


def test_a_timestamp_with_a_time_of_day_is_refused_as_a_date() -> None:
    day = pa.field("v", pa.date32())
    for kind in (pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.timestamp("s", "Asia/Tokyo")):
        offset_s = 9 * 3_600 if kind.tz == "Asia/Tokyo" else 0
        midnight = pa.array([86_400 - offset_s, None], pa.timestamp("s", kind.tz)).cast(kind)
        assert cast_column(midnight, day, "output column").to_pylist() == [dt.date(1970, 1, 2), None]
        late = pa.array([None, 86_400 + 84_600], pa.timestamp("s", kind.tz)).cast(kind)
        with pytest.raises(StateValueError, match=r"output column 'v' .*it has times of day, which a date would lose"):
            cast_column(late, day, "output column")


def test_a_column_name_with_a_leading_dot_is_not_a_path() -> None:
    inner = [pa.field("b", pa.int64()), pa.field(".b", pa.int64(), nullable=False)]
    column = pa.array([{"b": 1, ".b": None}], pa.struct([pa.field("b", pa.int64()), pa.field(".b", pa.int64())]))
    with pytest.raises(StateValueError, match=r"'v': its '\.b' is declared without NULLs"):
        refuse_nulls(column, pa.field("v", pa.struct(inner)), "output column")
    table = pa.table({".v": [1], "v": [2], "id": [0]})
    with pytest.raises(StateValueError, match=r"column '\.v': PyArrow cannot aggregate"):
        aggregate_groups(table, "id", [(".v", "sum")])


def test_duplicate_column_names_in_another_order_are_refused() -> None:
    fields = [pa.field(name, pa.int64()) for name in ("a", "b", "a")]
    columns = [pa.array([n]) for n in (1, 2, 3)]
    given = pa.table(columns, names=["a", "b", "a"])
    assert [column.to_pylist() for column in conform_table(given, fields, "it gave").columns] == [[1], [2], [3]]
    with pytest.raises(StateValueError, match="in this order, as some have the same name"):
        conform_table(pa.table(columns, names=["a", "a", "b"]), fields, "it gave")


READ: list[tuple[str, pa.Array, pa.DataType, str]] = [
    ("text for a number", pa.array([None, "7"]), pa.int64(), r"'7' \(string\) is not converted to int64 automatically; cast it"),
    ("large text", pa.array(["7"], pa.large_string()), pa.float64(), r"'7' \(large_string\) is not converted to double"),
    ("a dictionary of text", pa.array(["7"]).dictionary_encode(), pa.int32(), r"'7' \(string\) is not converted to int32"),
    ("text for a decimal", pa.array(["7.5"]), pa.decimal128(5, 1), r"'7.5' \(string\) is not converted to decimal128\(5, 1\)"),
    ("text for a date", pa.array(["2024-01-01"]), pa.date32(), r"'2024-01-01' \(string\) is not converted to date32\[day\]"),
    ("text for a time", pa.array(["2024-01-01T00:00:00Z"]), INSTANT, r"\(string\) is not converted to timestamp\[us, tz=UTC\]"),
    ("text for a boolean", pa.array(["true"]), pa.bool_(), r"'true' \(string\) is not converted to bool"),
    ("bytes for a number", pa.array([b"7"]), pa.int64(), r"b'7' \(binary\) is not converted to int64"),
    ("long text", pa.array(["7" * 1000]), pa.float64(), r"cannot hold string: '7{1,20}\.\.\.7{1,20}' \(string\)"),
    ("a boolean for a number", pa.array([True]), pa.int64(), r"True \(bool\) is not converted to int64"),
    ("a number for a boolean", pa.array([7]), pa.bool_(), r"7 \(int64\) is not converted to bool"),
    ("a float for a boolean", pa.array([0.0]), pa.bool_(), r"0.0 \(double\) is not converted to bool"),
    ("a number for a time", pa.array([7]), INSTANT, r"7 \(int64\) is not converted to timestamp\[us, tz=UTC\]"),
    ("a number for a date", pa.array([7], pa.int32()), pa.date32(), r"7 \(int32\) is not converted to date32\[day\]"),
    ("a number for a duration", pa.array([7]), pa.duration("us"), r"7 \(int64\) is not converted to duration\[us\]"),
    ("a time for a number", pa.array([0], INSTANT), pa.int64(), r"1970-01-01 00:00:00\+00:00 \(timestamp\[us, tz=UTC\]\) is not converted to"),
    ("a duration for a number", pa.array([7], pa.duration("ms")), pa.int64(), r"0:00:00.007000 \(duration\[ms\]\) is not converted to int64"),
    ("a time beyond Python's", pa.array([1 << 60], INSTANT), pa.int64(), r"'115292150460.*\(timestamp\[us, tz=UTC\]\) is not converted to"),
    ("a time for text", pa.array([0], INSTANT), pa.string(), r"1970-01-01 00:00:00\+00:00 \(timestamp\[us, tz=UTC\]\) is not converted to string"),
    ("a date for text", pa.array([0], pa.date32()), pa.string(), r"1970-01-01 \(date32\[day\]\) is not converted to string"),
    ("a duration for text", pa.array([7], pa.duration("ms")), pa.string(), r"0:00:00.007000 \(duration\[ms\]\) is not converted to string"),
    ("times for text in a list", pa.array([[0]], pa.list_(INSTANT)), pa.list_(pa.string()), r": timestamp\[us, tz=UTC\] is not converted to string"),
    ("in a list", pa.array([["7"]]), pa.list_(pa.int64()), ": string is not converted to int64 automatically"),
    ("in a large list", pa.array([["7"]], pa.large_list(pa.string())), pa.list_(pa.int64()), ": string is not converted to int64"),
    ("in a struct", pa.array([{"y": 1, "x": "7"}]), pa.struct([("x", pa.int64()), ("y", pa.int64())]), ": string is not converted to int64"),
    ("deeper", pa.array([[{"x": [True]}]]), pa.list_(pa.struct([("x", pa.list_(pa.int8()))])), ": bool is not converted to int8"),
    ("in a map", pa.array([[("a", "7")]], pa.map_(pa.string(), pa.string())), pa.map_(pa.string(), pa.int64()), ": string is not converted to int64"),
    ("as a map's key", pa.array([[("7", 7)]], pa.map_(pa.string(), pa.int64())), pa.map_(pa.int64(), pa.int64()), ": string is not converted to int64"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "kind", "text"), [r[1:] for r in READ], ids=[r[0] for r in READ])
def test_values_of_another_kind_are_not_converted_automatically(column: pa.Array, kind: pa.DataType, text: str) -> None:
    """The function must cast such values itself, as in the APIs that take Python values."""
    for given in (column, pa.chunked_array([column.slice(0, 0), column])):
        with pytest.raises(
            StateValueError, match=r"output column 'v' of type .* cannot hold .*: .*cast it in"
        ) as raised:
            cast_column(given, pa.field("v", kind), "output column")
        assert raised.match(text)


@pytest.mark.parametrize(
    ("column", "kind", "values"),
    [
        (pa.array([7]), pa.string(), ["7"]),
        (pa.array([b"a"]), pa.string(), ["a"]),
        (pa.array(["a"]), pa.binary(), [b"a"]),
        (pa.array([b"ab"], pa.binary(2)), pa.binary(), [b"ab"]),
        (pa.array([True]), pa.float64(), [1.0]),
        (pa.array([0], pa.date32()), INSTANT, [dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)]),
        (
            pa.array([7], pa.timestamp("ms", "UTC")),
            INSTANT,
            [dt.datetime(1970, 1, 1, 0, 0, 0, 7_000, tzinfo=dt.timezone.utc)],
        ),
        (pa.array([1.5, float("nan"), None]), pa.string(), ["1.5", None, None]),
        (pa.array(np.array([1.5, np.nan], np.float16)), pa.string(), ["1.5", None]),
        (pa.array([[float("nan")]]), pa.list_(pa.string()), [[None]]),
        (pa.array([7.0, float("nan")]), pa.int64(), [7, None]),
        (pa.array([None], INSTANT), pa.string(), [None]),
        (pa.nulls(2, pa.string()), pa.int64(), [None, None]),
        (pa.array([], pa.string()), INSTANT, []),
    ],
    ids=[
        "numbers as text",
        "bytes as text",
        "text as bytes",
        "fixed bytes",
        "a boolean as a float",
        "dates as times",
        "times of another unit",
        "NaN as text",
        "a half float's NaN as text",
        "NaN as text in a list",
        "NaN as a whole number",
        "NaT as text",
        "NULLs",
        "no rows",
    ],
)
def test_numbers_text_dates_and_missing_values_are_cast(column: pa.Array, kind: pa.DataType, values: list[Any]) -> None:
    """Numbers become text as in Spark; NULL, NaN and empty columns convert to any type."""
    assert cast_column(column, pa.field("v", kind), "output column").to_pylist() == values


def test_the_error_for_a_null_in_a_column_without_nulls_names_its_row() -> None:
    fields = [pa.field("k", pa.string()), pa.field("n", pa.int64(), nullable=False)]
    with pytest.raises(StateValueError, match="output column 'n' is declared without NULLs and row 1 is NULL"):
        conform_table(TABLE, fields, "it gave")
    assert conform_table(TABLE.slice(0, 1), fields, "it gave").schema == pa.schema(fields)
    chunks = pa.chunked_array([[1, 2], [3, None]])
    with pytest.raises(StateValueError, match="row 3 is NULL"):
        refuse_nulls(chunks, fields[1], "output column")
    refuse_nulls(chunks.slice(0, 3), fields[1], "output column")


def test_forbidden_nulls_inside_lists_and_structs_are_refused() -> None:
    point = pa.struct([pa.field("x", pa.int64(), nullable=False), pa.field("y", pa.int64())])
    strict = pa.field("v", pa.list_(pa.field("element", point, nullable=False)))
    good: list[Any] = [[{"x": 1, "y": None}], [], None, [{"x": 2, "y": 3}, {"x": 4, "y": None}]]
    refuse_nulls(pa.array(good, strict.type), strict, "output column")
    loose = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    bad = cast_column(pa.array([*good, [None]], pa.list_(loose)), strict, "output column")
    with pytest.raises(StateValueError, match=r"output column 'v': its 'element' is declared without NULLs and row 3"):
        refuse_nulls(bad, strict, "output column")
    refuse_nulls(bad.slice(0, 4), strict, "output column")
    deep = pa.field("v", pa.struct([pa.field("p", point), pa.field("n", pa.int64())]))
    rows = [{"p": None, "n": 1}, None, {"p": {"x": None, "y": 1}, "n": 1}]
    given = pa.array(rows, pa.struct([("p", loose), ("n", pa.int64())]))
    for column in (given, pa.chunked_array([given])):
        with pytest.raises(StateValueError, match=r"output column 'v': its 'p': its 'x' is declared without NULLs"):
            conform_table(pa.table([column], names=["v"]), [deep], "it gave")
        assert conform_table(pa.table([column.slice(0, 2)], names=["v"]), [deep], "it gave").num_rows == 2


STRICT = pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))
INSIDE: list[tuple[str, pa.DataType, Any, Any, str]] = [
    ("a value", STRICT, [("a", 1)], [("a", 1), ("b", None)], "its 'value' is declared without NULLs and row "),
    ("of a list's map", pa.list_(STRICT), [[("a", 1)], None], [[("b", None)]], "its '[a-z]+': its 'value' is"),
    ("of a struct's map", pa.struct([("m", STRICT)]), {"m": None}, {"m": [("b", None)]}, "its 'm': its 'value' is"),
    ("of a map's map", pa.map_(pa.string(), STRICT), [("a", None)], [("a", [("b", None)])], "its 'value': its 'value' is"),
    ("in a list of a map", pa.map_(pa.string(), pa.list_(pa.field("element", pa.int64(), nullable=False))), [("a", [1]), ("b", None)], [("a", [1, None])], "its 'value': its 'element' is"),
    ("in a struct of a map", pa.map_(pa.string(), POINT), [("a", {"x": 1, "tags": None})], [("a", {"x": None, "tags": []})], "its 'value': its 'x' is"),
    ("in a key", pa.map_(POINT, pa.int64()), [({"x": 1, "tags": None}, None)], [({"x": None, "tags": []}, 1)], "its 'key': its 'x' is"),
]  # fmt: skip


def make_nullable(kind: pa.DataType) -> pa.DataType:
    """Return the type with every nested field nullable."""
    if pa.types.is_list(kind):
        return pa.list_(make_nullable(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(make_nullable(kind.key_type), make_nullable(kind.item_type))
    return pa.struct([(field.name, make_nullable(field.type)) for field in kind]) if pa.types.is_struct(kind) else kind


@pytest.mark.parametrize("cast", [False, True], ids=["of the type", "cast"])
@pytest.mark.parametrize(
    ("kind", "good", "bad", "text"), [case[1:] for case in INSIDE], ids=[case[0] for case in INSIDE]
)
def test_forbidden_nulls_inside_maps_are_refused(kind: pa.DataType, good: Any, bad: Any, text: str, cast: bool) -> None:
    given = make_nullable(kind) if cast else kind
    field = pa.field("v", kind)
    for chunks in ([good, None, good], [good, bad]), ([None, good], [bad]):
        columns = (
            pa.array([value for chunk in chunks for value in chunk], given),
            pa.chunked_array([pa.array(c, given) for c in chunks]),
        )
        for column in columns:
            with pytest.raises(StateValueError, match=f"output column 'v': {text}"):
                conform_table(pa.table([column], names=["v"]), [field], "it gave")
            fine = column.slice(0, len(column) - 1)
            assert conform_table(pa.table([fine], names=["v"]), [field], "it gave")["v"].to_pylist() == fine.to_pylist()
