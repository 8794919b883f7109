"""Missing values of pandas and NumPy in results of functions become NULL, never text, in every API."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.state import GroupState

from spark_state_ext import StateBatch
from spark_state_ext.errors import StateValueError
from spark_state_ext.testing import run

NAN = float("nan")
ROWS = [{"k": "a", "name": "x"}, {"k": "a", "name": None}, {"k": None, "name": None}]
ZONE = "America/New_York"


def process_frames(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Any:
    (pdf,) = pdfs
    name = pdf["name"].iloc[-1]  # None with pandas 2, NaN with pandas 3
    seen = repr(state.getOption)
    state.update((name, [name], {"k": name}, key[0]))
    return [(key[0], name, seen)]


def process_rows(key: Any, rows: list[Any], state: GroupState) -> Any:
    seen = repr(state.getOption)
    state.update((NAN, [pd.NA], {"k": pd.NaT}, key.k))
    yield key.k, np.datetime64("NaT"), seen


def process_tables(batch: StateBatch) -> dict[str, Any]:
    count = len(batch)
    seen = [repr(None if name is None else ()) for name in batch.state["key"].to_pylist()]
    batch.update(
        {"name": [NAN] * count, "names": [["x", NAN]] * count, "by": [None] * count, "key": pd.Series(batch.keys["k"])}
    )
    return {"k": pd.Series(batch.keys["k"]), "name": np.full(count, NAN), "seen": seen}


@pytest.mark.parametrize(
    ("api", "function"), [("pandas", process_frames), ("rows", process_rows), ("arrow", process_tables)]
)
def test_missing_text_is_null_in_state_output_and_keys(api: Any, function: Any) -> None:
    state = "name string, names array<string>, by map<string, string>, key string"
    done = run(function, [ROWS, ROWS], "k", "k string, name string, seen string", state, api=api)
    assert {(row["k"], row["name"]) for row in done.output.to_pylist()} == {("a", None), (None, None)}
    second = {row["k"]: row["seen"] for row in done.outputs[1].to_pylist()}
    if api != "arrow":
        assert second == {key: repr((None, [None], {"k": None}, key)) for key in ("a", None)}
    stored = {row["k"]: row for row in done.state.to_pylist()}
    assert set(stored) == {"a", None}
    for key, row in stored.items():
        assert row["name"] is None
        assert row["names"][-1] is None
        assert row["key"] == key


# Type in pandas, values, Spark's type, stored values.
WHEN = dt.datetime(2024, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001  # in the session's time zone
IN_UTC = (WHEN + dt.timedelta(hours=5)).replace(tzinfo=dt.timezone.utc)
ARROW = pd.ArrowDtype
TYPES: list[tuple[Any, list[Any], str, list[Any]]] = [
    ("Int64", [2**60 + 1, pd.NA], "bigint", [2**60 + 1, None]),
    ("boolean", [True, pd.NA], "boolean", [True, None]),
    ("Float64", [1.5, pd.NA], "double", [1.5, None]),
    ("string", ["x", pd.NA], "string", ["x", None]),
    (pd.StringDtype("pyarrow"), ["x", pd.NA], "string", ["x", None]),
    ("category", ["x", None], "string", ["x", None]),
    ("category", [7, None], "bigint", [7, None]),
    (ARROW(pa.string()), ["x", None], "string", ["x", None]),
    (ARROW(pa.int64()), [2**60 + 1, None], "bigint", [2**60 + 1, None]),
    (ARROW(pa.float64()), [1.5, None], "double", [1.5, None]),
    (ARROW(pa.bool_()), [True, None], "boolean", [True, None]),
    (ARROW(pa.binary()), [b"x", None], "binary", [b"x", None]),
    (ARROW(pa.date32()), [dt.date(2024, 1, 2), None], "date", [dt.date(2024, 1, 2), None]),
    (ARROW(pa.decimal128(5, 2)), [decimal.Decimal("1.25"), None], "decimal(5,2)", [decimal.Decimal("1.25"), None]),
    (ARROW(pa.timestamp("us")), [WHEN, None], "timestamp", [IN_UTC, None]),
    (ARROW(pa.timestamp("ns")), [WHEN, None], "timestamp", [IN_UTC, None]),
    (ARROW(pa.timestamp("us", "UTC")), [IN_UTC, None], "timestamp", [IN_UTC, None]),
    (ARROW(pa.timestamp("us")), [WHEN, None], "timestamp_ntz", [WHEN, None]),
    (ARROW(pa.list_(pa.string())), [["x", None], None], "array<string>", [["x", None], None]),
    (ARROW(pa.map_(pa.string(), pa.int64())), [[("x", 1)], None], "map<string, bigint>", [[("x", 1)], None]),
    (ARROW(pa.struct([("x", pa.int64())])), [{"x": 1}, None], "struct<x: bigint>", [{"x": 1}, None]),
]


@pytest.mark.parametrize("kind", [ARROW(pa.timestamp("us")), ARROW(pa.timestamp("us", "UTC"))], ids=str)
@pytest.mark.parametrize("rows", [3, 30])
def test_values_stay_in_their_rows_for_any_index_labels(kind: Any, rows: int) -> None:
    """A filtered, sorted or labelled frame has other index labels than 0, 1, 2."""
    times = [WHEN + dt.timedelta(days=day) for day in range(rows)]
    frame = pd.DataFrame({"n": range(rows), "at": pd.Series(times[::-1], dtype=ARROW(pa.timestamp("us"))).astype(kind)})
    frames = [frame.tail(2), frame[frame.n % 2 == 1], frame.sort_values("at"), frame.set_axis(["x"] * rows)]

    def yield_frames(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield from frames

    done = run(
        yield_frames,
        [[{"k": 1}]],
        "k",
        "n long, at timestamp",
        "n long",
        timezone=ZONE if kind.pyarrow_dtype.tz is None else "UTC",
    )
    ahead = dt.timedelta(hours=5 if kind.pyarrow_dtype.tz is None else 0)
    expected = [(n, times[rows - 1 - n]) for part in frames for n in part.n]
    values = zip(done.output["n"].to_pylist(), done.output["at"].to_pylist(), strict=True)
    assert [(n, at.replace(tzinfo=None) - ahead) for n, at in values] == expected


def test_nested_maps_in_frames_with_arrow_types_are_stored() -> None:
    kind = pa.struct([("m", pa.list_(pa.map_(pa.string(), pa.int64())))])
    frame = pd.DataFrame({"v": pd.Series([{"m": [[("x", 1)], None]}, None], dtype=ARROW(kind))})

    def yield_frames(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        yield frame

    done = run(yield_frames, [[{"k": 1}]], "k", "v struct<m: array<map<string, bigint>>>", "n long")
    assert done.output["v"].to_pylist() == [{"m": [[("x", 1)], None]}, None]


@pytest.mark.parametrize("rows", [1, 5])
def test_frames_of_all_types_work_as_output_state_and_input(rows: int) -> None:
    """One frame has all types: a small one, one large enough to be sent as a whole, and an input batch."""
    columns_of_frame = {f"c{at}": pd.Series(values * rows, dtype=kind) for at, (kind, values, *_) in enumerate(TYPES)}
    schema = ", ".join(f"c{at} {spark}" for at, (_, _, spark, _) in enumerate(TYPES))
    stored = {f"c{at}": values * rows for at, (*_, values) in enumerate(TYPES)}

    def yield_frames(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        frame = pd.DataFrame(columns_of_frame)
        state.update(tuple(frame.iloc[-1]))
        yield frame

    done = run(yield_frames, [[{"k": 1}]], "k", schema, schema, timezone=ZONE)
    assert done.output.to_pydict() == stored
    (state,) = done.state.to_pylist()
    assert [state[name] for name in columns_of_frame] == [None] * len(TYPES)

    def pass_on(batch: StateBatch) -> pa.Table:
        return batch.rows.drop_columns(["k"])

    # Arrow tables have no session time zone: their times without a zone are in UTC.
    frame = pd.DataFrame({"k": 1, **columns_of_frame}).drop(
        columns=[f"c{at}" for at, kind in enumerate(TYPES) if kind[2] == "timestamp"]
    )
    columns = {name: values for name, values in stored.items() if name in frame.columns}
    schema = ", ".join(f"c{at} {kind[2]}" for at, kind in enumerate(TYPES) if f"c{at}" in columns)
    passed = run(pass_on, [frame], "k", schema, "n bigint", api="arrow", input_schema=f"k bigint, {schema}")
    assert passed.output.to_pydict() == columns


class _Thing:
    pass


NO_TEXT = [dt.date(2024, 1, 1), pd.Timestamp("2024-01-01"), pd.Timedelta(1, "s"), [1], {"a": 1}, _Thing(), b"\xff"]


@pytest.mark.parametrize("form", ["row", "small frame", "large frame"])
def test_values_that_are_not_text_are_refused_in_a_string_column(form: str) -> None:
    for value in NO_TEXT:

        def yield_frames(key: Any, pdfs: Any, state: GroupState, value: Any = value) -> Any:
            returned = value if key[0] == 3 else "x"
            if form == "row":
                return [(key[0], returned)]
            return [pd.DataFrame({"k": key[0], "name": pd.Series([returned] * (1 if form == "small frame" else 9))})]

        with pytest.raises(StateValueError, match=r"output column 'name' of type string cannot hold .* \(key \(3,\)"):
            run(yield_frames, [[{"k": k} for k in (1, 3, 5)]], "k", "k bigint, name string", "n bigint")


def test_missing_values_in_object_columns_become_null() -> None:
    missing = [pd.NA, pd.NaT, NAN, np.datetime64("NaT"), decimal.Decimal("NaN"), None]

    def yield_frames(key: Any, pdfs: Any, state: GroupState) -> Any:
        values = pd.Series(["x", *missing], dtype=object)
        return [pd.DataFrame({"k": key[0], "name": values, "names": [["x", *missing[:3]]] * len(values)})]

    output = run(yield_frames, [[{"k": 1}]], "k", "k bigint, name string, names array<string>", "n bigint").output
    assert output.column("name").to_pylist() == ["x"] + [None] * len(missing)
    assert set(map(tuple, output.column("names").to_pylist())) == {("x", None, None, None)}
    with pytest.raises(StateValueError, match=r"column 'names' of type list.* cannot hold .*date32"):
        run(
            lambda *_: [(1, "x", [dt.date(2024, 1, 1)])],
            [[{"k": 1}]],
            "k",
            "k bigint, name string, names array<string>",
            "n bigint",
        )
