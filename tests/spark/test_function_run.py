"""`spark_state_ext.testing.run` gives the same output as the job on Spark, and reads DDL and hashes keys as Spark does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F
from streams import collect, read, using, write_batches
from test_testing_run import COUNTED, EVENT_TIME, STATE, dicts, random_keys

from arrow_schemas.spark_hashes import hash_keys
from spark_state_ext import Agg, aggregate, sessionize
from spark_state_ext.testing import Window, run, run_operator
from spark_state_ext.testing.ddl import ddl_struct
from tests.helpers.timed_sessions import at, sessions

DDL = [
    "user string, n bigint",
    "a TINYINT, b Byte, c smallint, d short, e int, f INTEGER, g long, h real, i float, j double, k boolean",
    "`odd name` string NOT NULL COMMENT 'its', `a``b` binary, date date, x timestamp, y timestamp_ntz, z timestamp_ltz",
    "a decimal, b dec(5), c numeric(38, 5) NOT NULL",
    "a array<struct<x: int, y: array<string> NOT NULL>>, m map<string, map<int, decimal(3,1)>>",
    "struct<a: int, b: string>",
    "a struct<x int, `y z`: string>",
]


@pytest.mark.spark
def test_run_agrees_with_spark_on_output_ddl_and_hashes(spark: Any, tmp_path: Path) -> None:
    """The same job runs on Spark's own operator and on ours."""
    generator = random.Random(4)
    batches: list[Any] = [
        [at(generator.choice("abcdefghij"), 12 * number + generator.randint(-20, 5)) for _ in range(5)]
        for number in range(8)
    ]
    schema = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    folder = write_batches(tmp_path / "in", [pa.Table.from_pylist(rows, schema) for rows in batches])
    # `None` is the batch without data that Spark runs last, with the final watermark.
    result = run(
        sessions,
        [*batches, None],
        "user",
        COUNTED,
        STATE,
        timeout_conf=EVENT_TIME,
        event_time="at",
        delay_ms=5_000,
        buckets=2,
        restart=[3],
    )
    assert result.output.num_rows > 6
    for operator in ("spark", "arrow"):
        with using(spark, operator, tmp_path / operator):
            stream = read(spark, folder, "user string, at timestamp").withWatermark("at", "5 seconds")
            out = stream.groupBy("user").applyInPandasWithState(sessions, COUNTED, STATE, "append", EVENT_TIME)
            assert sorted(map(tuple, collect(spark, out, "append"))) == dicts(result.output)
    for ddl in DDL:
        spark_schema = spark.createDataFrame([], ddl).schema.jsonValue()
        assert ddl_struct(ddl, "the schema") == spark_schema
    keys = random_keys(generator, 300)
    hashes = read_once(spark, tmp_path / "keys", pa.table(keys)).select(
        F.xxhash64(*keys).alias("all"), *(F.xxhash64(name).alias(name) for name in keys)
    )
    rows = hashes.collect()
    assert [row["all"] for row in rows] == hash_keys(list(keys.values())).view(np.int64).tolist()
    for name, column in keys.items():
        assert [row[name] for row in rows] == hash_keys([column]).view(np.int64).tolist(), name


def read_once(spark: Any, folder: Path, table: pa.Table) -> Any:
    folder.mkdir()
    pq.write_table(table, folder / "keys.parquet")
    return spark.read.parquet(str(folder)).coalesce(1)


@pytest.mark.spark
def test_run_operator_agrees_with_sparks_windows_and_sessions(spark: Any, tmp_path: Path) -> None:
    """Spark's own windows and session windows run on the same rows."""
    generator = random.Random(6)
    batches = [
        [
            {**at(generator.choice("abcde"), 12 * number + generator.randint(-30, 5)), "value": generator.randint(0, 9)}
            for _ in range(8)
        ]
        for number in range(6)
    ]
    batches[2][0]["at"] = None
    schema = pa.schema([("user", pa.string()), ("at", pa.timestamp("us", "UTC")), ("value", pa.int64())])
    folder = write_batches(tmp_path / "in", [pa.Table.from_pylist(rows, schema) for rows in batches])
    stream = read(spark, folder, "user string, at timestamp, value bigint").withWatermark("at", "5 seconds")
    aggregates = {"n": Agg.count(), "total": Agg.sum("value")}
    spark_aggregates = [F.count("*").alias("n"), F.sum("value").alias("total")]
    tables = [pa.Table.from_pylist(rows, schema) for rows in batches]
    # `None` is the batch without data that Spark runs last, with the final watermark.
    arguments: Any = {"batches": [*tables, None], "event_time": "at", "delay_ms": 5_000, "buckets": 2, "restart": [3]}
    windows = run_operator(
        aggregate, keys=[Window("at", 10_000), "user"], aggregates=aggregates, output_mode="append", **arguments
    )
    session_rows = run_operator(sessionize, keys="user", time="at", gap_ms=6_000, aggregates=aggregates, **arguments)
    for result, key in (
        (windows, F.window("at", "10 seconds")),
        (session_rows, F.session_window("at", "6 seconds")),
    ):
        name = "window" if result is windows else "session_window"
        out = stream.groupBy(key, "user").agg(*spark_aggregates)
        bounds = [F.unix_micros(out[name][bound]).alias(bound) for bound in ("start", "end")]
        expected = sorted(map(tuple, collect(spark, out.select("user", *bounds, "n", "total"), "append")))
        table = result.output.combine_chunks()
        times = [table.column(name).chunk(0).field(bound).cast(pa.int64()) for bound in ("start", "end")]
        assert len(expected) > 8
        assert sorted(zip(*(column.to_pylist() for column in columns_of(table, times)), strict=True)) == expected


def columns_of(table: pa.Table, times: list[pa.Array]) -> list[Any]:
    return [table.column("user"), *times, table.column("n"), table.column("total")]
