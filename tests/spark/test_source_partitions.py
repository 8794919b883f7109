"""Buckets by source partition, over several starts of a query. The input files have a column for the partition."""

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
from tests.helpers.waiting import wait_for_uploads

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("key", pa.string()), ("stream", pa.string()), ("partition", pa.int32())])
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
# The keys that move from partition 1 to 3 when 2 partitions become 4, as in the example of Samza's proposal.
MOVED = [key for key in LETTERS if (partition_of(key, 2), partition_of(key, 4)) == (1, 3)]
Partitioner = Callable[[str, int], int]


def make_rows(keys: Sequence[str], partitions: int, stream: str = "", by: Partitioner = partition_of) -> Any:
    return table(SCHEMA, [(key, stream, by(key, partitions)) for key in keys])


def make_job(session: Any, folder: Path, bucket_by: Any, **options: Any) -> Job:
    return Job(
        session,
        "arrow",
        folder,
        count,
        COUNTS,
        schema=SCHEMA,
        options={"bucket_by": bucket_by, "buckets": 2, **options},
    )


def run_batches(job: Job, *tables: Any) -> list[dict[str, int]]:
    return [dict(batch) for batch in job.run(*tables).values()]


# The folders in which every start of a query may leave files, even one that is refused.
FOLDERS_OF_RUNS = ("epochs", "lease", "holds")


def check_refused(job: Job, error: str, text: str, *tables: Any, new: Sequence[str] = ()) -> None:
    """Check that a start of the query fails, and that it changes no file of the state; only `new` files are added."""
    (query_folder,) = (path for path in (job.folder / "root" / "tested").iterdir() if path.name.count("-") == 4)
    wait_for_uploads(query_folder, job.folder / "local")
    files = [path for path in query_folder.rglob("*") if path.is_file() and path.parent.name not in FOLDERS_OF_RUNS]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises((PySparkException, UsageError), match=rf"(?s){error}.*{text}") as caught:
        job.run(*tables)
    assert "UserFunctionError" not in str(caught.value)
    for path, data in before.items():
        assert path.read_bytes() == data
    added = [path for path in query_folder.rglob("*") if path.is_file() and path not in before]
    assert [path.name for path in added if path.parent.name not in FOLDERS_OF_RUNS] == list(new)


def read_assignments(job: Job) -> list[dict[str, Any]]:
    paths = sorted((job.folder / "root" / "tested").glob("*/partitions_*.json"))
    return [json.loads(path.read_text())["streams"] for path in paths]


@pytest.mark.parametrize(
    "session",
    ["classic", pytest.param("connect", marks=[pytest.mark.connect, pytest.mark.soak])],
    indirect=True,
)
def test_a_query_continues_with_right_counts_if_its_source_grows_between_starts(session: Any, tmp_path: Path) -> None:
    job = make_job(session, tmp_path, SourcePartition("partition", 2))
    fed = [LETTERS, LETTERS[:13]]
    assert run_batches(job, *[make_rows(keys, 2) for keys in fed]) == counted(*fed)
    wait_for_uploads(tmp_path / "root", tmp_path / "local")
    with open_state(str(tmp_path / "root")) as state:
        assert state.bucket_map.buckets == 2
        # Files prove the first batch only. A key is looked up in all buckets; it is in the bucket of its partition.
        counts = {key: state.get(key).column("n").to_pylist() for key in LETTERS}
        assert counts == {key: [1] for key in LETTERS}
        by_bucket = dict(zip(*state.scan(["key", "bucket"]).read_all().to_pydict().values(), strict=True))
        assert by_bucket == {key: partition_of(key, 2) for key in LETTERS}
    # The batch has no row of a new partition, but the plan's bucket map differs from that of the state.
    fed.append(LETTERS[5:])
    text = r"began with 2 partitions and the plan says 4: give counts=\[2, 4\]"
    job.options["bucket_by"] = SourcePartition("partition", 4)
    check_refused(job, "BucketMapChangedError", text, make_rows(fed[-1], 2))
    job.options["bucket_by"] = None
    check_refused(
        job, "BucketMapChangedError", "has its state in 2 buckets by source partition and the job asks for 2 buckets"
    )
    job.options["bucket_by"] = SourcePartition("partition", 2)
    assert run_batches(job) == counted(*fed)[-1:]
    # The source has grown, but the plan does not declare it.
    fed.append(LETTERS[3:])
    check_refused(
        job, "PartitionsChangedError", r"from partition [23], .* 2 partitions.*counts=\[2, 4\]", make_rows(fed[-1], 4)
    )
    job.options["bucket_by"] = SourcePartition("partition", [2, 4])
    assert run_batches(job) == counted(*fed)[-1:]
    assert read_assignments(job) == [
        {"": {"counts": [2], "buckets": [0, 1]}},
        {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1]}},
        # The query has received rows of the last partition.
        {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1], "reached": 4}},
    ]
    # The declared number cannot decrease, and a partition cannot get another bucket.
    fed.append(MOVED)
    job.options["bucket_by"] = SourcePartition("partition", 2)
    check_refused(
        job, "PartitionsChangedError", r"up to 4 partitions.*at most 2: give counts=\[2, 4\]", make_rows(MOVED[:1], 2)
    )
    fed.insert(-1, MOVED[:1])
    path = "partitioned:range_before_expansion"
    job.options["bucket_by"] = SourcePartition("partition", [2, 4], before_expansion=path)
    check_refused(job, "PartitionsChangedError", "partition 2 has its keys in bucket 0", make_rows(MOVED, 4))
    job.options["bucket_by"] = SourcePartition("partition", [2, 4, 8])
    fed.append(LETTERS)
    assert run_batches(job, make_rows(LETTERS, 8)) == counted(*fed)[-3:]
    assert len(read_assignments(job)) == 5
    # The plan has declared 16 partitions in advance, but the source grows to a smaller number.
    job.options["bucket_by"] = SourcePartition("partition", [2, 4, 8, 16])
    assert max(partition_of(key, 11) for key in LETTERS) == 10
    check_refused(
        job,
        "PartitionsChangedError",
        "from partition 10, but not from partition 15: .* grown from 8 partitions.* cannot be followed",
        make_rows(LETTERS, 11),
        new=["partitions_5.json"],
    )


@pytest.mark.soak
def test_a_key_that_moves_loses_its_count_if_each_new_partition_has_its_own_bucket(spark: Any, tmp_path: Path) -> None:
    """This is the wrong mapping in the proposal's example: a key that moves from partition 1 to 3 starts from 0."""
    job = make_job(spark, tmp_path, SourcePartition("partition", 8))
    assert run_batches(job, make_rows(LETTERS, 2)) == counted(LETTERS)
    (second,) = run_batches(job, make_rows(LETTERS, 4))
    assert MOVED
    assert {key: second[key] for key in MOVED} == dict.fromkeys(MOVED, 1)
    unmoved = [key for key in LETTERS if partition_of(key, 2) == partition_of(key, 4)]
    assert {key: second[key] for key in unmoved} == dict.fromkeys(unmoved, 2)


@pytest.mark.soak
def test_state_in_hashed_buckets_cannot_be_used_by_source_partition(spark: Any, tmp_path: Path) -> None:
    job = make_job(spark, tmp_path, None, buckets=3)
    assert run_batches(job, make_rows(LETTERS, 2)) == counted(LETTERS)
    job.options["bucket_by"] = SourcePartition("partition", 2)
    check_refused(
        job,
        "BucketMapChangedError",
        "has its state in 3 buckets and the job asks for 2 buckets by source",
        make_rows("a", 2),
    )
    job.options["bucket_by"] = SourcePartition("partition", 3)
    check_refused(job, "BucketMapChangedError", "has its state in 3 buckets and the job asks for 3 buckets by source")
    job.options["bucket_by"] = None
    assert run_batches(job) == [{"a": 2}]


@pytest.mark.soak
def test_state_whose_assignment_is_missing_or_corrupt_is_refused(spark: Any, tmp_path: Path) -> None:
    job = make_job(spark, tmp_path, SourcePartition("partition", 2))
    assert run_batches(job, make_rows(LETTERS, 2)) == counted(LETTERS)
    (path,) = (tmp_path / "root" / "tested").glob("*/partitions_0.json")
    data = path.read_bytes()
    path.unlink()
    check_refused(
        job, "PartitionsChangedError", r"has state by source partition, but partitions_0\.json", make_rows("a", 2)
    )
    path.write_bytes(data[:-4])
    check_refused(
        job, "CorruptFileError", r"partitions_0\.json is not a valid assignment of partitions.*copy of the query folder"
    )
    path.write_bytes(data)
    assert run_batches(job) == [{"a": 2}]


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        (("a", "", None), "UsageError", "'partition' is NULL in 1 rows"),
        pytest.param(("a", "", -1), "UsageError", "'partition' has -1", marks=pytest.mark.soak),
        pytest.param(("a", "", 2), "PartitionsChangedError", r"partition 2.*counts=\[2, 4\]", marks=pytest.mark.soak),
    ],
)
def test_a_batch_with_an_invalid_partition_is_refused_and_changes_nothing(
    spark: Any, tmp_path: Path, row: tuple[Any, ...], error: str, text: str
) -> None:
    job = make_job(spark, tmp_path, SourcePartition("partition", 2))
    assert run_batches(job, make_rows(LETTERS, 2)) == counted(LETTERS)
    check_refused(job, error, text, table(SCHEMA, [("b", "", partition_of("b", 2)), row]))
    # Once such rows are filtered out, the query continues.
    job.before = lambda df: df.where("coalesce(partition, -1) in (0, 1)")
    assert run_batches(job) == [{"b": 2}]


@pytest.mark.soak
def test_two_streams_share_the_state_of_a_key_while_one_of_them_grows(spark: Any, tmp_path: Path) -> None:
    """Clicks and orders of a key are counted together, as a join does: a key has the same bucket for both streams."""
    by_stream = {"clicks": 3, "orders": 3}
    job = make_job(spark, tmp_path, SourcePartition("partition", by_stream, stream="stream"))
    tables = [pa.concat_tables([make_rows(LETTERS, 3, "clicks"), make_rows(LETTERS[::2], 3, "orders")])]
    fed = [LETTERS + LETTERS[::2]]
    assert run_batches(job, *tables) == counted(*fed)
    grown = pa.concat_tables([make_rows(LETTERS, 3, "clicks"), make_rows(LETTERS, 6, "orders")])
    check_refused(job, "PartitionsChangedError", r"of stream 'orders'.*counts=\[3, 6\] of stream 'orders'", grown)
    fed.append(LETTERS + LETTERS)
    job.options["bucket_by"] = SourcePartition("partition", {"orders": [3, 6], "clicks": 3}, stream="stream")
    assert run_batches(job) == counted(*fed)[-1:]
    fed.append(["z", *LETTERS])
    last = pa.concat_tables([make_rows(["z"], 6, "orders"), make_rows(LETTERS, 3, "clicks")])
    assert run_batches(job, last) == counted(*fed)[-1:]
    check_refused(
        job,
        "PartitionsChangedError",
        "stream 'views', but the plan declares clicks, orders",
        make_rows("a", 3, "views"),
    )
    assert read_assignments(job)[-1] == {
        "clicks": {"counts": [3], "buckets": [0, 1, 2]},
        "orders": {"counts": [3, 6], "buckets": [0, 1, 2, 0, 1, 2], "reached": 6},
    }


@pytest.mark.soak
def test_a_join_of_two_streams_equals_a_batch_join_while_one_of_them_grows(spark: Any, tmp_path: Path) -> None:
    """Each batch emits the number of new pairs of a click and an order of a key."""

    def count_pairs(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        clicks, orders = state.getOption or (0, 0)
        before = clicks * orders
        for pdf in pdfs:
            clicks += int((pdf["stream"] == "clicks").sum())
            orders += int((pdf["stream"] == "orders").sum())
        state.update((clicks, orders))
        yield pd.DataFrame({"key": [key[0]], "n": [clicks * orders - before]})

    job = make_job(spark, tmp_path, SourcePartition("partition", {"clicks": 3, "orders": 3}, stream="stream"))
    job.function, job.state = count_pairs, "clicks long, orders long"
    clicks: list[str] = []
    orders: list[str] = []
    pairs: Counter[str] = Counter()
    for number, counts in enumerate((3, 3, 6, 6)):
        job.options["bucket_by"] = SourcePartition(
            "partition", {"clicks": 3, "orders": [3, 6] if counts == 6 else 3}, stream="stream"
        )
        new_keys = LETTERS[number::2], LETTERS[number % 3 :]
        batch = pa.concat_tables([make_rows(new_keys[0], 3, "clicks"), make_rows(new_keys[1], counts, "orders")])
        for emitted in run_batches(job, batch):
            pairs.update(emitted)
        clicks += new_keys[0]
        orders += new_keys[1]
        expected = Counter({key: n * Counter(orders)[key] for key, n in Counter(clicks).items()})
        assert +pairs == +expected


def test_each_stream_of_a_key_can_have_its_own_state(spark: Any, tmp_path: Path) -> None:
    """Partial aggregation before the shuffle also keeps the streams apart."""
    source = SourcePartition("partition", {"a": 2, "b": [1, 3]}, stream="stream", group_by="stream_and_partition")
    fed = pa.concat_tables([make_rows(LETTERS * 3, 2, "a"), make_rows(LETTERS * 2, 1, "b")])
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
    emitted = run_operator(
        job, lambda df: aggregate(state, df, "key", {"n": Agg.count()}), "update", fed, make_rows(["z"] * 2, 3, "b")
    )
    assert emitted == [sorted((key, n) for key in LETTERS for n in (3, 2)), [("z", 4)]]
    wait_for_uploads(tmp_path / "root", tmp_path / "local")
    # Files prove the first batch only.
    with open_state(str(tmp_path / "root"), unproven=True) as opened:
        assert opened.buckets == 3
        assert sorted(opened.get("z").column("n").to_pylist()) == [2, 3]


def run_operator(job: Job, plan: Callable[[Any], Any], mode: str, *tables: Any) -> list[list[tuple[Any, ...]]]:
    """Run a built-in operator over some tables, and return the rows of each batch that emitted any."""
    job.feed(*tables)
    batches: list[list[tuple[Any, ...]]] = []
    df = plan(job.before(read(job.session, str(job.folder / "in"), ddl(job.schema))))
    writer = df.writeStream.foreachBatch(lambda out, _: batches.append(sorted(tuple(row) for row in out.collect())))
    finish(writer.outputMode(mode).option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
    return [batch for batch in batches if batch]


def test_built_in_operators_keep_the_state_of_a_key_that_moves_to_a_new_partition(spark: Any, tmp_path: Path) -> None:
    """The partition is not among the columns of their state."""
    source, last_partition = SourcePartition("partition", [2, 4]), partition_of("end", 4)

    def run(name: str, plan: Callable[[ArrowState, Any], Any], mode: str) -> list[list[tuple[Any, ...]]]:
        folder = tmp_path / name
        folder.mkdir()
        root, local = str(folder / "root"), str(folder / "local")
        state = ArrowState(root, name, bucket_by=source, local_dir=local, lease_ms=1_000)
        job = Job(spark, "arrow", folder, count, schema=SCHEMA)
        tables = make_rows(MOVED * 2, 2), make_rows([*MOVED, "new"], 4), make_rows(["end"], 4)
        emitted = run_operator(job, lambda df: plan(state, df), mode, *tables)
        wait_for_uploads(folder / "root", folder / "local")
        with open_state(root, unproven=True) as opened:
            bucket_by_key = dict(zip(*opened.scan(["key", "bucket"]).read_all().to_pydict().values(), strict=True))
        assert bucket_by_key.items() >= dict.fromkeys(MOVED, 1).items()
        return emitted

    def make_sessions(state: ArrowState, df: Any) -> Any:
        at = F.expr("timestamp_seconds(if(key = 'end', 1000, if(partition >= 2, 5, 0)))")
        timed = df.withColumn("at", at).withWatermark("at", "1 second")
        return sessionize(state, timed, "key", "at", 10_000, {"n": Agg.count()}).select("key", "n")

    assert run("deduplicate", lambda state, df: deduplicate(state, df, ["key"]), "append") == [
        sorted((key, "", 1) for key in MOVED),
        [("new", "", partition_of("new", 4))],
        [("end", "", last_partition)],
    ]
    best = run("top", lambda state, df: top_k(state, df, "key", "partition", 1, emit="changed"), "update")
    assert best == [
        sorted((key, "", 1, 1) for key in MOVED),
        sorted([*((key, "", 3, 1) for key in MOVED), ("new", "", partition_of("new", 4), 1)]),
        [("end", "", last_partition, 1)],
    ]
    assert run("sessions", make_sessions, "append") == [sorted([*((key, 3) for key in MOVED), ("new", 1)])]


@pytest.mark.parametrize(
    "session",
    [pytest.param("classic", marks=pytest.mark.soak), pytest.param("connect", marks=pytest.mark.connect)],
    indirect=True,
)
def test_before_expansion_follows_a_producer_that_partitions_by_range(session: Any, tmp_path: Path) -> None:
    """The producer splits its last range. The default mapping does not follow that, but the user's function does."""
    path = "partitioned:range_before_expansion"
    job = make_job(session, tmp_path, SourcePartition("partition", 2, before_expansion=path))
    fed = [LETTERS, LETTERS, LETTERS[3:], LETTERS]
    assert run_batches(job, make_rows(fed[0], 2, by=range_of)) == counted(*fed)[:1]
    job.options["bucket_by"] = SourcePartition("partition", [2, 3, 5], before_expansion=path)
    tables = [make_rows(keys, partitions, by=range_of) for keys, partitions in zip(fed[1:], (3, 5, 5), strict=True)]
    assert run_batches(job, *tables) == counted(*fed)[1:]


def test_a_partition_or_stream_column_that_is_missing_or_of_the_wrong_type_is_refused(
    spark: Any, tmp_path: Path
) -> None:
    for source, text in (
        (SourcePartition("part", 2), "names the column 'part', but the input has no column of that name"),
        (SourcePartition("key", 2), "'key', which is string: it must be bigint, or another integer type"),
        (SourcePartition("partition", {"a": 2}, stream="partition"), "'partition', which is int: it must be string"),
    ):
        job = make_job(spark, tmp_path, source)
        job.feed(make_rows("a", 2))
        with pytest.raises(UsageError, match=text):
            job.planned()


@reads_state
def test_a_query_from_a_savepoint_needs_and_keeps_the_bucket_map_by_source_partition(
    spark: Any, tmp_path: Path
) -> None:
    source = SourcePartition("partition", [2, 4])
    old = make_job(spark, tmp_path / "old", source)
    (tmp_path / "old").mkdir()
    fed = [LETTERS, LETTERS[:9]]
    assert run_batches(old, make_rows(fed[0], 2), make_rows(fed[1], 4)) == counted(*fed)
    state = ArrowState(str(tmp_path / "old" / "root"), "tested", bucket_by=source)
    path = str(tmp_path / "savepoint")
    take_savepoint(spark, path, old.checkpoint, state, form="canonical")
    for number, (bucket_by, text) in enumerate(
        (
            (SourcePartition("partition", 4), r"began with 2 partitions and the plan says 4: give counts=\[2, 4\]"),
            (None, "by source partition and the job asks for 2 buckets"),
        )
    ):
        folder = tmp_path / f"other-{number}"
        folder.mkdir()
        other = make_job(spark, folder, bucket_by, start_from=Savepoint(path))
        with pytest.raises(PySparkException, match=rf"(?s)BucketMapChangedError.*{text}"):
            other.run(make_rows(LETTERS, 4))
    fed += [LETTERS, MOVED]
    transformed = str(tmp_path / "few")
    assert main(["savepoint", "transform", path, transformed, "--keep", "key != 'a'"]) == 0
    for name, start, all_keys in (("new", path, fed), ("fewer", transformed, [LETTERS[1:], LETTERS[1:9], *fed[2:]])):
        (tmp_path / name).mkdir()
        new = make_job(spark, tmp_path / name, source, start_from=Savepoint(start))
        assert run_batches(new, *[make_rows(keys, 4) for keys in fed[2:]]) == counted(*all_keys)[2:]
        assert read_assignments(new) == [
            {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1]}},
            {"": {"counts": [2, 4], "buckets": [0, 1, 0, 1], "reached": 4}},
        ]


@pytest.mark.soak
@reads_state
def test_a_query_from_a_retained_checkpoint_continues_with_its_assignment(spark: Any, tmp_path: Path) -> None:
    """The new query may declare more partitions but not other ones, whether it claims the folder or not."""
    (tmp_path / "old").mkdir()
    old = make_job(spark, tmp_path / "old", SourcePartition("partition", [2, 4]))
    fed = [LETTERS, LETTERS[:9], LETTERS]
    assert run_batches(old, make_rows(fed[0], 2), make_rows(fed[1], 4)) == counted(*fed)[:2]
    root = str(tmp_path / "old" / "root")
    path = "partitioned:range_before_expansion"
    for number, (mode, bucket_by) in enumerate(
        (
            ("no_claim", SourcePartition("partition", [2, 4], before_expansion=path)),
            ("no_claim", SourcePartition("partition", [2, 4, 8])),
            ("claim", SourcePartition("partition", 2)),
            ("claim", SourcePartition("partition", [2, 4, 8])),
        )
    ):
        folder = tmp_path / f"new-{number}"
        folder.mkdir()
        start = RetainedCheckpoint(root, str(old.checkpoint), mode=mode)
        options = {"root": root} if mode == "claim" else {}
        new = make_job(spark, folder, bucket_by, start_from=start, **options)
        if bucket_by.assignment.streams[0].counts[-1] == 8:
            assert run_batches(new, make_rows(LETTERS, 8)) == counted(*fed)[-1:]
            continue
        with pytest.raises(PySparkException, match=r"(?s)PartitionsChangedError"):
            new.run(make_rows(["b", "d"], 2))
    assert [(assignment[""]["counts"], assignment[""].get("reached")) for assignment in read_assignments(old)] == [
        ([2, 4], None),
        ([2, 4], 4),
        ([2, 4, 8], 4),
        ([2, 4, 8], 8),
    ]
    assert read_assignments(old)[-1][""]["buckets"] == [0, 1] * 4


def test_erase_requests_live_reads_backends_and_commands_work_with_source_partitions(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Erase requests and live reads cover every bucket, and each backend has the assignment."""
    second = Backend(str(tmp_path / "second"))
    job = make_job(
        spark,
        tmp_path,
        SourcePartition("partition", [2, 4]),
        backends=["changelog", "fsspec", second],
        erase_requests=True,
        lease_ms=30_000,
    )
    fed = [LETTERS, LETTERS]
    assert run_batches(job, make_rows(fed[0], 2), make_rows(fed[1], 4)) == counted(*fed)
    with open_live(str(tmp_path / "local"), "tested") as live:
        counts = {key: live.get(key).rows.column("n").to_pylist() for key in LETTERS}
        # A live read returns the state of the newest batch that is known to be committed.
        assert set(map(tuple, counts.values())) in ({(1,)}, {(2,)})
    erase_keys(str(tmp_path / "root"), {"key": [*MOVED, "a"]}, operator="tested")
    job.options["bucket_by"] = SourcePartition("partition", [2, 4, 8])
    erased = {*MOVED, "a"}
    assert run_batches(job, make_rows(LETTERS, 8)) == [{key: 1 if key in erased else 3 for key in LETTERS}]
    (query_folder,) = (path for path in (tmp_path / "root" / "tested").iterdir() if path.name.count("-") == 4)
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
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # Files that the end of the query deletes meanwhile may be missing.
    (row,) = [result for result in results if result["status"] != "missing"]
    assert "partitions_0.json fails its checksum" in str(row)


@reads_state
def test_a_query_by_source_partition_cannot_start_from_the_savepoint_of_a_table(spark: Any, tmp_path: Path) -> None:
    """The savepoint of a table has hashed buckets."""
    path = str(tmp_path / "savepoint")
    df = spark.createDataFrame([("a", 7)], COUNTS)
    write_savepoint(df, path, keys=["key"], state_schema="n bigint", buckets=2, operator="tested")
    job = make_job(spark, tmp_path, SourcePartition("partition", 2), start_from=Savepoint(path))
    with pytest.raises(
        PySparkException, match=r"(?s)BucketMapChangedError.*in 2 buckets and the job asks for 2 buckets by"
    ):
        job.run(make_rows("a", 2))


@reads_state
def test_state_for_each_stream_of_a_key_cannot_be_exported_to_spark(spark: Any, tmp_path: Path) -> None:
    source = SourcePartition("partition", {"a": 1, "b": 1}, stream="stream", group_by="stream_and_partition")
    job = make_job(spark, tmp_path, source)
    job.run(make_rows("a", 1, "a"), make_rows("a", 1, "b"))
    state = ArrowState(str(tmp_path / "root"), "tested", bucket_by=source)
    path = str(tmp_path / "savepoint")
    take_savepoint(spark, path, job.checkpoint, state)
    with pytest.raises(UnsupportedPlanError, match="a state for each stream of a key"):
        export_native(spark, path)
