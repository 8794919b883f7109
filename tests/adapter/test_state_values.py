"""Conversion of state columns between Arrow and the Python values of GroupState."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    Row,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from arrow_schemas.spark_types import state_fields
from spark_state_ext.errors import StateValueError
from spark_state_ext.spark.callers.state_values import column_to_values, make_row_copier, values_to_column
from spark_state_ext.spark.compat import SPARK_VERSION, STATE_BINARY
from tests.helpers.waiting import WAIT_S

WHEN = dt.datetime(2013, 3, 10, 2, 30, 1, 123456)  # noqa: DTZ001  # Spark's state values are naive
POINT = StructType([StructField("x", IntegerType()), StructField("at", TimestampType())])

CASES: list[tuple[DataType, list[Any]]] = [
    (ByteType(), [1, -128, None]),
    (IntegerType(), [2**31 - 1, None]),
    (LongType(), [2**53 + 1, None, -(2**63)]),
    (FloatType(), [1.5, None, float("inf")]),
    (DoubleType(), [0.1, None]),
    (DecimalType(10, 2), [decimal.Decimal("12345678.90"), None]),
    (StringType(), ["", "ä", None]),
    (BinaryType(), [b"", b"\x00\xff", None]),
    (BooleanType(), [True, False, None]),
    (DateType(), [dt.date(1969, 12, 31), dt.date(2024, 2, 29), None]),
    (TimestampType(), [WHEN, None]),
    (TimestampNTZType(), [WHEN, None]),
    (ArrayType(LongType()), [[1, None, 2**60], [], None]),
    (ArrayType(TimestampType()), [[WHEN, None], None]),
    (MapType(StringType(), DateType()), [{"a": dt.date(2000, 1, 1), "b": None}, {}, None]),
    (POINT, [Row(x=1, at=WHEN), Row(x=None, at=None), None]),
    (ArrayType(POINT), [[Row(x=1, at=WHEN), None], None]),
]


def find_arrow_type(spark_type: DataType) -> Any:
    (field,) = state_fields(json.dumps(StructType([StructField("v", spark_type)]).jsonValue()))
    return field.type


@pytest.mark.parametrize(("spark_type", "values"), CASES, ids=[case[0].simpleString() for case in CASES])
def test_values_are_read_as_they_were_written(spark_type: DataType, values: list[Any]) -> None:
    column = values_to_column(values, spark_type, find_arrow_type(spark_type), "v")
    assert column_to_values(column, spark_type) == values


def test_a_nested_struct_is_read_as_a_row() -> None:
    column = values_to_column([(1, WHEN)], POINT, find_arrow_type(POINT), "v")
    (value,) = column_to_values(column, POINT)
    assert isinstance(value, Row)
    assert value.x == 1
    assert value.at == WHEN


def test_a_struct_may_be_given_as_dict_or_tuple() -> None:
    given = [{"x": 1, "at": WHEN}, (1, WHEN), Row(x=1, at=WHEN)]
    values = column_to_values(values_to_column(given, POINT, find_arrow_type(POINT), "v"), POINT)
    assert values == [Row(x=1, at=WHEN)] * 3


def test_a_double_accepts_an_integer_and_an_array_accepts_a_numpy_array() -> None:
    assert column_to_values(values_to_column([5], DoubleType(), find_arrow_type(DoubleType()), "v"), DoubleType()) == [
        5.0
    ]
    array = ArrayType(LongType())
    assert column_to_values(values_to_column([np.array([1, 2])], array, find_arrow_type(array), "v"), array) == [[1, 2]]


def test_binary_is_read_as_the_type_that_spark_uses() -> None:
    nested = ArrayType(MapType(BinaryType(), BinaryType()))
    for spark_type, value in ((BinaryType(), bytearray(b"ab")), (nested, [{b"k": b"ab"}])):
        column = values_to_column([value], spark_type, find_arrow_type(spark_type), "v")
        (value_read,) = column_to_values(column, spark_type)
        binary = value_read if isinstance(spark_type, BinaryType) else value_read[0][b"k"]
        assert binary == b"ab"
        assert type(binary) is (bytes if SPARK_VERSION >= (4, 1) else bytearray)


def test_a_decimal_is_rounded_half_up_as_spark_does() -> None:
    spark_type = DecimalType(5, 1)
    column = values_to_column([decimal.Decimal("1.25")], spark_type, find_arrow_type(spark_type), "v")
    assert column_to_values(column, spark_type) == [decimal.Decimal("1.3")]


@pytest.mark.parametrize("value", ["text", b"ab", bytearray(b"ab"), {"a": 1}], ids=repr)
@pytest.mark.parametrize("element", [StringType(), LongType(), BinaryType()], ids=lambda kind: kind.simpleString())
def test_an_array_refuses_text_bytes_and_dicts(value: Any, element: DataType) -> None:
    for spark_type, given in (
        (ArrayType(element), value),
        (MapType(StringType(), ArrayType(element)), {"k": value}),
    ):
        with pytest.raises(StateValueError, match=r"state column 'v' of type .* cannot hold .*: it is not a list"):
            values_to_column([None, given], spark_type, find_arrow_type(spark_type), "state column 'v'")
        keep = make_row_copier(StructType([StructField("v", spark_type)]), "state column")
        assert keep is not None
        with pytest.raises(StateValueError, match="it is not a list"):
            keep((given,))


def test_a_date_column_refuses_numbers() -> None:
    dates = DateType()
    given = [dt.date(2024, 1, 2), None, np.datetime64("2024-01-02T05:00:00.000000000")]
    assert column_to_values(values_to_column(given, dates, find_arrow_type(dates), "v"), dates) == [
        given[0],
        None,
        given[0],
    ]
    for spark_type, value in (
        (dates, 19_000),
        (dates, 1.5),
        (dates, np.int64(3)),
        (dates, True),
        (ArrayType(dates), [19_000]),
        (MapType(dates, LongType()), {5: 5}),
    ):
        with pytest.raises(StateValueError, match=r"cannot hold .*: it is not a date"):
            values_to_column([value], spark_type, find_arrow_type(spark_type), "v")


def test_text_does_not_depend_on_the_other_values_of_its_column() -> None:
    text = StringType()
    for other in ("y", 5, None, True):
        given = [b"x", "ä", bytearray(b"z"), other]
        texts = column_to_values(values_to_column(given, text, find_arrow_type(text), "v"), text)
        assert texts == ["x", "ä", "z", None if other is None else str(other).lower()]
    surrogates: list[list[Any]] = [["a", "\ud800"], [5, "\ud800"]]
    for bad in surrogates:
        with pytest.raises(StateValueError, match=r"v of type string cannot hold '\\ud800' \(str\)"):
            values_to_column(bad, text, find_arrow_type(text), "v")


MISSING = [
    None,
    pd.NA,
    pd.NaT,
    float("nan"),
    np.float32("nan"),
    decimal.Decimal("NaN"),
    decimal.Decimal("sNaN"),
    np.datetime64("NaT"),
    np.datetime64("NaT", "ns"),
    np.timedelta64("NaT", "s"),
    pa.scalar(None, pa.string()),
]
# A value of each type.
PRESENT_VALUES: list[tuple[DataType, Any]] = [
    (StringType(), "x"),
    (LongType(), 7),
    (BooleanType(), True),
    (BinaryType(), STATE_BINARY(b"x")),
    (DateType(), dt.date(2024, 1, 2)),
    (TimestampType(), WHEN),
    (TimestampNTZType(), WHEN),
    (DecimalType(5, 2), decimal.Decimal("1.25")),
    (DoubleType(), 1.5),
    (FloatType(), 1.5),
    (ArrayType(StringType()), ["x"]),
    (MapType(StringType(), StringType()), {"k": "x"}),
    (POINT, Row(x=1, at=None)),
]


@pytest.mark.parametrize(("spark_type", "value"), PRESENT_VALUES, ids=lambda value: str(value)[:20])
def test_missing_values_are_null_at_every_level(spark_type: DataType, value: Any) -> None:
    """NaN is a number only in columns of floats and doubles."""
    inside = StructType([StructField("a", ArrayType(spark_type)), StructField("m", MapType(LongType(), spark_type))])
    keep = make_row_copier(StructType([StructField("v", inside)]), "state column")
    assert keep is not None
    for missing in MISSING:
        is_number = isinstance(spark_type, (FloatType, DoubleType)) and isinstance(missing, (float, np.floating))
        null = float("nan") if is_number else None
        for given, expected in (
            ([missing], [null]),
            ([value, missing], [value, null]),
            ([missing, None], [null, None]),
        ):
            column = values_to_column(given, spark_type, find_arrow_type(spark_type), "v")
            assert repr(column_to_values(column, spark_type)) == repr(expected)
            row = keep(((given, dict(enumerate(given))),))
            (nested,) = values_to_column(row, inside, find_arrow_type(inside), "v").to_pylist()
            plain = column.to_pylist()
            assert repr(nested) == repr({"a": plain, "m": list(enumerate(plain))})


def test_a_missing_key_of_a_map_is_refused() -> None:
    for kind in (StringType(), LongType(), DecimalType(5, 2), DateType()):
        of_kind = MapType(kind, LongType())
        for missing in MISSING[:6] + MISSING[7:]:  # a signaling NaN cannot be a key of a dict
            with pytest.raises(StateValueError, match="a key is NULL"):
                values_to_column([{missing: 1}], of_kind, find_arrow_type(of_kind), "v")
    doubles = MapType(DoubleType(), LongType())
    assert (
        repr(values_to_column([{float("nan"): 1}], doubles, find_arrow_type(doubles), "v").to_pylist())
        == "[[(nan, 1)]]"
    )


class Unconvertible:
    pass


@pytest.mark.parametrize(
    "value",
    [
        dt.date(2024, 1, 1),
        dt.timedelta(1),
        pd.Timestamp("2024-01-01"),
        np.datetime64("2024-01-01", "ns"),
        np.timedelta64(1, "ns"),
        {"a": 1},
        [1, 2],
        (1,),
        Unconvertible(),
        np.array(["x"]),
        np.array("x"),
        pd.Series(["x"]),
        print,
        b"\xff",
        pa.scalar(dt.date(2024, 1, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_string_column_refuses_values_that_are_not_text_or_numbers(value: Any) -> None:
    text = StringType()
    cases: list[tuple[DataType, Any]] = [
        (text, value),
        (ArrayType(text), [value]),
        (MapType(LongType(), text), {1: value}),
        (StructType([StructField("x", text)]), {"x": value}),
    ]
    for spark_type, given in cases:
        with pytest.raises(
            StateValueError, match=r"v of type .* cannot hold .*: (it is neither text|Could not|Invalid)"
        ):
            values_to_column(["x" if spark_type is text else None, given], spark_type, find_arrow_type(spark_type), "v")


@pytest.mark.parametrize(
    "value", [5, True, np.bool_(False), 1e20, np.float64(-0.0), decimal.Decimal("1.50"), b"x", "y"]
)
def test_nested_text_equals_the_text_of_a_column(value: Any) -> None:
    """Chains need this: the states of their steps are structs."""
    text = StringType()
    [text_read] = column_to_values(values_to_column([value], text, find_arrow_type(text), "v"), text)
    inside: list[tuple[DataType, Any, Any]] = [
        (ArrayType(text), [value, None], [text_read, None]),
        (MapType(text, text), {value: value}, {text_read: text_read}),
        (StructType().add("x", text), (value,), Row(x=text_read)),
    ]
    for spark_type, given, expected in inside:
        assert column_to_values(
            values_to_column([given], spark_type, find_arrow_type(spark_type), "v"), spark_type
        ) == [expected]


def test_map_keys_that_become_equal_are_refused() -> None:
    hundredths, text = MapType(DecimalType(5, 2), LongType()), MapType(StringType(), LongType())
    near = {decimal.Decimal("1.001"): 1, decimal.Decimal("1.002"): 2}
    pairs: list[tuple[DataType, Any]] = [(hundredths, near), (text, {5: 1, "5": 2}), (ArrayType(hundredths), [near])]
    for spark_type, given in pairs:
        with pytest.raises(StateValueError, match=r"two of its keys are the same as (decimal\(5,2\)|string)"):
            values_to_column([given], spark_type, find_arrow_type(spark_type), "v")
    for spark_type in (text, hundredths, MapType(LongType(), LongType()), MapType(BinaryType(), LongType())):
        with pytest.raises(StateValueError, match=r"v of type map.* cannot hold \{None: 1\}.*: a key is NULL"):
            values_to_column([{None: 1}], spark_type, find_arrow_type(spark_type), "v")


def test_map_keys_may_be_nested() -> None:
    lists = ArrayType(ArrayType(LongType()))
    cases: list[tuple[MapType, Any]] = [
        (MapType(lists, LongType()), {((1, None), ()): 1, ((2,),): 2}),
        (MapType(StructType().add("x", ArrayType(BinaryType())), LongType()), {Row(x=(b"a",)): 1, Row(x=None): 2}),
    ]
    for spark_type, given in cases:
        column = values_to_column([given, None], spark_type, find_arrow_type(spark_type), "v")
        assert column_to_values(column, spark_type) == [given, None]


def test_a_number_beyond_a_float_is_refused() -> None:
    single = FloatType()
    largest = float(np.finfo(np.float32).max)
    given = [largest, -largest, float("inf"), float("-inf"), float("nan"), None, 5, True]
    column = values_to_column(given, single, find_arrow_type(single), "v")
    assert repr(column.to_pylist()) == repr(
        [largest, -largest, float("inf"), float("-inf"), float("nan"), None, 5.0, 1.0]
    )
    lists = ArrayType(single)
    assert repr(values_to_column([given[:6]], lists, find_arrow_type(lists), "v").to_pylist()) == repr([given[:6]])
    for value in (1e300, -3.5e38, np.float64(1e39)):
        for spark_type, one in ((single, value), (lists, [value]), (StructType().add("x", single), (value,))):
            with pytest.raises(StateValueError, match=r"v of type .* cannot hold .*: it is more than a float holds"):
                values_to_column([None, one], spark_type, find_arrow_type(spark_type), "v")


@pytest.mark.parametrize("spark_type", [TimestampType(), TimestampNTZType()], ids=str)
def test_a_time_that_python_cannot_represent_is_an_error(spark_type: DataType) -> None:
    for year in (0, 10_000):
        us = (year - 1970) * 31_556_952_000_000
        column = pa.array([0, us], pa.int64()).cast(find_arrow_type(spark_type))
        with pytest.raises(StateValueError, match=r"a state column 'v' of type timestamp\w* has a value that Python"):
            column_to_values(column, spark_type, "state column 'v'")


def test_text_that_is_not_utf_8_is_an_error() -> None:
    """Spark passes on the bytes of a string column unchanged."""
    bad = pa.array([b"x", b"\xff"]).view(pa.string())
    with pytest.raises(StateValueError, match=r"a column 's' of type string has text that is not UTF-8: .*0xff"):
        column_to_values(bad, StringType(), "column 's'")


def test_a_time_that_could_not_be_read_again_is_refused() -> None:
    """East of Greenwich, the last hours of the year 9999 by UTC are in the year 10000."""
    script = (
        "import datetime as dt, os, time\nos.environ['TZ'] = 'Asia/Tokyo'\ntime.tzset()\n"
        "import pyarrow as pa\nfrom pyspark.sql.types import TimestampType\n"
        "from spark_state_ext.spark.callers.state_values import values_to_column\n"
        "late = dt.datetime.max.replace(tzinfo=dt.timezone.utc)\n"
        "try:\n    values_to_column([None, late], TimestampType(), pa.timestamp('us', 'UTC'), 'v')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.startswith("StateValueError v of type timestamp cannot hold datetime.datetime(9999, "), (
        done.stdout
    )


@pytest.mark.parametrize(
    ("spark_type", "value"),
    [
        (LongType(), "text"),
        (LongType(), 1.5),
        (ByteType(), 128),
        (IntegerType(), 2**31),
        (DateType(), "2024-01-01"),
        (TimestampType(), "2024-01-01"),
        (DecimalType(3, 0), decimal.Decimal(12345)),
        (DecimalType(3, 0), "7"),
        (DecimalType(3, 0), True),
        (ArrayType(DecimalType(3, 0)), ["7"]),
        (BooleanType(), "yes"),
        (ArrayType(LongType()), ["text"]),
        (ArrayType(LongType()), [1.5, 2]),
        (ArrayType(LongType()), np.array([2.5])),
        (ArrayType(LongType()), [True]),
        (ArrayType(IntegerType()), [np.bool_(True)]),
        (ArrayType(ArrayType(ShortType())), [[1], None, [1.5]]),
        (ArrayType(ByteType()), [128]),
        (MapType(StringType(), LongType()), {"a": 1.5}),
        (MapType(LongType(), StringType()), {1.5: "a"}),
        (POINT, (1.5, None)),
        (POINT, Row(x=decimal.Decimal("1.5"), at=None)),
        (POINT, (1,)),
    ],
    ids=str,
)
def test_the_error_of_a_value_that_does_not_fit_has_the_value(spark_type: DataType, value: Any) -> None:
    with pytest.raises(StateValueError, match="'total'") as raised:
        values_to_column([None, value], spark_type, find_arrow_type(spark_type), "state column 'total'")
    assert repr(value) in str(raised.value)


WHOLE: list[tuple[DataType, Any, Any]] = [
    (ArrayType(LongType()), [2.0, None, np.int32(3), decimal.Decimal(2**62), float("nan")], [2, None, 3, 2**62, None]),
    (ArrayType(ShortType()), iter((1, 2)), [1, 2]),
    (ArrayType(LongType()), np.array([2.0]), [2]),
    (MapType(LongType(), IntegerType()), {5.0: 6.0, 7: None}, {5: 6, 7: None}),
    (POINT, (1.0, WHEN), Row(x=1, at=WHEN)),
]


@pytest.mark.parametrize(("spark_type", "value", "expected"), WHOLE, ids=lambda value: type(value).__name__)
def test_nested_integers_accept_whole_numbers_of_other_types(spark_type: DataType, value: Any, expected: Any) -> None:
    column = values_to_column([None, value], spark_type, find_arrow_type(spark_type), "v")
    assert column_to_values(column, spark_type) == [None, expected]
