"""A query keeps its state in one folder, restarts, and counts every row once, whatever `foreachBatch` does.

A task must not identify its run by anything that a sink can change. The actions of a sink may run in threads without Spark's
local properties, under the user's job groups and tags, in sessions derived from the stream's, several times in a batch, and
nested.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import configured
from pyspark.sql.streaming.state import GroupState
from streams import finish, read, write_batches

from spark_state_ext import ArrowState
from tests.helpers.soak import examples, whole
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.spark

KEYS, BATCHES = 20, 2


def _write(df: Any, folder: str, name: str) -> None:
    df.write.mode("overwrite").parquet(f"{folder}/{name}")


def run_in_plain_thread(work: Callable[[], object]) -> None:
    """Run it in a Python thread, which has none of Spark's local properties, and raise its error here."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def in_own_thread(df: Any, batch: int, folder: str) -> None:
    _write(df, folder, f"a{batch}")


def in_a_thread(df: Any, batch: int, folder: str) -> None:
    run_in_plain_thread(lambda: _write(df, folder, f"a{batch}"))


def first_in_own_thread_then_in_another(df: Any, batch: int, folder: str) -> None:
    df.count()
    run_in_plain_thread(lambda: _write(df, folder, f"a{batch}"))


def first_in_another_thread_then_in_own(df: Any, batch: int, folder: str) -> None:
    run_in_plain_thread(df.count)
    _write(df, folder, f"a{batch}")


def in_two_threads_at_once(df: Any, batch: int, folder: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(_write, df, folder, f"{name}{batch}") for name in "ab"]:
            future.result()


def several_writes(df: Any, batch: int, folder: str) -> None:
    for name in "abc":
        _write(df, folder, f"{name}{batch}")


def with_cache(df: Any, batch: int, folder: str) -> None:
    df.persist()
    df.count()
    _write(df, folder, f"a{batch}")
    df.unpersist()


def with_a_nested_action(df: Any, batch: int, folder: str) -> None:
    _write(df.limit(1_000), folder, f"b{batch}")
    spark = df.sparkSession
    joined = df.join(spark.read.parquet(f"{folder}/b{batch}").select("key"), "key", "left_semi")
    _write(joined, folder, f"a{batch}")


def with_job_groups(df: Any, batch: int, folder: str) -> None:
    context = df.sparkSession.sparkContext
    df.limit(1_000).count()
    context.setJobGroup("write counts", "sink A", interruptOnCancel=True)
    df.count()
    context.setJobGroup(f"batch {batch}", "sink B")
    context.setLocalProperty("spark.scheduler.pool", "sinks")
    _write(df, folder, f"a{batch}")


def with_tags(df: Any, batch: int, folder: str) -> None:
    context = df.sparkSession.sparkContext
    context.addJobTag("counts")
    _write(df, folder, f"a{batch}")
    context.clearJobTags()


def with_a_new_session(df: Any, batch: int, folder: str) -> None:
    other = df.sparkSession.newSession()
    other.conf.set("spark.sql.shuffle.partitions", "5")
    other.range(10).groupBy("id").count().collect()
    _write(df, folder, f"a{batch}")


def in_an_inheritable_thread(df: Any, batch: int, folder: str) -> None:
    from pyspark import InheritableThread

    errors: list[Exception] = []

    def work() -> None:
        try:
            _write(df, folder, f"a{batch}")
        except Exception as error:
            errors.append(error)

    thread = InheritableThread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class _Worker:
    """A thread that runs one piece of work after the other until the process ends, like a thread of a pool."""

    def __init__(self, thread: Callable[..., Any]) -> None:
        self._work: Queue[tuple[Callable[[], object], Future[object]]] = Queue()
        thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work, future = self._work.get()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def run(self, work: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        self._work.put((work, future))
        return future


_workers: dict[str, _Worker] = {}


def find_worker(kind: str, folder: str) -> _Worker:
    """Return a job's own thread. It was created in the first batch, and still reports the query and number of that batch."""
    from pyspark import InheritableThread

    key = f"{kind} {folder}"
    if key not in _workers:
        _workers[key] = _Worker({"inheritable": InheritableThread, "plain": threading.Thread}[kind])
    return _workers[key]


def in_an_inheritable_thread_of_the_first_batch(df: Any, batch: int, folder: str) -> None:
    find_worker("inheritable", folder).run(lambda: _write(df, folder, f"a{batch}")).result()


def in_a_plain_thread_of_the_first_batch(df: Any, batch: int, folder: str) -> None:
    find_worker("plain", folder).run(lambda: _write(df, folder, f"a{batch}")).result()


def in_threads_of_the_first_batch_and_its_own(df: Any, batch: int, folder: str) -> None:
    """Any of the three threads may be the last one to compute a partition."""
    futures = [
        find_worker(kind, folder).run(partial(_write, df, folder, f"{name}{batch}"))
        for kind, name in (("inheritable", "b"), ("plain", "c"))
    ]
    _write(df, folder, f"a{batch}")
    for future in futures:
        future.result()


Sink = Callable[[Any, int, str], None]
EVERYWHERE: list[Sink] = whole(
    [in_a_thread, with_a_nested_action],
    [
        in_two_threads_at_once,
        in_own_thread,
        first_in_own_thread_then_in_another,
        first_in_another_thread_then_in_own,
        several_writes,
        with_cache,
    ],
)
# Only classic sessions have `sparkContext` and `newSession`.
CLASSIC: list[Sink] = whole(
    [in_threads_of_the_first_batch_and_its_own],
    [
        with_job_groups,
        with_a_new_session,
        in_an_inheritable_thread_of_the_first_batch,
        with_tags,
        in_an_inheritable_thread,
        in_a_plain_thread_of_the_first_batch,
    ],
)


def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def fail_once(flag: str, sink: Sink, df: Any, batch: int, folder: str) -> None:
    """Run the sink, and raise an error after it the first time."""
    sink(df, batch, folder)
    if not Path(flag).exists():
        Path(flag).touch()
        raise ValueError("the sink is away")


class _Job:
    def __init__(self, session: Any, folder: Path, sink: Sink, **options: Any) -> None:
        self.session, self.folder, self.sink, self.batches = session, folder, sink, 0
        local = {"local_dir": folder / "local", "lease_ms": 60_000, "strict": True, "buckets": 4}
        self.state = ArrowState(folder / "root", "sunk", **{**local, **options})
        (folder / "out").mkdir()

    def start(self, batches: int = BATCHES) -> None:
        """Plan and start the query again over new files."""
        rows = pa.table({"key": pa.array(range(KEYS), pa.int64())})
        source = write_batches(self.folder / "in", [rows] * batches)
        self.batches += batches
        out = self.state.apply_in_pandas_with_state(
            read(self.session, source, "key long"), "key", count, "key long, n long", "n long", "update", "NoTimeout"
        )
        writer = out.writeStream.foreachBatch(partial(_called, self.sink, str(self.folder / "out")))
        writer = writer.outputMode("update").option("checkpointLocation", str(self.folder / "checkpoint"))
        # Two tasks of a batch must agree on their run, whichever thread computes each.
        with configured(self.session, {"spark.sql.shuffle.partitions": "2"}):
            finish(writer.trigger(availableNow=True).start())

    def check_counts_and_folders(self, query_folders: int = 1) -> None:
        rows: dict[int, int] = {}
        for batch in range(self.batches):
            table = pq.read_table(self.folder / "out" / f"a{batch}")
            assert set(table["n"].to_pylist()) == {batch + 1}
            rows.update(zip(table["key"].to_pylist(), table["n"].to_pylist(), strict=True))
        assert rows == dict.fromkeys(range(KEYS), self.batches)
        names = [path.name for path in (self.folder / "root" / "sunk").iterdir()]
        assert len([name for name in names if name not in ("starting", "spill")]) == query_folders, names


def _called(sink: Sink, folder: str, df: Any, batch: int) -> None:
    sink(df, batch, folder)


@pytest.mark.parametrize("sink", [*EVERYWHERE, *CLASSIC])
def test_a_query_continues_after_restarts_whatever_its_sink_does(spark: Any, tmp_path: Path, sink: Sink) -> None:
    """A lease must not delay a restart: it is far longer than the test."""
    job = _Job(spark, tmp_path, sink)
    for _ in range(examples(2, 3)):
        job.start()
    job.check_counts_and_folders()


@pytest.mark.connect
@pytest.mark.parametrize(
    "sink", [sink if sink is in_a_thread else pytest.param(sink, marks=pytest.mark.soak) for sink in EVERYWHERE]
)
def test_a_connect_query_continues_after_a_restart_whatever_its_sink_does(
    connect: Any, tmp_path: Path, sink: Sink
) -> None:
    job = _Job(connect, tmp_path, sink)
    for _ in range(2):
        job.start()
    job.check_counts_and_folders()


@pytest.mark.parametrize(
    "sink", [in_own_thread, pytest.param(in_a_thread, marks=pytest.mark.soak), first_in_another_thread_then_in_own]
)
def test_a_failed_first_batch_is_repeated(spark: Any, tmp_path: Path, sink: Sink) -> None:
    """With `strict`, the folder of the first attempt must not count as the folder of another query."""
    job = _Job(spark, tmp_path, partial(fail_once, str(tmp_path / "failed"), sink))
    with pytest.raises(Exception, match="the sink is away"):
        job.start(1)
    assert (tmp_path / "failed").exists()
    job.start(1)
    # An attempt that does not know its query makes its own folder. The counts show that pointers name the right one.
    job.check_counts_and_folders(query_folders=1 if sink is in_own_thread else 2)


@pytest.mark.soak
@pytest.mark.connect
def test_a_failed_first_batch_is_repeated_over_connect(connect: Any, tmp_path: Path) -> None:
    job = _Job(connect, tmp_path, partial(fail_once, str(tmp_path / "failed"), in_own_thread))
    with pytest.raises(Exception, match="the sink is away"):
        job.start(1)
    job.start(1)
    job.check_counts_and_folders(query_folders=2)


def test_strict_still_refuses_to_begin_without_the_existing_state(spark: Any, tmp_path: Path) -> None:
    job = _Job(spark, tmp_path, in_a_thread)
    job.start(1)
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(Exception, match="ExistingStateError"):
        job.start(1)


def test_two_queries_of_one_plan_have_separate_folders_if_tasks_do_not_know_their_query(
    spark: Any, tmp_path: Path
) -> None:
    """One DataFrame is started twice at the same time."""
    rows = pa.table({"key": pa.array(range(KEYS), pa.int64())})
    source = write_batches(tmp_path / "in", [rows] * 3)
    state = ArrowState(tmp_path / "root", "sunk", buckets=2, local_dir=tmp_path / "local")
    out = state.apply_in_pandas_with_state(
        read(spark, source, "key long"), "key", count, "key long, n long", "n long", "update", "NoTimeout"
    )
    tables: list[dict[int, int]] = [{}, {}]

    def save(table: dict[int, int], df: Any, batch: int) -> None:
        run_in_plain_thread(lambda: table.update({row.key: row.n for row in df.collect()}))

    barrier = threading.Barrier(2)

    def run(number: int) -> None:
        barrier.wait(WAIT_S)
        finish(
            out.writeStream.foreachBatch(partial(save, tables[number]))
            .outputMode("update")
            .option("checkpointLocation", str(tmp_path / f"checkpoint {number}"))
            .trigger(availableNow=True)
            .start()
        )

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, number) for number in range(2)]:
            future.result()
    assert tables == [dict.fromkeys(range(KEYS), 3)] * 2
    query_folders = [
        path.name for path in (tmp_path / "root" / "sunk").iterdir() if path.name not in ("starting", "spill")
    ]
    assert len(query_folders) == 2
