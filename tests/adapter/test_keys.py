"""Calling a pandas function per key, without Spark: what a key sees must not depend on the other keys."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import ArrayType, BooleanType, LongType, StringType, StructField, StructType

from arrow_schemas import RowSchema, key_fields, state_fields
from spark_state_ext.errors import ResultTypeError, StateValueError, UserFunctionError
from spark_state_ext.spark.callers.group_state import Clock, KeyState
from spark_state_ext.spark.callers.groups import CallContext, Groups, Result
from spark_state_ext.spark.callers.keys import KeyCaller
from spark_state_ext.spark.callers.results import OutputColumns
from spark_state_ext.spark.compat import NUMBERS_JOIN
from spark_state_ext.spark.executor.error_border import rewrite_error
from spark_state_ext.store import Lookup
from spark_state_ext.worker.memory import tune_memory

STATE = StructType([StructField("n", LongType())])
KEYS = StructType([StructField("k", LongType())])
SCHEMA = RowSchema(key_fields(json.dumps(KEYS.jsonValue())), state_fields(json.dumps(STATE.jsonValue())))
CONTEXT = CallContext(3, 7, 1_000, -1, False, "NoTimeout")
NOTHING = SCHEMA.empty()


def make_caller(function: Any, rows_max: int = 10_000) -> KeyCaller:
    return KeyCaller(function, SCHEMA, STATE, ["k", "v"], OutputColumns(("k", "n")), "UTC", rows_max)


def make_groups(keys: list[int | None], values: list[Any], bad_hash: bool = False) -> Groups:
    hashes = np.array([0 if bad_hash or k is None else (k * 2654435761) % 2**64 for k in keys], dtype=np.uint64)
    table = pa.table({"c0": pa.array(keys, pa.int64()), "c1": pa.array(values, pa.int64())})
    return Groups.of(table, hashes, [0], 2, SCHEMA)


def call(
    key_caller: KeyCaller, groups: Groups, lookup: Lookup | None = None, result: Result | None = None
) -> list[pd.DataFrame]:
    return list(key_caller.call_data(groups, lookup or no_states(groups), NOTHING, CONTEXT, result or Result()))


def no_states(groups: Groups) -> Lookup:
    return Lookup(np.full(groups.count, -1, dtype=np.int64), NOTHING)


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 8)), st.one_of(st.none(), st.integers(2**53, 2**53 + 9))),
        min_size=1,
        max_size=40,
    ),
    bad_hash=st.booleans(),
    rows_max=st.sampled_from([2, 10_000]),
)
def test_each_key_sees_the_frames_that_it_would_see_alone(
    rows: list[tuple[int | None, int | None]], bad_hash: bool, rows_max: int
) -> None:
    seen: dict[Any, list[pd.DataFrame]] = {}

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        assert not isinstance(pdfs, list)
        name = None if pd.isna(key[0]) else int(key[0])
        assert name not in seen
        assert type(key[0]) is (np.float64 if name is None else np.int64)
        seen[name] = list(pdfs)
        return iter(())

    groups = make_groups([k for k, _ in rows], [v for _, v in rows], bad_hash)
    call(make_caller(function, rows_max), groups)
    assert set(seen) == {k for k, _ in rows}
    for key, frames in seen.items():
        values = [v for k, v in rows if k == key]
        for at, frame in enumerate(frames):
            expected = values[at * rows_max : (at + 1) * rows_max]
            assert list(frame.columns) == ["k", "v"]
            assert isinstance(frame.index, pd.RangeIndex)
            assert list(frame.index) == list(range(len(expected)))
            assert frame["v"].dtype == (np.float64 if None in expected else np.int64)
            assert [None if pd.isna(v) else v for v in frame["v"]] == [
                v if v is None or None not in expected else float(v) for v in expected
            ]
        assert sum(map(len, frames)) == len(values)


def test_changed_keys_become_rows_of_a_run() -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        if key[0] == 1:
            state.update((10,))
        elif key[0] == 2:
            state.remove()
        return iter(())

    groups = make_groups([1, 2, 3, 1], [0, 0, 0, 0])
    result = Result()
    call(make_caller(function), groups, result=result)
    assert result.data is not None
    rows = result.data.rows.to_pylist()
    assert [rows[i]["key.k"] for i in range(2)] == [groups.keys[0][at].as_py() for at in result.data.positions.tolist()]
    assert {r["key.k"]: (r["state.n"], r["defined"], r["deleted"], r["timeout_ms"]) for r in rows} == {
        1: (10, True, False, None),
        2: (None, False, True, None),
    }


def test_an_exception_names_key_bucket_and_batch() -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        raise KeyError("missing")

    groups = make_groups([41], [0])
    with pytest.raises(UserFunctionError, match=r"key \(41,\) \(bucket 3, batch 7.*KeyError") as raised:
        call(make_caller(function), groups)
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.traceback[-1].name == "function", (
        "Spark does not show causes, so the error's own traceback needs the frame"
    )


def test_an_exit_is_reported_as_an_error_of_the_function_with_its_key() -> None:
    """It would end Spark's worker, with a traceback that does not name the key."""

    def function(key: Any, rows: Any, state: Any) -> Any:
        sys.exit(3)

    with pytest.raises(UserFunctionError, match=r"key \(41,\) \(bucket 3, batch 7\): SystemExit: 3"):
        call(make_caller(function), make_groups([41], [0]))


def test_an_exception_whose_text_fails_is_named_by_its_type() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        raise SilentError

    with pytest.raises(UserFunctionError, match=r"key \(41,\) \(bucket 3, batch 7\): SilentError$"):
        call(make_caller(function), make_groups([41], [0]))


@pytest.mark.parametrize("value", [(1, 2), (), [1, 2], ("text", {}), 5, 1.5], ids=repr)
def test_update_refuses_a_state_with_a_wrong_number_of_columns(value: Any) -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        with pytest.raises(StateValueError):
            state.update(value)
        assert state.get == (1,), "the previous state stays"
        state.update(value)
        raise AssertionError("not reached")

    groups = make_groups([41], [0])
    before = pa.record_batch([[0], [41], [1], [None], [True], [False]], names=NOTHING.schema.names).cast(NOTHING.schema)
    lookup = Lookup(np.zeros(1, dtype=np.int64), before)
    with pytest.raises(StateValueError, match=r"columns n: .*\(key \(41,\), bucket 3, batch 7\)") as raised:
        call(make_caller(function), groups, lookup)
    assert "function" in [entry.name for entry in raised.traceback]


def test_the_error_of_a_value_that_does_not_fit_names_its_key() -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        if key[0] > 1:
            state.update((7 if key[0] == 2 else "many",))
        return iter(())

    groups = make_groups([1, 2, 3], [0, 0, 0])
    with pytest.raises(
        StateValueError, match=r"'n' of type bigint cannot hold 'many' \(str\) \(key \(3,\), bucket 3, batch 7\)"
    ):
        call(make_caller(function), groups)


def test_output_frames_are_joined_without_loss() -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": [key[0]]})
        yield pd.DataFrame()
        yield pd.DataFrame({"k": [key[0], key[0]]})

    groups = make_groups(list(range(500)), [0] * 500)
    frames = call(make_caller(function), groups)
    assert len(frames) < 50
    assert sorted(pd.concat(frames)["k"]) == sorted([*range(500)] * 3)


def test_find_keys_returns_the_positions_of_keys_with_rows() -> None:
    groups = make_groups([1, 2, 3], [0, 0, 0], bad_hash=True)
    others = pa.array([3, 4, 1, 9], pa.int64())
    positions = groups.find_keys(np.zeros(4, dtype=np.uint64), [others])
    keys = [None if i < 0 else groups.keys[0][i].as_py() for i in positions.tolist()]
    assert keys == [3, None, 1, None]
    assert groups.find_keys(np.empty(0, dtype=np.uint64), [others.slice(0, 0)]).tolist() == []


@pytest.mark.parametrize(
    "value",
    [
        (1, 2.5, "a", None, b"b", True),
        (np.int64(3), np.float64(1.5), np.bool_(True)),
        (np.int16(3), pd.Timestamp(5), pd.Timedelta(seconds=2), np.datetime64(7, "us")),
        [1, np.float32(0.5)],
        (),
    ],
)
def test_key_state_behaves_as_sparks_group_state(value: Any) -> None:
    schema = StructType([StructField(f"n{i}", LongType()) for i in range(len(value))])
    arguments: dict[str, Any] = {
        "batchProcessingTimeMs": 1,
        "eventTimeWatermarkMs": 0,
        "timeoutConf": "NoTimeout",
        "hasTimedOut": False,
        "watermarkPresent": False,
        "defined": False,
        "updated": False,
        "removed": False,
        "timeoutTimestamp": -1,
        "keyAsUnsafe": b"",
        "valueSchema": schema,
    }
    sparks = GroupState(optionalValue=None, **arguments)  # type: ignore[arg-type]
    ours = KeyState(None, Clock(1, 0, "NoTimeout", False, False, schema))
    for state in (sparks, ours):
        assert not state.exists
        assert state.getOption is None
        with pytest.raises(ValueError):
            _ = state.get
        state.update(value)
        assert state.exists
    assert ours.get == sparks.get
    assert ours.getOption == sparks.getOption
    assert str(ours) == str(sparks)
    assert list(map(type, ours.get)) == list(map(type, sparks.get))
    assert ours.json() == sparks.json()
    for state in (sparks, ours):
        with pytest.raises(TypeError):
            state.update(None)  # type: ignore[arg-type]
        state.remove()
        assert not state.exists
        assert state.getOption is None
    assert ours.json() == sparks.json()
    assert ours.touched


def test_a_tuned_worker_still_collects_garbage() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    before = gc.get_threshold()
    try:
        tune_memory.__wrapped__()
        assert gc.get_threshold()[0] >= before[0]
        assert gc.get_freeze_count() > 0
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@pytest.mark.parametrize("first", [1, 2**60 + 1, 2.5, True, "a", None, 2**70], ids=str)
@pytest.mark.parametrize("second", [3, 4.5, float("nan"), False, "b", None], ids=str)
@pytest.mark.parametrize("third", [5, None], ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_joined_frames_have_the_same_values_as_if_spark_joined_them(
    first: Any, second: Any, third: Any, rows: int
) -> None:
    values = (first, second, third)
    frames = [pd.DataFrame({"k": [key] * rows, "n": [value] * rows}) for key, value in enumerate(values, 1)]
    # Spark adds a frame without rows whose columns are of objects.
    added = [pd.DataFrame(dict.fromkeys(["k", "n"]), index=[])]

    def function(key: tuple[Any, ...], pdfs: Any, state: KeyState) -> Iterator[pd.DataFrame]:
        yield frames[key[0] - 1]

    output = call(make_caller(function), make_groups([1, 2, 3], [0, 0, 0]))
    values_read = pd.concat([*output, *added], ignore_index=True)["n"]
    expected = pd.concat([*frames, *added], ignore_index=True)["n"]
    assert values_read.isna().tolist() == expected.isna().tolist()
    assert values_read.dropna().tolist() == expected.dropna().tolist()
    assert list(map(type, values_read.dropna())) == list(map(type, expected.dropna()))
    if expected.dtype.kind in "if":
        assert values_read.dtype == expected.dtype


@pytest.mark.skipif(NUMBERS_JOIN, reason="pandas 2 joins such frames in Spark's worker too, or fails as it does there")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pd.array([2**60 + 1], dtype="Int64"), [1.0]),
        (pd.array(["9999-12-31"], dtype="datetime64[us]"), pd.array(["2020-01-01"], dtype="datetime64[ns]")),
    ],
    ids=["extension", "units"],
)
@pytest.mark.parametrize("rows", [1, 9])
def test_frames_that_are_not_joined_keep_each_value(first: Any, second: Any, rows: int) -> None:
    def function(key: tuple[Any, ...], pdfs: Any, state: KeyState) -> Iterator[pd.DataFrame]:
        yield pd.concat([pd.DataFrame({"k": [key[0]], "n": first if key[0] == 1 else second})] * rows)

    column = pd.concat(call(make_caller(function), make_groups([1, 2], [0, 0])))["n"]
    assert sorted(set(column)) == sorted([first[0], second[0]])


def test_frames_with_different_columns_are_not_joined() -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        frames = [{"k": [1], "n": [2]}, {"k": [1]}, {"n": [1], "k": [2]}, {"k": [1], "other": [2]}]
        yield pd.DataFrame(frames[int(key[0]) % 4])

    groups = make_groups(list(range(8)), [0] * 8)
    frames = call(make_caller(function), groups)
    assert sum(map(len, frames)) == 8
    assert all(not frame.isna().any().any() for frame in frames)
    assert {tuple(sorted(frame.columns)) for frame in frames} == {("k", "n"), ("k",), ("k", "other")}


@pytest.mark.parametrize(
    "labels",
    [
        [pd.NA, "n"],
        [1, "n"],
        [None, "n"],
        [("k", 1), ("n", 1)],
        pd.MultiIndex.from_tuples([("k", 1), ("n", 1)]),
        pd.RangeIndex(2),
    ],
    ids=str,
)
def test_frames_whose_column_labels_are_not_strings_stay_unchanged(labels: Any) -> None:
    # Spark checks these labels. Frames before and after are not changed by them.
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        frame = pd.DataFrame([[int(key[0]), 5]])
        frame.columns = pd.Index(labels if key[0] == 1 else ["k", "n"])
        yield frame

    frames = call(make_caller(function), make_groups([0, 1, 2], [0] * 3))
    assert sorted(row for frame in frames for row in frame.to_numpy().tolist()) == [[0, 5], [1, 5], [2, 5]]
    (odd,) = [frame for frame in frames if frame.iloc[0, 0] == 1]
    assert len(odd) == 1
    pd.testing.assert_index_equal(odd.columns, pd.Index(labels))


def test_a_function_may_change_the_index_of_its_frame_without_effect_on_other_keys() -> None:
    seen: list[Any] = []

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        for pdf in pdfs:
            seen.append((pdf.index.name, list(pdf.columns)))
            pdf.index.name = "row"
            pdf.columns = pd.Index(["x", "y"])
        return iter(())

    groups = make_groups([1, 2, 3], [0, 0, 0])
    call(make_caller(function), groups)
    assert seen == [(None, ["k", "v"])] * 3


@pytest.mark.parametrize("form", ["a list of tuples", "tuples", "lists of tuples", "a dict of columns", "dicts"])
def test_output_may_be_rows_or_columns(form: str) -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Any:
        rows = [(int(key[0]), None), (int(key[0]), 2**53 + 1)]
        columns = dict(zip(("n", "k"), ([None, 2**53 + 1], [int(key[0])] * 2), strict=True))
        return {
            "a list of tuples": rows,
            "tuples": iter(rows),
            "lists of tuples": iter([rows[:1], rows[1:]]),
            "a dict of columns": columns,
            "dicts": iter([columns, {"k": [], "n": []}]),
        }[form]

    groups = make_groups([1, 2], [0, 0])
    frame = pd.concat(call(make_caller(function), groups))
    assert list(frame.columns) == ["k", "n"]
    assert sorted(zip(frame["k"], frame["n"].map(str), strict=True)) == [
        (key, n) for key in (1, 2) for n in (str(2**53 + 1), "None")
    ], "no number is rounded"


@pytest.mark.parametrize(
    "row", [[(1,)], [(1, 2, 3)], [[1, 2]], [[(1, 2), 3]], {"k": [1]}, {"k": [1], "m": [1]}], ids=repr
)
def test_output_with_a_wrong_number_of_columns_is_refused(row: Any) -> None:
    groups = make_groups([41], [0])
    with pytest.raises(StateValueError, match=r"the function gave .* expected .*k, n .*key \(41,\)"):
        call(make_caller(lambda key, pdfs, state: row), groups)


def test_rows_and_frames_of_one_key_keep_their_order() -> None:
    def mixed(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[Any]:
        yield (1, 1)
        yield pd.DataFrame({"k": [1], "n": [2]})
        yield [(1, 3), (1, 4)]
        yield pd.DataFrame({"k": [1], "n": [5]})
        yield {"k": [1], "n": [6]}

    frames = call(make_caller(mixed), make_groups([1], [0]))
    assert pd.concat(frames)["n"].tolist() == [1, 2, 3, 4, 5, 6]


LISTS = StructType([StructField("k", LongType()), StructField("n", ArrayType(LongType()))])


@pytest.mark.parametrize("form", ["tuples", "a list of tuples", "lists of tuples", "a dict of columns", "dicts"])
def test_output_rows_keep_the_values_that_they_had_when_they_were_given(form: str) -> None:
    """All keys share one list, within rows that wait to be sent together."""
    buffer = [0]

    def generate(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[Any]:
        for n in (int(key[0]), int(key[0]) + 10):
            buffer[0] = n
            yield {"tuples": (n, buffer), "lists of tuples": [(n, buffer)]}.get(form, {"n": [buffer], "k": [n]})

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Any:
        if form in ("tuples", "lists of tuples", "dicts"):
            return generate(key, pdfs, state)
        buffer[0] = int(key[0])
        return [(buffer[0], buffer)] if form == "a list of tuples" else {"n": [buffer], "k": [buffer[0]]}

    key_caller = KeyCaller(function, SCHEMA, STATE, ["k", "v"], OutputColumns(("k", "n"), LISTS), "UTC", 10_000)
    frame = pd.concat(call(key_caller, make_groups([1, 2, 3], [0, 0, 0])))
    assert len(frame) >= 3
    assert frame["n"].tolist() == [[n] for n in frame["k"]]


def test_a_state_has_its_value_from_the_end_of_the_keys_call() -> None:
    buffer: list[int] = []

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[Any]:
        buffer[:] = [9]
        state.update((buffer,))
        yield {"k": [], "n": []}
        buffer[:] = [int(key[0])]

    state = StructType([StructField("all", ArrayType(LongType()))])
    schema = RowSchema(SCHEMA.keys, state_fields(json.dumps(state.jsonValue())))
    groups, result = make_groups([1, 2, 3], [0, 0, 0]), Result()
    key_caller = KeyCaller(function, schema, state, ["k", "v"], OutputColumns(("k", "n")), "UTC", 10_000)
    lookup = Lookup(np.full(3, -1, dtype=np.int64), schema.empty())
    assert list(key_caller.call_data(groups, lookup, schema.empty(), CONTEXT, result)) == []
    assert result.data is not None
    assert sorted((row["key.k"], row["state.all"]) for row in result.data.rows.to_pylist()) == [
        (k, [k]) for k in (1, 2, 3)
    ]


def test_a_frame_has_its_value_from_when_it_is_sent() -> None:
    """Spark's worker also collects the frames of many keys before it converts them."""

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        frame = pd.DataFrame({"k": [1], "n": [1]})
        yield frame
        frame.loc[0, "n"] = 2
        yield frame

    (frame,) = call(make_caller(function), make_groups([1], [0]))
    assert frame["n"].tolist() == [2, 2]


ONE_ROW: list[tuple[Any, str]] = [
    ({"k": "ab", "n": "DE"}, "'k' is 'ab' (str)"),
    ({"k": [1], "n": b"a"}, "'n' is b'a' (bytes)"),
    ({"k": 1, "n": 2}, "'k' is 1 (int)"),
    ({"k": [1], "n": None}, "'n' is None (NoneType)"),
    ({"k": [1], "n": {"x": 1}}, "'n' is {'x': 1} (dict)"),
    ({"k": np.array(1), "n": [1]}, "'k' is array(1) (ndarray)"),
]


@pytest.mark.parametrize("form", ["yielded", "returned"])
@pytest.mark.parametrize(("item", "text"), ONE_ROW, ids=[text for _, text in ONE_ROW])
def test_a_dict_of_one_rows_values_is_refused(item: Any, text: str, form: str) -> None:
    """Users write this by mistake; a text would become one row for each of its letters."""
    expected = re.escape(
        f"{text}: a dict holds columns, give a list for each, or a tuple for one row (key (41,), bucket 3, batch 7)"
    )
    with pytest.raises(StateValueError, match=expected):
        call(make_caller(lambda key, pdfs, state: item if form == "returned" else iter([item])), make_groups([41], [0]))


@pytest.mark.parametrize(
    ("item", "lengths"),
    [
        ({"k": [1], "n": [1, 2]}, "'k' has 1, 'n' has 2"),
        ({"k": (1, 2, 3), "n": np.array([1, 2])}, "'k' has 3, 'n' has 2"),
        ({"n": iter([1, 2]), "k": []}, "'k' has 0, 'n' has 2"),
    ],
    ids=["lists", "an array", "an iterator"],
)
def test_columns_of_different_lengths_are_refused(item: Any, lengths: str) -> None:
    text = rf"the function gave a dict whose columns have different lengths: {lengths}; .*\(key \(41,\), bucket 3"
    with pytest.raises(StateValueError, match=text):
        call(make_caller(lambda key, pdfs, state: item), make_groups([41], [0]))


@pytest.mark.parametrize(
    "column",
    [(1, 2), np.array([1, 2]), pd.Series([1, 2]), pa.array([1, 2]), range(1, 3), {1: "a", 2: "b"}.keys()],
    ids=lambda column: type(column).__name__,
)
def test_a_column_of_a_dict_may_be_any_iterable_of_values(column: Any) -> None:
    (frame,) = call(make_caller(lambda key, pdfs, state: {"k": [41, 41], "n": column}), make_groups([41], [0]))
    assert frame["k"].tolist() == [41, 41]
    assert [n.as_py() if isinstance(n, pa.Scalar) else n for n in frame["n"]] == [1, 2]


NOT_ROWS: list[tuple[Any, str]] = [
    ((3, 4), "3 (int)"),
    (("a", 3), "'a' (str)"),
    ([5], "5 (int)"),
    ("ab", "'a' (str)"),
    (iter([(1, 2), None]), "None (NoneType)"),
    ([{1, 2}], "{1, 2} (set)"),
    (pd.Series([1.5]), "1.5 (float)"),
    (pa.table({"k": [1]}), "(ChunkedArray)"),
    (iter([pd.DataFrame({"k": [1], "n": [2]}), "x" * 10_000]), "xxx' (str)"),
]


@pytest.mark.parametrize(("result", "text"), NOT_ROWS, ids=[text for _, text in NOT_ROWS])
def test_the_error_of_an_item_that_is_not_a_row_names_its_key(result: Any, text: str) -> None:
    """The most frequent mistake is to return one row instead of a list of rows."""
    expected = (
        rf"{re.escape(text)} for a row: return, or yield, one tuple of k, n .* \(key \(41,\), bucket 3, batch 7\)"
    )
    with pytest.raises(ResultTypeError, match=expected) as raised:
        call(make_caller(lambda key, pdfs, state: result), make_groups([41], [0]))
    assert isinstance(raised.value, StateValueError)
    assert isinstance(raised.value, TypeError)
    assert len(str(raised.value)) < 500


OUTPUT = StructType([StructField("k", LongType()), StructField("n", LongType()), StructField("is", BooleanType())])
UNFIT_OUTPUT: list[tuple[str, Any, str]] = [
    ("text for a number", [(1, 2, None), (1, "many", None)], r"'n' of type bigint cannot hold 'many' \(str\), in the row \(1, 'many', None\)"),
    ("a list for a number", [(1, [2], None)], r"'n' of type bigint cannot hold \[2\] \(list\)"),
    ("text for a boolean", {"k": [1], "n": [1], "is": ["so"]}, r"'is' of type boolean cannot hold 'so'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), [case[1:] for case in UNFIT_OUTPUT], ids=[case[0] for case in UNFIT_OUTPUT])
def test_the_error_of_a_row_value_that_spark_cannot_convert_names_its_key(given: Any, text: str) -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Any:
        return given if key == (41,) else [(1, 2, None)]

    key_caller = KeyCaller(
        function, SCHEMA, STATE, ["k", "v"], OutputColumns(tuple(OUTPUT.names), OUTPUT), "UTC", 10_000
    )
    with pytest.raises(ResultTypeError, match=rf"{text}.* \(key \(41,\), bucket 3, batch 7\)"):
        call(key_caller, make_groups([3, 41, 5], [0, 0, 0]))


def test_row_values_that_spark_can_convert_are_passed_on() -> None:
    rows = [(1, 2, True), (1.0, "3", "true"), (None, None, None)]
    key_caller = KeyCaller(
        lambda key, pdfs, state: rows,
        SCHEMA,
        STATE,
        ["k", "v"],
        OutputColumns(tuple(OUTPUT.names), OUTPUT),
        "UTC",
        10_000,
    )
    (frame,) = call(key_caller, make_groups([41], [0]))
    assert list(frame["n"]) == [2, "3", None]


def test_a_string_state_column_refuses_numpy_times() -> None:
    """Spark's `GroupState` converts such a time to a number, and a string column would keep its text."""
    text = StructType([StructField("s", StringType())])
    for value in (np.datetime64("2024-01-01", "ns"), np.timedelta64(5, "ns")):
        state = KeyState(None, Clock(1, 0, "NoTimeout", False, False, text))
        with pytest.raises(StateValueError, match=r"update\(\) was given (np|numpy)\..* for the state column 's'"):
            state.update((value,))
        assert not state.touched
        state.update((type(value)("NaT", "ns"),))
        assert state.get == (None,)


def format_definition(function: Any) -> str:
    return f'  File "{__file__}", line {function.__code__.co_firstlineno}, in {function.__name__}'


def drop_test_frames(error: BaseException) -> BaseException:
    """Remove the frames of these tests, which Spark's worker does not have."""
    if error.__cause__ is not None:
        error.__cause__.with_traceback(None)
    return error.with_traceback(None)


WRONG_RESULTS: list[tuple[Any, str]] = [
    (None, r"returned None: yield rows or frames, or return a list of them \(\[\] for no output\)"),
    (5, r"returned 5 \(int\): yield rows or frames, or return a list of them \(\[\] for no output\)"),
    (pd.DataFrame({"k": [1], "n": [2]}), r"returned a DataFrame: yield it, or return \[frame\]"),
]


@pytest.mark.parametrize(("result", "text"), WRONG_RESULTS, ids=["None", "5", "a frame"])
def test_the_error_of_a_result_that_is_not_iterable_names_its_key_and_the_function(result: Any, text: str) -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Any:
        return result

    with pytest.raises(ResultTypeError, match=rf"the function {text} \(key \(41,\), bucket 3, batch 7\)") as raised:
        call(make_caller(function), make_groups([41], [0]))
    assert format_definition(function) in str(rewrite_error(drop_test_frames(raised.value), function))


def test_the_error_of_a_function_with_wrong_parameters_names_the_function() -> None:
    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame]) -> Any:
        return []

    with pytest.raises(UserFunctionError, match="2 positional arguments but 3 were given") as raised:
        call(make_caller(function), make_groups([41], [0]))
    assert format_definition(function) in str(rewrite_error(drop_test_frames(raised.value), function))


def test_the_error_of_a_misnamed_column_names_its_key() -> None:
    """Frames are checked some keys later; the error still names the key of the wrong frame."""

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        rows = 20 if key[0] % 2 else 1
        yield pd.DataFrame({"k": [key[0]] * rows, "N" if key[0] == wrong else "n": [1] * rows})

    for wrong in (3, 4, 40):
        groups = make_groups(list(range(50)), [0] * 50)
        key_caller = KeyCaller(
            function, SCHEMA, STATE, ["k", "v"], OutputColumns(("k", "n"), strict=True), "UTC", 10_000
        )
        with pytest.raises(StateValueError, match=rf"no 'N'.*strict_output=False.*key \({wrong},\)"):
            call(key_caller, groups)
        assert sum(map(len, call(make_caller(function), groups))) == 25 * 20 + 25


@pytest.mark.parametrize("labels", [[0, 1], [("k", ""), ("n", "")]], ids=["no names", "tuples"])
def test_the_error_of_a_frame_without_column_names_names_its_key(labels: list[Any]) -> None:
    """Spark joins it with a frame that has the output's names, so that all of its values would be NULL."""

    def function(key: tuple[Any, ...], pdfs: Iterable[pd.DataFrame], state: KeyState) -> Iterator[pd.DataFrame]:
        frame = pd.DataFrame([[key[0], 1]])
        frame.columns = pd.Index(labels)
        yield frame

    key_caller = KeyCaller(function, SCHEMA, STATE, ["k", "v"], OutputColumns(("k", "n"), strict=True), "UTC", 9)
    with pytest.raises(StateValueError, match=r"the output schema has k, n and no .*strict_output=False.*key \(1,\)"):
        call(key_caller, make_groups([1], [0]))
    assert len(call(make_caller(function), make_groups([1], [0]))) == 1


@pytest.mark.parametrize("value", [{"n": 1}, "h", b"h", {5}, frozenset({5})], ids=repr)
def test_update_refuses_a_value_that_is_not_a_sequence_of_values(value: Any) -> None:
    """Spark's `GroupState` would store the column name, the letter, the number of the byte or the set's item."""
    state = KeyState((1,), Clock(0, 0, "NoTimeout", False, False, STATE))
    with pytest.raises(StateValueError, match="the state has the columns n: give a tuple with one value for each"):
        state.update(value)
    assert state.get == (1,), "the previous state stays"


LONG = pd.Series(["a\nb"] * 50)
LINES: list[Any] = [LONG, [(1, 2, LONG)], [(1, "x" * 5_000, 3)]]


@pytest.mark.parametrize("result", LINES, ids=["items", "a row", "a long row"])
def test_a_wrong_output_is_shortened_in_the_first_line_of_the_error(result: Any) -> None:
    with pytest.raises(ResultTypeError) as raised:
        call(make_caller(lambda key, pdfs, state: [result]), make_groups([41], [0]))
    first, *_ = str(raised.value).split("\n")
    assert "(key (41,), bucket 3, batch 7)" in first
    assert len(first) < 500


def test_a_wrong_state_is_shortened_in_the_one_line_of_the_error() -> None:
    state = KeyState((1,), Clock(0, 0, "NoTimeout", False, False, STATE))
    for value in ((1, LONG), ("x" * 5_000, 2)):
        with pytest.raises(StateValueError, match="give a tuple with one value for each") as raised:
            state.update(value)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 500
