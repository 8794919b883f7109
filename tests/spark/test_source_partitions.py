"""Buckets that are the source's partitions, over starts of a query: its input is files with a column for the partition."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from jobs import COUNTS, Job, count, ddl, reads_state, table
from partitioned import counted, partition_of, range_of
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from streams import finish, read

from spark_state_ext import (
    Agg,
    ArrowState,
    Backend,
    RetainedCheckpoint,
    Savepoint,
    SourcePartition,
    aggregate,
    deduplicate,
    erase_keys,
    export_native,
    open_live,
    open_state,
    sessionize,
    take_savepoint,
    top_k,
    write_savepoint,
)
from spark_state_ext.__main__ import main
from spark_state_ext.errors import UnsupportedPlanError, UsageError

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("key", pa.string()), ("stream", pa.string()), ("partition", pa.int32())])
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
# Of 2 partitions, and of 4: what of these moves. From 1 to 3 too, as in Samza's proposal.
MOVED = [key for key in LETTERS if (partition_of(key, 2), partition_of(key, 4)) == (1, 3)]
Partitioner = Callable[[str, int], int]


def rows(keys: Sequence[str], partitions: int, stream: str = "", by: Partitioner = partition_of) -> Any:
    return table(SCHEMA, [(key, stream, by(key, partitions)) for key in keys])


def job_of(session: Any, folder: Path, bucket_by: Any, **options: Any) -> Job:
    return Job(
        session,
        "arrow",
        folder,
        count,
        COUNTS,
        schema=SCHEMA,
        options={"bucket_by": bucket_by, "buckets": 2, **options},
    )


def batches_of(job: Job, *tables: Any) -> list[dict[str, int]]:
    return [dict(them) for them in job.run(*tables).values()]


# What each start of a query may leave, even one that is refused.
OF_RUNS = ("epochs", "lease", "holds")


def refused(job: Job, error: str, text: str, *tables: Any, new: Sequence[str] = ()) -> None:
    """A start of the query fails, and its state and Spark's checkpoint are as before."""
    (query_folder,) = (it for it in (job.folder / "root" / "tested").iterdir() if it.name.count("-") == 4)
    files = [it for it in query_folder.rglob("*") if it.is_file() and it.parent.name not in OF_RUNS]
    before = {it: it.read_bytes() for it in files}
    with pytest.raises((PySparkException, UsageError), match=rf"(?s){error}.*{text}") as caught:
        job.run(*tables)
    assert "UserFunctionError" not in str(caught.value)
    for path, data in before.items():
        assert path.read_bytes() == data
    there = [it for it in query_folder.rglob("*") if it.is_file() and it not in before]
    assert [it.name for it in there if it.parent.name not in OF_RUNS] == list(new)


def recorded(job: Job) -> list[dict[str, Any]]:
    found = sorted((job.folder / "root" / "tested").glob("*/partitions_*.json"))
    return [json.loads(it.read_text())["streams"] for it in found]


@pytest.mark.parametrize(
    "session",
    ["classic", pytest.param("connect", marks=[pytest.mark.connect, pytest.mark.soak])],
    indirect=True,
)
def test_a_source_grows_between_starts(session: Any, tmp_path: Path) -> None:
    job = job_of(session, tmp_path, SourcePartition("partition", 2))
    fed = [LETTERS, LETTERS[:13]]
    assert batches_of(job, *[rows(keys, 2) for keys in fed]) == counted(*fed)
    with open_state(str(tmp_path / "root")) as state:
        assert state.bucket_map.buckets == 2
        # Of the first batch, which files prove. A key is looked for in all buckets, and is in that of its partition.
        found = {key: state.get(key).column("n").to_pylist() for key in LETTERS}
        assert found == {key: [1] for key in LETTERS}
        by_bucket = dict(zip(*state.scan(["key", "bucket"]).read_all().to_pydict().values(), strict=True))
        assert by_bucket == {key: partition_of(key, 2) for key in LETTERS}
    # A batch that has none of the new partitions, and plans that are none of this state.
    fed.append(LETTERS[5:])
    text = r"began with 2 partitions and the plan says 4: give counts=\[2, 4\]"
    job.options["bucket_by"] = SourcePartition("partition", 4)
    refused(job, "BucketMapChangedError", text, rows(fed[-1], 2))
    job.options["bucket_by"] = None
    refused(
        job, "BucketMapChangedError", "has its state in 2 buckets by source partition and the job asks for 2 buckets"
    )
    job.options["bucket_by"] = SourcePartition("partition", 2)
    assert batches_of(job) == counted(*fed)[-1:]
    # The source has grown, and the plan does not say so.
    fed.append(LETTERS[3:])
    refused(job, "PartitionsChangedError", r"from partition [23], .* 2 partitions.*counts=\[2, 4\]", rows(fed[-1], 4))
    job.options["bucket_by"] = SourcePartition("partition", [2, 4])
    assert batches_of(job) == counted(*fed)[-1:]
    assert recorded(job) == [
        {"": {"counts": [2], "buckets": [0, 1]}},
        {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1]}},
        # Rows of the last partition have come.
        {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1], "reached": 4}},
    ]
    # It never shrinks, and no partition goes elsewhere.
    fed.append(MOVED)
    job.options["bucket_by"] = SourcePartition("partition", 2)
    refused(job, "PartitionsChangedError", r"up to 4 partitions.*at most 2: give counts=\[2, 4\]", rows(MOVED[:1], 2))
    fed.insert(-1, MOVED[:1])
    path = "partitioned:range_before_expansion"
    job.options["bucket_by"] = SourcePartition("partition", [2, 4], before_expansion=path)
    refused(job, "PartitionsChangedError", "partition 2 has its keys in bucket 0", rows(MOVED, 4))
    job.options["bucket_by"] = SourcePartition("partition", [2, 4, 8])
    fed.append(LETTERS)
    assert batches_of(job, rows(LETTERS, 8)) == counted(*fed)[-3:]
    assert len(recorded(job)) == 5
    # It grows to a number between, which the plan has declared to be 16 in advance.
    job.options["bucket_by"] = SourcePartition("partition", [2, 4, 8, 16])
    assert max(partition_of(key, 11) for key in LETTERS) == 10
    refused(
        job,
        "PartitionsChangedError",
        "from partition 10, but not from partition 15: .* grown from 8 partitions.* cannot be followed",
        rows(LETTERS, 11),
        new=["partitions_5.json"],
    )


@pytest.mark.soak
def test_partitions_that_each_have_a_bucket_lose_counts(spark: Any, tmp_path: Path) -> None:
    """The broken mapping of the proposal's example: a key that moves from partition 1 to 3 starts from 0."""
    job = job_of(spark, tmp_path, SourcePartition("partition", 8))
    assert batches_of(job, rows(LETTERS, 2)) == counted(LETTERS)
    (second,) = batches_of(job, rows(LETTERS, 4))
    assert MOVED
    assert {key: second[key] for key in MOVED} == dict.fromkeys(MOVED, 1)
    stayed = [key for key in LETTERS if partition_of(key, 2) == partition_of(key, 4)]
    assert {key: second[key] for key in stayed} == dict.fromkeys(stayed, 2)


@pytest.mark.soak
def test_state_that_was_hashed_has_no_partitions(spark: Any, tmp_path: Path) -> None:
    job = job_of(spark, tmp_path, None, buckets=3)
    assert batches_of(job, rows(LETTERS, 2)) == counted(LETTERS)
    job.options["bucket_by"] = SourcePartition("partition", 2)
    refused(
        job,
        "BucketMapChangedError",
        "has its state in 3 buckets and the job asks for 2 buckets by source",
        rows("a", 2),
    )
    job.options["bucket_by"] = SourcePartition("partition", 3)
    refused(job, "BucketMapChangedError", "has its state in 3 buckets and the job asks for 3 buckets by source")
    job.options["bucket_by"] = None
    assert batches_of(job) == [{"a": 2}]


def test_state_without_its_assignment_is_refused(spark: Any, tmp_path: Path) -> None:
    job = job_of(spark, tmp_path, SourcePartition("partition", 2))
    assert batches_of(job, rows(LETTERS, 2)) == counted(LETTERS)
    (path,) = (tmp_path / "root" / "tested").glob("*/partitions_0.json")
    data = path.read_bytes()
    path.unlink()
    refused(job, "PartitionsChangedError", r"has state by source partition, but partitions_0\.json", rows("a", 2))
    path.write_bytes(data[:-4])
    refused(
        job, "CorruptFileError", r"partitions_0\.json is not a valid assignment of partitions.*copy of the query folder"
    )
    path.write_bytes(data)
    assert batches_of(job) == [{"a": 2}]


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        (("a", "", None), "UsageError", "'partition' is NULL in 1 rows"),
        pytest.param(("a", "", -1), "UsageError", "'partition' has -1", marks=pytest.mark.soak),
        pytest.param(("a", "", 2), "PartitionsChangedError", r"partition 2.*counts=\[2, 4\]", marks=pytest.mark.soak),
    ],
)
def test_a_batch_with_such_a_row_has_no_effect(
    spark: Any, tmp_path: Path, row: tuple[Any, ...], error: str, text: str
) -> None:
    job = job_of(spark, tmp_path, SourcePartition("partition", 2))
    assert batches_of(job, rows(LETTERS, 2)) == counted(LETTERS)
    refused(job, error, text, table(SCHEMA, [("b", "", partition_of("b", 2)), row]))
    # What has no partition is left out now, and the query goes on.
    job.before = lambda df: df.where("coalesce(partition, -1) in (0, 1)")
    assert batches_of(job) == [{"b": 2}]


def test_two_streams_of_which_one_grows(spark: Any, tmp_path: Path) -> None:
    """Clicks and orders of a key are counted together, as by a join: both streams have it in one bucket."""
    by_stream = {"clicks": 3, "orders": 3}
    job = job_of(spark, tmp_path, SourcePartition("partition", by_stream, stream="stream"))
    both = [pa.concat_tables([rows(LETTERS, 3, "clicks"), rows(LETTERS[::2], 3, "orders")])]
    fed = [LETTERS + LETTERS[::2]]
    assert batches_of(job, *both) == counted(*fed)
    grown = pa.concat_tables([rows(LETTERS, 3, "clicks"), rows(LETTERS, 6, "orders")])
    refused(job, "PartitionsChangedError", r"of stream 'orders'.*counts=\[3, 6\] of stream 'orders'", grown)
    fed.append(LETTERS + LETTERS)
    job.options["bucket_by"] = SourcePartition("partition", {"orders": [3, 6], "clicks": 3}, stream="stream")
    assert batches_of(job) == counted(*fed)[-1:]
    fed.append(["z", *LETTERS])
    last = pa.concat_tables([rows(["z"], 6, "orders"), rows(LETTERS, 3, "clicks")])
    assert batches_of(job, last) == counted(*fed)[-1:]
    refused(
        job, "PartitionsChangedError", "stream 'views', but the plan declares clicks, orders", rows("a", 3, "views")
    )
    assert recorded(job)[-1] == {
        "clicks": {"counts": [3], "buckets": [0, 1, 2]},
        "orders": {"counts": [3, 6], "buckets": [0, 1, 2, 0, 1, 2], "reached": 6},
    }


@pytest.mark.soak
def test_two_streams_are_joined_while_one_of_them_grows(spark: Any, tmp_path: Path) -> None:
    """Each batch gives the pairs of a click and an order of one key that it completes; all are those of a batch join."""

    def joined(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        clicks, orders = state.getOption or (0, 0)
        before = clicks * orders
        for pdf in pdfs:
            clicks += int((pdf["stream"] == "clicks").sum())
            orders += int((pdf["stream"] == "orders").sum())
        state.update((clicks, orders))
        yield pd.DataFrame({"key": [key[0]], "n": [clicks * orders - before]})

    job = job_of(spark, tmp_path, SourcePartition("partition", {"clicks": 3, "orders": 3}, stream="stream"))
    job.function, job.state = joined, "clicks long, orders long"
    clicks: list[str] = []
    orders: list[str] = []
    pairs: Counter[str] = Counter()
    for number, counts in enumerate((3, 3, 6, 6)):
        job.options["bucket_by"] = SourcePartition(
            "partition", {"clicks": 3, "orders": [3, 6] if counts == 6 else 3}, stream="stream"
        )
        new = LETTERS[number::2], LETTERS[number % 3 :]
        batch = pa.concat_tables([rows(new[0], 3, "clicks"), rows(new[1], counts, "orders")])
        for found in batches_of(job, batch):
            pairs.update(found)
        clicks += new[0]
        orders += new[1]
        wanted = Counter({key: n * Counter(orders)[key] for key, n in Counter(clicks).items()})
        assert +pairs == +wanted


def test_streams_with_buckets_of_their_own(spark: Any, tmp_path: Path) -> None:
    """Each stream of a key has a state; rows are combined before the shuffle, and stay apart there."""
    source = SourcePartition("partition", {"a": 2, "b": [1, 3]}, stream="stream", group_by="stream_and_partition")
    fed = pa.concat_tables([rows(LETTERS * 3, 2, "a"), rows(LETTERS * 2, 1, "b")])
    job = Job(
        spark,
        "arrow",
        tmp_path,
        count,
        schema=SCHEMA,
        before=lambda df: df,
        options={"bucket_by": source},
    )
    state = ArrowState(
        str(tmp_path / "root"),
        "tested",
        bucket_by=source,
        local_dir=str(tmp_path / "local"),
        lease_ms=1_000,
    )
    told = run_operator(
        job, lambda df: aggregate(state, df, "key", {"n": Agg.count()}), "update", fed, rows(["z"] * 2, 3, "b")
    )
    assert told == [sorted((key, n) for key in LETTERS for n in (3, 2)), [("z", 4)]]
    # Of the first batch.
    with open_state(str(tmp_path / "root"), unproven=True) as found:
        assert found.buckets == 3
        assert sorted(found.get("z").column("n").to_pylist()) == [2, 3]


def run_operator(job: Job, plan: Callable[[Any], Any], mode: str, *tables: Any) -> list[list[tuple[Any, ...]]]:
    """What each batch of a built-in operator gives, by `foreachBatch`."""
    job.feed(*tables)
    told: list[list[tuple[Any, ...]]] = []
    df = plan(job.before(read(job.session, str(job.folder / "in"), ddl(job.schema))))
    writer = df.writeStream.foreachBatch(lambda out, _: told.append(sorted(tuple(row) for row in out.collect())))
    finish(writer.outputMode(mode).option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
    return [it for it in told if it]


def test_built_in_operators_go_by_partition(spark: Any, tmp_path: Path) -> None:
    """None of them has the partition among its columns; a key that moves is known."""
    source, last = SourcePartition("partition", [2, 4]), partition_of("end", 4)

    def run(name: str, plan: Callable[[ArrowState, Any], Any], mode: str) -> list[list[tuple[Any, ...]]]:
        folder = tmp_path / name
        folder.mkdir()
        root, local = str(folder / "root"), str(folder / "local")
        state = ArrowState(root, name, bucket_by=source, local_dir=local, lease_ms=1_000)
        job = Job(spark, "arrow", folder, count, schema=SCHEMA)
        tables = rows(MOVED * 2, 2), rows([*MOVED, "new"], 4), rows(["end"], 4)
        found = run_operator(job, lambda df: plan(state, df), mode, *tables)
        with open_state(root, unproven=True) as opened:
            placed = dict(zip(*opened.scan(["key", "bucket"]).read_all().to_pydict().values(), strict=True))
        assert placed.items() >= dict.fromkeys(MOVED, 1).items()
        return found

    def sessions(state: ArrowState, df: Any) -> Any:
        at = F.expr("timestamp_seconds(if(key = 'end', 1000, if(partition >= 2, 5, 0)))")
        timed = df.withColumn("at", at).withWatermark("at", "1 second")
        return sessionize(state, timed, "key", "at", 10_000, {"n": Agg.count()}).select("key", "n")

    assert run("deduplicate", lambda state, df: deduplicate(state, df, ["key"]), "append") == [
        sorted((key, "", 1) for key in MOVED),
        [("new", "", partition_of("new", 4))],
        [("end", "", last)],
    ]
    best = run("top", lambda state, df: top_k(state, df, "key", "partition", 1, emit="changed"), "update")
    assert best == [
        sorted((key, "", 1, 1) for key in MOVED),
        sorted([*((key, "", 3, 1) for key in MOVED), ("new", "", partition_of("new", 4), 1)]),
        [("end", "", last, 1)],
    ]
    assert run("sessions", sessions, "append") == [sorted([*((key, 3) for key in MOVED), ("new", 1)])]


@pytest.mark.parametrize(
    "session",
    [pytest.param("classic", marks=pytest.mark.soak), pytest.param("connect", marks=pytest.mark.connect)],
    indirect=True,
)
def test_a_producer_by_range(session: Any, tmp_path: Path) -> None:
    """Its last range is split, which the default mapping would not follow: the user's function does."""
    path = "partitioned:range_before_expansion"
    job = job_of(session, tmp_path, SourcePartition("partition", 2, before_expansion=path))
    fed = [LETTERS, LETTERS, LETTERS[3:], LETTERS]
    assert batches_of(job, rows(fed[0], 2, by=range_of)) == counted(*fed)[:1]
    job.options["bucket_by"] = SourcePartition("partition", [2, 3, 5], before_expansion=path)
    tables = [rows(keys, partitions, by=range_of) for keys, partitions in zip(fed[1:], (3, 5, 5), strict=True)]
    assert batches_of(job, *tables) == counted(*fed)[1:]


def test_columns_that_are_none(spark: Any, tmp_path: Path) -> None:
    for source, text in (
        (SourcePartition("part", 2), "names the column 'part', but the input has no column of that name"),
        (SourcePartition("key", 2), "'key', which is string: it must be bigint, or another integer type"),
        (SourcePartition("partition", {"a": 2}, stream="partition"), "'partition', which is int: it must be string"),
    ):
        job = job_of(spark, tmp_path, source)
        job.feed(rows("a", 2))
        with pytest.raises(UsageError, match=text):
            job.planned()


@reads_state
def test_a_savepoint_has_the_map(spark: Any, tmp_path: Path) -> None:
    source = SourcePartition("partition", [2, 4])
    old = job_of(spark, tmp_path / "old", source)
    (tmp_path / "old").mkdir()
    fed = [LETTERS, LETTERS[:9]]
    assert batches_of(old, rows(fed[0], 2), rows(fed[1], 4)) == counted(*fed)
    state = ArrowState(str(tmp_path / "old" / "root"), "tested", bucket_by=source)
    path = str(tmp_path / "savepoint")
    take_savepoint(spark, path, old.checkpoint, state, form="canonical")
    for at, (bucket_by, text) in enumerate(
        (
            (SourcePartition("partition", 4), r"began with 2 partitions and the plan says 4: give counts=\[2, 4\]"),
            (None, "by source partition and the job asks for 2 buckets"),
        )
    ):
        folder = tmp_path / f"other-{at}"
        folder.mkdir()
        other = job_of(spark, folder, bucket_by, start_from=Savepoint(path))
        with pytest.raises(PySparkException, match=rf"(?s)BucketMapChangedError.*{text}"):
            other.run(rows(LETTERS, 4))
    fed += [LETTERS, MOVED]
    few = str(tmp_path / "few")
    assert main(["savepoint", "transform", path, few, "--keep", "key != 'a'"]) == 0
    for name, start, begun in (("new", path, fed), ("fewer", few, [LETTERS[1:], LETTERS[1:9], *fed[2:]])):
        (tmp_path / name).mkdir()
        new = job_of(spark, tmp_path / name, source, start_from=Savepoint(start))
        assert batches_of(new, *[rows(keys, 4) for keys in fed[2:]]) == counted(*begun)[2:]
        assert recorded(new) == [
            {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1]}},
            {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1], "reached": 4}},
        ]


@reads_state
def test_what_another_query_left_has_an_assignment(spark: Any, tmp_path: Path) -> None:
    """Who starts from it grows on from there, whether the folder is claimed or not."""
    (tmp_path / "old").mkdir()
    old = job_of(spark, tmp_path / "old", SourcePartition("partition", [2, 4]))
    fed = [LETTERS, LETTERS[:9], LETTERS]
    assert batches_of(old, rows(fed[0], 2), rows(fed[1], 4)) == counted(*fed)[:2]
    root = str(tmp_path / "old" / "root")
    path = "partitioned:range_before_expansion"
    for at, (mode, bucket_by) in enumerate(
        (
            ("no_claim", SourcePartition("partition", [2, 4], before_expansion=path)),
            ("no_claim", SourcePartition("partition", [2, 4, 8])),
            ("claim", SourcePartition("partition", 2)),
            ("claim", SourcePartition("partition", [2, 4, 8])),
        )
    ):
        folder = tmp_path / f"new-{at}"
        folder.mkdir()
        start = RetainedCheckpoint(root, str(old.checkpoint), mode=mode)
        options = {"root": root} if mode == "claim" else {}
        new = job_of(spark, folder, bucket_by, start_from=start, **options)
        if bucket_by.assignment.streams[0].counts[-1] == 8:
            assert batches_of(new, rows(LETTERS, 8)) == counted(*fed)[-1:]
            continue
        with pytest.raises(PySparkException, match=r"(?s)PartitionsChangedError"):
            new.run(rows(["b", "d"], 2))
    assert [(found[""]["counts"], found[""].get("reached")) for found in recorded(old)] == [
        ([2, 4], None),
        ([2, 4], 4),
        ([2, 4, 8], 4),
        ([2, 4, 8], 8),
    ]
    assert recorded(old)[-1][""]["buckets"] == [0, 1] * 4


def test_what_else_finds_a_key_or_a_file(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Erase requests go to every bucket, a live job is asked in every bucket, and other backends have the assignment."""
    second = Backend(str(tmp_path / "second"))
    job = job_of(
        spark,
        tmp_path,
        SourcePartition("partition", [2, 4]),
        backends=["changelog", "fsspec", second],
        erase_requests=True,
        lease_ms=30_000,
    )
    fed = [LETTERS, LETTERS]
    assert batches_of(job, rows(fed[0], 2), rows(fed[1], 4)) == counted(*fed)
    with open_live(str(tmp_path / "local"), "tested") as live:
        told = {key: live.get(key).rows.column("n").to_pylist() for key in LETTERS}
        # As of the batch that is known to be committed.
        assert set(map(tuple, told.values())) in ({(1,)}, {(2,)})
    erase_keys(str(tmp_path / "root"), {"key": [*MOVED, "a"]}, operator="tested")
    job.options["bucket_by"] = SourcePartition("partition", [2, 4, 8])
    gone = {*MOVED, "a"}
    assert batches_of(job, rows(LETTERS, 8)) == [{key: 1 if key in gone else 3 for key in LETTERS}]
    (query_folder,) = (it for it in (tmp_path / "root" / "tested").iterdir() if it.name.count("-") == 4)
    copies = tmp_path / "second" / "tested" / query_folder.name
    for name in ("partitions_0.json", "partitions_1.json"):
        assert (copies / name).read_bytes() == (query_folder / name).read_bytes()
    capsys.readouterr()
    assert main(["why", str(query_folder / "partitions_1.json"), "-o", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "assignment of partitions"
    assert main(["verify", str(tmp_path / "root")]) == 0
    data = (query_folder / "partitions_0.json").read_bytes()
    (query_folder / "partitions_0.json").write_bytes(data.replace(b"counts", b"Counts"))
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "root"), "-o", "jsonl"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # What the query's end removes meanwhile may be missing.
    (row,) = [it for it in found if it["status"] != "missing"]
    assert "partitions_0.json fails its checksum" in str(row)


@reads_state
def test_a_table_has_no_partitions(spark: Any, tmp_path: Path) -> None:
    """Its savepoint is in hashed buckets: a query by partition cannot begin with it, and is told so."""
    path = str(tmp_path / "savepoint")
    df = spark.createDataFrame([("a", 7)], COUNTS)
    write_savepoint(df, path, keys=["key"], state_schema="n bigint", buckets=2, operator="tested")
    job = job_of(spark, tmp_path, SourcePartition("partition", 2), start_from=Savepoint(path))
    with pytest.raises(
        PySparkException, match=r"(?s)BucketMapChangedError.*in 2 buckets and the job asks for 2 buckets by"
    ):
        job.run(rows("a", 2))


@reads_state
def test_a_state_for_each_stream_does_not_go_to_spark(spark: Any, tmp_path: Path) -> None:
    source = SourcePartition("partition", {"a": 1, "b": 1}, stream="stream", group_by="stream_and_partition")
    job = job_of(spark, tmp_path, source)
    job.run(rows("a", 1, "a"), rows("a", 1, "b"))
    state = ArrowState(str(tmp_path / "root"), "tested", bucket_by=source)
    path = str(tmp_path / "savepoint")
    take_savepoint(spark, path, job.checkpoint, state)
    with pytest.raises(UnsupportedPlanError, match="a state for each stream of a key"):
        export_native(spark, path)
