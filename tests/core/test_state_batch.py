"""The columns and methods of a `StateBatch` that a function reads, without Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from batch_driver import Stored, made, outcome_of
from default_batch import (
    KEYS,
    STATE,
    A,
    B,
    C,
    D,
    after,
    batch_of,
    key,
)

from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.state_batch import StateBatch


def test_the_columns_of_a_batch_are_aligned_with_its_keys() -> None:
    batch = batch_of(watermark_ms=7, bucket=3, batch_id=9)
    assert len(batch) == 4
    assert batch.keys.column_names == ["name", "x"]
    assert batch.keys["name"].to_pylist() == ["a", "b", None, "d"]
    assert batch.exists.to_pylist() == [True, False, False, True]
    assert batch.timed_out.to_pylist() == [False, False, False, True]
    assert batch.state.to_pylist() == [
        {"n": 10, "note": "ten"},
        {"n": None, "note": None},
        {"n": None, "note": None},
        {"n": 40, "note": None},
    ]
    assert batch.counts.to_pylist() == [1, 2, 3, 0]
    assert batch.offsets.to_pylist() == [0, 1, 3, 6, 6]
    assert batch.offsets.type == pa.int32()
    assert batch.group_ids.to_pylist() == [0, 1, 1, 2, 2, 2]
    assert batch.lists("value").to_pylist() == [[0], [0, 1], [0, 1, 2], []]
    assert (batch.watermark_ms, batch.processing_time_ms, batch.bucket, batch.batch_id) == (7, 1_000, 3, 9)
    assert repr(batch) == "StateBatch(6 rows of 3 keys, 1 keys timed out, bucket 3, batch 9)"
    assert list(batch.scan()) == []
    table = batch.with_state({"more": batch.counts, "numbers": np.arange(4)})
    assert table.column_names == ["name", "x", "n", "note", "more", "numbers"]
    assert table.num_rows == 4
    assert batch.with_state().column_names == ["name", "x", "n", "note"]
    # A column with the name of a state column replaces it.
    table = batch.with_state({"n": pa.array([5, 6, 7, 8], pa.int64())})
    assert table.column_names == ["name", "x", "n", "note"]
    batch.update(table)
    stored = after(batch)
    assert [stored[name].values for name in (A, key(B), key(C), D)] == [(5, "ten"), (6, None), (7, None), (8, None)]


@pytest.mark.parametrize("form", ["numpy", "pandas", "arrow of numpy", "by key"])
def test_update_copies_values_that_the_function_changes_later(form: str) -> None:
    """Arrow columns share the memory of NumPy and pandas, and the function may change it after the call."""
    batch = batch_of()
    numbers = np.array([1, 2, 3, 4], dtype=np.int64)
    frame = pd.DataFrame({"n": numbers, "note": ["a", "b", "c", "d"]})
    notes = pa.array(["a", "b", "c", "d"])
    given: dict[str, Any] = {
        "numpy": {"n": numbers, "note": notes},
        "pandas": frame,
        "arrow of numpy": pa.table({"n": pa.array(numbers), "note": notes}),
        "by key": batch.keys.append_column("n", pa.array(numbers)).append_column("note", notes),
    }
    batch.update(given[form])
    numbers *= 100
    frame.loc[:, "n"] *= 100
    stored = after(batch)
    assert [stored[name].values for name in (A, key(B), key(C), D)] == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]


def test_with_state_refuses_key_names_and_columns_of_another_length() -> None:
    batch = batch_of()
    for columns, text in (
        ({"x": [1, 2, 3, 4]}, r"with_state\(\) was given a column 'x', which is a key column: give it another name"),
        ({"more": [1, 2]}, r"with_state\(\) was given columns of 2 values, for 4 keys: give one for each"),
        ({"more": [1, 2], "n": [1]}, r"with_state\(\) was given a dict whose columns have different lengths"),
    ):
        with pytest.raises(StateValueError, match=text):
            batch.with_state(columns)


def test_a_value_in_place_of_a_column_is_refused() -> None:
    """Text of four letters must not be split into one letter for each of the four keys."""
    batch = batch_of()
    with pytest.raises(StateValueError, match=r"update\(\) was given a dict whose column 'n' is 0 \(int\)"):
        batch.update({"n": 0, "note": ["a", "b", "c", "d"]})
    with pytest.raises(StateValueError, match=r"update\(\) was given a dict whose column 'note' is 'abcd' \(str\)"):
        batch.update({"n": [1, 2, 3, 4], "note": "abcd"})
    with pytest.raises(StateValueError, match=r"remove\(\) was given a dict whose column 'name' is 'a' \(str\)"):
        batch.remove({"name": "a", "x": [0.0]})
    with pytest.raises(StateValueError, match=r"with_state\(\) was given a dict whose column 'more' is 'abcd' \(str\)"):
        batch.with_state({"more": "abcd"})
    with pytest.raises(StateValueError, match=r"update\(\) was given .* different lengths: 'n' has 1, 'note' has 2"):
        batch.update({"n": [1], "note": ["a", "b"]})
    assert not batch.outcome.touched.any()


def test_a_batch_without_rows_has_only_keys_that_timed_out() -> None:
    batch = batch_of([], [D, A])
    assert batch.offsets.to_pylist() == [0, 0, 0]
    assert batch.counts.to_pylist() == [0, 0]
    assert batch.group_ids.to_pylist() == []
    assert batch.group_ids.type == pa.int64()
    assert batch.lists("value").to_pylist() == [[], []]
    assert batch.timed_out.to_pylist() == [True, True]
    assert (
        batch.aggregate([("value", "sum"), ([], "count_all")]).to_pylist() == [{"value_sum": None, "count_all": 0}] * 2
    )


def test_aggregate_returns_one_row_for_each_key_in_their_order() -> None:
    batch = batch_of(values=[[5], [None, None], [3, 1, 3]])
    functions: list[Any] = [
        *[("value", name) for name in ("sum", "max", "count", "count_distinct", "list", "first", "last", "mean")],
        ([], "count_all"),
        ("value", "count", pc.CountOptions(mode="only_null")),
        ("value", "hash_count_distinct", pc.CountOptions(mode="all")),
        (["value"], "min"),
    ]
    table = batch.aggregate(functions)
    by_column = [column.to_pylist() for column in table.columns]
    assert [list(row) for row in zip(*by_column, strict=True)] == [
        [5, 5, 1, 1, [5], 5, 5, 5.0, 1, 0, 1, 5],
        [None, None, 0, 0, [None, None], None, None, None, 2, 2, 1, None],
        [7, 3, 3, 2, [3, 1, 3], 3, 3, 7 / 3, 3, 0, 2, 1],
        [None, None, 0, 0, None, None, None, None, 0, 0, 0, None],
    ]
    assert table.column_names[:2] == ["value_sum", "value_max"]
    assert "__group" not in table.column_names


def test_aggregate_treats_columns_with_count_in_their_name_like_other_columns() -> None:
    """For keys that timed out, only counts are 0, independent of the names of columns."""
    rows = pa.table({"name": ["a", "a"], "x": [1.0, 1.0], "country": ["fr", "de"], "discount": [1.5, 2.5]})
    batch = made(KEYS, STATE, rows, [A], [2], [D])
    table = batch.aggregate(
        [
            ("country", "max"),
            ("discount", "sum"),
            ("country", "count"),
            ("discount", "count_distinct"),
            ("country", "list"),
        ]
    )
    assert table.to_pylist() == [
        {
            "country_max": "fr",
            "discount_sum": 4.0,
            "country_count": 2,
            "discount_count_distinct": 2,
            "country_list": ["fr", "de"],
        },
        {
            "country_max": None,
            "discount_sum": None,
            "country_count": 0,
            "discount_count_distinct": 0,
            "country_list": None,
        },
    ]


def test_aggregate_and_lists_accept_chunked_and_sliced_rows() -> None:
    rows = pa.table({"value": pa.array(range(100), pa.int64()), "text": pa.array([str(i) for i in range(100)])})
    pieces = pa.concat_tables([rows.slice(5, 3), rows.slice(40, 2), rows.slice(90, 4)])
    keys = pa.schema([("k", pa.int64())])
    batch = made(keys, STATE, pieces, [(1,), (2,), (3,)], [4, 1, 4])
    assert batch.aggregate([("value", "sum"), ("text", "last")]).to_pylist() == [
        {"value_sum": 5 + 6 + 7 + 40, "text_last": "40"},
        {"value_sum": 41, "text_last": "41"},
        {"value_sum": 90 + 91 + 92 + 93, "text_last": "93"},
    ]
    assert batch.lists("value").to_pylist() == [[5, 6, 7, 40], [41], [90, 91, 92, 93]]
    assert batch.lists("text").to_pylist() == [["5", "6", "7", "40"], ["41"], ["90", "91", "92", "93"]]
    nested = made(keys, STATE, pa.table({"v": pa.array([[1], [2, 3], [], None])}).slice(1), [(1,), (2,)], [1, 2])
    assert nested.lists("v").to_pylist() == [[[2, 3]], [[], None]]


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        ([("none", "sum")], r"aggregate\(\) was given the column 'none'; the rows have name, x, value"),
        (
            [("value", "sum"), (["none"], "count")],
            r"aggregate\(\) was given the column 'none'; the rows have name, x, val",
        ),
        ([(".none", "sum")], r"aggregate\(\) was given the column '.none'; the rows have"),
        ([("name", "sum")], r"aggregate\(\) was given what PyArrow cannot do: .*sum.*string"),
        ([("value", "middle")], r"aggregate\(\) was given what PyArrow cannot do: .*hash_middle"),
        ([([], "sum")], r"aggregate\(\) was given what PyArrow cannot do: .*hash_sum"),
    ],
)
def test_aggregate_refuses_unknown_columns_and_functions(functions: list[Any], text: str) -> None:
    for batch in (batch_of(), batch_of([], [D])):
        with pytest.raises(StateValueError, match=text):
            batch.aggregate(functions)


def test_lists_refuses_an_unknown_column() -> None:
    with pytest.raises(StateValueError, match=r"lists\(\) was given the column 'none'; the rows have name, x, value"):
        batch_of().lists("none")


def test_aggregate_and_lists_refuse_an_ambiguous_column_name() -> None:
    rows = pa.table([pa.array([1, 2]), pa.array([3, 4]), pa.array([5, 6])], names=["v", "v", "w"])
    batch = made(pa.schema([("k", pa.int64())]), STATE, rows, [(1,), (2,)], [1, 1])
    with pytest.raises(
        StateValueError, match=r"aggregate\(\) was given the column 'v'; the rows have two of that name"
    ):
        batch.aggregate([("v", "sum")])
    with pytest.raises(StateValueError, match=r"lists\(\) was given the column 'v'; the rows have two of that name"):
        batch.lists("v")
    assert batch.aggregate([("w", "sum")]).to_pylist() == [{"w_sum": 5}, {"w_sum": 6}]
    assert batch.lists("w").to_pylist() == [[5], [6]]


def test_lists_returns_views_of_the_rows() -> None:
    batch = batch_of()
    values = batch.rows.column("value").chunk(0)
    assert batch.lists("value").values.buffers()[1].address == values.buffers()[1].address


def test_state_may_be_null_in_columns_declared_without_null() -> None:
    """Keys without state have NULL there, so the schema that functions see must allow NULL."""
    state = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    batch = made(KEYS, state, batch_of().rows, [A, B, C], [1, 2, 3], known={A: (1,)})
    assert batch.state.schema.field("n").nullable
    batch.state.validate(full=True)
    with pytest.raises(StateValueError, match="'n' is declared without NULLs"):
        batch.update({"n": [1, None, 3]})
    batch.update({"n": [2, None, None]}, where=[True, False, False])
    assert outcome_of(batch, {A: Stored((1,))}) == {A: Stored((2,))}


def test_null_in_exists_and_an_input_column_named_group_are_accepted() -> None:
    """NULL in `exists` means False. `__group` is also the name that aggregation uses internally."""
    batch = StateBatch(
        rows=pa.table({"__group": [1, 2, 3]}),
        keys=pa.table({"k": [1, 2]}),
        state=pa.table({"n": [5, None]}),
        exists=pa.array([True, None]),
        starts=np.array([0, 2]),
        watermark_ms=None,
        processing_time_ms=0,
    )
    assert batch.exists.to_pylist() == [True, False]
    assert batch.aggregate([("__group", "sum")]).to_pylist() == [{"__group_sum": 3}, {"__group_sum": 3}]
