"""Imports, and starts of an imported query, that are refused with an error before anything is lost."""

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
    """A stopped job; tests only read its folder."""
    job = NativeJob(spark, tmp_path_factory.mktemp("stopped"), conf_of("hdfs", 1))
    job.run(FIRST)
    return job


def import_checkpoint(spark: Any, checkpoint: Path, to: Path, **options: Any) -> Any:
    options = {"buckets": 3, "operator": "tested", "idle_s": 0, **options}
    return import_native(spark, checkpoint, to / "savepoint", to / "new", **options)


def run_query(spark: Any, folder: Path, plan: Any) -> Path:
    """Run another stateful query and return its checkpoint."""
    source = read(spark, write_batches(folder / "in", [keyed("a", "b")]), ddl(KEYED))
    writer = plan(source).writeStream.format("noop").outputMode("append")
    finish(writer.option("checkpointLocation", str(folder / "other")).trigger(availableNow=True).start())
    return folder / "other"


def count_by_key(df: Any) -> Any:
    return df.groupBy("key").applyInPandasWithState(count, COUNTS, "n bigint", "append", GroupStateTimeout.NoTimeout)


@pytest.mark.skipif(SPARK >= (4, 0), reason="newer releases read state")
def test_pyspark_3_5_refuses_an_import_and_names_the_release_that_can_do_it(
    spark: Any, stopped: NativeJob, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"import it with PySpark 4\.0 or newer"):
        import_checkpoint(spark, stopped.checkpoint, tmp_path)


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
def test_an_error_names_the_first_pyspark_that_reads_a_checkpoint_format(
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
    ("version", "advice"),
    [
        ((4, 0), "the first that it met: import the job in a separate application"),
        ((4, 3), "which newer Spark cannot read"),
    ],
)
def test_the_error_for_a_snapshot_of_another_version_says_what_to_do(version: tuple[int, int], advice: str) -> None:
    text = (
        "An error occurred while calling o1.collectToPython.\n: org.apache.spark.SparkException: "
        "[CANNOT_LOAD_STATE_STORE.CANNOT_READ_CHECKPOINT] An error occurred during loading state. Cannot read RocksDB "
        "checkpoint metadata. Expected v1, but found v2. SQLSTATE: 58030"
    )
    with pytest.raises(StorageError, match=advice) as raised, translate_errors("/old", version):
        raise PySparkException(text)
    assert str(raised.value).startswith("Spark cannot read the state of /old: [CANNOT_LOAD_STATE_STORE.")
    with pytest.raises(StorageError) as raised, translate_errors("/old", version):
        raise PySparkException("[OTHER] Something else.")
    assert str(raised.value) == "Spark cannot read the state of /old: [OTHER] Something else."


@reads_state
def test_a_job_that_wrote_a_short_time_ago_is_refused(spark: Any, stopped: NativeJob, tmp_path: Path) -> None:
    with pytest.raises(LiveRunError, match=r"it wrote there .* s ago"):
        import_checkpoint(spark, stopped.checkpoint, tmp_path, idle_s=86_400)
    assert not list(tmp_path.iterdir())


@reads_state
def test_a_job_that_runs_in_this_application_is_refused(spark: Any, tmp_path: Path) -> None:
    source = read(spark, write_batches(tmp_path / "in", [keyed("a")]), ddl(KEYED))
    writer = count_by_key(source).writeStream.format("noop").outputMode("append")
    query = writer.option("checkpointLocation", str(tmp_path / "running")).start()
    try:
        query.processAllAvailable()
        with pytest.raises(LiveRunError, match="runs in this application"):
            import_checkpoint(spark, tmp_path / "running", tmp_path / "to")
    finally:
        query.stop()


@reads_state
def test_checkpoints_of_other_operators_are_refused(spark: Any, tmp_path: Path) -> None:
    def join(df: Any) -> Any:
        return df.alias("l").join(df.alias("r"), "key")

    cases = [
        (
            "several",
            lambda df: count_by_key(df.dropDuplicates(["key", "value"])),
            "several stateful operators, .*dedupe",
        ),
        ("join", join, "is symmetricHashJoin"),
        ("dedupe", lambda df: df.dropDuplicates(["key"]), "is dedupe"),
    ]
    for name, plan, text in cases:
        (tmp_path / name).mkdir()
        with pytest.raises(UnsupportedPlanError, match=text):
            import_checkpoint(spark, run_query(spark, tmp_path / name, plan), tmp_path / name)


@reads_state
def test_a_damaged_checkpoint_is_refused_and_the_session_keeps_its_settings(
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
    for at, (name, data, error, text) in enumerate(damages):
        damaged = tmp_path / str(at)
        shutil.copytree(stopped.checkpoint, damaged)
        (damaged / name).unlink() if data is None else (damaged / name).write_bytes(data)
        (damaged / name).with_name(f".{Path(name).name}.crc").unlink(missing_ok=True)
        # The import sets the first to the value of the checkpoint, and the second while it writes the import marks.
        with configured(spark, {f"{STORE}.checkpointFormatVersion": "2", f"{STORE}.providerClass": ROCKSDB}):
            before = spark.sql("SET").collect()
            with pytest.raises(error, match=text):
                import_checkpoint(spark, damaged, tmp_path / f"to-{at}")
            assert spark.sql("SET").collect() == before
        assert not (tmp_path / f"to-{at}").exists()


@reads_state
def test_unusable_checkpoint_locations_are_refused(spark: Any, stopped: NativeJob, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "something").touch()
    with pytest.raises(PySparkException, match="is not empty, it has something"):
        import_checkpoint(spark, stopped.checkpoint, tmp_path)
    with pytest.raises(PySparkException, match="not the checkpoint location of a query that has run"):
        import_checkpoint(spark, tmp_path / "nothing", tmp_path)
    with pytest.raises(UsageError, match="both checkpoint locations are"):
        import_native(spark, tmp_path, tmp_path / "savepoint", tmp_path)
    with pytest.raises(UsageError, match="must be a URL or an absolute path"):
        import_native(spark, "relative", tmp_path / "savepoint", tmp_path)


@reads_state
def test_a_query_does_not_start_from_another_savepoint_or_an_unfinished_location(
    spark: Any, stopped: NativeJob, tmp_path: Path
) -> None:
    job = stopped.copy(tmp_path / "job")
    import_checkpoint(spark, job.checkpoint, job.folder)
    import_checkpoint(spark, job.checkpoint, tmp_path / "again")

    with pytest.raises(
        StreamingQueryException, match=r"was imported into the savepoint .* starts from the savepoint at"
    ):
        job.run(NEXT, Savepoint(str(tmp_path / "again" / "savepoint")), "new")
    (job.folder / "new" / "metadata").write_bytes(b"spark_state_ext is importing a job to this location")
    with pytest.raises(Exception, match=r"(?i)json|unrecognized"):
        job.run([], Savepoint(str(job.folder / "savepoint")), "new")


@reads_state
def test_arrow_state_cannot_be_imported_and_is_exported_only_to_other_operators(
    spark: Any, stopped: NativeJob, tmp_path: Path
) -> None:
    job = stopped.copy(tmp_path / "job")
    import_checkpoint(spark, job.checkpoint, job.folder)
    savepoint = Savepoint(str(job.folder / "savepoint"))
    job.run(NEXT, savepoint, "new")

    with pytest.raises(UsageError, match="is already this package's own"):
        import_checkpoint(spark, job.folder / "new", tmp_path / "again")
    with pytest.raises(UnsupportedPlanError, match="no release of PySpark up to"):
        export_native(spark, savepoint, to="applyInPandasWithState")
    grouped = export_native(spark, savepoint)
    assert ("kept",) in {tuple(row) for row in grouped.count().select("key").collect()}
