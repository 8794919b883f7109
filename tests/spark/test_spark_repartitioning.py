"""A stopped query of ours goes on after Spark has repartitioned its checkpoint: with its buckets, and with their pointers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, emitted, keyed
from killed_jobs import PROVIDERS
from processes import kill_tree
from pyspark.errors import StreamingQueryException
from repartitioning import FORMAT_2, ROCKSDB, repartition, repartitions
from streams import finish, using
from timed_counts import BUCKETS, FILES, batch_computation, run, state_of, state_partitions, stored, timed_counts

from arrow_schemas.pointer import Pointer
from spark_state_ext import Savepoint, take_savepoint
from spark_state_ext.__main__ import main
from spark_state_ext.spark.client.state_reader import StateReader
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.spark, repartitions]

EXPECTED = batch_computation(FILES)
CHANGELOG = {**FORMAT_2, "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true"}


def pointers(job: Job) -> dict[int, Pointer]:
    """What Spark's state says of each bucket, as of the last committed batch."""
    # Spark's reader goes by the session's checkpoint format.
    with job.configured():
        reader = StateReader(job.session, str(job.checkpoint))
        (store,) = reader.stores()
        return reader.by_bucket(store, reader.batch().batch)


def counted(files: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(key for keys in files for key in keys)


def committed(job: Job) -> int:
    return max(int(path.name) for path in (job.checkpoint / "commits").glob("[0-9]*"))


@pytest.mark.parametrize(
    "conf",
    [
        pytest.param(FORMAT_2, id="format-2"),
        pytest.param(ROCKSDB, id="format-1", marks=pytest.mark.soak),
        pytest.param(CHANGELOG, id="changelog", marks=pytest.mark.soak),
    ],
)
def test_a_query_goes_on_with_its_buckets_on_more_and_fewer_partitions(
    spark: Any, tmp_path: Path, conf: dict[str, str]
) -> None:
    """Were a pointer to go back, while offsets do not, counts would be lost: so pointers are compared, not counts alone."""
    job = timed_counts(spark, tmp_path / "job", 2, conf)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    at = 2
    for partitions in (5, 1, 3):
        before, batch = pointers(job), committed(job)
        assert sorted(before) == list(range(BUCKETS))
        repartition(spark, job.checkpoint, partitions, conf)
        assert committed(job) == batch + 1
        assert pointers(job) == before
        # What reads by pointers finds the same state at the batch that Spark has added.
        assert stored(job) == counted(FILES[:at])
        # The session says 2 as before: Spark goes by the checkpoint.
        assert run(job, FILES[at : at + 2]) == EXPECTED[at : at + 2]
        at += 2
        after = pointers(job)
        assert {bucket: it.calls for bucket, it in after.items()} == {
            bucket: it.calls + 2 for bucket, it in before.items()
        }
        assert {it.partitioning[1] for it in after.values() if it.partitioning} == {partitions}
    assert stored(job) == counted(FILES[:at])
    with job.configured():
        take_savepoint(spark, tmp_path / "savepoint", job.checkpoint, state_of(job))
    start = Savepoint(str(tmp_path / "savepoint"))
    new = timed_counts(spark, tmp_path / "new", 4, conf, start_from=start)
    assert run(new, FILES[at : at + 2]) == EXPECTED[at : at + 2]
    assert state_partitions(new) == 4


@pytest.mark.soak
def test_a_repartitioning_that_was_killed_is_done_again(spark: Any, tmp_path: Path) -> None:
    job = timed_counts(spark, tmp_path / "job", 2, FORMAT_2)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = pointers(job)
    # Who reads this part of the state waits for ever.
    (part,) = (job.checkpoint / "state" / "0" / "1").glob("2_*.zip")
    part.rename(tmp_path / "part")
    os.mkfifo(part)
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("repartitioning.py"))]
    with (tmp_path / "killed.log").open("w") as log:
        process = subprocess.Popen([*program, str(job.checkpoint), "5"], stdout=log, stderr=log, start_new_session=True)
    try:
        eventually(lambda: (job.checkpoint / "offsets" / "2").exists() or process.poll() is not None, 0.05)
        assert process.poll() is None, (tmp_path / "killed.log").read_text()[-2_000:]
    finally:
        kill_tree(process.pid)
        process.wait()
    part.unlink()
    (tmp_path / "part").rename(part)
    finished_by_a_retry(job, before, 5)


def test_a_repartitioning_that_was_aborted_while_it_wrote_is_done_again(spark: Any, tmp_path: Path) -> None:
    job = timed_counts(spark, tmp_path / "job", 2, FORMAT_2)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = pointers(job)
    # Where the folder of a partition should be.
    obstacle = job.checkpoint / "state" / "0" / "3"
    obstacle.touch()
    with pytest.raises(Exception, match=r"(?s)repartition.*state/0/3"):
        repartition(spark, job.checkpoint, 5, FORMAT_2)
    # Others were written by then.
    assert any((job.checkpoint / "state" / "0" / "2").glob("3_*.zip"))
    obstacle.unlink()
    finished_by_a_retry(job, before, 5)


def finished_by_a_retry(job: Job, before: Mapping[int, Pointer], partitions: int) -> None:
    """After a repartitioning that has not come to its end after the first two files: nothing runs until it has."""
    assert committed(job) == 1
    assert pointers(job) == before
    with pytest.raises(StreamingQueryException, match="STREAMING_UNFINISHED_REPARTITION_DETECTED"):
        run(job, FILES[2:3])
    with pytest.raises(Exception, match="LAST_BATCH_ABANDONED_REPARTITION"):
        repartition(job.session, job.checkpoint, partitions + 1, job.conf)
    assert pointers(job) == before
    repartition(job.session, job.checkpoint, partitions, job.conf)
    assert pointers(job) == before
    assert run(job, []) == EXPECTED[2:3]
    assert run(job, FILES[3:5]) == EXPECTED[3:5]
    assert stored(job) == counted(FILES[:5])


@pytest.mark.parametrize("conf", [FORMAT_2, pytest.param(ROCKSDB, marks=pytest.mark.soak)])
def test_a_repartitioning_is_taken_back_by_going_back_before_it(
    spark: Any, tmp_path: Path, conf: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark itself has no way back. `rollback` takes state, pointers and offsets back together, and partitions with them."""
    job = timed_counts(spark, tmp_path / "job", 2, conf)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = pointers(job)
    repartition(spark, job.checkpoint, 5, conf)
    assert run(job, FILES[2:4]) == EXPECTED[2:4]
    assert main(["rollback", str(job.checkpoint), "--to-batch", "1", "--apply", "--idle-s", "0"]) == 0, (
        capsys.readouterr()
    )
    assert pointers(job) == before
    # A sink that knows its batches would pass over their numbers.
    job.sink.rename(tmp_path / "old sink")
    # The input comes again, in one batch with what is new.
    files = [*FILES[:2], [key for keys in FILES[2:5] for key in keys], *FILES[5:]]
    expected = batch_computation(files)
    assert run(job, FILES[4:5]) == expected[2:3]
    assert {it.partitioning[1] for it in pointers(job).values() if it.partitioning} == {2}
    assert stored(job) == counted(FILES[:5])
    # And forth again, and back to a batch on fewer partitions than there were before it.
    for partitions, at in ((5, 3), (1, 4)):
        before = pointers(job)
        repartition(spark, job.checkpoint, partitions, conf)
        assert pointers(job) == before
        assert run(job, files[at : at + 1]) == expected[at : at + 1]
    before, batch = pointers(job), committed(job)
    assert run(job, files[5:7]) == expected[5:7]
    command = ["rollback", str(job.checkpoint), "--to-batch", str(batch), "--apply", "--idle-s", "0"]
    assert main(command) == 0, capsys.readouterr()
    assert pointers(job) == before


@pytest.mark.soak
def test_what_spark_cannot_repartition_can_go_on_as_it_was(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """State in the HDFS-backed provider, which is Spark's default. Spark finds out when it has begun already."""
    hdfs = {"spark.sql.streaming.stateStore.providerClass": PROVIDERS["hdfs"]}
    job = timed_counts(spark, tmp_path / "job", 2, hdfs)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = pointers(job)
    with pytest.raises(Exception, match=r"UNSUPPORTED_PROVIDER.*HDFSBackedStateStoreProvider is not supported"):
        repartition(spark, job.checkpoint, 5, hdfs)
    with pytest.raises(StreamingQueryException, match="STREAMING_UNFINISHED_REPARTITION_DETECTED"):
        run(job, FILES[2:3])
    command = ["rollback", str(job.checkpoint), "--to-batch", "1", "--apply", "--idle-s", "0"]
    assert main(command) == 0, capsys.readouterr()
    assert pointers(job) == before
    assert run(job, FILES[3:4]) == EXPECTED[2:4]
    assert stored(job) == counted(FILES[:4])


@pytest.mark.parametrize("conf", [FORMAT_2, pytest.param(ROCKSDB, marks=pytest.mark.soak)])
def test_a_batch_that_failed_is_not_counted_twice_and_not_lost(
    spark: Any, tmp_path: Path, conf: dict[str, str]
) -> None:
    """Its tasks had ended, so files and local stores hold what it made. Spark gives it up; its input comes again.

    Not from a file source: Spark 4.3 gives that the offsets of the batch that was given up, and the query does not start.
    """
    from growing_source import GrowingSource, keys_of, release

    spark.dataSource.register(GrowingSource)
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS, options={"buckets": BUCKETS}, conf=conf)
    table: dict[str, int] = {}
    fails = False

    def upsert(df: Any, batch: int) -> None:
        rows = df.collect()
        if fails:
            raise RuntimeError("the sink is full")
        table.update({row.key: row.n for row in rows})

    def go(batches: int) -> None:
        release(tmp_path, batches)
        with job.configured(), using(spark, "arrow", tmp_path, **job.options):
            events = spark.readStream.format("growing").load(str(tmp_path))
            out = events.groupBy("key").applyInPandasWithState(count, COUNTS, "n bigint", "append", "NoTimeout")
            writer = out.writeStream.foreachBatch(upsert).option("checkpointLocation", str(job.checkpoint))
            finish(writer.trigger(availableNow=True).start())

    def expected(batches: int) -> Counter[str]:
        return counted([keys_of(batch) for batch in range(batches)])

    go(1)
    go(2)
    before = pointers(job)
    fails = True
    with pytest.raises(StreamingQueryException, match="the sink is full"):
        go(3)
    fails = False
    assert committed(job) == 1
    assert (job.checkpoint / "offsets" / "2").exists()
    with pytest.raises(Exception, match="LAST_BATCH_FAILED"):
        repartition(spark, job.checkpoint, 5, conf)
    repartition(spark, job.checkpoint, 5, conf, skip=True)
    assert pointers(job) == before
    assert stored(job) == table == expected(2)
    go(3)
    assert stored(job) == table == expected(3)
    go(5)
    assert stored(job) == table == expected(5)


def test_uploads_are_left_to_the_last_call_of_a_task_on_the_new_partitions(spark: Any, tmp_path: Path) -> None:
    """One plan, which Spark starts on 2, then 5, then 1 partitions: only what was compared on that number is relied upon."""
    # No delta goes inline, so each that a call need not wait for is left to a later one.
    options = {"buckets": BUCKETS, "inline_bytes_max": 1}
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS, options=options, conf=FORMAT_2)
    job.feed(keyed(*FILES[0]))
    table: dict[str, int] = {}
    planned = None
    for at, partitions in enumerate((2, 5, 1)):
        if at:
            before = pointers(job)
            repartition(spark, job.checkpoint, partitions, FORMAT_2)
            assert pointers(job) == before
        job.feed(*[keyed(*keys) for keys in FILES[2 * at + 1 : 2 * at + 3]])
        with job.configured():
            planned = planned or job.planned()
            writer = planned.writeStream.foreachBatch(
                lambda df, _: table.update({row.key: row.n for row in df.collect()})
            )
            finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
        assert table == counted(FILES[: 2 * at + 3])
        found = [it.partitioning for it in pointers(job).values()]
        assert len({it[0] for it in found if it}) == 1
        assert [it[1] for it in found if it] == [partitions] * BUCKETS
        assert not any(it.inline for it in pointers(job).values())
    assert list(tmp_path.glob("root/tested/*/spread-*")) == [], "every bucket was where it was expected"


def test_a_batch_without_data_calls_all_buckets_of_the_new_partitions(spark: Any, tmp_path: Path) -> None:
    """Under Spark's checkpoint format 1 the buckets of a partition must stand on one attempt (`engine.aligned_timeouts`)."""
    job = timed_counts(spark, tmp_path / "job", 2, ROCKSDB)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    repartition(spark, job.checkpoint, 5, ROCKSDB)

    def without_data(query: Any) -> list[Any]:
        return [
            it["stateOperators"][0] for it in query.recentProgress if it["numInputRows"] == 0 and it["stateOperators"]
        ]

    since = max(emitted(job.sink))
    job.conf["spark.sql.streaming.noDataMicroBatches.enabled"] = "true"
    # Before a batch with data a query that was started again has none without.
    job.feed(keyed(*FILES[2]))
    with job.running() as query:
        eventually(lambda: len(without_data(query)) > 3 or query.exception() is not None)
        called = without_data(query)
    assert {(it["numShufflePartitions"], it["numRowsUpdated"]) for it in called} == {(5, BUCKETS)}
    # What was pending times out, and once.
    rows = [row for batch, found in emitted(job.sink).items() if batch > since for row in found]
    ends = [(f"{key} timed out at {n}",) for key, n in counted(FILES[:3]).items() if key in FILES[2]]
    assert sorted(rows) == sorted([*EXPECTED[2], *ends])
