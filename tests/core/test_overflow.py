"""`StateBatch.aggregate` computes sums, products and means exactly or raises an error; values never wrap around."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from batch_driver import made
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_state_ext.errors import StateValueError

KEYS = pa.schema([("k", pa.string())])
STATE = pa.schema([("n", pa.int64())])
MOST = 2**63 - 1
DECIMAL = pa.decimal128(38, 2)
MOST_CENTS = Decimal(10**38 - 1).scaleb(-2, decimal.Context(prec=40))
INTEGERS = st.one_of(st.none(), st.integers(-(2**63), MOST), st.integers(-5, 5), st.sampled_from([MOST, -(2**63), 2]))


def aggregate_groups(groups: list[list[Any]], kind: pa.DataType, function: str, *options: Any) -> list[Any]:
    rows = pa.table({"v": pa.array([value for group in groups for value in group], kind)})
    keys = [(f"key {at}",) for at in range(len(groups))]
    batch = made(KEYS, STATE, rows, keys, [len(group) for group in groups])
    values: list[Any] = batch.aggregate([("v", function, *options)]).column(0).to_pylist()
    return values


@pytest.mark.parametrize(
    ("kind", "function", "group"),
    [
        (pa.int64(), "sum", [MOST, 1]),
        (pa.int64(), "hash_sum", [-(2**63), -1]),
        (pa.int64(), "sum", [MOST, None, MOST, MOST, -3]),
        (pa.int64(), "product", [2**32, 2**31]),
        (pa.int32(), "product", [2**31 - 1] * 3),
        (pa.int64(), "product", [-(2**63), -1]),
        (DECIMAL, "sum", [MOST_CENTS, Decimal("0.01")]),
        (DECIMAL, "sum", [MOST_CENTS] * 7),
        (DECIMAL, "mean", [MOST_CENTS] * 2),
        (DECIMAL, "product", [MOST_CENTS] * 2),
    ],
    ids=str,
)
def test_an_overflow_is_an_error_that_names_the_key(kind: Any, function: str, group: list[Any]) -> None:
    asked = rf"aggregate\(\) was asked for the {function} of 'v'; for key {{'k': 'key 1'}} it does not fit "
    with pytest.raises(StateValueError, match=asked):
        aggregate_groups([[group[0]], group, [group[1]]], kind, function)


@settings(max_examples=200)
@given(
    st.lists(st.lists(INTEGERS, min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from(["sum", "product"])
)
def test_integer_results_equal_pythons_or_are_refused(groups: list[list[int | None]], function: str) -> None:
    exact = sum if function == "sum" else math.prod
    present = [[value for value in group if value is not None] for group in groups]
    results = [exact(group) if group else None for group in present]
    if all(value is None or -(2**63) <= value <= MOST for value in results):
        assert aggregate_groups(groups, pa.int64(), function) == results
    else:
        with pytest.raises(StateValueError, match="does not fit int64"):
            aggregate_groups(groups, pa.int64(), function)


def test_a_product_with_a_zero_is_zero_despite_an_overflow_before() -> None:
    assert aggregate_groups([[2**62, 2**62, 0, 2**62]], pa.int64(), "product") == [0]


def test_a_group_with_a_null_result_does_not_overflow() -> None:
    """Arrow returns NULL for groups with NULLs if it must not skip them."""
    options = pc.ScalarAggregateOptions(skip_nulls=False)
    assert aggregate_groups([[MOST, MOST, None], [1]], pa.int64(), "sum", options) == [None, 1]


def test_results_at_the_limits_of_their_type_are_returned() -> None:
    assert aggregate_groups([[MOST, 1, -1], [-(2**63), 0]], pa.int64(), "sum") == [MOST, -(2**63)]
    assert aggregate_groups([[-(2**62), 2], [2**21, 2**21, 2**20]], pa.int64(), "product") == [-(2**63), 2**62]
    cents = [MOST_CENTS, Decimal("0.00")]
    assert aggregate_groups([cents, [Decimal("1.00"), None]], DECIMAL, "sum") == [MOST_CENTS, Decimal("1.00")]
    assert aggregate_groups([[None, None]], pa.int64(), "sum") == [None]
    assert aggregate_groups([[0.5, 1e308, 1e308]], pa.float64(), "sum") == [math.inf]
