"""A stopped query of ours continues with its buckets and pointers after Spark has repartitioned its checkpoint."""

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
from timed_counts import (
    BUCKETS,
    FILES,
    batch_computation,
    count_state_partitions,
    make_state,
    make_timed_job,
    read_counts,
    run,
)

from arrow_schemas.pointer import Pointer
from spark_state_ext import Savepoint, take_savepoint
from spark_state_ext.__main__ import main
from spark_state_ext.spark.client.state_reader import StateReader
from tests.helpers.soak import whole
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.spark, repartitions]

EXPECTED = batch_computation(FILES)
CHANGELOG = {**FORMAT_2, "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true"}


def read_pointers(job: Job) -> dict[int, Pointer]:
    """Return the pointer of each bucket in Spark's state, as of the last committed batch."""
    # Spark's reader uses the session's checkpoint format.
    with job.configured():
        reader = StateReader(job.session, str(job.checkpoint))
        (store,) = reader.stores()
        return reader.by_bucket(store, reader.batch().batch)


def count_keys(files: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(key for keys in files for key in keys)


def find_last_commit(job: Job) -> int:
    return max(int(path.name) for path in (job.checkpoint / "commits").glob("[0-9]*"))


@pytest.mark.parametrize(
    "conf",
    [
        pytest.param(FORMAT_2, id="format-2"),
        pytest.param(ROCKSDB, id="format-1", marks=pytest.mark.soak),
        pytest.param(CHANGELOG, id="changelog", marks=pytest.mark.soak),
    ],
)
def test_a_repartitioned_query_keeps_its_buckets_and_pointers_on_more_and_fewer_partitions(
    spark: Any, tmp_path: Path, conf: dict[str, str]
) -> None:
    """An older pointer with the same offsets would lose counts. Thus pointers are compared, and not only counts."""
    job = make_timed_job(spark, tmp_path / "job", 2, conf)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    files_read = 2
    for partitions in whole([5, 1], [3]):
        before, batch = read_pointers(job), find_last_commit(job)
        assert sorted(before) == list(range(BUCKETS))
        repartition(spark, job.checkpoint, partitions, conf)
        assert find_last_commit(job) == batch + 1
        assert read_pointers(job) == before
        # Reading by pointers returns the same state for the batch that Spark has added.
        assert read_counts(job) == count_keys(FILES[:files_read])
        # The session still has 2 partitions, but Spark uses the number in the checkpoint.
        assert run(job, FILES[files_read : files_read + 2]) == EXPECTED[files_read : files_read + 2]
        files_read += 2
        after = read_pointers(job)
        assert {bucket: pointer.calls for bucket, pointer in after.items()} == {
            bucket: pointer.calls + 2 for bucket, pointer in before.items()
        }
        assert {pointer.partitioning[1] for pointer in after.values() if pointer.partitioning} == {partitions}
    assert read_counts(job) == count_keys(FILES[:files_read])
    with job.configured():
        take_savepoint(spark, tmp_path / "savepoint", job.checkpoint, make_state(job))
    start = Savepoint(str(tmp_path / "savepoint"))
    new = make_timed_job(spark, tmp_path / "new", 4, conf, start_from=start)
    assert run(new, FILES[files_read : files_read + 2]) == EXPECTED[files_read : files_read + 2]
    assert count_state_partitions(new) == 4


@pytest.mark.soak
def test_a_repartitioning_that_was_killed_can_be_repeated(spark: Any, tmp_path: Path) -> None:
    job = make_timed_job(spark, tmp_path / "job", 2, FORMAT_2)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = read_pointers(job)
    # A process that reads this file of the state waits for ever.
    (state_file,) = (job.checkpoint / "state" / "0" / "1").glob("2_*.zip")
    state_file.rename(tmp_path / "part")
    os.mkfifo(state_file)
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("repartitioning.py"))]
    with (tmp_path / "killed.log").open("w") as log:
        process = subprocess.Popen([*program, str(job.checkpoint), "5"], stdout=log, stderr=log, start_new_session=True)
    try:
        eventually(lambda: (job.checkpoint / "offsets" / "2").exists() or process.poll() is not None, 0.05)
        assert process.poll() is None, (tmp_path / "killed.log").read_text()[-2_000:]
    finally:
        kill_tree(process.pid)
        process.wait()
    state_file.unlink()
    (tmp_path / "part").rename(state_file)
    check_that_a_retry_finishes(job, before, 5)


@pytest.mark.soak
def test_a_repartitioning_that_failed_while_it_wrote_state_can_be_repeated(spark: Any, tmp_path: Path) -> None:
    job = make_timed_job(spark, tmp_path / "job", 2, FORMAT_2)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = read_pointers(job)
    # This file is in the place of the folder of a partition.
    obstacle = job.checkpoint / "state" / "0" / "3"
    obstacle.touch()
    with pytest.raises(Exception, match=r"(?s)repartition.*state/0/3"):
        repartition(spark, job.checkpoint, 5, FORMAT_2)
    # Spark had written other partitions before.
    assert any((job.checkpoint / "state" / "0" / "2").glob("3_*.zip"))
    obstacle.unlink()
    check_that_a_retry_finishes(job, before, 5)


def check_that_a_retry_finishes(job: Job, before: Mapping[int, Pointer], partitions: int) -> None:
    """Check that an unfinished repartitioning after the first two files stops the query until it is repeated."""
    assert find_last_commit(job) == 1
    assert read_pointers(job) == before
    with pytest.raises(StreamingQueryException, match="STREAMING_UNFINISHED_REPARTITION_DETECTED"):
        run(job, FILES[2:3])
    with pytest.raises(Exception, match="LAST_BATCH_ABANDONED_REPARTITION"):
        repartition(job.session, job.checkpoint, partitions + 1, job.conf)
    assert read_pointers(job) == before
    repartition(job.session, job.checkpoint, partitions, job.conf)
    assert read_pointers(job) == before
    assert run(job, []) == EXPECTED[2:3]
    assert run(job, FILES[3:5]) == EXPECTED[3:5]
    assert read_counts(job) == count_keys(FILES[:5])


@pytest.mark.soak
@pytest.mark.parametrize("conf", [FORMAT_2, pytest.param(ROCKSDB, marks=pytest.mark.soak)])
def test_a_rollback_to_a_batch_before_a_repartitioning_undoes_the_repartitioning(
    spark: Any, tmp_path: Path, conf: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark cannot undo it. `rollback` restores state, pointers, offsets and the number of partitions together."""
    job = make_timed_job(spark, tmp_path / "job", 2, conf)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = read_pointers(job)
    repartition(spark, job.checkpoint, 5, conf)
    assert run(job, FILES[2:4]) == EXPECTED[2:4]
    assert main(["rollback", str(job.checkpoint), "--to-batch", "1", "--apply", "--idle-s", "0"]) == 0, (
        capsys.readouterr()
    )
    assert read_pointers(job) == before
    # The file sink would ignore batches whose numbers it has seen.
    job.sink.rename(tmp_path / "old sink")
    # The rolled-back input is read again, in one batch with the new file.
    files = [*FILES[:2], [key for keys in FILES[2:5] for key in keys], *FILES[5:]]
    expected = batch_computation(files)
    assert run(job, FILES[4:5]) == expected[2:3]
    assert {pointer.partitioning[1] for pointer in read_pointers(job).values() if pointer.partitioning} == {2}
    assert read_counts(job) == count_keys(FILES[:5])
    # Repartition twice again, then roll back to the batch after the change to fewer partitions.
    for partitions, index in ((5, 3), (1, 4)):
        before = read_pointers(job)
        repartition(spark, job.checkpoint, partitions, conf)
        assert read_pointers(job) == before
        assert run(job, files[index : index + 1]) == expected[index : index + 1]
    before, batch = read_pointers(job), find_last_commit(job)
    assert run(job, files[5:7]) == expected[5:7]
    command = ["rollback", str(job.checkpoint), "--to-batch", str(batch), "--apply", "--idle-s", "0"]
    assert main(command) == 0, capsys.readouterr()
    assert read_pointers(job) == before


@pytest.mark.soak
def test_a_query_continues_after_rollback_if_spark_cannot_repartition_its_state(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark does not support its default provider, the HDFS-backed one, and fails only after it has begun."""
    hdfs = {"spark.sql.streaming.stateStore.providerClass": PROVIDERS["hdfs"]}
    job = make_timed_job(spark, tmp_path / "job", 2, hdfs)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    before = read_pointers(job)
    with pytest.raises(Exception, match=r"UNSUPPORTED_PROVIDER.*HDFSBackedStateStoreProvider is not supported"):
        repartition(spark, job.checkpoint, 5, hdfs)
    with pytest.raises(StreamingQueryException, match="STREAMING_UNFINISHED_REPARTITION_DETECTED"):
        run(job, FILES[2:3])
    command = ["rollback", str(job.checkpoint), "--to-batch", "1", "--apply", "--idle-s", "0"]
    assert main(command) == 0, capsys.readouterr()
    assert read_pointers(job) == before
    assert run(job, FILES[3:4]) == EXPECTED[2:4]
    assert read_counts(job) == count_keys(FILES[:4])


@pytest.mark.parametrize("conf", [FORMAT_2, pytest.param(ROCKSDB, marks=pytest.mark.soak)])
def test_a_failed_batch_that_a_repartitioning_gives_up_is_neither_lost_nor_counted_twice(
    spark: Any, tmp_path: Path, conf: dict[str, str]
) -> None:
    """The tasks of the batch had ended, so that files and local stores have its rows. Spark reads its input again.

    This does not work with a file source: Spark 4.3 gives it the offsets of the abandoned batch, and the query fails.
    """
    from growing_source import GrowingSource, keys_of, release

    spark.dataSource.register(GrowingSource)
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS, options={"buckets": BUCKETS}, conf=conf)
    table: dict[str, int] = {}
    sink_fails = False

    def upsert(df: Any, batch: int) -> None:
        rows = df.collect()
        if sink_fails:
            raise RuntimeError("the sink is full")
        table.update({row.key: row.n for row in rows})

    def run_batches(batches: int) -> None:
        release(tmp_path, batches)
        with job.configured(), using(spark, "arrow", tmp_path, **job.options):
            events = spark.readStream.format("growing").load(str(tmp_path))
            out = events.groupBy("key").applyInPandasWithState(count, COUNTS, "n bigint", "append", "NoTimeout")
            writer = out.writeStream.foreachBatch(upsert).option("checkpointLocation", str(job.checkpoint))
            finish(writer.trigger(availableNow=True).start())

    def expected_counts(batches: int) -> Counter[str]:
        return count_keys([keys_of(batch) for batch in range(batches)])

    run_batches(1)
    run_batches(2)
    before = read_pointers(job)
    sink_fails = True
    with pytest.raises(StreamingQueryException, match="the sink is full"):
        run_batches(3)
    sink_fails = False
    assert find_last_commit(job) == 1
    assert (job.checkpoint / "offsets" / "2").exists()
    with pytest.raises(Exception, match="LAST_BATCH_FAILED"):
        repartition(spark, job.checkpoint, 5, conf)
    repartition(spark, job.checkpoint, 5, conf, skip=True)
    assert read_pointers(job) == before
    assert read_counts(job) == table == expected_counts(2)
    run_batches(3)
    assert read_counts(job) == table == expected_counts(3)
    run_batches(5)
    assert read_counts(job) == table == expected_counts(5)


@pytest.mark.soak
def test_the_last_call_of_a_task_still_waits_for_all_uploads_after_a_repartitioning(spark: Any, tmp_path: Path) -> None:
    """Spark starts one plan on 2, 5 and 1 partitions: calls rely only on a partitioning that was checked for this number."""
    # No delta is stored inline, so that each upload is deferred to the last call, unless a call waits for it.
    options = {"buckets": BUCKETS, "inline_bytes_max": 1}
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS, options=options, conf=FORMAT_2)
    job.feed(keyed(*FILES[0]))
    table: dict[str, int] = {}
    output = None
    for index, partitions in enumerate((2, 5, 1)):
        if index:
            before = read_pointers(job)
            repartition(spark, job.checkpoint, partitions, FORMAT_2)
            assert read_pointers(job) == before
        job.feed(*[keyed(*keys) for keys in FILES[2 * index + 1 : 2 * index + 3]])
        with job.configured():
            output = output or job.planned()
            writer = output.writeStream.foreachBatch(
                lambda df, _: table.update({row.key: row.n for row in df.collect()})
            )
            finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
        assert table == count_keys(FILES[: 2 * index + 3])
        partitionings = [pointer.partitioning for pointer in read_pointers(job).values()]
        assert len({partitioning[0] for partitioning in partitionings if partitioning}) == 1
        assert [partitioning[1] for partitioning in partitionings if partitioning] == [partitions] * BUCKETS
        assert not any(pointer.inline for pointer in read_pointers(job).values())
    assert list(tmp_path.glob("root/tested/*/spread-*")) == [], "every bucket was in the expected partition"


@pytest.mark.soak
def test_a_batch_without_data_calls_all_buckets_of_the_new_partitions(spark: Any, tmp_path: Path) -> None:
    """With Spark's checkpoint format 1, the state of a partition's buckets must come from one attempt.

    See `engine.aligned_timeouts`.
    """
    job = make_timed_job(spark, tmp_path / "job", 2, ROCKSDB)
    assert run(job, FILES[:2]) == EXPECTED[:2]
    repartition(spark, job.checkpoint, 5, ROCKSDB)

    def find_batches_without_data(query: Any) -> list[Any]:
        return [
            progress["stateOperators"][0]
            for progress in query.recentProgress
            if progress["numInputRows"] == 0 and progress["stateOperators"]
        ]

    last_batch = max(emitted(job.sink))
    job.conf["spark.sql.streaming.noDataMicroBatches.enabled"] = "true"
    # A restarted query runs a batch with data before the first one without data.
    job.feed(keyed(*FILES[2]))
    with job.running() as query:
        eventually(lambda: len(find_batches_without_data(query)) > 3 or query.exception() is not None)
        batches = find_batches_without_data(query)
    assert {(batch["numShufflePartitions"], batch["numRowsUpdated"]) for batch in batches} == {(5, BUCKETS)}
    # Each pending timeout fires exactly once.
    rows = [row for batch, texts in emitted(job.sink).items() if batch > last_batch for row in texts]
    timed_out = [(f"{key} timed out at {n}",) for key, n in count_keys(FILES[:3]).items() if key in FILES[2]]
    assert sorted(rows) == sorted([*EXPECTED[2], *timed_out])
