"""State as tables of Spark: the data source ``arrow_state``, and `read_state`, which returns the same on every release."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyspark
import pytest
from jobs import CLASSIC, COUNTS, count, keyed
from jobs import Job as SparkJob
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from reading_support import Job
from test_reading import lived

from arrow_schemas.row import RowSchema
from arrow_schemas.spark_hash import hash_key
from arrow_schemas.spark_types import key_fields
from spark_state_ext import open_state, read_state, register, write_savepoint
from spark_state_ext.errors import UsageError
from spark_state_ext.spark.client.columns import _make_hashable
from spark_state_ext.testing.model import Model, Row, canonicalise
from tests.helpers.waiting import wait_for_uploads

SPARK = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
Read = Callable[..., Any]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = lived(Job(tmp_path / "root", tmp_path), 14)
    yield job
    job.close()


@pytest.fixture(params=["source", "function"])
def read(request: pytest.FixtureRequest, session: Any) -> Read:
    """Both ways to read state."""
    if request.param == "function":
        return lambda path, **options: read_state(session, path, **options)
    if SPARK < (4, 0):
        pytest.skip("PySpark 3.5 has no Python data sources")
    register(session)

    def load(path: Any, **options: Any) -> Any:
        texts = {
            name: ",".join(map(str, value)) if isinstance(value, list) else str(value)
            for name, value in options.items()
        }
        return session.read.format("arrow_state").options(**texts).load(str(path))

    return load


def model_of(frame: Any) -> Model:
    rows = frame.collect()
    model = {(canonicalise(r.name), canonicalise(r.x)): Row(r["count"], r.note, r.timeout_ms, r.defined) for r in rows}
    assert len(model) == len(rows)
    return model


def test_state_can_be_read_as_rows_timeouts_and_metadata(job: Job, read: Read) -> None:
    columns = ["name", "x", "count", "note", "timeout_ms", "defined", "bucket"]
    frame = read(job.root, columns=columns)
    assert model_of(frame) == job.models[12]
    assert frame.select("bucket").distinct().count() == 4
    assert read(job.root).columns == columns[:5]
    assert model_of(read(job.root, batch=5, columns=columns)) == job.models[5]
    one_bucket = read(job.root, buckets=[2], columns=["name", "bucket"])
    assert one_bucket.columns == ["name", "bucket"]
    assert [row.bucket for row in one_bucket.distinct().select("bucket").distinct().collect()] == [2]
    timeouts = {
        (canonicalise(r.name), canonicalise(r.x)): r.timeout_ms for r in read(job.root, table="timeouts").collect()
    }
    assert timeouts == {key: row.timeout_ms for key, row in job.models[12].items() if row.timeout_ms is not None}
    files = read(job.root, table="metadata")
    assert files.where("state = 'read' AND kind = 'delta'").select("batch").distinct().collect()[0].batch == 12
    assert files.count() == sum(len(job.folder.child(str(bucket)).names()) for bucket in range(4))


@CLASSIC
def test_changes_between_two_batches_can_be_read(job: Job, read: Read) -> None:
    before, after = job.models[3], job.models[11]
    rows = read(job.root, from_batch=3, to_batch=11).collect()
    changes = {(canonicalise(r.name), canonicalise(r.x)): (r._change, r["count"]) for r in rows}
    expected = {key: ("delete", row.count) for key, row in before.items() if key not in after}
    expected |= {key: ("insert", row.count) for key, row in after.items() if key not in before}
    expected |= {key: ("update", after[key].count) for key, row in before.items() if after.get(key, row) != row}
    assert {kind for kind, _ in expected.values()} >= {"insert", "update"}
    assert (changes, len(rows)) == (expected, len(expected))
    assert read(job.root, from_batch=12).collect() == []


@pytest.mark.spark
def test_wrong_options_of_reads_are_refused_with_their_reason(job: Job, spark: Any) -> None:
    wrong_options: list[tuple[dict[str, Any], str]] = [
        ({"bucket": "1"}, "most likely 'buckets' is meant"),
        ({"table": "rows"}, "must be one of state, timeouts, metadata"),
        ({"to_batch": 3}, "to_batch needs from_batch"),
        ({"from_batch": 3, "to_batch": 1}, "must not come before"),
        ({"batch": "last"}, "whole number"),
        ({"hold": "no"}, "true or false"),
    ]
    for options, message in wrong_options:
        with pytest.raises(UsageError, match=message):
            read_state(spark, job.root, **options)
    with pytest.raises(PySparkException, match="the files have batch"):
        read_state(spark, job.root, batch=99)
    if SPARK < (4, 0):
        with pytest.raises(UsageError, match="read_state"):
            register(spark)
        return
    register(spark)
    with pytest.raises(PySparkException, match="most likely 'batch' is meant"):
        spark.read.format("arrow_state").option("btch", 1).load(str(job.root)).collect()
    with pytest.raises(PySparkException, match="write_savepoint"):
        spark.range(1).write.format("arrow_state").mode("append").save(str(job.root))


@pytest.mark.spark
def test_keys_and_state_of_every_type_are_read_back_and_hashed_as_in_spark(spark: Any, tmp_path: Path) -> None:
    """A key's hash in Python equals the one that Spark computes."""
    keys = {
        "b": "boolean",
        "y": "byte",
        "h": "short",
        "i": "int",
        "l": "long",
        "f": "float",
        "d": "double",
        "s": "string",
        "n": "binary",
        "t": "date",
        "ts": "timestamp",
        "tn": "timestamp_ntz",
        "p": "decimal(10,2)",
        "q": "decimal(30,4)",
        "a": "array<int>",
        "r": "struct<u:string,v:double>",
    }
    random_ = random.Random(4)
    columns = [
        F.when(F.col("id") % 7 == number % 7, F.lit(None))
        .otherwise(make_column(number, random_))
        .cast(kind)
        .alias(name)
        for number, (name, kind) in enumerate(keys.items())
    ]
    table = spark.range(40).select(*columns, F.col("id").alias("k"))
    path = str(tmp_path / "savepoint")
    state = table.select("k", *keys, F.create_map(F.lit("m"), "k").alias("m"))
    schema = ", ".join(
        f"{field.name} {field.dataType.simpleString()}" for field in state.schema.fields if field.name != "k"
    )
    write_savepoint(state, path, keys=["k"], state_schema=schema, buckets=3)
    table_read = read_state(spark, path).drop("timeout_ms")
    assert sorted(map(str, table_read.collect())) == sorted(map(str, state.collect()))
    if SPARK >= (4, 0):
        register(spark)
        loaded = spark.read.format("arrow_state").load(path).drop("timeout_ms")
        assert sorted(map(str, loaded.collect())) == sorted(map(str, state.collect()))
    with open_state(path) as opened:
        rows = opened.scan().read_all()
    for name in keys:
        field = table.schema[name]
        [arrow_field] = key_fields(table.select(name).schema.json())
        spark_hashes = {
            r.k: r.h for r in table.select("k", F.xxhash64(_make_hashable(name, field)).alias("h")).collect()
        }
        key_column = RowSchema((arrow_field,), ()).normalise_keys([rows[name].combine_chunks()])[0]
        hashes = [hash_key([key_column.slice(row, 1)]) for row in range(rows.num_rows)]
        assert hashes == [spark_hashes[k] % 2**64 for k in rows["k"].to_pylist()], name


def make_column(number: int, random_: random.Random) -> Any:
    row_id = F.col("id")
    zeros = F.when(row_id % 5 == 0, F.lit(-0.0)).when(row_id % 5 == 1, F.lit(float("nan"))).otherwise(row_id / 3 - 4)
    text = F.expr("repeat(concat('é', id), cast(id as int))")
    return [
        row_id % 2 == 0,
        row_id - 20,
        row_id * 100 - 2000,
        row_id * 100_000_000 - 2_000_000_000,
        (row_id - 20) * F.lit(2**57),
        zeros,
        zeros,
        text,
        text.cast("binary"),
        F.date_add(F.lit("1960-01-01").cast("date"), row_id.cast("int") * 1000),
        F.timestamp_micros((row_id - 20) * random_.randrange(10**15)),
        F.timestamp_micros((row_id - 20) * 10**14).cast("timestamp_ntz"),
        (row_id - 20) / 7,
        (row_id - 20).cast("decimal(30,4)") * F.lit(Decimal("123456789012345.25")),
        F.array(row_id, F.lit(None), row_id - 5),
        F.struct(row_id.cast("string"), zeros),
    ][number]


@pytest.mark.spark
def test_open_state_reads_the_state_of_a_job_that_ran_on_spark(spark: Any, tmp_path: Path) -> None:
    job = SparkJob(spark, "arrow", tmp_path, count, output=COUNTS)
    keys = ["a", "b", "c", "d", "e", "f"]
    for _ in range(3):
        job.feed(keyed(*keys))
        job.run()
    root = tmp_path / "root"
    wait_for_uploads(root, tmp_path / "local")
    with open_state(root, unproven=True) as state:
        assert (state.batch, state.begun_batch) == (1, 2)
        table = state.scan().read_all()
        assert sorted(table.column(0).to_pylist()) == keys
        assert set(table.column(1).to_pylist()) == {2}
        assert all(state.get(key).num_rows == 1 for key in keys)
