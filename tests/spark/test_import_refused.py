"""What cannot be imported, and what an imported query cannot be started from: each is said before anything is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, KEYED, SPARK, configured, count, ddl, keyed, reads_state
from native_job import FIRST, NEXT, NativeJob, conf_of
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.streaming.state import GroupStateTimeout
from streams import finish, read, write_batches

from benchmarks.spark import ROCKSDB
from spark_state_ext import Savepoint, export_native, import_native
from spark_state_ext.errors import CorruptFileError, LiveRunError, StorageError, UnsupportedPlanError, UsageError
from spark_state_ext.spark.client.settings import refuse_unread_format
from spark_state_ext.spark.native.spark_state import refuse_old_spark, translate_errors

pytestmark = pytest.mark.spark

STORE = "spark.sql.streaming.stateStore"


@pytest.fixture(scope="module")
def stopped(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> NativeJob:
    """A job that was stopped; nobody writes there."""
    job = NativeJob(spark, tmp_path_factory.mktemp("stopped"), conf_of("hdfs", 1))
    job.run(FIRST)
    return job


def _import(spark: Any, checkpoint: Path, to: Path, **options: Any) -> Any:
    options = {"buckets": 3, "operator": "tested", "idle_s": 0, **options}
    return import_native(spark, checkpoint, to / "savepoint", to / "new", **options)


def _stateful(spark: Any, folder: Path, plan: Any) -> Path:
    """The checkpoint of another query."""
    source = read(spark, write_batches(folder / "in", [keyed("a", "b")]), ddl(KEYED))
    writer = plan(source).writeStream.format("noop").outputMode("append")
    finish(writer.option("checkpointLocation", str(folder / "other")).trigger(availableNow=True).start())
    return folder / "other"


def _counted(df: Any) -> Any:
    return df.groupBy("key").applyInPandasWithState(count, COUNTS, "n bigint", "append", GroupStateTimeout.NoTimeout)


@pytest.mark.skipif(SPARK >= (4, 0), reason="newer releases read state")
def test_pyspark_3_5_names_the_way_by_a_newer_one(spark: Any, stopped: NativeJob, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"import it with PySpark 4\.0 or newer"):
        _import(spark, stopped.checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("version", "checkpoint_format", "first"),
    [
        ((3, 5), 1, "4.0"),
        ((4, 0), 1, None),
        ((4, 0), 2, "4.1"),
        ((4, 1), 2, None),
        ((4, 3), 2, None),
        ((5, 0), 2, None),
    ],
)
def test_which_pyspark_reads_which_checkpoint_format(
    version: tuple[int, int], checkpoint_format: int, first: str | None
) -> None:
    def refuse() -> None:
        refuse_old_spark(version)
        refuse_unread_format("/old", checkpoint_format, version)

    if first is None:
        refuse()
        return
    with pytest.raises(UsageError, match=rf"mport it with PySpark {first} or newer"):
        refuse()


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ((4, 0), "the first that it met: import the job in a separate application"),
        ((4, 3), "which newer Spark cannot read"),
    ],
)
def test_a_snapshot_that_spark_4_0_marked_otherwise_is_told_with_what_to_do(
    version: tuple[int, int], says: str
) -> None:
    text = (
        "An error occurred while calling o1.collectToPython.\n: org.apache.spark.SparkException: "
        "[CANNOT_LOAD_STATE_STORE.CANNOT_READ_CHECKPOINT] An error occurred during loading state. Cannot read RocksDB "
        "checkpoint metadata. Expected v1, but found v2. SQLSTATE: 58030"
    )
    with pytest.raises(StorageError, match=says) as found, translate_errors("/old", version):
        raise PySparkException(text)
    assert str(found.value).startswith("Spark cannot read the state of /old: [CANNOT_LOAD_STATE_STORE.")
    with pytest.raises(StorageError) as found, translate_errors("/old", version):
        raise PySparkException("[OTHER] Something else.")
    assert str(found.value) == "Spark cannot read the state of /old: [OTHER] Something else."


@reads_state
def test_a_job_that_may_run_is_refused(spark: Any, stopped: NativeJob, tmp_path: Path) -> None:
    with pytest.raises(LiveRunError, match=r"it wrote there .* s ago"):
        _import(spark, stopped.checkpoint, tmp_path, idle_s=86_400)
    assert not list(tmp_path.iterdir())


@reads_state
def test_a_job_that_runs_in_this_application_is_refused(spark: Any, tmp_path: Path) -> None:
    source = read(spark, write_batches(tmp_path / "in", [keyed("a")]), ddl(KEYED))
    writer = _counted(source).writeStream.format("noop").outputMode("append")
    query = writer.option("checkpointLocation", str(tmp_path / "running")).start()
    try:
        query.processAllAvailable()
        with pytest.raises(LiveRunError, match="runs in this application"):
            _import(spark, tmp_path / "running", tmp_path / "to")
    finally:
        query.stop()


@reads_state
def test_other_operators_are_refused(spark: Any, tmp_path: Path) -> None:
    def joined(df: Any) -> Any:
        return df.alias("l").join(df.alias("r"), "key")

    cases = [
        ("several", lambda df: _counted(df.dropDuplicates(["key", "value"])), "several stateful operators, .*dedupe"),
        ("join", joined, "is symmetricHashJoin"),
        ("dedupe", lambda df: df.dropDuplicates(["key"]), "is dedupe"),
    ]
    for name, plan, says in cases:
        (tmp_path / name).mkdir()
        with pytest.raises(UnsupportedPlanError, match=says):
            _import(spark, _stateful(spark, tmp_path / name, plan), tmp_path / name)


@reads_state
def test_a_damaged_checkpoint_is_refused_and_leaves_the_session_as_it_was(
    spark: Any, stopped: NativeJob, tmp_path: Path
) -> None:
    last = stopped.last_batch()
    damages = [
        (f"offsets/{last}", b"v1\n{", CorruptFileError, f"offsets/{last} is not a readable Spark log"),
        (f"offsets/{last - 1}", None, PySparkException, f"offsets/{last - 1} is missing"),
        (f"commits/{last}", b"v1\n", CorruptFileError, f"commits/{last} is not a readable Spark log"),
        ("metadata", b"{}", PySparkException, "does not hold a query's id"),
        ("notes", b"", PySparkException, "not a file that Spark is known to write"),
        (f"state/0/0/{last + 1}.delta", b"\0" * 40, StorageError, "Spark cannot read the state"),
    ]
    for at, (name, data, error, says) in enumerate(damages):
        damaged = tmp_path / str(at)
        shutil.copytree(stopped.checkpoint, damaged)
        (damaged / name).unlink() if data is None else (damaged / name).write_bytes(data)
        (damaged / name).with_name(f".{Path(name).name}.crc").unlink(missing_ok=True)
        # One that the import sets to what the checkpoint has, and one that it sets while it writes the marks.
        with configured(spark, {f"{STORE}.checkpointFormatVersion": "2", f"{STORE}.providerClass": ROCKSDB}):
            before = spark.sql("SET").collect()
            with pytest.raises(error, match=says):
                _import(spark, damaged, tmp_path / f"to-{at}")
            assert spark.sql("SET").collect() == before
        assert not (tmp_path / f"to-{at}").exists()


@reads_state
def test_places_that_cannot_work_are_refused(spark: Any, stopped: NativeJob, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "something").touch()
    with pytest.raises(PySparkException, match="is not empty, it has something"):
        _import(spark, stopped.checkpoint, tmp_path)
    with pytest.raises(PySparkException, match="not the checkpoint location of a query that has run"):
        _import(spark, tmp_path / "nothing", tmp_path)
    with pytest.raises(UsageError, match="both checkpoint locations are"):
        import_native(spark, tmp_path, tmp_path / "savepoint", tmp_path)
    with pytest.raises(UsageError, match="must be a URL or an absolute path"):
        import_native(spark, "relative", tmp_path / "savepoint", tmp_path)


@reads_state
def test_a_location_that_is_not_finished_and_one_without_its_savepoint_start_nothing(
    spark: Any, stopped: NativeJob, tmp_path: Path
) -> None:
    job = stopped.copy(tmp_path / "job")
    _import(spark, job.checkpoint, job.folder)
    _import(spark, job.checkpoint, tmp_path / "again")

    with pytest.raises(
        StreamingQueryException, match=r"was imported into the savepoint .* starts from the savepoint at"
    ):
        job.run(NEXT, Savepoint(str(tmp_path / "again" / "savepoint")), "new")
    (job.folder / "new" / "metadata").write_bytes(b"spark_state_ext is importing a job to this location")
    with pytest.raises(Exception, match=r"(?i)json|unrecognized"):
        job.run([], Savepoint(str(job.folder / "savepoint")), "new")


@reads_state
def test_the_state_of_this_package_is_refused_and_goes_out_to_other_operators_only(
    spark: Any, stopped: NativeJob, tmp_path: Path
) -> None:
    job = stopped.copy(tmp_path / "job")
    _import(spark, job.checkpoint, job.folder)
    savepoint = Savepoint(str(job.folder / "savepoint"))
    job.run(NEXT, savepoint, "new")

    with pytest.raises(UsageError, match="is already this package's own"):
        _import(spark, job.folder / "new", tmp_path / "again")
    with pytest.raises(UnsupportedPlanError, match="no release of PySpark up to"):
        export_native(spark, savepoint, to="applyInPandasWithState")
    grouped = export_native(spark, savepoint)
    assert ("kept",) in {tuple(row) for row in grouped.count().select("key").collect()}
