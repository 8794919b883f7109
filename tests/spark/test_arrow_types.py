"""Functions over Arrow tables and plain rows get and keep values of every type, on real Spark."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from api_jobs import ApiJob
from jobs import CLASSIC, ddl, keyed
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from spark_state_ext import StateBatch
from tests.helpers.soak import whole

pytestmark = pytest.mark.spark


UTC = dt.timezone.utc
POINT = pa.struct([("x", pa.int32()), ("tags", pa.list_(pa.string()))])
DECIMAL = decimal.Decimal("-12345678901234567890.123456789012345678")
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "a": (pa.int8(), [1, None, -128]),
    "b": (pa.int16(), [1, None, 2**15 - 1]),
    "c": (pa.int32(), [1, None, -(2**31)]),
    "d": (pa.int64(), [2**53 + 1, None, -(2**63)]),
    "e": (pa.float32(), [1.5, None, float("-inf")]),
    "f": (pa.float64(), [0.1, None, 5e-324]),
    "g": (pa.string(), ["é\x00\U0001f600", None, ""]),
    "h": (pa.binary(), [b"\x00\xff", None, b""]),
    "i": (pa.bool_(), [True, None, False]),
    "j": (pa.decimal128(38, 18), [DECIMAL, None, -DECIMAL]),
    "k": (pa.date32(), [dt.date(2020, 2, 29), None, dt.date(9999, 12, 31)]),
    "l": (
        pa.timestamp("us", "UTC"),
        [dt.datetime(2024, 7, 1, 0, 0, 0, 1, UTC), None, dt.datetime(1905, 2, 3, tzinfo=UTC)],
    ),
    "m": (pa.timestamp("us"), [dt.datetime(2024, 3, 10, 2, 30), None, dt.datetime(1600, 1, 1)]),  # noqa: DTZ001
    "n": (pa.list_(pa.int64()), [[1, None, 2**60], None, []]),
    "o": (POINT, [{"x": 1, "tags": ["a", None]}, None, {"x": None, "tags": None}]),
    "p": (pa.list_(POINT), [[{"x": 1, "tags": []}, None], None, []]),
}
MAPS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "q": (pa.map_(pa.string(), pa.int64()), [[("k", 2**53 + 1), ("none", None)], None, []]),
    "r": (pa.map_(pa.int32(), pa.list_(pa.string())), [[(1, ["a"])], None, [(2, None)]]),
}
TYPED = pa.schema([("id", pa.int64()), *((name, kind) for name, (kind, _) in {**TYPES, **MAPS}.items())])


def typed_rows() -> Any:
    columns = [pa.array(values, kind) for kind, values in {**TYPES, **MAPS}.values()]
    return pa.table([pa.array([0, 1, 2], pa.int64()), *columns], schema=TYPED)


def store_rows(batch: StateBatch) -> Any:
    """Store the rows in the state, and return the previous state; keys, rows and state must agree."""
    for name in TYPES:
        assert batch.keys[name].type == batch.rows[name].type
        assert batch.keys[name].combine_chunks().equals(batch.rows[name].combine_chunks())
    assert batch.rows.schema.field("l").type == pa.timestamp("us", "UTC")
    names = [f"s_{name}" for name in batch.rows.column_names]
    out = batch.state if batch.exists.true_count else batch.rows.rename_columns(names)
    if batch.exists.true_count:
        assert batch.state.rename_columns(batch.rows.column_names).cast(batch.rows.schema).equals(batch.rows)
    batch.update(batch.rows.rename_columns(names))
    return out.rename_columns(batch.rows.column_names)


def store_plain_rows(key: Any, rows: list[Any], state: GroupState) -> Iterator[tuple[Any, ...]]:
    (row,) = rows
    assert tuple(key) == tuple(row)[1 : 1 + len(TYPES)]
    before = state.getOption
    assert before is None or before == tuple(row)
    yield before or row
    state.update(tuple(row))


ZONE = {"spark.sql.session.timeZone": "America/New_York"}
LARGE = {"spark.sql.execution.arrow.useLargeVarTypes": "true"}


@CLASSIC
@pytest.mark.parametrize(
    ("api", "conf"),
    whole([("arrow", ZONE)], [("rows", ZONE), ("arrow", LARGE)]),
    ids=whole(["arrow"], ["rows", "large"]),
)
def test_values_of_every_type_come_back_from_keys_rows_and_state(
    session: Any, api: str, conf: dict[str, str], tmp_path: Path
) -> None:
    """Keys, rows and state have the same values in the next batch and after a restart."""
    function: Callable[..., Any] = store_rows if api == "arrow" else store_plain_rows
    job = ApiJob(session, "arrow", tmp_path, function, ddl(TYPED), api=api, schema=TYPED, keys=list(TYPES), conf=conf)
    job.state = ddl(pa.schema([field.with_name(f"s_{field.name}") for field in TYPED]))
    batch = typed_rows()
    rows = job.run(batch, batch) | job.run(batch)
    expected = sorted((tuple(row.values()) for row in batch.to_pylist()), key=repr)
    assert rows == {0: expected, 1: expected, 2: expected}


@CLASSIC
def test_output_and_state_may_have_not_null_columns(session: Any, tmp_path: Path) -> None:
    """Fields inside lists and structs are not nullable either."""
    inner = StructType([StructField("x", LongType(), False), StructField("name", StringType(), False)])
    output = StructType(
        [
            StructField("key", StringType(), False),
            StructField("list", ArrayType(LongType(), False), False),
            StructField("struct", inner, False),
        ]
    )
    state = StructType([StructField("n", LongType(), False), StructField("last", inner, False)])

    def function(batch: StateBatch) -> Any:
        n = pc.add(pc.fill_null(batch.state["n"], 0), batch.counts)
        last = pa.array([{"name": key, "x": at} for at, key in enumerate(batch.keys["key"].to_pylist())])
        batch.update({"n": n, "last": last})
        return {"key": batch.keys["key"], "list": [[count] for count in n.to_pylist()], "struct": last}

    job = ApiJob(session, "arrow", tmp_path, function, output, state=state)
    rows = job.run(keyed("a"), keyed("a", "a"))
    assert rows == {0: [("a", [1], {"x": 0, "name": "a"})], 1: [("a", [3], {"x": 0, "name": "a"})]}
