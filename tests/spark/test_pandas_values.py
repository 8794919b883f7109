"""`pandas_values` compared with Spark's own worker: the same rows through a real `applyInPandasWithState`.

A recording function runs in Spark's operator and describes its arguments, down to the types of the elements of arrays. The
driver captures the same rows as Arrow through `mapInArrow`, which is how the package receives them, converts them with our
functions and describes the result with the same code.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyspark
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from spark_state_ext.errors import UnsupportedTypeError
from spark_state_ext.spark.callers.pandas_values import (
    column_to_series,
    compute_null_flags,
    convert_keys,
    dtype_depends_on_nulls,
    make_empty_frame,
    table_to_frame,
)
from tests.helpers.soak import whole

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSION = (int(pyspark.__version__.split(".")[0]), int(pyspark.__version__.split(".")[1]))
UTC = datetime.timezone.utc


def find_zones() -> list[str]:
    extra_zones = ["UTC"]
    if VERSION >= (4, 2):
        try:
            pc.local_timestamp(pa.array([0], pa.timestamp("us", tz="+05:30")))
            extra_zones.append("+05:30")
        except pa.ArrowInvalid:
            pass  # this pyarrow does not support offsets, so Spark's worker would fail
    return whole(["America/New_York"], extra_zones)


ZONES = find_zones()


# -- the types and their values, in SQL -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A type and some of its values."""

    name: str
    type: str
    values: list[str]
    inner: list[str] = field(default_factory=list)
    """Values with a NULL inside."""
    key: bool = True
    since: tuple[int, int] = (3, 5)


def array(*values: str) -> str:
    return f"array({', '.join(values)})"


def struct(**values: str) -> str:
    return f"named_struct({', '.join(f'{name!r}, {value}' for name, value in values.items())})"


def mapping(*pairs: str) -> str:
    return f"map({', '.join(pairs)})"


STAMPS = [
    "TIMESTAMP '2021-11-07 05:30:00Z'",  # 01:30 in New York, and
    "TIMESTAMP '2021-11-07 06:30:00Z'",  # 01:30 again
    "TIMESTAMP '2021-03-14 06:59:59.999999Z'",  # the last moment before a gap in New York, and
    "TIMESTAMP '2021-03-14 07:00:00Z'",  # the first after it
    "TIMESTAMP '1905-02-03 04:05:06.789012Z'",
    "TIMESTAMP '1700-01-01 00:00:00Z'",  # local mean time
    "TIMESTAMP '2099-07-01 12:00:00Z'",  # later than the last transition that pytz has
]
NAIVE = [
    "TIMESTAMP_NTZ '2021-03-14 02:30:00'",
    "TIMESTAMP_NTZ '2021-11-07 01:30:00.000001'",
    "TIMESTAMP_NTZ '1905-02-03 04:05:06'",
    "TIMESTAMP_NTZ '2200-01-01 00:00:00'",
]
DAYS = "INTERVAL '-9' DAY"
BIG = "9007199254740993"  # 2**53 + 1, which a float cannot hold
MIDDLE = "16777217"  # 2**24 + 1, which a 32-bit float cannot hold
VARIANT = "parse_json('{\"a\": [1, null]}')"

CASES = [
    Case("byte", "TINYINT", ["1", "-128", "127"]),
    Case("short", "SMALLINT", ["1", "-32768", "32767"]),
    Case("int", "INT", ["1", "-2147483648", MIDDLE]),
    Case("long", "BIGINT", [BIG, "-1", "0", "9223372036854775807"]),
    Case("float", "FLOAT", ["1.1", "'NaN'", "'-0.0'", "'0.0'", "'Infinity'", MIDDLE]),
    Case("double", "DOUBLE", ["0.1", "'NaN'", "'-0.0'", "'0.0'", "'-Infinity'", "1e300"]),
    Case("boolean", "BOOLEAN", ["true", "false"]),
    Case("decimal", "DECIMAL(38, 18)", ["1.10", "-12345678901234567890.123456789012345678", "0"]),
    Case("decimal_whole", "DECIMAL(10, 0)", ["1", "-9999999999"]),
    Case("string", "STRING", ["'a'", "''", "'NaN'", "'\u00fc\u20ac\U0001f600'"]),
    Case("binary", "BINARY", ["X'00FF'", "X''"]),
    Case("date", "DATE", ["'2021-03-14'", "'1969-12-31'", "'0001-01-01'", "'9999-12-31'"]),
    Case("timestamp", "TIMESTAMP", STAMPS),
    Case("timestamp_ntz", "TIMESTAMP_NTZ", NAIVE),
    Case("interval", "INTERVAL DAY TO SECOND", [DAYS, "INTERVAL '1 02:03:04.000005' DAY TO SECOND"]),
    Case("void", "VOID", ["NULL"]),
    Case("time", "TIME", ["'12:34:56.123456'", "'00:00:00'"], since=(4, 1)),
    Case("variant", "VARIANT", [VARIANT, "parse_json('2')"], key=False, since=(4, 0)),
    Case("array_int", "ARRAY<INT>", ["array(1, 2)", "array()"], ["array(16777217, NULL)", "array(NULL)"]),
    Case("array_long", "ARRAY<BIGINT>", [array(BIG), "array()"], [array(BIG, "NULL")]),
    Case("array_double", "ARRAY<DOUBLE>", ["array(0.1, '-0.0')", "array()"], ["array(0.1, NULL)"]),
    Case("array_boolean", "ARRAY<BOOLEAN>", ["array(true)", "array()"], ["array(true, NULL)"]),
    Case("array_string", "ARRAY<STRING>", ["array('a', '')", "array()"], ["array('a', NULL)"]),
    Case("array_decimal", "ARRAY<DECIMAL(5, 2)>", ["array(1.10)", "array()"], ["array(1.10, NULL)"]),
    Case("array_date", "ARRAY<DATE>", ["array('1969-12-31', '9999-12-31')"], ["array(NULL, '2000-01-01')"]),
    Case("array_timestamp", "ARRAY<TIMESTAMP>", [array(*STAMPS), "array()"], [array("NULL", STAMPS[1])]),
    Case("array_ntz", "ARRAY<TIMESTAMP_NTZ>", [array(*NAIVE), "array()"], [array(NAIVE[0], "NULL")]),
    Case("array_interval", "ARRAY<INTERVAL DAY TO SECOND>", [array(DAYS)], [array(DAYS, "NULL")]),
    Case(
        "array_array_int",
        "ARRAY<ARRAY<INT>>",
        ["array(array(1, 2), array(3, 4))", "array(array())", "array()"],
        ["array(array(1, NULL), NULL)"],
    ),
    Case(
        "array_array_timestamp",
        "ARRAY<ARRAY<TIMESTAMP>>",
        [array(array(STAMPS[0]), array(STAMPS[1])), "array(array())", "array()"],  # ragged arrays fail in Spark
        [array(array(STAMPS[0], "NULL"))],
    ),
    Case(
        "array_struct",
        "ARRAY<STRUCT<a: INT, t: TIMESTAMP>>",
        [array(struct(a="1", t=STAMPS[0])), "array()"],
        [array(struct(a="NULL", t=STAMPS[1]), struct(a="2", t="NULL"), "NULL")],
    ),
    Case(
        "array_map",
        "ARRAY<MAP<STRING, INT>>",
        ["array(map('a', 1), map())", "array()"],
        ["array(map('a', 1, 'b', NULL), NULL)"],
        key=False,
    ),
    Case(
        "struct",
        "STRUCT<i: INT, l: BIGINT, b: BOOLEAN, d: DOUBLE, s: STRING>",
        [struct(i="1", l=BIG, b="true", d="'-0.0'", s="'x'"), struct(i="2", l="3", b="false", d="1", s="''")],
        [
            struct(i="NULL", l=BIG, b="false", d="'NaN'", s="NULL"),
            struct(i="1", l="NULL", b="NULL", d="NULL", s="''"),
        ],
    ),
    Case(
        "struct_more",
        "STRUCT<t: TIMESTAMP, n: TIMESTAMP_NTZ, d: DATE, c: DECIMAL(5, 2), y: BINARY,"
        " a: ARRAY<TIMESTAMP>, s: STRUCT<a: INT>>",
        [struct(t=t, n=NAIVE[0], d="'1969-12-31'", c="1.10", y="X'00'", a=array(t), s=struct(a="1")) for t in STAMPS],
        [
            struct(t="NULL", n="NULL", d="NULL", c="NULL", y="NULL", a="NULL", s="NULL"),
            struct(t=STAMPS[0], n="NULL", d="NULL", c="0", y="NULL", a="array(NULL)", s=struct(a="NULL")),
        ],
    ),
    Case(
        "struct_variant",
        "STRUCT<v: VARIANT>",
        [struct(v=VARIANT)],
        [struct(v="NULL")],
        key=False,
        since=(4, 0),
    ),
    Case(
        "map_int",
        "MAP<STRING, INT>",
        ["map('a', 1, 'b', 2)", "map()"],
        ["map('a', 16777217, 'b', NULL)"],
        key=False,
    ),
    Case(
        "map_timestamp",
        "MAP<TIMESTAMP, ARRAY<TIMESTAMP_NTZ>>",
        [mapping(STAMPS[0], array(NAIVE[0]), STAMPS[1], "array()"), "map()"],
        [mapping(STAMPS[1], "NULL"), mapping(STAMPS[0], "array(NULL)")],
        key=False,
    ),
    Case(
        "map_struct",
        "MAP<INT, STRUCT<a: ARRAY<BIGINT>, m: MAP<STRING, BOOLEAN>>>",
        [mapping("1", struct(a="array(1)", m="map('x', true)")), "map()"],
        [
            mapping("1", struct(a="array(1, NULL)", m="map('x', NULL)"), "2", "NULL"),
            mapping("1", struct(a="NULL", m="NULL")),
        ],
        key=False,
    ),
]
CASES = [case for case in CASES if case.since <= VERSION]
KEYS = [case for case in CASES if case.key]
NAMES = ["i", "g", *(case.name for case in CASES)]
WIDTH = max(len(case.values) for case in CASES) + 1


def groups(case: Case) -> dict[str, list[str]]:
    """Return the values of one column in each group of rows."""
    inner = case.inner or case.values
    parts = {
        "full": case.values,
        "some NULL": ["NULL", *case.values],
        "all NULL": ["NULL"],
        "NULL inside": inner,
        "NULL inside some": [case.values[0], *inner],
        "NULL and NULL inside": ["NULL", *inner, case.values[0]],
    }
    return {name: list(itertools.islice(itertools.cycle(part), WIDTH)) for name, part in parts.items()}


GROUPS = list(groups(CASES[0]))


# -- both sides -------------------------------------------------------------------------------------------

Record = Callable[[Any, Any, Any], Iterator[pd.DataFrame]]


def make_functions() -> tuple[Callable[[Any], Any], Callable[[pd.DataFrame], Any], Record, Record]:
    """Make the describing functions; nested functions are pickled to Spark's workers by value."""

    def describe(value: Any) -> Any:
        import pandas as pd

        kind = f"{type(value).__module__}.{type(value).__name__}"
        if isinstance(value, np.ndarray):
            elements = [describe(element) for element in value]
            return [kind, str(value.dtype), list(value.shape), elements]
        if isinstance(value, (list, tuple)):
            return [kind, [describe(element) for element in value]]
        if isinstance(value, dict):
            return [kind, [[describe(k), describe(v)] for k, v in value.items()]]
        if isinstance(value, (pd.Timestamp, pd.Timedelta)) and value is not pd.NaT:
            return [kind, repr(value), str(value.asm8.dtype), str(value.asm8), getattr(value, "fold", 0)]
        if isinstance(value, (np.datetime64, np.timedelta64)):
            return [kind, str(value), str(value.dtype)]
        if kind == "pyspark.sql.types.VariantVal":
            return [kind, value.value.hex(), value.metadata.hex()]
        return [kind, repr(value)]

    def describe_frame(frame: pd.DataFrame) -> Any:
        # The order of a group's rows is undefined; `i` numbers them.
        order = frame["i"].argsort().tolist()
        series = [frame.iloc[:, c] for c in range(frame.shape[1])]
        return {
            "index": [repr(frame.index), str(frame.index.dtype), repr(frame.index.name)],
            "names": [repr(list(frame.columns)), type(frame.columns).__name__, str(frame.columns.dtype)],
            "rows": [int(i) for i in frame["i"].iloc[order]],
            "dtypes": [repr(s.dtype) for s in series],
            "columns": [[describe(s.iloc[row]) for row in order] for s in series],
        }

    def record(key: Any, pdfs: Any, state: Any) -> Iterator[pd.DataFrame]:
        import json

        import pandas as pd

        result = {"key": describe(key), "pdfs": type(pdfs).__name__, "frames": [*map(describe_frame, pdfs)]}
        yield pd.DataFrame({"record": [json.dumps(result)]})

    def record_timeout(key: Any, pdfs: Any, state: Any) -> Iterator[pd.DataFrame]:
        if state.hasTimedOut:
            state.remove()
            yield from record(key, pdfs, state)
        else:
            state.update((1,))
            state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 1)

    return describe, describe_frame, record, record_timeout


describe, describe_frame, record, record_timeout = make_functions()


def capture(rows: DataFrame) -> pa.Table:
    """Return rows as `mapInArrow` receives them."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield pa.RecordBatch.from_pydict({"batch": [sink.getvalue().to_pybytes()]})

    payloads = rows.coalesce(1).mapInArrow(write, "batch binary").collect()
    return pa.concat_tables([pa.ipc.open_stream(bytes(row["batch"])).read_all() for row in payloads])


@dataclass
class Both:
    """The same rows as we receive them, and as Spark's worker passed them to a function."""

    zone: str
    table: pa.Table
    by_group: dict[str, Any]
    """Spark's records of the groups that `groups` defines, by name."""
    by_row: dict[int, Any]
    """Spark's records of each row in a group of its own; its key has all columns that may be keys."""

    def rows(self, group: str) -> pa.Table:
        return self.table.filter(pc.equal(self.table.column("g"), group))

    def spark_column(self, group: str, name: str) -> tuple[str, list[Any]]:
        (frame,) = self.by_group[group]["frames"]
        index = NAMES.index(name)
        return frame["dtypes"][index], frame["columns"][index]


def make_rows(spark: SparkSession) -> DataFrame:
    columns = {case: groups(case) for case in CASES}
    rows: list[str] = []
    for group, j in itertools.product(GROUPS, range(WIDTH)):
        cells = [f"CAST({column[group][j]} AS {case.type})" for case, column in columns.items()]
        rows.append(f"({', '.join([str(len(rows)), repr(group), *cells])})")
    return spark.sql(f"SELECT * FROM VALUES {', '.join(rows)} AS rows({', '.join(NAMES)})")


def run_spark(
    spark: SparkSession, rows: DataFrame, keys: list[str], function: Record, timeout: str, folder: Path
) -> list[Any]:
    """Stream the rows through Spark's own operator in one batch, and return the records."""
    source = str(folder / "source")
    rows.select("i").coalesce(1).write.parquet(source)
    stream = spark.readStream.schema("i INT").parquet(source)
    if timeout == "EventTimeTimeout":
        stream = stream.withColumn("at", F.expr("TIMESTAMP '2020-01-01 00:00:00Z'")).withWatermark("at", "1 second")
    name = f"records_{uuid.uuid4().hex}"
    query = (
        stream.join(rows, "i")
        .groupBy(*keys)
        .applyInPandasWithState(function, "record STRING", "n INT", "update", timeout)
        .writeStream.format("memory")
        .queryName(name)
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
        return [json.loads(row["record"]) for row in spark.table(name).collect()]
    finally:
        query.stop()
        spark.catalog.dropTempView(name)


@contextmanager
def configured(spark: SparkSession, options: dict[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in options}
    for name, value in options.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)


def options_for(zone: str, group_size: int) -> dict[str, str]:
    # Spark sends several small groups in one Arrow batch, and pyarrow then chooses the types within a map by all rows of
    # the batch. We must match the types that a group has on its own, so that each group gets a batch.
    options = {"spark.sql.session.timeZone": zone, "spark.sql.execution.arrow.maxRecordsPerBatch": str(group_size)}
    if VERSION >= (4, 1):
        options["spark.sql.timeType.enabled"] = "true"
    return options


@pytest.fixture(scope="module", params=ZONES)
def both(spark: SparkSession, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("both")
    with configured(spark, options_for(request.param, WIDTH)):
        rows = make_rows(spark)
        table = capture(rows)
        by_group = run_spark(spark, rows, ["g"], record, "NoTimeout", folder / "group")
    with configured(spark, options_for(request.param, 1)):
        keys = ["i", *(case.name for case in KEYS)]
        by_row = run_spark(spark, rows, keys, record, "NoTimeout", folder / "row")
    names = dict(zip(table.column("i").to_pylist(), table.column("g").to_pylist(), strict=True))
    return Both(
        zone=request.param,
        table=table,
        by_group={names[row_record["frames"][0]["rows"][0]]: row_record for row_record in by_group},
        by_row={row_record["frames"][0]["rows"][0]: row_record for row_record in by_row},
    )


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_key = pytest.mark.parametrize("case", KEYS, ids=lambda case: case.name)


# -- compared with Spark ----------------------------------------------------------------------------------------


@pytest.mark.spark
def test_spark_calls_the_function_for_every_row_and_group(both: Both) -> None:
    assert sorted(both.by_group) == sorted(GROUPS)
    assert sorted(both.by_row) == list(range(both.table.num_rows))
    assert {group_record["pdfs"] for group_record in both.by_group.values()} == {"generator"}


@pytest.mark.spark
@every_case
def test_a_column_converts_to_the_same_series_as_in_spark(both: Both, case: Case) -> None:
    for group in GROUPS:
        series = column_to_series(both.rows(group).column(case.name), both.zone, VERSION)
        ours = (repr(series.dtype), [describe(series.iloc[i]) for i in range(len(series))])
        assert ours == both.spark_column(group, case.name)


@pytest.mark.spark
def test_the_rows_of_a_group_convert_to_the_same_frame_as_in_spark(both: Both) -> None:
    for group in GROUPS:
        frame = table_to_frame(both.rows(group), NAMES, both.zone, VERSION)
        assert [describe_frame(frame)] == both.by_group[group]["frames"]


@pytest.mark.spark
def test_a_single_row_converts_to_the_same_frame_as_in_spark(both: Both) -> None:
    for row, row_record in both.by_row.items():
        frame = table_to_frame(both.table.slice(row, 1), NAMES, both.zone, VERSION)
        assert [describe_frame(frame)] == row_record["frames"]


@pytest.mark.spark
@every_key
def test_keys_convert_to_the_same_values_as_in_spark(both: Both, case: Case) -> None:
    keys = convert_keys(both.table.column(case.name), both.zone, VERSION)
    index = 1 + KEYS.index(case)
    assert [describe(key) for key in keys] == [both.by_row[row]["key"][1][index] for row in range(len(keys))]


@pytest.mark.spark
@every_case
def test_groups_with_equal_null_flags_convert_together_as_they_do_alone(both: Both, case: Case) -> None:
    column = both.table.column(case.name)
    names = np.array(both.table.column("g").to_pylist())
    flags = compute_null_flags(column)
    classes: dict[tuple[bool, ...], list[str]] = {}
    for group in both.by_group:
        classes.setdefault(tuple(bool(flag[names == group].any()) for flag in flags), []).append(group)
    assert bool(flags) == dtype_depends_on_nulls(column.type)
    for members in classes.values():
        rows = np.flatnonzero(np.isin(names, members))
        series = column_to_series(column.take(pa.array(rows)), both.zone, VERSION)
        for group in members:
            part = series[names[rows] == group]
            ours = (repr(part.dtype), [describe(part.iloc[i]) for i in range(len(part))])
            assert ours == both.spark_column(group, case.name)


@pytest.mark.spark
@every_case
def test_dtype_depends_on_nulls_says_if_nulls_change_what_spark_passes(both: Both, case: Case) -> None:
    kind = both.table.schema.field(case.name).type
    full_dtype, some_null_dtype, all_null_dtype = (
        both.spark_column(group, case.name)[0] for group in ("full", "some NULL", "all NULL")
    )
    assert some_null_dtype == all_null_dtype
    if not pa.types.is_nested(kind):
        assert (full_dtype != some_null_dtype) == dtype_depends_on_nulls(kind)
    elif not dtype_depends_on_nulls(kind):
        value_with_nulls, value_without_nulls = (
            both.spark_column(g, case.name)[1][0] for g in ("NULL inside some", "full")
        )
        assert value_with_nulls == value_without_nulls


@pytest.mark.spark
def test_a_timeout_call_gets_the_same_key_and_empty_frame_as_in_spark(spark: SparkSession, tmp_path: Path) -> None:
    with configured(spark, options_for(ZONES[0], WIDTH)):
        rows = make_rows(spark)
        table = capture(rows)
        keys = ["i", *(case.name for case in KEYS)]
        records = run_spark(spark, rows, keys, record_timeout, "EventTimeTimeout", tmp_path)
    columns = [convert_keys(table.column(name), ZONES[0], VERSION) for name in keys]
    expected = [describe(key) for key in zip(*columns, strict=True)]
    assert sorted(json.dumps(timeout_record["key"]) for timeout_record in records) == sorted(map(json.dumps, expected))
    frame = describe_frame(make_empty_frame(["i", "at", *NAMES[1:]]))
    for timeout_record in records:
        assert timeout_record["pdfs"] == "list"
        assert timeout_record["frames"] == [frame]


@pytest.mark.spark
@pytest.mark.parametrize("type_", ["TIMESTAMP", "TIMESTAMP_NTZ"])
def test_a_timestamp_out_of_the_nanosecond_range_converts_or_fails_as_in_spark(
    spark: SparkSession, tmp_path: Path, type_: str
) -> None:
    rows = spark.sql(f"SELECT 0 AS i, CAST('9999-01-01 00:00:00' AS {type_}) AS at")
    with configured(spark, options_for("UTC", WIDTH)):
        column = capture(rows).column("at")
        try:
            value = describe(column_to_series(column, "UTC", VERSION).iloc[0])
        except (pa.ArrowInvalid, pd.errors.OutOfBoundsDatetime) as error:
            with pytest.raises(StreamingQueryException, match=re.escape(str(error))):
                run_spark(spark, rows, ["i"], record, "NoTimeout", tmp_path)
        else:
            (row_record,) = run_spark(spark, rows, ["i"], record, "NoTimeout", tmp_path)
            assert value == row_record["frames"][0]["columns"][1][0]


# -- without Spark -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "variant", "values"),
    [
        (pa.string(), pa.large_string(), ["a", None, "\u20ac"]),
        (pa.binary(), pa.large_binary(), [b"a", None]),
        (pa.list_(pa.string()), pa.list_(pa.large_string()), [["a", None], None, []]),
        (pa.list_(pa.int32()), pa.large_list(pa.int32()), [[1, None], None, []]),
        (
            pa.struct([("s", pa.string()), ("i", pa.int32())]),
            pa.struct([("s", pa.large_string()), ("i", pa.int32())]),
            [{"s": "x", "i": 1}, None],
        ),
    ],
    ids=str,
)
def test_large_variants_of_types_convert_to_the_same_values(
    plain: pa.DataType, variant: pa.DataType, values: list[Any]
) -> None:
    for rows in (values, values[:1], values[1:]):
        series, large_series = (column_to_series(pa.array(rows, kind), "UTC", VERSION) for kind in (plain, variant))
        assert series.dtype == large_series.dtype
        assert [describe(v) for v in series] == [describe(v) for v in large_series]
        keys, large_keys = (convert_keys(pa.array(rows, kind), "UTC", VERSION) for kind in (plain, variant))
        assert [describe(v) for v in keys] == [describe(v) for v in large_keys]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "-03:00"])
@pytest.mark.parametrize("shape", ["plain", "array", "struct", "map"])
def test_the_time_zone_of_the_arrow_column_does_not_change_the_values(zone: str, shape: str) -> None:
    def make_column(zone: str) -> pa.Array:
        stamps: list[Any] = [datetime.datetime(2021, 11, 7, hour, 30, tzinfo=UTC) for hour in (5, 6)]
        kind: pa.DataType = pa.timestamp("us", tz=zone)
        if shape == "array":
            stamps, kind = [stamps, [None]], pa.list_(kind)
        if shape == "struct":
            stamps, kind = [{"t": stamp} for stamp in stamps], pa.struct([("t", kind)])
        if shape == "map":
            stamps, kind = [[(stamp, stamp)] for stamp in stamps], pa.map_(kind, kind)
        return pa.array([*stamps, None], kind)

    expected, series = (
        column_to_series(make_column(z), "America/New_York", VERSION) for z in ("America/New_York", zone)
    )
    assert expected.dtype == series.dtype
    assert [describe(v) for v in expected] == [describe(v) for v in series]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2, 3]),
        pa.array([1.5, None]),
        pa.array([True, False]),
        pa.array(["a", "b"]),
        pa.array([decimal.Decimal("1.1"), None]),
        pa.array([datetime.datetime(2021, 1, 1, tzinfo=UTC)] * 2, pa.timestamp("us", tz="UTC")),
    ],
    ids=lambda column: str(column.type),
)
def test_converted_values_can_be_written_without_changing_the_arrow_column(column: pa.Array) -> None:
    before = column.to_pylist()
    series = column_to_series(column, "UTC", VERSION)
    assert series.name is None
    assert isinstance(series.index, pd.RangeIndex)
    frame: Any = table_to_frame(pa.table({"a": column, "b": column}), ["a", "b"], "UTC", VERSION)
    series.iloc[0] = series.iloc[1]
    frame.loc[0, "a"] = frame.loc[1, "a"]
    assert describe(series.iloc[0]) == describe(series.iloc[1])
    assert describe(frame.iloc[0, 0]) == describe(frame.iloc[1, 0])
    assert column.to_pylist() == before


def test_a_frame_has_the_given_names_and_needs_one_for_each_column() -> None:
    table = pa.table({"x": [1, 2], "y": ["a", "b"]})
    frame = table_to_frame(table, ["same", "same"], "UTC", VERSION)
    assert list(frame.columns) == ["same", "same"]
    assert frame.iloc[:, 0].tolist() == [1, 2]
    assert frame.iloc[:, 1].tolist() == ["a", "b"]
    with pytest.raises(ValueError, match="1 names for 2 columns"):
        table_to_frame(table, ["only"], "UTC", VERSION)


NESTED = [
    (pa.list_(pa.int64()), [[1], [None], None, [], [2, None, 3], [4]]),
    (pa.list_(pa.list_(pa.bool_())), [[[True]], [[], [None]], None, [], [None, [False]], [[True], [False]]]),
    (pa.struct([("a", pa.int32()), ("b", pa.bool_())]), [{"a": 1}, {"b": True}, None, {"a": 2, "b": False}, {}]),
    (pa.map_(pa.string(), pa.int32()), [[("a", 1)], None, [("a", None)], [], [("b", 2), ("c", None)]]),
    (pa.list_(pa.struct([("a", pa.list_(pa.int8()))])), [[{"a": [1]}], [{"a": None}], [{"a": [None]}], [], None]),
]


@pytest.mark.parametrize(
    ("kind", "values"), NESTED, ids=lambda part: str(part) if isinstance(part, pa.DataType) else ""
)
@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_keys_of_nested_types_convert_together_as_they_do_alone(
    kind: pa.DataType, values: list[Any], start: int, chunks: int
) -> None:
    array = pa.array(values * 2, kind)
    column = pa.chunked_array([array] * chunks).slice(start, len(array) * chunks - 2)
    alone = [column_to_series(column.slice(i, 1), "UTC", VERSION)[0] for i in range(len(column))]
    assert [describe(key) for key in convert_keys(column, "UTC", VERSION)] == [describe(key) for key in alone]


def test_a_chunked_struct_column_converts_like_a_single_chunk() -> None:
    kind = pa.struct([("a", pa.int32())])
    values = [{"a": 1}, {"a": None}]
    chunked = column_to_series(pa.chunked_array([pa.array([v], kind) for v in values]), "UTC", VERSION)
    single_chunk = column_to_series(pa.array(values, kind), "UTC", VERSION)
    assert [describe(v) for v in chunked] == [describe(v) for v in single_chunk]


def test_an_empty_column_converts_to_no_values() -> None:
    for kind in (pa.int64(), pa.string(), pa.list_(pa.timestamp("us")), pa.struct([("t", pa.timestamp("us"))])):
        assert len(column_to_series(pa.array([], kind), "UTC", VERSION)) == 0
        assert convert_keys(pa.array([], kind), "UTC", VERSION) == []


def test_a_struct_with_two_fields_of_the_same_name_is_refused() -> None:
    kind = pa.struct([("a", pa.int32()), ("a", pa.string())])
    column = pa.StructArray.from_arrays([pa.array([1], pa.int32()), pa.array(["x"])], fields=list(kind))
    with pytest.raises(UnsupportedTypeError, match="several fields of the same name"):
        column_to_series(column, "UTC", VERSION)


def test_ragged_arrays_of_timestamps_fail_as_in_spark() -> None:
    stamp = datetime.datetime(2021, 1, 1, tzinfo=UTC)
    column = pa.array([[[stamp], []]], pa.list_(pa.list_(pa.timestamp("us", tz="UTC"))))
    if tuple(map(int, np.__version__.split(".")[:2])) < (1, 24):  # older NumPy only warns
        with pytest.warns(Warning, match="ragged"):
            column_to_series(column, "UTC", VERSION)
    else:
        with pytest.raises(ValueError, match="inhomogeneous"):
            column_to_series(column, "UTC", VERSION)
