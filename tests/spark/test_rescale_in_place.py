"""Rescaling to more or fewer buckets on real Spark, from a snapshot and in place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import TIMED, Job, configured, event_rows, reads_state
from processes import kill_tree
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.state import GroupStateTimeout
from savepoint_job import AFTER_ITS_TASKS, IN_A_TASK, OPERATOR, Query, batch_computation, file_of
from streams import finish

from arrow_schemas import BucketMap
from spark_state_ext import (
    Backend,
    OpenState,
    RetainedCheckpoint,
    Savepoint,
    erase_keys,
    open_committed,
    open_state,
    take_savepoint,
)
from spark_state_ext.errors import ChangedJobError
from spark_state_ext.files.layout import STARTING_FOLDER
from tests.helpers.soak import SOAK
from tests.helpers.waiting import eventually, removed

pytestmark = [pytest.mark.spark, reads_state]


def make_query(folder: Path, buckets: int, **options: Any) -> Query:
    return Query(folder, str(folder / "root"), {}, buckets, options=options)


def rescale_in_place(old: Query, buckets: int, **options: Any) -> Query:
    """Return the same query with another number of buckets and an empty local disk."""
    shutil.rmtree(old.folder / "local", ignore_errors=True)
    options = {"rescale": str(old.checkpoint), **options}
    return replace(old, buckets=buckets, options=options)


def run_files(job: Query, first: int, last: int, spark: Any) -> Query:
    """Run a job over some files, and compare what it has emitted with the batch computation."""
    job.feed(range(first, last))
    job.run(spark)
    expected = batch_computation(file_of(number, number in job.whole) for number in range(last))
    assert job.table == {key: expected[key] for key in job.table}
    return job


def state_of(job: Query, spark: Any) -> dict[int, tuple[int, int]]:
    """Return the state that Spark has committed for the job."""
    (backend,) = job.options.get("backends", (job,))
    with open_committed(spark, backend.root, str(job.checkpoint)) as state:
        return state_by_key(state)


def state_by_key(state: OpenState) -> dict[int, tuple[int, int]]:
    return {row["key"]: (row["n"], row["total"]) for row in state.scan().read_all().to_pylist()}


def expected_state(files: Iterable[int]) -> dict[int, tuple[int, int]]:
    return batch_computation(file_of(number, False) for number in files)


@pytest.mark.parametrize("kind", ["savepoint", pytest.param("retained_checkpoint", marks=pytest.mark.soak)])
def test_a_job_starts_from_a_snapshot_with_another_number_of_buckets(spark: Any, tmp_path: Path, kind: str) -> None:
    old = run_files(make_query(tmp_path / "old", 3), 0, 3, spark)
    if kind == "savepoint":
        path = str(tmp_path / "savepoint")
        take_savepoint(spark, path, old.checkpoint, old.state)
        start: Any = Savepoint(path)
    else:
        start = RetainedCheckpoint(old.root, str(old.checkpoint))
    for buckets in (8, 2):
        new = replace(make_query(tmp_path / f"new-{buckets}", buckets), start_from=start)
        new.feed(range(3, 5))
        new.run(spark)
        assert state_of(new, spark) == expected_state(range(5))
    removed(Path(old.root))
    shutil.rmtree(tmp_path / "savepoint", ignore_errors=True)
    removed(new.folder / "local")
    new.feed(range(5, 6))
    new.run(spark)
    assert state_of(new, spark) == expected_state(range(6))


def test_a_query_is_rescaled_in_place_several_times(spark: Any, tmp_path: Path) -> None:
    job = run_files(make_query(tmp_path / "job", 3), 0, 3, spark)
    next_file = 3
    for buckets in (8, 2, 5) if SOAK else (8, 5):
        job = run_files(rescale_in_place(job, buckets), next_file, next_file + 2, spark)
        next_file += 2
        assert state_of(job, spark) == expected_state(range(next_file))
    # The `rescale` option may remain, and may be removed.
    job = run_files(rescale_in_place(job, 5), next_file, next_file + 1, spark)
    job = run_files(replace(job, options={}), next_file + 1, next_file + 2, spark)
    assert state_of(job, spark) == expected_state(range(next_file + 2))
    # Without the option, another number of buckets is refused, and the query continues with its own number.
    refused = replace(job, buckets=8, options={})
    refused.feed([next_file + 2])
    with pytest.raises(StreamingQueryException, match=r"5 buckets and the job asks for 8: .*rescale the query with"):
        refused.run(spark)
    job.run(spark)
    assert state_of(job, spark) == expected_state(range(next_file + 3))
    # A savepoint of a rescaled query is like any other.
    path = str(tmp_path / "savepoint")
    take_savepoint(spark, path, job.checkpoint, job.state)
    removed(Path(job.root))
    new = replace(make_query(tmp_path / "new", 3), start_from=Savepoint(path))
    new.feed([next_file + 3])
    new.run(spark)
    assert state_of(new, spark) == expected_state(range(next_file + 4))


@pytest.mark.soak
def test_a_worker_that_starts_late_needs_nothing_of_the_state_before_the_rescaling(spark: Any, tmp_path: Path) -> None:
    """The old folder is deleted while the query's plan is in use, and then new workers run its tasks."""
    job = run_files(make_query(tmp_path / "job", 5), 0, 2, spark)
    old_folder = job.query_folder
    job = rescale_in_place(job, 3)
    planned_output = job.plan(spark)
    for first, traceback in ((2, "true"), (4, "false")):
        job.feed(range(first, first + 2))
        # Spark reuses a worker only for the same environment, and this setting is part of it.
        with configured(spark, {"spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": traceback}):
            writer = planned_output.writeStream.outputMode("update").format("noop")
            finish(writer.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start())
        assert state_of(job, spark) == expected_state(range(first + 2))
        shutil.rmtree(old_folder.root, ignore_errors=True)
        shutil.rmtree(Path(job.root) / OPERATOR / STARTING_FOLDER, ignore_errors=True)


@pytest.mark.soak
def test_one_heavy_bucket_can_be_split_without_the_others(spark: Any, tmp_path: Path) -> None:
    job = run_files(make_query(tmp_path / "job", 3), 0, 2, spark)
    job = run_files(rescale_in_place(job, 0, bucket_by=BucketMap.split(3, {1: 4})), 2, 3, spark)
    with open_committed(spark, job.root, str(job.checkpoint)) as state:
        assert state.bucket_map == BucketMap.split(3, {1: 4})
    # The number of buckets stays the same but they are of equal size: bucket maps are compared, not numbers.
    job = run_files(rescale_in_place(job, 6), 3, 5, spark)
    assert state_of(job, spark) == expected_state(range(5))
    with open_committed(spark, job.root, str(job.checkpoint)) as state:
        assert state.bucket_map == BucketMap(6)
    with open_state(job.root) as state:
        assert state.buckets == 6
        assert state_by_key(state) == expected_state(range(state.batch + 1))
    # Spark retains a batch from before the rescaling, whose state is in the old folder.
    with open_committed(spark, job.root, str(job.checkpoint), batch=1) as state:
        assert state.buckets == 3
        assert state_by_key(state) == expected_state(range(2))


@pytest.mark.soak
@pytest.mark.parametrize(
    "with_backend",
    [pytest.param(False, id="in the root"), pytest.param(True, id="in a backend", marks=pytest.mark.soak)],
)
def test_a_savepoint_can_be_taken_before_a_bucket_has_its_own_snapshot(
    spark: Any, tmp_path: Path, with_backend: bool
) -> None:
    options: dict[str, Any] = {"backends": [Backend(str(tmp_path / "elsewhere"))]} if with_backend else {}
    job = run_files(make_query(tmp_path / "job", 3, **options), 0, 3, spark)
    job = run_files(rescale_in_place(job, 8, **options), 3, 4, spark)
    starts: dict[str, Any] = {"retained": RetainedCheckpoint(job.root, str(job.checkpoint), **options)}
    for form in ("native", "canonical"):
        path = str(tmp_path / form)
        take_savepoint(spark, path, job.checkpoint, job.state, form=form)
        starts[form] = Savepoint(path)
    for name, start in starts.items():
        new = replace(make_query(tmp_path / f"from-{name}", 8), start_from=start)
        new.feed([4])
        new.run(spark)
        assert state_of(new, spark) == expected_state(range(5))
    # The query can be rescaled again.
    job = run_files(rescale_in_place(job, 3, **options), 4, 5, spark)
    assert state_of(job, spark) == expected_state(range(5))


def kill_in_first_batch(hanging: Query, log: Path) -> None:
    """Start a query in another process, and kill the process within the first batch."""
    spec = log.with_suffix(".json")
    spec.write_text(json.dumps({"query": hanging.to_plain(), "provider": "hdfs"}))
    with log.open("w") as output:
        program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("savepoint_job.py")), str(spec)]
        process = subprocess.Popen(program, stdout=output, stderr=output, start_new_session=True)
    try:
        eventually(lambda: hanging.reached.exists() or process.poll() is not None, 0.05)
    finally:
        kill_tree(process.pid)
        process.wait()
    assert hanging.reached.exists(), log.read_text()[-2_000:]
    hanging.reached.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old_buckets", "new_buckets", "hang"),
    [(*numbers, hang) for numbers in ((3, 8), (96, 64), (64, 1)) for hang in (IN_A_TASK, AFTER_ITS_TASKS)]
    if SOAK
    else [(7, 2, AFTER_ITS_TASKS)],
)
def test_a_query_killed_while_it_is_rescaled_continues_with_either_number_of_buckets(
    spark: Any, tmp_path: Path, old_buckets: int, new_buckets: int, hang: str
) -> None:
    old = run_files(make_query(tmp_path / "job", old_buckets), 0, 3, spark)
    new = rescale_in_place(old, new_buckets)
    new.feed([3])
    kill_in_first_batch(replace(new, hang=hang), tmp_path / "killed.log")
    # The query continues with the old number, because no batch was committed with the new one.
    shutil.rmtree(old.folder / "local", ignore_errors=True)
    old.run(spark)
    assert state_of(old, spark) == expected_state(range(4))
    new = run_files(rescale_in_place(old, new_buckets), 4, 5, spark)
    assert state_of(new, spark) == expected_state(range(5))
    # Now the old number is refused, and the state is unchanged.
    old.feed([5])
    with pytest.raises(StreamingQueryException, match="BucketCountChangedError"):
        old.run(spark)
    new.run(spark)
    assert state_of(new, spark) == expected_state(range(6))


def make_timed_function() -> Callable[..., Iterator[pd.DataFrame]]:
    # A nested function is pickled by value, so that workers need not import this module.
    def count_until_timeout(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        """Count rows; a key without rows for 10 s of event time emits its count and is removed."""
        if state.hasTimedOut:
            (n,) = state.get
            state.remove()
            yield pd.DataFrame({"text": [f"{key[0]} had {n}"]})
            return
        n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 10_000)
        yield pd.DataFrame({"text": [f"{key[0]} has {n}"]})

    return count_until_timeout


def events_at(at_s: int, *keys: str) -> Any:
    return event_rows(*((key, at_s, 1) for key in keys))


def run_with_rescaling(
    spark: Any, operator: str, folder: Path, bucket_counts: tuple[int, int], parts: list[Any]
) -> dict[int, Any]:
    """Run all parts but the last, repeat the last batch, and run the last part rescaled; return the output of each batch."""
    folder.mkdir()
    job = Job(
        *(spark, operator, folder, make_timed_function()),
        timeout=GroupStateTimeout.EventTimeTimeout,
        schema=TIMED,
        watermark=("at", "0 seconds"),
        options={"buckets": bucket_counts[0]},
    )
    batches: dict[int, Any] = {}

    def record(df: Any, batch: int) -> None:
        batches[batch] = sorted(row.text for row in df.collect())

    def start() -> Any:
        writer = job.planned().writeStream.foreachBatch(record)
        return writer.option("checkpointLocation", str(job.checkpoint)).trigger(processingTime="0 seconds").start()

    for part in parts[:-1]:
        job.feed(*part)
        query = start()
        query.processAllAvailable()
        query.stop()
    # The last batch has no data. It is repeated, as if Spark had been killed before it committed the batch.
    commits = folder / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)
    job.options = {"buckets": bucket_counts[1], "rescale": str(job.checkpoint)}
    query = start()
    try:
        eventually(lambda: (commits / str(last)).exists())
        job.feed(*parts[-1])
        query.processAllAvailable()
    finally:
        query.stop()
    return batches


@pytest.mark.soak
@pytest.mark.parametrize("bucket_counts", [(3, 8), (8, 3)] if SOAK else [(8, 3)], ids=str)
def test_timeouts_fire_as_on_sparks_operator_if_a_rescaled_query_repeats_a_batch_without_data(
    spark: Any, tmp_path: Path, bucket_counts: tuple[int, int]
) -> None:
    """Each batch emits the same on both operators, also if the first batch after the restart has no data."""
    parts = [
        [events_at(0, *"abcdefghij"), events_at(5, "a", "b")],
        [events_at(30, "a", "k", "l")],
        [events_at(31, *"bcd"), events_at(60, "z"), events_at(90, "z", "a")],
    ]
    arrow_output, spark_output = (
        run_with_rescaling(spark, operator, tmp_path / operator, bucket_counts, parts)
        for operator in ("arrow", "spark")
    )
    assert arrow_output == spark_output
    assert sum("had" in text for texts in arrow_output.values() for text in texts) > 8
    # Calls of the batch without data used the old bucket map, and noted their pointers.
    assert list((tmp_path / "arrow" / "root" / "tested" / "starting").glob("*.pointer"))


def test_a_rescaling_is_refused_for_a_wrong_checkpoint_and_for_a_pending_erase_request(
    spark: Any, tmp_path: Path
) -> None:
    job = run_files(make_query(tmp_path / "job", 3), 0, 2, spark)
    wrong = replace(job, buckets=5, options={"rescale": str(tmp_path / "elsewhere")})
    wrong.feed([2])
    with pytest.raises(StreamingQueryException, match="give the checkpointLocation of this query"):
        wrong.run(spark)
    # The plan can see the pending request, so that the query is refused before it runs.
    erase_keys(job.root, [1], operator=OPERATOR)
    names = sorted(path.name for path in (Path(job.root) / OPERATOR).iterdir())
    with pytest.raises(ChangedJobError, match=r"erase request 1 in .* is not done yet"):
        rescale_in_place(job, 5).run(spark)
    assert sorted(path.name for path in (Path(job.root) / OPERATOR).iterdir()) == names
    job.run(spark)
    assert state_of(job, spark) == expected_state(range(3))


def test_the_rescale_option_has_no_effect_at_a_first_start(spark: Any, tmp_path: Path) -> None:
    job = make_query(tmp_path / "job", 3, rescale=str(tmp_path / "job" / "checkpoint"))
    job = run_files(job, 0, 2, spark)
    assert state_of(job, spark) == expected_state(range(2))
