"""Refused jobs: changed jobs, state of others, two runs on one state, executors without the package, wrong arguments."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from jobs import Job, emitted, keyed
from pyspark import __version__ as pyspark_version
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import DecimalType, StructField, StructType
from streams import finish, read, write_batches

from arrow_schemas.lineage import parse_file_name
from spark_state_ext import Agg, ArrowState, StateBatch, aggregate, enable
from spark_state_ext.errors import UnsupportedPlanError, UnsupportedTypeError, UsageError
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_log import LeaseLog
from tests.helpers.soak import whole
from tests.helpers.waiting import WAIT_S, eventually, removed, wait_for_uploads

pytestmark = pytest.mark.spark

STATE = "n long"


def arrow_state(folder: Path, **options: Any) -> ArrowState:
    arguments = {"root": folder / "root", "operator": "guarded", "buckets": 2, "local_dir": folder / "local", **options}
    return ArrowState(**arguments)


def run(spark: Any, folder: Path, **changes: Any) -> list[Any]:
    """Start a job over one new file and return the rows that it emitted. `changes` are its differences from the first start."""
    table = pa.table({"k": pa.array([1, 2, 1], pa.int64())})
    events = read(spark, write_batches(folder / "in", [table]), "k long").selectExpr(changes.pop("select", "k"))
    state_type = changes.pop("state", STATE)
    width = changes.pop("width", 1)
    checkpoint = changes.pop("checkpoint", folder / "checkpoint")
    key_name = changes.pop("key", "k")

    def count(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        before = state.getOption or (0,)
        n = before[0] + sum(len(pdf) for pdf in pdfs)
        state.update((n, *[None] * (width - 1)))
        yield pd.DataFrame({"k": [str(key[0])], "n": [n], "before": [repr(before)]})

    rows: list[Any] = []
    out = arrow_state(folder, **changes).apply_in_pandas_with_state(
        events, key_name, count, "k string, n long, before string", state_type, "update", "NoTimeout"
    )
    finish(
        out.writeStream.outputMode("update")
        .foreachBatch(lambda df, _: rows.extend(df.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    return sorted((r.k, r.n) for r in rows)


def count_rows(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    n = (state.getOption or (0,))[0] + sum(len(pdf) for pdf in pdfs)
    state.update((n,))
    yield pd.DataFrame({"key": [key[0]], "n": [n]})


def files_of(folder: Path) -> dict[str, bytes]:
    root = folder / "root"
    files = (path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in files
        if path.parent.name not in ("lease", "starting")
    }


def test_changed_jobs_are_refused_and_leave_the_state_as_it_was(spark: Any, tmp_path: Path) -> None:
    assert run(spark, tmp_path) == [("1", 2), ("2", 1)]
    wait_for_uploads(tmp_path / "root", tmp_path / "local")
    before = files_of(tmp_path)
    refused: list[tuple[dict[str, Any], str, str]] = whole(
        [
            ({"buckets": 4}, "BucketCountChangedError", "2 buckets"),
            ({"operator": "other"}, "OperatorChangedError", "'guarded'"),
            ({"state": "n string"}, "SchemaChangedError", "'n' was int64 and is now string"),
            ({"select": "cast(k AS string) AS k"}, "SchemaChangedError", "'k' was int64 and is now string"),
        ],
        # `test_evolution` tests the compatibility of schemas without Spark.
        [
            ({"state": "m long"}, "SchemaChangedError", "'n'"),
            ({"state": "n int"}, "SchemaChangedError", "'n' was int64 and is now int32"),
        ],
    )
    for changes, error, text in refused:
        with pytest.raises(Exception, match=error) as raised:
            run(spark, tmp_path, **changes)
        assert text in str(raised.value)
        assert files_of(tmp_path) == before
    # Each refused start left one input file; the unchanged job reads them all.
    assert run(spark, tmp_path)[-1] == ("2", 2 + len(refused))


def test_the_state_schema_may_get_a_nullable_column_and_a_wider_number(spark: Any, tmp_path: Path) -> None:
    assert run(spark, tmp_path, state="n int") == [("1", 2), ("2", 1)]
    assert run(spark, tmp_path, state="n long, note string", width=2) == [("1", 4), ("2", 2)]
    assert run(spark, tmp_path, state="n long, note string", width=2) == [("1", 6), ("2", 3)]
    names = {path.name for path in (tmp_path / "root").rglob("operator_*.json")}
    assert names == {"operator_0.json", "operator_1.json"}
    # Each file names the schema of its rows, starting with the first batch after the change.
    schema_ids = set()
    for path in (tmp_path / "root").rglob("*.arrow"):
        parts = parse_file_name(path.name)
        assert parts is not None
        header = read_header(Folder(str(path.parent)), *parts)
        schema_ids.add((header.writer.batch, header.schema_id))
    assert schema_ids == {(0, 0), (1, 1), (2, 1)}


def test_a_key_in_another_case_is_the_same_key(spark: Any, tmp_path: Path) -> None:
    """Spark's own operator does the same, unless names are case-sensitive."""
    assert run(spark, tmp_path) == [("1", 2), ("2", 1)]
    assert run(spark, tmp_path, key="K") == [("1", 4), ("2", 2)]
    assert run(spark, tmp_path, select="k AS K", key="k") == [("1", 6), ("2", 3)]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(Exception, match=r"SchemaChangedError.*column 'k' is now 'K'"):
            run(spark, tmp_path, select="k AS K", key="K")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_functions_get_a_key_column_with_the_case_that_the_job_uses(spark: Any, tmp_path: Path) -> None:
    for key in ("k", "K"):
        source = write_batches(tmp_path / "in", [pa.table({"k": pa.array([1], pa.int64())})])

        def count_and_check(batch: StateBatch, key: str = key) -> pa.Table:
            batch.update(batch.keys.append_column("n", batch.counts))
            assert batch.keys.column_names == [key]
            return batch.keys

        out = arrow_state(tmp_path).apply_in_arrow_with_state(
            read(spark, source, "k long"), key, count_and_check, f"{key} long", STATE
        )
        writer = out.writeStream.outputMode("update").format("noop").trigger(availableNow=True)
        finish(writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start())


def test_decimals_with_a_negative_scale_are_refused_by_the_plan(spark: Any, tmp_path: Path) -> None:
    """Arrow has no functions for them. Spark makes such types only if a setting allows them."""
    state, hundreds = arrow_state(tmp_path), DecimalType(5, -2)
    spark.conf.set("spark.sql.legacy.allowNegativeScaleOfDecimal", "true")
    try:
        events = read(spark, write_batches(tmp_path / "in", []), "k long")
        events = events.select("k", F.col("k").cast(hundreds).alias("d"))
        for keys, frame, state_type, column in (
            ("d", events, STATE, "key column 'd'"),
            (F.struct("d").alias("s"), events, STATE, r"key column 's\.d'"),
            ("k", events, StructType([StructField("d", hundreds)]), "state column 'd'"),
        ):
            with pytest.raises(UnsupportedTypeError, match=rf"{column}.*negative scale"):
                state.apply_in_pandas_with_state(frame, keys, count_rows, "k long", state_type, "update", "NoTimeout")
        with pytest.raises(UnsupportedTypeError, match=r"state column 'total'.*negative scale"):
            aggregate(state, events, "k", {"total": Agg.sum("d")})
        # Input columns may have them.
        state.apply_rows_with_state(events, "k", lambda key, rows, _: None, "k long", STATE)
    finally:
        spark.conf.unset("spark.sql.legacy.allowNegativeScaleOfDecimal")


def test_unsupported_types_and_batch_queries_are_refused_by_the_plan(spark: Any, tmp_path: Path) -> None:
    state = arrow_state(tmp_path)

    def plan(df: Any, keys: Any, state_type: str = STATE) -> Any:
        return state.apply_in_pandas_with_state(
            df, keys, lambda k, p, s: iter(()), "k long", state_type, "update", "NoTimeout"
        )

    events = read(spark, write_batches(tmp_path / "in", []), "k long, m map<string, long>, s string")
    with pytest.raises(UnsupportedTypeError, match=r"'m'.*map"):
        plan(events, "m")
    if int(pyspark_version.split(".")[0]) >= 4:
        with pytest.raises(UnsupportedTypeError, match="collation"):
            plan(events.selectExpr("k", "s COLLATE UNICODE_CI AS s"), "s")
    with pytest.raises(UnsupportedTypeError, match=r"'d'.*interval"):
        plan(events, "k", "d interval day to second")
    with pytest.raises(UnsupportedPlanError, match="batch DataFrame"):
        plan(spark.range(3), "id")
    with pytest.raises(UnsupportedPlanError, match="more than one event-time column"):
        # A join of two streams can have two such columns. `withWatermark` would move the metadata to the newer column.
        both = events.selectExpr("k", "timestamp_millis(k) AS a", "timestamp_millis(k) AS b")
        delay = {"spark.watermarkDelayMs": 1_000}
        plan(both.withMetadata("a", delay).withMetadata("b", delay), "k")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buckets": 0}, "buckets"),
        ({"operator": "a/b"}, "operator"),
        ({"root": "relative/path"}, "absolute"),
        ({"root": "file://relative/path"}, "absolute"),
        ({"root": "nosuchprotocol://x"}, "nosuchprotocol"),
        ({"local_dir": "here"}, "local_dir"),
        ({"lease_ms": 1}, "lease_ms"),
        ({"lease_ms": "1s"}, "lease_ms must be a whole number, not '1s'"),
        ({"memory_bytes_max": 1}, "memory_bytes_max"),
        ({"memory_bytes_max": 1e9}, "memory_bytes_max must be a whole number"),
        ({"commit_timeout_ms": None}, "commit_timeout_ms must be a whole number, not None"),
        ({"buckets": True}, "buckets must be a whole number, not True"),
        ({"root": None}, "root must be a path or a URL"),
        ({"root": b"/tmp/x"}, "root must be a path or a URL"),
        ({"local_dir": 1}, "local_dir must be a path"),
        ({"local_keep_s": "1 day"}, "local_keep_s must be a number of seconds"),
        ({"operator": None}, "operator must be a name"),
        ({"operator": ".x"}, "the first a letter or digit, not '.x'"),
        ({"operator": "x" * 101}, "at most 100 letters"),
        ({"storage_options": "key"}, "storage_options must be a mapping"),
        ({"erase_within_s": 3_599}, r"erase_within_s must be at least 3600 \(an hour\), not 3599"),
        ({"erase_within_s": "1 day"}, "erase_within_s must be a whole number, not '1 day'"),
        ({"erase_within_s": 86_400, "clean_up": False}, "erase_within_s needs clean_up=True"),
        ({"erase_within_s": 86_400, "pointer_write": "both"}, "erase_within_s needs pointer_write='v2'"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ArrowState(**{"root": "/tmp/x", "operator": "o", **options})


def test_enable_with_swapped_arguments_is_refused(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="then an ArrowState"):
        enable(arrow_state(tmp_path), spark)  # type: ignore[arg-type]  # swapped arguments


@pytest.mark.parametrize(("starts", "clean_up"), [pytest.param(1, True, marks=pytest.mark.soak), (3, False)])
def test_a_root_without_the_state_is_refused_and_nothing_is_written_there(
    spark: Any, tmp_path: Path, starts: int, clean_up: bool
) -> None:
    """After one start, all of the state is in Spark's own; after several, only the last deltas are. Local stores exist."""
    elsewhere = tmp_path / "elsewhere"
    for _ in range(starts):
        run(spark, tmp_path, clean_up=clean_up)
    with pytest.raises(Exception, match="StateElsewhereError") as raised:
        run(spark, tmp_path, root=elsewhere, clean_up=clean_up)
    assert f"has its state in {tmp_path / 'root'}" in str(raised.value)
    assert f"{elsewhere}/guarded" in str(raised.value)
    assert not elsewhere.exists(), "the refused start wrote neither a lease nor an operator file"
    # The refused start left one input file.
    assert run(spark, tmp_path, clean_up=clean_up)[-1] == ("2", starts + 2)


def test_a_root_may_be_moved_as_a_whole(spark: Any, tmp_path: Path) -> None:
    for _ in range(3):
        run(spark, tmp_path)
    shutil.move(tmp_path / "root", tmp_path / "moved")
    for start in range(4, 6):
        assert run(spark, tmp_path, root=tmp_path / "moved") == [("1", 2 * start), ("2", start)]


def test_a_copied_checkpoint_continues_with_a_copied_query_folder(spark: Any, tmp_path: Path) -> None:
    """The text of `LiveRunError` recommends this."""
    for _ in range(3):
        run(spark, tmp_path)
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copied checkpoint")
    [query_folder] = [path for path in (tmp_path / "root" / "guarded").iterdir() if (path / "lease").is_dir()]
    wait_for_uploads(query_folder, tmp_path / "local")
    copy = tmp_path / "copied" / "guarded" / query_folder.name

    def copy_all() -> bool:
        """Return False if a file disappeared meanwhile: the driver may be releasing the lease."""
        shutil.rmtree(copy, ignore_errors=True)
        with contextlib.suppress(shutil.Error):
            shutil.copytree(query_folder, copy)
            return True
        return False

    eventually(copy_all)
    before = {path: path.read_bytes() for path in query_folder.rglob("*.arrow")}
    copied = {"root": tmp_path / "copied", "checkpoint": tmp_path / "copied checkpoint"}
    assert run(spark, tmp_path, **copied) == [("1", 8), ("2", 4)]
    assert before == {path: path.read_bytes() for path in query_folder.rglob("*.arrow")}, (
        "the files of the first query are unchanged"
    )


@pytest.mark.parametrize("clean_up", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_the_first_batch_restores_a_removed_root_from_the_local_stores(
    spark: Any, tmp_path: Path, clean_up: bool
) -> None:
    for _ in range(3):
        run(spark, tmp_path, clean_up=clean_up)
    removed(tmp_path / "root")
    assert run(spark, tmp_path, clean_up=clean_up) == [("1", 8), ("2", 4)]
    assert list((tmp_path / "root").rglob("*.snapshot.arrow"))
    assert list((tmp_path / "root").rglob("operator_0.json"))
    # Another machine has only the root.
    for path in (tmp_path / "local").glob("spark_state_ext-*/*-guarded"):
        path.rename(path.with_suffix(".away"))
    assert run(spark, tmp_path, clean_up=clean_up) == [("1", 10), ("2", 5)]


def test_a_running_query_restores_a_removed_root(spark: Any, tmp_path: Path) -> None:
    """Its processes notice that the root is missing when they renew the lease."""
    root, batches = tmp_path / "root", 0
    options, conf = {"buckets": 2, "clean_up": False}, {"spark.sql.shuffle.partitions": "1"}
    job = Job(spark, "arrow", tmp_path, count_rows, "key string, n bigint", options=options, conf=conf)

    def run_batch() -> None:
        nonlocal batches
        batches += 1
        job.feed(keyed("a", "b"))
        eventually(lambda: len(emitted(job.sink)) >= batches)

    job.feed()
    with job.running() as query:
        # Enough batches for every worker process to have seen the root once.
        for _ in range(12):
            run_batch()
        root.rename(tmp_path / "removed")

        def is_restored() -> bool:
            run_batch()
            return bool(list(root.rglob("operator_0.json")) and list(root.rglob("*.snapshot.arrow")))

        eventually(is_restored)
        assert query.exception() is None
    # Another machine has only the root.
    job.options["local_dir"] = str(tmp_path / "another")
    assert job.run(keyed("a", "b")) == {batches: [("a", batches + 1), ("b", batches + 1)]}


def test_a_checkpoint_of_sparks_operator_does_not_start_ours_and_vice_versa(spark: Any, tmp_path: Path) -> None:
    """An existing job cannot continue with `enable`, as its state is Spark's. A job cannot switch back either."""
    for first, second in (("spark", "arrow"), ("arrow", "spark")):
        (tmp_path / first).mkdir()
        job = Job(spark, first, tmp_path / first, count_rows, "key string, n bigint")
        assert job.run(keyed("a")) == {0: [("a", 1)]}
        job.operator = second
        with pytest.raises(StreamingQueryException, match=r"(?i)schema"):
            job.run(keyed("a"))
        job.operator = first
        assert job.run() == {1: [("a", 2)]}


def test_state_of_another_query_is_kept_or_with_strict_refused(spark: Any, tmp_path: Path) -> None:
    assert run(spark, tmp_path) == [("1", 2), ("2", 1)]
    # A new checkpoint location is a new query: it reads both files and starts without state; the other query's state stays.
    assert run(spark, tmp_path, checkpoint=tmp_path / "second")[-1] == ("2", 2)
    assert len([path for path in (tmp_path / "root" / "guarded").iterdir() if path.name != "starting"]) == 2
    with pytest.raises(Exception, match=r"ExistingStateError.*checkpointLocation"):
        run(spark, tmp_path, checkpoint=tmp_path / "third", strict=True)


def test_executors_without_the_package_raise_an_error_with_their_python(tmp_path: Path) -> None:
    """The Python of Spark's executors has everything except this package; the driver has it."""
    bare = tmp_path / "bare"
    site = next(p for p in sys.path if p.endswith("site-packages"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    target = next((bare / "lib").glob("python*")) / "site-packages"
    hidden = {"spark_state_ext", "arrow_schemas"}
    for entry in Path(site).iterdir():
        if entry.name.split("-")[0].split(".")[0] not in hidden and "spark_state_ext" not in entry.name:
            (target / entry.name).symlink_to(entry)
    job = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        sys.path[:0] = [sys.argv[1], sys.argv[3]]
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(
            "spark.sql.shuffle.partitions", "1").getOrCreate()
        import test_guards
        test_guards.run(spark, Path(sys.argv[2]))
        """
    )
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": str(bare / "bin" / "python"),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", job, str(here), str(tmp_path), str(here.parent.parent)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=environment,
        # Python adds its working folder to the path; in the checkout it would find the package.
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode != 0
    assert "ExecutorPackageError" in done.stderr
    assert f"{bare}/bin/python" in done.stderr
    assert "PYSPARK_PYTHON" in done.stderr


def test_a_second_live_run_on_one_state_is_refused(spark: Any, tmp_path: Path) -> None:
    """A copied Spark checkpoint keeps its query id; another application starts the copy while the first query runs."""
    assert run(spark, tmp_path) == [("1", 2), ("2", 1)]
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    job = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from pyspark.sql import SparkSession
        spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(
            "spark.sql.shuffle.partitions", "2").getOrCreate()
        import test_guards
        folder = Path(sys.argv[1])
        test_guards.run(spark, folder, checkpoint=folder / "copy")
        """
    )

    def count_slowly(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        time.sleep(0.2)
        state.update(((state.getOption or (0,))[0] + 1,))
        yield pd.DataFrame({"k": [str(key[0])], "n": [1], "before": [""]})

    many = pa.table({"k": pa.array(range(4_000), pa.int64())})
    events = read(spark, write_batches(tmp_path / "in", [many]), "k long")
    out = arrow_state(tmp_path).apply_in_pandas_with_state(
        events, "k", count_slowly, "k string, n long, before string", STATE, "update", "NoTimeout"
    )
    first = (
        out.writeStream.outputMode("update")
        .format("noop")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        log = LeaseLog(Folder(str(next((tmp_path / "root").rglob("lease")).parent)))
        newest = log.newest()
        eventually(lambda: log.newest() != newest)
        second = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", job, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert first.isActive, first.exception()
    finally:
        first.stop()
    assert second.returncode != 0
    assert "LiveRunError" in second.stderr
    assert "Stop the other run" in second.stderr


@pytest.mark.parametrize("kind", ["classic", pytest.param("connect", marks=pytest.mark.connect)])
def test_two_operators_of_one_name_in_a_query_are_refused_by_the_plan(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    session = request.getfixturevalue("spark" if kind == "classic" else "connect")
    events = read(session, write_batches(tmp_path / "in", []), "k long")
    state = arrow_state(tmp_path)
    first = aggregate(state, events, "k", {"n": Agg.count()})
    with pytest.raises(UsageError, match=r"operator 'guarded' is already in this query: .*another name"):
        aggregate(state, first, "n", {"m": Agg.count()})
    with pytest.raises(UsageError, match="operator 'guarded' is already in this query"):
        state.apply_in_pandas_with_state(first, "n", count_rows, "k long", STATE, "update", "NoTimeout")
    aggregate(arrow_state(tmp_path, operator="other"), first, "n", {"m": Agg.count()})
