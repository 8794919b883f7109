"""More or fewer buckets on real Spark: from a snapshot, and in place."""

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
from tests.helpers.waiting import eventually

pytestmark = [pytest.mark.spark, reads_state]


def query(folder: Path, buckets: int, **options: Any) -> Query:
    return Query(folder, str(folder / "root"), {}, buckets, options=options)


def in_place(before: Query, buckets: int, **options: Any) -> Query:
    """The same query with another number of buckets, on an empty local disk."""
    shutil.rmtree(before.folder / "local", ignore_errors=True)
    options = {"rescale": str(before.checkpoint), **options}
    return replace(before, buckets=buckets, options=options)


def fed(it: Query, first: int, last: int, spark: Any) -> Query:
    """Run it over files, and compare what it has emitted with the batch computation."""
    it.feed(range(first, last))
    it.run(spark)
    whole = batch_computation(file_of(number, number in it.whole) for number in range(last))
    assert it.table == {key: whole[key] for key in it.table}
    return it


def state_of(it: Query, spark: Any) -> dict[int, tuple[int, int]]:
    """All its state, as Spark has committed it."""
    (backend,) = it.options.get("backends", (it,))
    with open_committed(spark, backend.root, str(it.checkpoint)) as state:
        return state_by_key(state)


def state_by_key(state: OpenState) -> dict[int, tuple[int, int]]:
    return {row["key"]: (row["n"], row["total"]) for row in state.scan().read_all().to_pylist()}


def expected(files: Iterable[int]) -> dict[int, tuple[int, int]]:
    return batch_computation(file_of(number, False) for number in files)


@pytest.mark.parametrize("kind", ["savepoint", pytest.param("retained_checkpoint", marks=pytest.mark.soak)])
def test_from_a_snapshot(spark: Any, tmp_path: Path, kind: str) -> None:
    old = fed(query(tmp_path / "old", 3), 0, 3, spark)
    if kind == "savepoint":
        path = str(tmp_path / "savepoint")
        take_savepoint(spark, path, old.checkpoint, old.state)
        start: Any = Savepoint(path)
    else:
        start = RetainedCheckpoint(old.root, str(old.checkpoint))
    for buckets in (8, 2):
        new = replace(query(tmp_path / f"new-{buckets}", buckets), start_from=start)
        new.feed(range(3, 5))
        new.run(spark)
        assert state_of(new, spark) == expected(range(5))
    shutil.rmtree(old.root)
    shutil.rmtree(tmp_path / "savepoint", ignore_errors=True)
    shutil.rmtree(new.folder / "local")
    new.feed(range(5, 6))
    new.run(spark)
    assert state_of(new, spark) == expected(range(6))


def test_in_place(spark: Any, tmp_path: Path) -> None:
    it = fed(query(tmp_path / "job", 3), 0, 3, spark)
    at = 3
    for buckets in (8, 2, 5) if SOAK else (8, 5):
        it = fed(in_place(it, buckets), at, at + 2, spark)
        at += 2
        assert state_of(it, spark) == expected(range(at))
    # The argument may stay, and may go.
    it = fed(in_place(it, 5), at, at + 1, spark)
    it = fed(replace(it, options={}), at + 1, at + 2, spark)
    assert state_of(it, spark) == expected(range(at + 2))
    # What is there goes on by its own number.
    refused = replace(it, buckets=8, options={})
    refused.feed([at + 2])
    with pytest.raises(StreamingQueryException, match=r"5 buckets and the job asks for 8: .*rescale the query with"):
        refused.run(spark)
    it.run(spark)
    assert state_of(it, spark) == expected(range(at + 3))
    # A savepoint of it is one as any other.
    path = str(tmp_path / "savepoint")
    take_savepoint(spark, path, it.checkpoint, it.state)
    shutil.rmtree(it.root)
    new = replace(query(tmp_path / "new", 3), start_from=Savepoint(path))
    new.feed([at + 3])
    new.run(spark)
    assert state_of(new, spark) == expected(range(at + 4))


def test_a_worker_that_comes_late_needs_nothing_of_what_the_query_was(spark: Any, tmp_path: Path) -> None:
    """What it was rescaled from goes while its plan is in force, and then its tasks get new workers."""
    it = fed(query(tmp_path / "job", 5), 0, 2, spark)
    old = it.query_folder
    it = in_place(it, 3)
    planned = it.planned(spark)
    for at, traceback in ((2, "true"), (4, "false")):
        it.feed(range(at, at + 2))
        # Spark keeps workers by the environment that it gives them, and this is in it.
        with configured(spark, {"spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": traceback}):
            writer = planned.writeStream.outputMode("update").format("noop")
            finish(writer.option("checkpointLocation", str(it.checkpoint)).trigger(availableNow=True).start())
        assert state_of(it, spark) == expected(range(at + 2))
        shutil.rmtree(old.root, ignore_errors=True)
        shutil.rmtree(Path(it.root) / OPERATOR / STARTING_FOLDER, ignore_errors=True)


def test_one_heavy_bucket_is_split_alone(spark: Any, tmp_path: Path) -> None:
    it = fed(query(tmp_path / "job", 3), 0, 2, spark)
    it = fed(in_place(it, 0, bucket_by=BucketMap.split(3, {1: 4})), 2, 3, spark)
    with open_committed(spark, it.root, str(it.checkpoint)) as state:
        assert state.bucket_map == BucketMap.split(3, {1: 4})
    # As many buckets, but of one size: maps are compared, not numbers.
    it = fed(in_place(it, 6), 3, 5, spark)
    assert state_of(it, spark) == expected(range(5))
    with open_committed(spark, it.root, str(it.checkpoint)) as state:
        assert state.bucket_map == BucketMap(6)
    with open_state(it.root) as state:
        assert state.buckets == 6
        assert state_by_key(state) == expected(range(state.batch + 1))
    # Spark retains a batch from before, whose state is in the folder before.
    with open_committed(spark, it.root, str(it.checkpoint), batch=1) as state:
        assert state.buckets == 3
        assert state_by_key(state) == expected(range(2))


@pytest.mark.parametrize(
    "elsewhere",
    [pytest.param(False, id="in the root"), pytest.param(True, id="in a backend", marks=pytest.mark.soak)],
)
def test_a_savepoint_is_taken_before_a_bucket_has_a_snapshot_of_its_own(
    spark: Any, tmp_path: Path, elsewhere: bool
) -> None:
    options: dict[str, Any] = {"backends": [Backend(str(tmp_path / "elsewhere"))]} if elsewhere else {}
    it = fed(query(tmp_path / "job", 3, **options), 0, 3, spark)
    it = fed(in_place(it, 8, **options), 3, 4, spark)
    starts: dict[str, Any] = {"retained": RetainedCheckpoint(it.root, str(it.checkpoint), **options)}
    for form in ("native", "canonical"):
        path = str(tmp_path / form)
        take_savepoint(spark, path, it.checkpoint, it.state, form=form)
        starts[form] = Savepoint(path)
    for name, start in starts.items():
        new = replace(query(tmp_path / f"from-{name}", 8), start_from=start)
        new.feed([4])
        new.run(spark)
        assert state_of(new, spark) == expected(range(5))
    # And it is rescaled again.
    it = fed(in_place(it, 3, **options), 4, 5, spark)
    assert state_of(it, spark) == expected(range(5))


def _killed(hanging: Query, log: Path) -> None:
    """Start a query in a process of its own, and kill that within its first batch."""
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
    ("n", "m", "hang"),
    [(*numbers, hang) for numbers in ((3, 8), (96, 64), (64, 1)) for hang in (IN_A_TASK, AFTER_ITS_TASKS)]
    if SOAK
    else [(7, 2, AFTER_ITS_TASKS)],
)
def test_killed_in_its_midst_and_gone_on_with_either_number(
    spark: Any, tmp_path: Path, n: int, m: int, hang: str
) -> None:
    it = fed(query(tmp_path / "job", n), 0, 3, spark)
    again = in_place(it, m)
    again.feed([3])
    _killed(replace(again, hang=hang), tmp_path / "killed.log")
    # The old number goes on, as no batch was committed with the other.
    shutil.rmtree(it.folder / "local", ignore_errors=True)
    it.run(spark)
    assert state_of(it, spark) == expected(range(4))
    again = fed(in_place(it, m), 4, 5, spark)
    assert state_of(again, spark) == expected(range(5))
    # Now the old one is refused, and nothing has happened to the state.
    it.feed([5])
    with pytest.raises(StreamingQueryException, match="BucketCountChangedError"):
        it.run(spark)
    again.run(spark)
    assert state_of(again, spark) == expected(range(6))


def _timed() -> Callable[..., Iterator[pd.DataFrame]]:
    # Nested, so that it travels to the workers by value: these need not find this module.
    def timed(key: Any, pdfs: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        """Counts rows; a key that has none for 10 s of event time says how many it had, and is gone."""
        if state.hasTimedOut:
            (n,) = state.get
            state.remove()
            yield pd.DataFrame({"text": [f"{key[0]} had {n}"]})
            return
        n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n,))
        state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 10_000)
        yield pd.DataFrame({"text": [f"{key[0]} has {n}"]})

    return timed


def _events(at_s: int, *keys: str) -> Any:
    return event_rows(*((key, at_s, 1) for key in keys))


def _outputs(spark: Any, operator: str, folder: Path, numbers: tuple[int, int], parts: list[Any]) -> dict[int, Any]:
    """What each batch gives: some of the parts, the last batch once more, and after a rescaling the others."""
    folder.mkdir()
    job = Job(
        *(spark, operator, folder, _timed()),
        timeout=GroupStateTimeout.EventTimeTimeout,
        schema=TIMED,
        watermark=("at", "0 seconds"),
        options={"buckets": numbers[0]},
    )
    batches: dict[int, Any] = {}

    def kept(df: Any, batch: int) -> None:
        batches[batch] = sorted(row.text for row in df.collect())

    def started() -> Any:
        writer = job.planned().writeStream.foreachBatch(kept)
        return writer.option("checkpointLocation", str(job.checkpoint)).trigger(processingTime="0 seconds").start()

    for part in parts[:-1]:
        job.feed(*part)
        running = started()
        running.processAllAvailable()
        running.stop()
    # The last batch has no data, and is done again: as if Spark had been killed before it wrote that it is committed.
    commits = folder / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    for name in (str(last), f".{last}.crc"):
        (commits / name).unlink()
    job.options = {"buckets": numbers[1], "rescale": str(job.checkpoint)}
    running = started()
    try:
        eventually(lambda: (commits / str(last)).exists())
        job.feed(*parts[-1])
        running.processAllAvailable()
    finally:
        running.stop()
    return batches


@pytest.mark.parametrize("numbers", [(3, 8), (8, 3)] if SOAK else [(8, 3)], ids=str)
def test_timeouts_and_batches_without_data(spark: Any, tmp_path: Path, numbers: tuple[int, int]) -> None:
    """As Spark's own operator has them, batch by batch; also where the first batch after the restart has no data."""
    parts = [
        [_events(0, *"abcdefghij"), _events(5, "a", "b")],
        [_events(30, "a", "k", "l")],
        [_events(31, *"bcd"), _events(60, "z"), _events(90, "z", "a")],
    ]
    ours, sparks = (_outputs(spark, it, tmp_path / it, numbers, parts) for it in ("arrow", "spark"))
    assert ours == sparks
    assert sum("had" in text for texts in ours.values() for text in texts) > 8
    # Calls of the batch without data have gone on as before.
    assert list((tmp_path / "arrow" / "root" / "tested" / "starting").glob("*.pointer"))


def test_what_is_asked_for_by_mistake(spark: Any, tmp_path: Path) -> None:
    it = fed(query(tmp_path / "job", 3), 0, 2, spark)
    wrong = replace(it, buckets=5, options={"rescale": str(tmp_path / "elsewhere")})
    wrong.feed([2])
    with pytest.raises(StreamingQueryException, match="give the checkpointLocation of this query"):
        wrong.run(spark)
    # What the plan can know is refused before anything runs.
    erase_keys(it.root, [1], operator=OPERATOR)
    there = sorted(path.name for path in (Path(it.root) / OPERATOR).iterdir())
    with pytest.raises(ChangedJobError, match=r"erase request 1 in .* is not done yet"):
        in_place(it, 5).run(spark)
    assert sorted(path.name for path in (Path(it.root) / OPERATOR).iterdir()) == there
    it.run(spark)
    assert state_of(it, spark) == expected(range(3))


def test_at_a_first_start_there_is_nothing_to_rescale(spark: Any, tmp_path: Path) -> None:
    it = query(tmp_path / "job", 3, rescale=str(tmp_path / "job" / "checkpoint"))
    it = fed(it, 0, 2, spark)
    assert state_of(it, spark) == expected(range(2))
