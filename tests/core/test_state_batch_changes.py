"""`StateBatch.update` and `remove`: what they change, what they refuse, and random sequences of them."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from batch_driver import Stored, made, outcome_of
from default_batch import (
    EVENT_TIME,
    KEYS,
    MASK,
    PROCESSING_TIME,
    STATE,
    A,
    B,
    C,
    D,
    Key,
    after,
    batch_of,
    key,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_state_ext.errors import StateValueError
from spark_state_ext.functions.state_batch import StateBatch
from spark_state_ext.testing.model import canonicalise

# -- update ---------------------------------------------------------------------------------------

FORMS = ["table", "batch", "dict", "chunks", "slice", "polars", "duckdb", "pandas", "reader"]


def convert(form: str, table: pa.Table) -> Any:
    """Convert a table to the form that another engine returns."""
    if form == "batch":
        return table.combine_chunks().to_batches()[0]
    if form == "dict":
        return {name: table.column(name).to_pylist() for name in table.column_names}
    if form == "chunks":
        return pa.concat_tables([table.slice(at, 1) for at in range(table.num_rows)])
    if form == "slice":
        return pa.concat_tables([table, table, table]).combine_chunks().slice(table.num_rows, table.num_rows)
    if form == "polars":
        return pytest.importorskip("polars").from_arrow(table)
    if form == "duckdb":
        return pytest.importorskip("duckdb").from_arrow(table)
    if form == "pandas":
        return pd.DataFrame(
            {name: pd.Series(table.column(name).to_pylist(), dtype=object) for name in table.column_names}
        )
    if form == "reader":
        return pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
    return table


def rows_of(*values: tuple[Any, ...], schema: pa.Schema = STATE) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in values], schema=schema)


@pytest.mark.parametrize("form", FORMS)
def test_update_accepts_one_row_for_each_key_in_their_order(form: str) -> None:
    batch = batch_of()
    batch.update(convert(form, rows_of((1, "x"), (2, None), (3, "z"), (4, "w"))))
    assert after(batch) == {
        A: Stored((1, "x")),
        key(B): Stored((2, None)),
        key(C): Stored((3, "z")),
        D: Stored((4, "w")),
    }


@pytest.mark.parametrize("form", FORMS)
def test_update_accepts_the_columns_in_any_order(form: str) -> None:
    batch = batch_of([A], [], {})
    batch.update(convert(form, rows_of((1, "x")).select(["note", "n"])))
    assert after(batch)[A] == Stored((1, "x"))


MASKS: dict[str, Any] = {
    "list": MASK,
    "numpy": np.array(MASK),
    "arrow": pa.array(MASK),
    "arrow with NULL for False": pa.array([None, True, False, True]),
    "chunked": pa.chunked_array([MASK[:1], MASK[1:]]),
    "slice": pa.array([True, *MASK, True]).slice(1, 4),
    "pandas": pd.Series(MASK),
    "list with None": [None, True, False, True],
    "pandas with NA": pd.Series([pd.NA, True, False, True], dtype="boolean"),
    "polars with null": "polars",
}


def get_mask(name: str) -> Any:
    """Return the mask of `MASKS` with this name."""
    if isinstance(MASKS[name], str):
        return pytest.importorskip("polars").Series([None, True, False, True])
    return MASKS[name]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ["table", "polars", "duckdb", "slice"])
@pytest.mark.parametrize("rows", ["all", "chosen"])
def test_update_with_where_changes_only_the_chosen_keys(mask: str, form: str, rows: str) -> None:
    batch = batch_of()
    given = rows_of((1, "x"), (2, "y"), (3, "z"), (4, "w")) if rows == "all" else rows_of((2, "y"), (4, "w"))
    batch.update(convert(form, given), where=get_mask(mask))
    assert after(batch) == {A: Stored((10, "ten")), key(B): Stored((2, "y")), D: Stored((4, "w"))}


def test_where_can_choose_no_key_or_every_key() -> None:
    batch = batch_of()
    batch.update(STATE.empty_table(), where=[False] * 4)
    batch.update(rows_of(*[(i, None) for i in range(4)]), where=[False] * 4)
    batch.update({**{name: [] for name in STATE.names}, "name": [], "x": []})
    assert not batch.outcome.touched.any()
    batch.update(rows_of(*[(i, None) for i in range(4)]), where=[True] * 4)
    assert [stored.values for stored in after(batch).values()] == [(0, None), (3, None), (1, None), (2, None)]


BY_KEY = pa.schema([*STATE, *KEYS])


@pytest.mark.parametrize("form", FORMS)
def test_update_by_key_columns_accepts_rows_in_any_order(form: str) -> None:
    # Arrow reads NaN of pandas as NULL.
    missing = 2.0 if form == "pandas" else float("nan")
    batch = batch_of([A, ("b", missing), C])
    given = rows_of((4, "w", "d", None), (2, "y", "b", missing), (3, "z", None, -0.0), schema=BY_KEY)
    batch.update(convert(form, given))
    assert after(batch) == {
        A: Stored((10, "ten")),
        key(("b", missing)): Stored((2, "y")),
        key(C): Stored((3, "z")),
        D: Stored((4, "w")),
    }


def test_update_by_key_columns_changes_only_the_keys_that_where_chooses() -> None:
    batch = batch_of()
    given = rows_of((4, "w", *D), (1, "x", *A), (3, "z", *C), schema=BY_KEY)
    batch.update(given, where=[True, True, False, True])
    assert after(batch) == {A: Stored((1, "x")), D: Stored((4, "w"))}
    batch.update(given, where=[False, True, False, False])
    assert batch.outcome.touched.tolist() == [True, False, False, True]


def test_update_by_key_accepts_the_rows_of_with_state() -> None:
    batch = batch_of([A, ("b", 2.0)], [])
    batch.update(batch.with_state().slice(0, 2))
    assert after(batch)[A] == Stored((10, "ten"))
    assert after(batch)["b", 2.0] == Stored((None, None))


def test_update_casts_types_of_other_engines_to_the_state_schema() -> None:
    """DuckDB returns sums as decimals, polars has large lists and string views, pandas returns floats."""
    state = pa.schema(
        [
            ("n", pa.int64()),
            ("s", pa.string()),
            ("l", pa.list_(pa.field("element", pa.int64()))),
            ("p", pa.struct([("x", pa.int32()), ("y", pa.string())])),
            ("at", pa.timestamp("us", "UTC")),
            ("m", pa.map_(pa.string(), pa.int64())),
        ]
    )
    batch = made(pa.schema([("k", pa.int64())]), state, pa.table({"v": [1]}), [(1,)], [1])
    moment = dt.datetime(2024, 5, 6, 7, 8, 9, 1, dt.timezone.utc)
    given = pa.table(
        {
            "n": pa.array([decimal.Decimal(2**62)], pa.decimal128(38, 0)),
            "s": pa.array(["text"]).dictionary_encode(),
            "l": pa.array([[1, None]], pa.large_list(pa.int32())),
            "p": pa.array([{"x": 5, "y": "why"}], pa.struct([("x", pa.int64()), ("y", pa.large_string())])),
            "at": pa.array([moment], pa.timestamp("us", "Europe/London")),
            "m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
        }
    )
    batch.update(given)
    (row,) = batch.outcome.updates[0].to_pylist()
    assert row == {"n": 2**62, "s": "text", "l": [1, None], "p": {"x": 5, "y": "why"}, "at": moment, "m": [("k", 1)]}
    assert batch.outcome.updates[0].schema.types == state.types


def test_rows_that_where_does_not_choose_are_not_checked() -> None:
    """A value that does not fit is not an error if its row is not stored."""
    state = pa.schema([pa.field("n", pa.int64(), nullable=False)])
    batch = made(pa.schema([("k", pa.int64())]), state, pa.table({"v": [1, 2]}), [(1,), (2,)], [1, 1])
    batch.update({"n": [None, 5]}, where=[False, True])
    batch.update({"k": [2, 1], "n": [6, None]}, where=[False, True])
    assert outcome_of(batch, {}) == {(2,): Stored((6,))}


def test_update_accepts_slices_of_nested_columns() -> None:
    """Values of arrays with an offset are stored correctly, for lists, structs and maps."""
    point = pa.struct([("x", pa.int64()), ("tags", pa.list_(pa.string()))])
    state = pa.schema([("l", pa.list_(pa.int64())), ("p", point), ("m", pa.map_(pa.string(), pa.int64()))])
    values = [
        ([i, None], {"x": i, "tags": [str(i)] * i}, [(str(i), i)]) if i % 3 else (None, None, None) for i in range(9)
    ]
    given = pa.table([pa.array([row[i] for row in values], field.type) for i, field in enumerate(state)], schema=state)
    keys = [(i,) for i in range(4)]
    batch = made(pa.schema([("k", pa.int64())]), state, pa.table({"v": range(4)}), keys, [1] * 4)
    batch.update(given.slice(3, 4))
    assert outcome_of(batch, {}) == {(i,): Stored(values[3 + i]) for i in range(4)}
    batch.update(given.slice(2, 4), where=[False, True, True, False])
    assert outcome_of(batch, {}) == {(i,): Stored(values[(2 if i in (1, 2) else 3) + i]) for i in range(4)}


SAME = pa.schema([("k", pa.int64()), ("n", pa.int64())])
ONE_KEY = pa.schema([("k", pa.int64())])


def make_overlapping(keys: pa.Schema = ONE_KEY, count: int = 3) -> StateBatch:
    """Return a batch with the keys 1, 2, …, whose state has a column of the key's name."""
    key_values = [(at + 1,) * len(keys) for at in range(count)]
    return made(keys, SAME, pa.table({"v": range(count)}), key_values, [1] * count, known={(1,): (1, 8)})


@pytest.mark.parametrize("form", FORMS)
def test_state_with_a_column_of_the_keys_name_is_updated_by_key(form: str) -> None:
    batch = make_overlapping()
    batch.update(convert(form, rows_of((3, 30), (1, 10), (2, 20), schema=SAME)))
    expected = {(at,): Stored((at, 10 * at)) for at in (1, 2, 3)}
    assert outcome_of(batch, {}) == expected
    batch = make_overlapping()
    batch.update(convert(form, rows_of((1, 10), (2, 20), (3, 30), schema=SAME)))
    assert outcome_of(batch, {}) == expected, "the order of the rows must not matter"
    batch = make_overlapping()
    batch.update(convert(form, rows_of((2, 20), schema=SAME)))
    assert outcome_of(batch, {}) == {(2,): expected[2,]}


def test_where_chooses_keys_if_the_rows_contain_the_key() -> None:
    for mask in ([True, False, True], np.array([True, False, True]), pa.array([True, None, True])):
        for rows in (((3, 30), (2, 20), (1, 10)), ((1, 10), (3, 30)), ((3, 30), (1, 10))):
            batch = make_overlapping()
            batch.update(rows_of(*rows, schema=SAME), where=mask)
            assert outcome_of(batch, {}) == {(1,): Stored((1, 10)), (3,): Stored((3, 30))}


def test_rows_with_only_some_of_the_key_columns_are_not_matched_by_key() -> None:
    keys = pa.schema([("k", pa.int64()), ("j", pa.int64())])
    batch = make_overlapping(keys, 2)
    batch.update({"k": [5, 6], "n": [1, 2]})
    assert outcome_of(batch, {}) == {(1, 1): Stored((5, 1)), (2, 2): Stored((6, 2))}
    batch = make_overlapping(keys, 2)
    batch.update({"j": [2, 1], "k": [2, 1], "n": [20, 10]})
    assert outcome_of(batch, {}) == {(1, 1): Stored((1, 10)), (2, 2): Stored((2, 20))}
    with pytest.raises(
        StateValueError, match=r"given the columns j, n; it takes the state columns \(k, n\), or these and the key"
    ):
        batch.update({"j": [2, 1], "n": [20, 10]})


def test_by_key_false_allows_other_values_in_a_state_column_of_the_keys_name() -> None:
    given = {"k": [5, None, 1], "n": [1, 2, 3]}
    batch = make_overlapping()
    with pytest.raises(
        StateValueError, match=r"key \{'k': 5\}, which is not in this batch \(by_key=False takes rows in the"
    ):
        batch.update(given)
    batch.update(given, by_key=False)
    assert outcome_of(batch, {}) == {(1,): Stored((5, 1)), (2,): Stored((None, 2)), (3,): Stored((1, 3))}
    with pytest.raises(StateValueError, match="given the columns n, note, name, x;"):
        batch_of().update({"n": [1] * 4, "note": ["a"] * 4, "name": ["a"] * 4, "x": [1.0] * 4}, by_key=False)
    batch = make_overlapping(pa.schema([("k", pa.int64()), ("k", pa.int64())]), 2)
    with pytest.raises(
        StateValueError, match=r"two key columns are called 'k': .* select with a mask \(by_key=False takes"
    ):
        batch.update({"k": [1, 2], "n": [1, 2]})
    batch.update({"k": [1, 2], "n": [3, 4]}, by_key=False)
    assert batch.outcome.updates[0].to_pydict() == {"k": [1, 2], "n": [3, 4]}


UPDATE_ERRORS: list[tuple[str, Any, Any, str]] = [
    ("a missing column", {"n": [1] * 4}, None, r"update\(\) was given the columns n; it takes the state columns \(n, note\), or these and the key columns \(name, x\)"),
    ("a column too many", {"n": [1] * 4, "note": ["a"] * 4, "z": [1] * 4}, None, r"given the columns n, note, z;"),
    ("one of the key columns", {"n": [1] * 4, "note": ["a"] * 4, "x": [1.0] * 4}, None, r"given the columns n, note, x;"),
    ("no columns", {}, None, r"given the columns \(none\);"),
    ("a column twice", pa.table([[1], [2], ["a"]], names=["n", "n", "note"]), None, r"given the columns n, n, note;"),
    ("too few rows", {"n": [1], "note": ["a"]}, None, r"update\(\) was given 1 rows and the batch has 4 keys"),
    ("too few rows with where", {"n": [1], "note": ["a"]}, MASK, r"given 1 rows; the batch has 4 keys, and `where` selects 2"),
    ("too few rows with where for all", {"n": [1], "note": ["a"]}, [True] * 4, r"given 1 rows and the batch has 4 keys"),
    ("columns of several lengths", {"n": [1], "note": ["a", "b"]}, None, r"update\(\) was given a dict whose columns have different lengths"),
    ("a scalar", {"n": 1, "note": "a"}, None, r"update\(\) was given a dict whose column 'n' is 1 \(int\)"),
    ("a number", 5, None, r"update\(\) was given a value of type int: a table is a pyarrow Table or RecordBatch, a mapping of columns, or anything with __arrow_c_stream__"),
    ("None", None, None, r"update\(\) was given a value of type NoneType"),
    ("text for a number", {"n": ["many"] * 4, "note": ["a"] * 4}, None, r"state column 'n' of type int64 cannot hold string: .*many"),
    ("a fraction", {"n": [1.5] * 4, "note": ["a"] * 4}, None, r"'n' of type int64 cannot hold double: .*1\.5"),
    ("a number too large", {"n": pa.array([2**63] * 4, pa.uint64()), "note": ["a"] * 4}, None, r"'n' of type int64 cannot hold uint64"),
    ("a list for a number", {"n": [[1]] * 4, "note": ["a"] * 4}, None, r"'n' of type int64 cannot hold list<"),
    ("a key of another batch", {"n": [1], "note": ["a"], "name": ["z"], "x": [1.0]}, None, r"update\(\) was given the key \{'name': 'z', 'x': 1\.0\}, which is not in this batch"),
    ("a key twice", {"n": [1, 2], "note": ["a"] * 2, "name": ["a"] * 2, "x": [1.0] * 2}, None, r"update\(\) was given 2 rows in which a key occurs more than once"),
    ("a key of another type", {"n": [1], "note": ["a"], "name": ["a"], "x": ["one"]}, None, r"key column 'x' of type double cannot hold string"),
    ("a mask of the wrong length", {"n": [1], "note": ["a"]}, [True], r"a mask must be 4 booleans, one for each key of the batch, not \[True\]"),
    ("a mask of numbers", {"n": [1], "note": ["a"]}, [0, 1, 0, 0], r"a mask must be 4 booleans"),
    ("a mask of Arrow's numbers", {"n": [1], "note": ["a"]}, pa.array([0, 1, 0, 0]), r"a mask must be 4 booleans"),
    ("a mask for all", {"n": [1], "note": ["a"]}, True, r"a mask must be 4 booleans"),
    ("a mask of booleans and others", {"n": [1], "note": ["a"]}, [None, True, "no", True], r"a mask must be 4 booleans"),
    ("a mask of NULLs", {"n": [1], "note": ["a"]}, [None] * 4, r"a mask must be 4 booleans"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "where", "text"), [e[1:] for e in UPDATE_ERRORS], ids=[e[0] for e in UPDATE_ERRORS])
def test_update_refuses_invalid_rows_and_masks(given: Any, where: Any, text: str) -> None:
    batch = batch_of()
    with pytest.raises(StateValueError, match=text):
        batch.update(given, where=where)
    assert not batch.outcome.touched.any(), "a refused call must not change the outcome"


def test_the_error_for_a_long_mask_is_short() -> None:
    for mask in ([True] * 100_000, np.zeros(100_000), pa.nulls(100_000)):
        with pytest.raises(StateValueError, match="a mask must be 4 booleans") as raised:
            batch_of().update({"n": [1], "note": ["a"]}, where=mask)
        assert len(str(raised.value)) < 500


def test_duplicate_state_columns_are_refused_with_a_clear_error() -> None:
    state = pa.schema([("n", pa.int64()), ("n", pa.int64())])
    batch = made(KEYS, state, batch_of().rows, [A, B, C], [1, 2, 3])
    with pytest.raises(StateValueError, match="columns n, n"):
        batch.update(pa.table([[1] * 3, [2] * 3], names=["n", "n"]))


# -- remove ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_remove_accepts_masks_of_every_form(mask: str) -> None:
    batch = batch_of()
    batch.remove(get_mask(mask))
    assert after(batch) == {A: Stored((10, "ten"))}
    assert batch.outcome.touched.tolist() == MASK


def test_remove_can_remove_no_key_or_every_key() -> None:
    batch = batch_of()
    batch.remove([False] * 4)
    assert not batch.outcome.touched.any()
    batch.remove()
    assert after(batch) == {}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [["x", "name"], ["name", "n", "x", "note"]], ids=["keys", "and more"])
def test_remove_accepts_key_columns_of_every_form(form: str, columns: list[str]) -> None:
    batch = batch_of()
    batch.remove(convert(form, rows_of((1, "x", "d", None), (2, "y", None, -0.0), schema=BY_KEY).select(columns)))
    assert after(batch) == {A: Stored((10, "ten"))}
    assert batch.outcome.touched.tolist() == [False, False, True, True]


def test_remove_accepts_a_polars_mask() -> None:
    pl = pytest.importorskip("polars")
    batch = batch_of()
    batch.remove(pl.Series(MASK))
    assert batch.outcome.touched.tolist() == MASK


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ({"name": ["a"]}, r"remove\(\) needs the key columns name, x, not name"),
        ({"name": ["z"], "x": [1.0]}, r"remove\(\) was given the key \{'name': 'z', 'x': 1.0\}, which is not in"),
        ({"name": ["a", "a"], "x": [1.0, 1.0]}, r"remove\(\) was given 2 rows in which a key occurs more than once"),
        ([True], "a mask must be 4 booleans"),
        (False, "a mask must be 4 booleans"),
        (None, "a mask must be 4 booleans"),
    ],
)
def test_remove_refuses_invalid_keys_and_masks(which: Any, text: str) -> None:
    batch = batch_of()
    with pytest.raises(StateValueError, match=text):
        batch.remove(which)
    assert not batch.outcome.touched.any()


def test_the_last_call_for_a_key_counts() -> None:
    batch = batch_of()
    batch.remove()
    batch.update(rows_of((1, "x"), (2, "y")), where=MASK)
    batch.update(rows_of((5, "v")), where=[False, True, False, False])
    assert after(batch) == {key(B): Stored((5, "v")), D: Stored((2, "y"))}
    batch.remove(MASK)
    assert after(batch) == {}


# -- random sequences ------------------------------------------------------------------------------

POOL: list[Key] = [(name, x) for name in ("a", "b", None) for x in (0.0, 1.5, float("nan"), None)]
SPELLINGS = {0.0: -0.0}


@st.composite
def actions(draw: st.DrawFn, keys: list[Key]) -> tuple[Any, ...]:
    n = len(keys)
    what = draw(st.sampled_from(["update", "by key", "remove", "remove by key", "timeout"]))
    mask = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=n, max_size=n)))
    whole = draw(st.booleans())
    values = draw(
        st.lists(
            st.tuples(
                st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), st.one_of(st.none(), st.text(max_size=2))
            ),
            min_size=n,
            max_size=n,
        )
    )
    times = draw(st.lists(st.one_of(st.none(), st.integers(50, 99)), min_size=n, max_size=n))
    order = draw(st.permutations(range(n)))
    some = order[: draw(st.integers(0, n))]
    return what, mask, whole, values, times, some


@settings(max_examples=150)
@given(data=st.data())
def test_any_sequence_of_changes_gives_the_state_of_a_dict(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(POOL), min_size=1, max_size=7, unique_by=repr))
    with_rows = data.draw(st.integers(0, len(keys)))
    conf = data.draw(st.sampled_from([EVENT_TIME, PROCESSING_TIME]))
    known = {
        canonicalise(name): Stored(
            (i, str(i)) if data.draw(st.booleans()) else None, 7 if data.draw(st.booleans()) else None
        )
        for i, name in enumerate(keys)
    }
    known = {name: stored for name, stored in known.items() if stored != Stored()}
    batch = batch_of(
        keys[:with_rows],
        keys[with_rows:],
        {name: stored.values for name, stored in known.items() if stored.values is not None},
        timeout_conf=conf,
        watermark_ms=50 if conf == EVENT_TIME else None,
    )
    states = {canonicalise(name): known.get(canonicalise(name), Stored()).values for name in keys}
    timeouts: dict[Key, int | None] = {}
    touched: set[Key] = set()
    for _ in range(data.draw(st.integers(0, 5))):
        what, mask, whole, values, times, some = data.draw(actions(keys))
        chosen = [i for i in range(len(keys)) if mask is None or mask[i]]
        where = None if mask is None else pa.array(mask)
        if what == "update":
            given = values if whole else [values[i] for i in chosen]
            batch.update(rows_of(*given), where=where)
            states.update({canonicalise(keys[i]): values[i] for i in chosen})
        elif what == "by key":
            variants = [(name, SPELLINGS.get(x, x)) for name, x in keys]
            batch.update(rows_of(*[(*values[i], *variants[i]) for i in some], schema=BY_KEY), where=where)
            chosen = [i for i in some if i in chosen]
            states.update({canonicalise(keys[i]): values[i] for i in chosen})
        elif what == "remove":
            batch.remove(True if mask is None else where)
            states.update({canonicalise(keys[i]): None for i in chosen})
        elif what == "remove by key":
            batch.remove(rows_of(*[keys[i] for i in some], schema=KEYS))
            chosen = list(some)
            states.update({canonicalise(keys[i]): None for i in chosen})
        else:
            given = times if whole else [times[i] for i in chosen]
            argument = "timestamp_ms" if conf == EVENT_TIME else "duration_ms"
            batch.set_timeout(**{argument: pa.array(given, pa.int64())}, where=where)
            base = 0 if conf == EVENT_TIME else 1_000
            timeouts.update({canonicalise(keys[i]): None if times[i] is None else base + times[i] for i in chosen})
        touched |= {canonicalise(keys[i]) for i in chosen}
    expected = {name: stored for name, stored in known.items() if name not in touched}
    for name in touched:
        stored = Stored(states[name], timeouts.get(name))
        if stored != Stored():
            expected[name] = stored
    assert outcome_of(batch, known) == expected
    assert batch.outcome.touched.tolist() == [canonicalise(name) in touched for name in keys]


def test_with_state_has_a_column_in_both_key_and_state_only_once() -> None:
    """Neither polars nor `update` accepts a table with a duplicate column name."""
    batch = make_overlapping()
    table = batch.with_state({"more": [7, 8, 9]})
    assert table.column_names == ["k", "n", "more"]
    assert table["k"].to_pylist() == [1, 2, 3]
    assert table["n"].to_pylist() == [8, None, None]
    batch.update(table.drop_columns(["more"]))
    assert outcome_of(batch, {})[2,] == Stored((2, None))
