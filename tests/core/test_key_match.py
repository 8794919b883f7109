"""Finding keys by value, with the same results as a dict of canonical keys, for all types that keys may have."""

from __future__ import annotations

import datetime as dt
import decimal
import random
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas.row import normalise_array
from spark_state_ext.functions import key_match
from spark_state_ext.functions.key_match import find_keys
from spark_state_ext.testing.model import canonicalise

NAN, OTHER_NAN = float("nan"), struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0123))[0]
POINT = pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.string()))])
DECIMAL = decimal.Decimal
MOMENT = dt.datetime(2020, 1, 1, 0, 0, 0, 1)  # noqa: DTZ001  # a time without a zone

# Values of each type, which are all different keys.
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [1, -128, 127, 0, None]),
    "int64": (pa.int64(), [1, -(2**63), 2**63 - 1, 2**53, 2**53 + 1, None]),
    "float32": (pa.float32(), [0.0, 1.5, NAN, float("inf"), None]),
    "float64": (pa.float64(), [0.0, 0.1, 5e-324, NAN, float("-inf"), None]),
    "string": (pa.string(), ["a", "", "A", "é", "e\u0301", "nan", "\x00", None]),
    "binary": (pa.binary(), [b"a", b"", b"\x00", b"\xff", None]),
    "boolean": (pa.bool_(), [True, False, None]),
    "decimal": (pa.decimal128(38, 18), [DECIMAL("1.5"), DECIMAL("-1"), None]),
    "date": (pa.date32(), [dt.date(2020, 2, 29), dt.date(1969, 12, 31), None]),
    "timestamp": (pa.timestamp("us", "UTC"), [MOMENT.replace(tzinfo=dt.timezone.utc), None]),
    "timestamp_ntz": (pa.timestamp("us"), [MOMENT, MOMENT.replace(microsecond=2), None]),
    "list": (pa.list_(pa.int64()), [[], [1], [2], [1, 2], [2, 1], [None], [None, None], None]),
    "list of floats": (pa.list_(pa.float64()), [[], [0.0], [NAN], [None], [1.0, 2.0], None]),
    "list of lists": (pa.list_(pa.list_(pa.int64())), [[], [[]], [[1], []], [[], [1]], [None], None]),
    "struct": (
        POINT,
        [
            {"x": 1.0, "tags": ["a"]},
            {"x": 1.0, "tags": ["b"]},
            {"x": NAN, "tags": []},
            {"x": None, "tags": None},
            {"x": 0.0, "tags": [None]},
            None,
        ],
    ),
}


def slice_column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return a column that is a slice with an offset."""
    return normalise_array(pa.array([*values[:1], *values, *values[:1]], kind).slice(1, len(values)), kind)


def find_expected(own: list[Any], wanted: list[Any]) -> list[int]:
    positions = {canonicalise(key): position for position, key in enumerate(own)}
    return [positions.get(canonicalise(key), -1) for key in wanted]


@pytest.mark.parametrize("which", TYPES)
def test_keys_of_every_type_are_found(which: str) -> None:
    kind, values = TYPES[which]
    generator = random.Random(7)
    for _ in range(20):
        own = generator.sample(values, generator.randint(1, len(values)))
        wanted = [generator.choice(values) for _ in range(generator.randint(0, 12))]
        positions = find_keys([slice_column(own, kind)], [slice_column(wanted, kind)])
        assert positions.dtype == np.int64
        assert positions.tolist() == find_expected(own, wanted)


def test_different_bits_of_one_key_are_equal() -> None:
    """NaNs with other bits and -0.0 are the same keys as NaN and 0.0, at any depth."""
    own = [pa.array([NAN, 0.0, 1.0])]
    assert find_keys(own, [pa.array([1.0, -0.0, OTHER_NAN, NAN])]).tolist() == [2, 1, 0, 0]
    tiny = np.array([0x7FC0_0123], dtype=np.uint32).view(np.float32)
    assert find_keys([pa.array([NAN], pa.float32())], [pa.array(tiny)]).tolist() == [0]
    own = [pa.array([{"x": NAN}, {"x": 0.0}])]
    assert find_keys(own, [pa.array([{"x": -0.0}, {"x": OTHER_NAN}])]).tolist() == [1, 0]
    own = [pa.array([[NAN, 0.0], [0.0]])]
    assert find_keys(own, [pa.array([[-0.0], [OTHER_NAN, -0.0]])]).tolist() == [1, 0]


def test_several_columns_form_one_key() -> None:
    names, numbers = pa.array(["a", "a", "b", None]), pa.array([1, 2, 1, None])
    wanted = [pa.array(["b", "a", None, "b", None]), pa.array([1, 1, None, 2, 1])]
    assert find_keys([names, numbers], wanted).tolist() == [2, 0, 3, -1, -1]


def test_a_key_can_be_wanted_several_times_or_no_key_at_all() -> None:
    own = [pa.array([3, 4])]
    assert find_keys(own, [pa.array([4, 4, 3, 4])]).tolist() == [1, 1, 0, 1]
    assert find_keys(own, [pa.array([], pa.int64())]).tolist() == []
    assert find_keys([pa.array([], pa.int64())], [pa.array([1, 1])]).tolist() == [-1, -1]


def test_different_keys_with_the_same_code_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_match, "_codes", lambda columns: np.zeros(len(columns[0]), dtype=np.uint64))
    for kind, values in TYPES.values():
        wanted = [values[-1], values[0], *values]
        positions = find_keys([slice_column(values[1:], kind)], [slice_column(wanted, kind)])
        assert positions.tolist() == find_expected(values[1:], wanted)


KEYS = st.tuples(
    st.sampled_from(["a", "b", "", None]),
    st.sampled_from([0.0, NAN, 1.0, None]),
    st.one_of(st.none(), st.lists(st.sampled_from([1, 2, None]), max_size=2)),
)


@settings(max_examples=150)
@given(own=st.lists(KEYS, unique_by=canonicalise, min_size=1, max_size=12), wanted=st.lists(KEYS, max_size=20))
def test_the_results_are_those_of_a_dict(own: list[Any], wanted: list[Any]) -> None:
    kinds = (pa.string(), pa.float64(), pa.list_(pa.int64()))

    def make_columns(keys: list[Any]) -> list[pa.Array]:
        return [pa.array([key[column] for key in keys], kind) for column, kind in enumerate(kinds)]

    assert find_keys(make_columns(own), make_columns(wanted)).tolist() == find_expected(own, wanted)
