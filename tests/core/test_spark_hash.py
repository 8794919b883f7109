"""Spark's hash of a key, in Python: published values of XXH64; Spark's own are compared in `spark/test_state_source`."""

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
def test_published_values(data: bytes, wanted: int) -> None:
    assert xxhash64(data, 0) == wanted


def hashed(value: Any, data_type: pa.DataType) -> int:
    schema = RowSchema((pa.field("k", data_type),), ())
    return hash_key(schema.normalise_keys([pa.array([value], data_type)]))


def test_equal_keys_hash_alike() -> None:
    assert hashed(0.0, pa.float64()) == hashed(-0.0, pa.float64()) != hashed(1.0, pa.float64())
    assert hashed(math.nan, pa.float32()) == hashed(-math.nan, pa.float32())
    assert hash_key([pa.array([None], pa.int64()), pa.array([5], pa.int64())]) == hashed(5, pa.int64())
    day = datetime.date(2024, 2, 29)
    assert hashed(day, pa.date32()) == hashed((day - datetime.date(1970, 1, 1)).days, pa.int32())
    assert hashed("é", pa.string()) == hashed("é".encode(), pa.binary())
    assert hashed(Decimal("1.20"), pa.decimal128(9, 2)) == hashed(120, pa.int64())


@given(st.integers(-(10**30), 10**30))
def test_long_decimals_are_hashed_as_java_writes_them(number: int) -> None:
    length = 1
    while not -(1 << (8 * length - 1)) <= number < 1 << (8 * length - 1):
        length += 1
    shortest = number.to_bytes(length, "big", signed=True)
    assert hashed(Decimal(number), pa.decimal128(38, 0)) == xxhash64(shortest, 42)


def test_what_no_key_has_is_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match="duration"):
        hash_key([pa.array([1], pa.duration("s"))])
