"""One rule for values that name a key, in `erase_keys` and similar functions, in `get`, and on the command line."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from arrow_schemas.row import RowSchema
from spark_state_ext.cli.values import parse_key
from spark_state_ext.erasing.query_folders import convert_keys
from spark_state_ext.errors import StateValueError, UsageError
from spark_state_ext.reading.lookup import LookupKey

DAY, AWARE = dt.date(2024, 2, 29), dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.timezone(dt.timedelta(hours=2)))
NAIVE = AWARE.replace(tzinfo=None)
INSTANT, LOCAL, PRICE = pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.decimal128(10, 2)
REFUSED = [
    (5, pa.string()),
    (True, pa.string()),
    (DAY, pa.string()),
    (b"x", pa.string()),
    ("x", pa.binary()),
    (1.0, pa.int64()),
    (True, pa.int64()),
    (Decimal(1), pa.int64()),
    (1, pa.bool_()),
    ("1.5", pa.float64()),
    (True, pa.float64()),
    (Decimal("0.5"), pa.float64()),
    (0.5, PRICE),
    ("0.5", PRICE),
    (NAIVE, pa.date32()),
    (NAIVE.replace(hour=0, minute=0), pa.date32()),
    (5, pa.date32()),
    (DAY, INSTANT),
    (DAY, LOCAL),
    (NAIVE, INSTANT),
    (AWARE, LOCAL),
    (5, INSTANT),
    (pd.Timestamp(NAIVE), INSTANT),
    (pd.Timestamp(AWARE), LOCAL),
    ([5], pa.list_(pa.string())),
    ([1.5], pa.list_(pa.int64())),
    ({"a": NAIVE}, pa.struct([("a", INSTANT)])),
]
ACCEPTED = [
    ("x", pa.string(), "x"),
    (b"x", pa.binary(), b"x"),
    (5, pa.int32(), 5),
    (np.int64(5), pa.int64(), 5),
    (True, pa.bool_(), True),
    (2, pa.float64(), 2.0),
    (0.5, pa.float32(), 0.5),
    (Decimal("0.5"), PRICE, Decimal("0.50")),
    (5, PRICE, Decimal("5.00")),
    (DAY, pa.date32(), DAY),
    (AWARE, INSTANT, AWARE),
    (pd.Timestamp(AWARE), INSTANT, AWARE),
    (NAIVE, LOCAL, NAIVE),
    (None, INSTANT, None),
    ([AWARE], pa.list_(INSTANT), [AWARE]),
]


def schema_of(kind: pa.DataType) -> RowSchema:
    return RowSchema((pa.field("who", kind),), (pa.field("n", pa.int64()),))


@pytest.mark.parametrize(("value", "kind"), REFUSED)
def test_a_value_of_another_type_is_refused_as_a_key(value: Any, kind: pa.DataType) -> None:
    schema = schema_of(kind)
    forms = [[value], {"who": [value]}, pa.table({"who": pa.array([value])})]
    for keys in forms:
        with pytest.raises(
            StateValueError, match=r"erase_keys.. was given values that do not fit the key column 'who'"
        ):
            convert_keys(keys, schema, "erase_keys()")
    with pytest.raises(UsageError, match="is not a value of the key column 'who'"):
        LookupKey.of((value,), ["who"], schema)


@pytest.mark.parametrize(("value", "kind", "stored"), ACCEPTED)
def test_a_value_of_the_columns_type_is_accepted_as_a_key(value: Any, kind: pa.DataType, stored: Any) -> None:
    schema = schema_of(kind)
    for keys in ([value], {"who": [value]}, pd.DataFrame({"who": pd.Series([value], dtype=object)})):
        assert convert_keys(keys, schema, "erase_keys()").column(0).to_pylist() == [stored]
    assert LookupKey.of((value,), ["who"], schema).columns[0].to_pylist() == [stored]


@pytest.mark.parametrize(
    ("values", "kind"), [([AWARE, NAIVE], INSTANT), ([NAIVE, AWARE], LOCAL), ([DAY, NAIVE], pa.date32())]
)
def test_dates_and_times_of_several_kinds_are_refused(values: list[Any], kind: pa.DataType) -> None:
    """PyArrow would convert all of them to the kind of the first one."""
    frame = pd.DataFrame({"who": pd.Series(values, dtype=object)})
    for keys in (values, {"who": values}, {"who": np.array(values, dtype=object)}, frame):
        with pytest.raises(StateValueError, match=r"key column 'who': (dates|times).* are mixed"):
            convert_keys(keys, schema_of(kind), "erase_keys()")


def test_the_error_says_which_values_are_needed() -> None:
    with pytest.raises(StateValueError, match="give times with a time zone, such as UTC"):
        convert_keys(pd.DataFrame({"who": [pd.Timestamp(NAIVE)]}), schema_of(INSTANT), "erase_keys()")
    schema_of_two = RowSchema((pa.field("a", pa.int64()), pa.field("b", PRICE)), (pa.field("n", pa.int64()),))
    with pytest.raises(StateValueError, match="key column 'b': values of type double are not converted"):
        convert_keys({"b": [0.5], "a": [1]}, schema_of_two, "erase_keys()")


@pytest.mark.parametrize(
    ("word", "kind"),
    [("2024-02-29", LOCAL), ("2024-02-29", INSTANT), ("2024-02-29T12:30", INSTANT), ("1.0", pa.int64())],
)
def test_words_of_the_command_line_follow_the_same_rule(word: str, kind: pa.DataType) -> None:
    schema = pa.schema([("who", kind)])
    for words, text in (([word], None), ([], f'{{"who": "{word}"}}')):
        with pytest.raises(UsageError, match="is not a value of the column 'who'"):
            parse_key(words, text, schema)
