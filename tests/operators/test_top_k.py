"""The top rows of each key, compared with all rows so far sorted in plain Python."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_bucket import MemoryBucket
from planned import TIME, at, make_top

from spark_state_ext.operators.arrays import order_within, sort_codes
from spark_state_ext.operators.top_k import TOP, TopK

SCHEMA = pa.schema([("number", pa.int64()), ("key", pa.string()), ("value", pa.float64()), ("text", pa.string())])
VALUES = st.none() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0, 3.5])
BATCHES = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), VALUES, st.none() | st.sampled_from(["", "a", "ä", "𐍈"])),
        max_size=10,
    ),
    min_size=1,
    max_size=6,
)


def make_sort_key(value: Any) -> Any:
    """Return a sort key: NULL first, then numbers, then NaN."""
    if value is None:
        return (0, 0)
    if isinstance(value, float):
        return (2, 0) if math.isnan(value) else (1, value)
    return (1, value.encode() if isinstance(value, str) else value)


@settings(max_examples=120)
@given(BATCHES, st.integers(1, 4), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1, 2, 5]))
def test_ranks_equal_the_row_numbers_over_all_input(
    batches: list[list[Any]], k: int, down: bool, down_text: bool, changed_only: bool, tasks: int
) -> None:
    order = [("value", down), ("text", down_text)]
    bucket = make_top(SCHEMA, ["key"], k, order, changed_only, tasks)
    seen: dict[Any, list[Any]] = {}
    written: dict[Any, Any] = {}
    number = 0
    for rows in batches:
        before = {key: rank_rows(key_rows, k, order) for key, key_rows in seen.items()}
        table = []
        for key, value, text in rows:
            number += 1
            table.append({"number": number, "key": key, "value": value, "text": text})
            seen.setdefault(key, []).append(table[-1])
        output = bucket.step(pa.Table.from_pylist(table, schema=SCHEMA))
        after = {key: rank_rows(key_rows, k, order) for key, key_rows in seen.items()}
        output_ranks = [(row["key"], row["rank"], row["number"]) for row in output]
        assert len(output_ranks) == len(set(output_ranks))
        expected = {
            (key, rank, row_number)
            for key, ranked in after.items()
            if ranked != before.get(key)
            for rank, row_number in enumerate(ranked, 1)
            if not changed_only or before.get(key, [])[rank - 1 : rank] != [row_number]
        }
        assert set(output_ranks) == expected
        for row in output:
            written[row["key"], row["rank"]] = row["number"]
            (input_row,) = (seen_row for seen_row in seen[row["key"]] if seen_row["number"] == row["number"])
            assert repr({name: row[name] for name in SCHEMA.names}) == repr(input_row)
    assert written == {
        (key, rank): row_number
        for key, key_rows in seen.items()
        for rank, row_number in enumerate(rank_rows(key_rows, k, order), 1)
    }


def rank_rows(rows: list[Any], k: int, order: list[tuple[str, bool]]) -> list[int]:
    ranked = list(rows)
    for name, down in reversed(order):
        # Python keeps the order of equal rows, even in reverse.
        ranked.sort(key=lambda row: make_sort_key(row[name]), reverse=down)
    return [row["number"] for row in ranked[:k]]


def test_a_smaller_k_applies_when_the_top_rows_change() -> None:
    order = [("number", True)]
    bucket = make_top(SCHEMA, ["key"], 3, order, False)

    def rows(*numbers: int) -> Any:
        return pa.Table.from_pylist([{"number": n, "key": "a"} for n in numbers], schema=SCHEMA)

    bucket.step(rows(1, 2, 3))
    bucket.function = make_top(SCHEMA, ["key"], 2, order, False).function
    assert bucket.step(rows(2)) == []
    assert [(row["rank"], row["number"]) for row in bucket.step(rows(9))] == [(1, 9), (2, 3)]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [-(2**63), -1, 0, 2**63 - 1]),
        (pa.int8(), [-128, 0, 127]),
        (pa.bool_(), [False, True]),
        (pa.date32(), [at(0), at(86_400)]),
        (TIME, [at(-1), at(0), at(0.000001)]),
        (pa.float32(), [-math.inf, -2.5, 0.0, 1e-40, 2.5, math.inf, math.nan]),
        (
            pa.decimal128(38, 3),
            [decimal.Decimal("-1e30"), decimal.Decimal("-0.001"), decimal.Decimal(0), decimal.Decimal("1e30")],
        ),
        (pa.string(), ["", "Z", "a", "￿", "𐍈"]),
        (pa.binary(), [b"", b"\0", b"\x80"]),
    ],
)
@pytest.mark.parametrize("descending", [False, True])
def test_sort_codes_order_every_type_as_spark_does(kind: Any, values: list[Any], descending: bool) -> None:
    """NULL is the smallest; values repeat, and the codes with the keys do not fit into one number."""
    column = pa.array([None, *values, values[0], None], kind)
    codes = sort_codes(column, descending)
    ranks = [0, *range(1, len(values) + 1), 1, 0]
    expected = sorted(range(len(ranks)), key=lambda place: -ranks[place] if descending else ranks[place])
    order = order_within(np.zeros(len(column), dtype=np.int64), codes)
    assert order.tolist() == expected
    keys = np.arange(len(column)) % 3
    order = order_within(keys, codes)
    assert order.tolist() == sorted(expected, key=lambda place: place % 3)
    assert sort_codes(pa.array([], kind), descending)[0].tolist() == []


def test_a_key_may_have_the_name_of_a_state_column() -> None:
    """The state is stored by the positions of the keys, not by their names."""
    schema = pa.schema([("top", pa.int64()), ("n", pa.int64())])
    bucket = make_top(schema, ["top"], 1, [("n", True)], changed_only=False)
    rows = pa.table([[2, 1, 2], [5, 6, 7]], schema=schema)
    for _ in range(2):
        output = bucket.step(rows)
    assert len(bucket.stored) == 2
    assert output == []


def test_a_column_name_may_begin_with_a_dot() -> None:
    """PyArrow would interpret such a name as a path."""
    kinds = [(".v", pa.int64()), ("v", pa.int64())]
    bucket = MemoryBucket(
        TopK(2, (("v", True),), (".v", "v"), ("key", ".v", "v"), "rank"),
        [pa.field("key", pa.string())],
        [pa.field(TOP, pa.list_(pa.struct(kinds)))],
    )
    schema = pa.schema([("key", pa.string()), *kinds])
    bucket.step(pa.Table.from_pylist([{"key": "a", ".v": 111, "v": 5}], schema=schema))
    output = bucket.step(pa.Table.from_pylist([{"key": "a", ".v": 222, "v": 9}], schema=schema))
    assert [(row[".v"], row["v"], row["rank"]) for row in output] == [(222, 9, 1), (111, 5, 2)]
