"""Every type that Spark allows for keys and state, over batches and a restart, on Spark's operator and on ours."""

# ruff: noqa: DTZ001  # Spark returns and accepts naive datetimes
from __future__ import annotations

import datetime as dt
import decimal
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from jobs import CLASSIC, KEYED, SPARK, Job, keyed, table
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import Row

pytestmark = pytest.mark.spark

UTC = dt.timezone.utc
DECIMAL = decimal.Decimal
OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0123))[0]
TINY_NAN = struct.unpack("<f", struct.pack("<I", 0x7FC0_0123))[0]
POINT = pa.struct([("x", pa.int32()), ("y", pa.string())])

# For each key column: its type, and lists of values that are the same key. While another column varies, a column has the first
# value of its first list.
KEYS: dict[str, dict[str, tuple[Any, list[list[Any]]]]] = {
    "flat": {
        "a": (pa.int8(), [[1, 1], [-128], [127], [None, None]]),
        "b": (pa.int16(), [[1], [-(2**15)], [2**15 - 1], [None]]),
        "c": (pa.int32(), [[1], [-(2**31)], [2**31 - 1], [None]]),
        "d": (pa.int64(), [[1], [-(2**63)], [2**63 - 1], [2**53], [2**53 + 1], [None]]),
        "e": (pa.float32(), [[0.0, -0.0], [1.5], [float("nan"), TINY_NAN], [float("-inf")], [None, None]]),
        "f": (pa.float64(), [[0.0, -0.0], [0.1], [float("nan"), OTHER_NAN], [float("inf")], [5e-324], [None]]),
        "g": (pa.string(), [["a", "a"], [""], ["A"], ["é"], ["e\u0301"], ["nan"], ["\U0001f600\x00"], [None]]),
        "h": (pa.binary(), [[b"a", b"a"], [b""], [b"\x00\xff"], [None, None]]),
        "i": (pa.bool_(), [[True, True], [False], [None]]),
        "j": (pa.decimal128(38, 18), [[DECIMAL("1.5"), DECIMAL("1.50")], [DECIMAL("-12345678901234567890.1")], [None]]),
        "k": (pa.decimal128(9, 0), [[DECIMAL(1)], [DECIMAL(-999999999)], [None]]),
        "l": (pa.date32(), [[dt.date(2020, 2, 29)] * 2, [dt.date(1969, 12, 31)], [dt.date(9999, 12, 31)], [None]]),
        "m": (
            pa.timestamp("us", "UTC"),
            [[dt.datetime(2020, 1, 1, 0, 0, 0, 1, UTC)] * 2, [dt.datetime(1905, 2, 3, tzinfo=UTC)], [None, None]],
        ),
        "n": (pa.timestamp("us"), [[dt.datetime(2020, 1, 1)], [dt.datetime(1999, 12, 31, 23, 59, 59, 999999)], [None]]),
    },
    "nested": {
        "a": (pa.list_(pa.int32()), [[[1, 2], [1, 2]], [[2, 1]], [[]], [[None, 1]], [None, None]]),
        "b": (POINT, [[{"x": 1, "y": "a"}] * 2, [{"x": None, "y": "a"}], [{"x": None, "y": None}] * 2, [None]]),
        "c": (pa.list_(POINT), [[[{"x": 1, "y": "a"}]], [[{"x": 1, "y": None}]], [[None]], [None]]),
        "d": (pa.list_(pa.float64()), [[[0.0], [-0.0]], [[float("nan")], [OTHER_NAN]], [[None]]]),
    },
}


def make_rows(columns: dict[str, tuple[Any, list[list[Any]]]]) -> tuple[Any, dict[int, list[int]]]:
    """Return a batch of rows that differ from the first row in one column, and the ids of each group by its first id."""
    base = [classes[0][0] for _, classes in columns.values()]
    arrays: list[list[Any]] = [[] for _ in columns]
    groups: dict[int, list[int]] = {}
    number = 0
    for index, (_, classes) in enumerate(columns.values()):
        for list_index, values in enumerate(classes):
            group = 0 if list_index == 0 and groups else number
            for value in values:
                for column, array in enumerate(arrays):
                    array.append(value if column == index else base[column])
                groups.setdefault(group, []).append(number)
                number += 1
    data = {name: pa.array(array, kind) for (name, (kind, _)), array in zip(columns.items(), arrays, strict=True)}
    return pa.table({**data, "id": pa.array(range(number), pa.int32())}), groups


@CLASSIC
@pytest.mark.parametrize("kind", KEYS)
def test_rows_with_equal_keys_of_every_type_share_state_over_batches_restarts_and_timeouts(
    session: Any, operator: str, kind: str, tmp_path: Path
) -> None:
    """Several values may be the same key, such as 0.0 and -0.0."""

    def collect_ids(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        first, n = state.getOption or (-1, 0)
        if state.hasTimedOut:
            text = f"{first:3} timed out with {n}"
            state.remove()
        else:
            ids = sorted(int(i) for pdf in pdfs for i in pdf["id"])
            state.update((ids[0], n + len(ids)))
            state.setTimeoutDuration(1)
            text = f"{ids[0]:3} {ids} {first} {n}"
        yield pd.DataFrame({"text": [text]})

    batch, groups = make_rows(KEYS[kind])
    job = Job(
        session, operator, tmp_path, collect_ids, state="first int, n int", keys=list(KEYS[kind]), schema=batch.schema
    )
    job.timeout = GroupStateTimeout.ProcessingTimeTimeout
    job.conf = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    rows = job.run(batch, batch) | job.run(batch) | job.run(batch.slice(0, 1))
    assert rows == {
        **{
            i: sorted((f"{first:3} {ids} {first if i else -1} {i * len(ids)}",) for first, ids in groups.items())
            for i in range(3)
        },
        3: sorted(
            [(f"  0 [0] 0 {3 * len(groups[0])}",)]
            + [(f"{first:3} timed out with {3 * len(ids)}",) for first, ids in groups.items() if first]
        ),
    }


FLAT_STATE = (
    "a tinyint, b smallint, c int, d bigint, e float, f double, g string, h binary, i boolean, j decimal(38, 18), k date, "
    "l timestamp, m timestamp_ntz"
)
FLAT_VALUES: dict[str, tuple[Any, ...]] = {
    "usual": (
        *(1, 2, 3, 4, 0.5, 0.1, "text", b"bytes", True, DECIMAL("1.500000000000000000"), dt.date(2020, 2, 29)),
        *(dt.datetime(2020, 1, 1, 5, 0, 0, 1), dt.datetime(2020, 1, 1, 5, 0, 0, 2)),
    ),
    "lowest": (
        *(-128, -(2**15), -(2**31), -(2**63), float("-inf"), -1.7976931348623157e308, "", b"", False),
        *(DECIMAL("-12345678901234567890.123456789012345678"), dt.date(1, 1, 1)),
        *(dt.datetime(1905, 2, 3, 4, 5, 6, 7), dt.datetime(1600, 1, 1)),
    ),
    "highest": (
        *(127, 2**15 - 1, 2**31 - 1, 2**63 - 1, float("inf"), 5e-324, "\U0001f600\x00é", b"\x00\xff", True),
        *(DECIMAL("99999999999999999999.999999999999999999"), dt.date(9999, 12, 31)),
        *(dt.datetime(2262, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)),
    ),
    "nulls": (None,) * 13,
    "zeros": (0, 0, 0, 0, -0.0, -0.0, "0", b"0", False, DECIMAL("0E-18"), *[dt.date(1970, 1, 1)], None, None),
    "nans": (None, None, None, 2**53 + 1, float("nan"), float("nan"), "nan", b"nan", *[None] * 5),
}
NESTED_STATE = (
    "a array<int>, b array<array<string>>, c struct<x: int, y: struct<z: string>>, d map<string, bigint>, "
    "e map<int, array<double>>, f array<struct<n: int, at: date>>, g struct<m: map<string, string>>"
)
NESTED_VALUES: dict[str, tuple[Any, ...]] = {
    "usual": (
        [1, None, 3],
        [["a"], []],
        Row(x=1, y=Row(z="deep")),
        {"one": 1, "none": None},
        {1: [0.5, None], 2: []},
        [Row(n=1, at=dt.date(2020, 1, 1)), Row(n=None, at=None)],
        Row(m={"k": "v"}),
    ),
    "empty": ([], [], Row(x=None, y=None), {}, {}, [], Row(m={})),
    "nulls": (None,) * 7,
    "inside": ([None], [None, [None]], Row(x=2, y=Row(z=None)), {"k": 2**62}, {0: None}, [None], Row(m=None)),
}


@CLASSIC
@pytest.mark.parametrize(
    ("schema", "values"), [(FLAT_STATE, FLAT_VALUES), (NESTED_STATE, NESTED_VALUES)], ids=["flat", "nested"]
)
def test_state_of_every_type_is_read_back_with_its_value_and_type(
    session: Any, operator: str, schema: str, values: dict[str, tuple[Any, ...]], tmp_path: Path
) -> None:
    """The next batch and the next start of the query get what a batch has stored."""
    if operator == "spark" and schema is NESTED_STATE and SPARK >= (4, 2):
        pytest.skip("Spark 4.2 and 4.3 cannot read back the schema of nested state in their own operator")

    def keep(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        stored = state.getOption
        if stored is None:
            state.update(values[key[0]])
        elif key[0] == "usual":
            state.update(stored)
        if stored is not None:
            # Before Spark 4.1, binary state is always a bytearray and never bytes.
            assert not any(isinstance(value, bytearray if SPARK >= (4, 1) else bytes) for value in stored)
            stored = tuple(bytes(value) if isinstance(value, bytearray) else value for value in stored)
        yield pd.DataFrame({"text": [f"{key[0]}: {stored!r}"]})

    job = Job(session, operator, tmp_path, keep, state=schema)
    batch = keyed(*values)
    rows = job.run(batch, batch) | job.run(batch)
    assert rows[0] == sorted([(f"{name}: None",) for name in values], key=repr)
    expected = sorted([(f"{name}: {value!r}",) for name, value in values.items()], key=repr)
    assert rows[1] == expected
    assert rows[2] == expected


AT = dt.datetime(2024, 1, 2, 3, 4, 5, 6)
OTHERS = (5, True, False, 0.1, 1e7, -1.25e-5, 12345678.9, 0.001, float("nan"), float("-inf"), DECIMAL("1.50"), 2**70)


@CLASSIC
def test_other_values_in_a_string_column_have_the_text_of_the_jvm(session: Any, operator: str, tmp_path: Path) -> None:
    """NaN becomes text in Spark's operator and NULL in ours, whose output frames may also have columns of Arrow types."""
    text, times, integer = pa.string(), pa.timestamp("us"), pa.int64()

    def keep(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        if state.exists:
            columns = {"text": state.get, "at": [AT, None] * 6, "n": [2**60 + 1, None] * 6}
            arrow_dtypes = dict(zip(columns, map(pd.ArrowDtype, (text, times, integer)), strict=True))
            dtypes = {"text": object, "at": object, "n": object} if operator == "spark" else arrow_dtypes
            yield pd.DataFrame({name: pd.Series(list(columns[name]), dtype=dtype) for name, dtype in dtypes.items()})
        else:
            state.update(OTHERS)

    state = ", ".join(f"c{index} string" for index in range(len(OTHERS)))
    job = Job(session, operator, tmp_path, keep, "text string, at timestamp_ntz, n bigint", state)
    rows = job.run(keyed("a"), keyed("a"))
    nan = "NaN" if operator == "spark" else None
    expected = ["5", "true", "false", "0.1", "1.0E7", "-1.25E-5", "1.23456789E7", "0.001", nan, "-Infinity", "1.50"]
    others = [(AT, 2**60 + 1), (None, None)] * 6
    texts = [*expected, str(2**70)]
    assert rows[1] == sorted([(text, *other) for text, other in zip(texts, others, strict=True)], key=repr)


@CLASSIC
def test_many_keys_keep_separate_state_also_with_values_of_a_megabyte(
    session: Any, operator: str, tmp_path: Path
) -> None:
    def keep(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        text, total = state.getOption or ("", 0)
        total += sum(int(pdf["value"].sum()) for pdf in pdfs)
        size = 1_000_000 if key[0] == "key 7" else int(key[0].split()[1])
        state.update(("x" * size, total))
        yield pd.DataFrame({"key": [key[0]], "size": [len(text)], "total": [total]})

    job = Job(session, operator, tmp_path, keep, "key string, size int, total bigint", "text string, total bigint")
    random = np.random.default_rng(5)
    batches = [
        table(KEYED, [(f"key {random.integers(300)}", int(random.integers(1000))) for _ in range(900)])
        for _ in range(3)
    ]
    rows = job.run(*batches[:2]) | job.run(batches[2])
    totals: dict[str, int] = {}
    for number, batch in enumerate(batches):
        before = dict(totals)
        for key, value in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            totals[key] = totals.get(key, 0) + value
        changed_keys = sorted(set(batch.column(0).to_pylist()))
        sizes = {key: 1_000_000 if key == "key 7" else int(key.split()[1]) for key in changed_keys}
        expected = [(key, sizes[key] if key in before else 0, totals[key]) for key in changed_keys]
        assert rows[number] == sorted(expected, key=repr)
