"""Spark's hash of a key in Python has the published values of XXH64; `spark/test_state_source` compares it with Spark."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrow_schemas.errors import UnsupportedTypeError
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_hash import hash_key, xxhash64


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_xxhash64_returns_the_published_values(data: bytes, wanted: int) -> None:
    assert xxhash64(data, 0) == wanted


def hash_value(value: Any, data_type: pa.DataType) -> int:
    schema = RowSchema((pa.field("k", data_type),), ())
    return hash_key(schema.normalise_keys([pa.array([value], data_type)]))


def test_equal_keys_have_the_same_hash() -> None:
    assert hash_value(0.0, pa.float64()) == hash_value(-0.0, pa.float64()) != hash_value(1.0, pa.float64())
    assert hash_value(math.nan, pa.float32()) == hash_value(-math.nan, pa.float32())
    assert hash_key([pa.array([None], pa.int64()), pa.array([5], pa.int64())]) == hash_value(5, pa.int64())
    day = datetime.date(2024, 2, 29)
    assert hash_value(day, pa.date32()) == hash_value((day - datetime.date(1970, 1, 1)).days, pa.int32())
    assert hash_value("é", pa.string()) == hash_value("é".encode(), pa.binary())
    assert hash_value(Decimal("1.20"), pa.decimal128(9, 2)) == hash_value(120, pa.int64())


@given(st.integers(-(10**30), 10**30))
def test_long_decimals_are_hashed_as_the_shortest_big_endian_bytes(number: int) -> None:
    length = 1
    while not -(1 << (8 * length - 1)) <= number < 1 << (8 * length - 1):
        length += 1
    shortest = number.to_bytes(length, "big", signed=True)
    assert hash_value(Decimal(number), pa.decimal128(38, 0)) == xxhash64(shortest, 42)


def test_a_type_that_keys_cannot_have_is_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match="duration"):
        hash_key([pa.array([1], pa.duration("s"))])
