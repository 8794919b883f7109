"""Savepoints of real queries, and queries that start from them."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, SPARK, Job, count, emitted, keyed, reads_state
from native_job import conf_of
from pyspark.errors import PySparkException, StreamingQueryException
from streams import finish

from spark_state_ext import (
    ArrowState,
    Backend,
    RetainedCheckpoint,
    Savepoint,
    open_committed,
    open_state,
    read_savepoint,
    savepoint_tables,
    stop_with_savepoint,
    take_savepoint,
    write_savepoint,
)
from spark_state_ext.__main__ import main
from spark_state_ext.errors import MissingCheckpointError, OperatorChangedError, StorageError, UsageError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LeaseRecord
from spark_state_ext.savepoints.claims import read_claim
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import is_detached, read_start
from spark_state_ext.spark.client import savepoints as client_savepoints
from spark_state_ext.spark.client.state_reader import CommittedBatch, StateReader, StoreOfState
from tests.helpers.soak import examples
from tests.helpers.waiting import eventually, removed, wait_for_uploads

pytestmark = pytest.mark.spark

FIRST = [["a", "b", "c"], ["a", "d"], ["a", "b"], ["a", "e"]]
NEXT = [["a", "b"], ["c", "f"], ["a", "a"]]


class Query:
    """A job that counts rows by key, and a table of its counts, like a database."""

    def __init__(self, session: Any, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.job = Job(session, "arrow", folder, count, output=COUNTS, options=options)
        self.table: dict[str, int] = {}

    @property
    def state(self) -> ArrowState:
        return ArrowState(
            self.job.options.get("root", str(self.job.folder / "root")),
            "tested",
            buckets=3,
            lease_ms=1_000,
            local_dir=str(self.job.folder / "local"),
        )

    @property
    def files(self) -> Folder:
        """The query folder."""
        (path,) = (path for path in (self.job.folder / "root" / "tested").iterdir() if path.name.count("-") == 4)
        return Folder(str(path))

    def run(self, batches: list[list[str]]) -> Query:
        def upsert(df: Any, batch: int) -> None:
            self.table.update({row.key: row.n for row in df.collect()})

        self.job.feed(*[keyed(*keys) for keys in batches])
        with self.job.configured():
            writer = self.job.planned().writeStream.foreachBatch(upsert)
            finish(writer.option("checkpointLocation", str(self.job.checkpoint)).trigger(availableNow=True).start())
        return self


def counted(*parts: list[list[str]]) -> dict[str, int]:
    return dict(Counter(key for part in parts for keys in part for key in keys))


@pytest.fixture
def old(spark: Any, tmp_path: Path) -> Query:
    """A query that has run and ended."""
    return Query(spark, tmp_path / "old").run(FIRST)


def read_lease(query: Query) -> LeaseRecord:
    newest = LeaseLog(query.files).newest()
    assert newest is not None
    return newest.record


def take(query: Query, path: Path, form: str = "native", **options: Any) -> Any:
    return take_savepoint(query.job.session, path, query.job.checkpoint, query.state, form=form, **options)


@reads_state
@pytest.mark.parametrize("form", ["native", pytest.param("canonical", marks=pytest.mark.soak)])
def test_a_query_starts_from_a_savepoint(spark: Any, old: Query, tmp_path: Path, form: str) -> None:
    savepoint = take(old, tmp_path / "savepoint", form, verify=True)
    assert (savepoint.batch, savepoint.form) == (3, form)
    manifest = read_manifest(Folder(savepoint.path))
    assert manifest.header.id == savepoint.id
    assert len(manifest.buckets) == 3
    assert manifest.header.offsets is not None
    assert "logOffset" in manifest.header.offsets
    # The savepoint needs no file of the old query.
    removed(tmp_path / "old")
    (tmp_path / "savepoint").rename(tmp_path / "moved")
    new = Query(spark, tmp_path / "new", start_from=Savepoint(str(tmp_path / "moved"))).run(NEXT)
    assert new.table == {key: n for key, n in counted(FIRST, NEXT).items() if key in new.table}
    assert set(new.table) == {key for keys in NEXT for key in keys}
    # Once the query is detached, the savepoint may be deleted and `start_from` may remain.
    eventually(lambda: is_detached(new.files))
    removed(tmp_path / "moved")
    new.run([["a", "d"]])
    assert (new.table["a"], new.table["d"]) == (counted(FIRST, NEXT)["a"] + 1, 2)


@reads_state
def test_taking_a_savepoint_changes_nothing_of_the_query(spark: Any, tmp_path: Path) -> None:
    old = Query(spark, tmp_path / "old").run(FIRST[:2])
    wait_for_uploads(tmp_path / "old" / "root", tmp_path / "old" / "local")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "old" / "root").rglob("*.arrow")}
    savepoint = take(old, tmp_path / "savepoint")
    links = [path for path in (tmp_path / "savepoint").rglob("*.arrow") if path.stat().st_nlink > 1]
    assert savepoint.batch == 1
    assert savepoint.duplicated == len(links)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "old" / "root").rglob("*.arrow")} == before
    assert old.files.child("holds").names() == []
    old.run(FIRST[2:])
    assert old.table == counted(FIRST)


@reads_state
@pytest.mark.parametrize("missing", [pytest.param("batch", marks=pytest.mark.soak), "pointers"])
def test_taking_a_savepoint_looks_for_a_later_batch_if_the_query_drops_the_first_one(
    old: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Spark's reader finds no files because the query has dropped them; the next attempt finds the following batch."""
    failed_calls: list[str] = []

    class LateReader(StateReader):
        def _fail_once(self, call: str) -> None:
            if call not in failed_calls:
                failed_calls.append(call)
                raise StorageError("the file does not exist")

        def batch(self, batch: int | None = None) -> CommittedBatch:
            if missing == "batch":
                self._fail_once("batch")
            return super().batch(batch)

        def pointers(self, store: StoreOfState, batch: int) -> Any:
            if missing == "pointers":
                self._fail_once("pointers")
            return super().pointers(store, batch)

        def has(self, batch: int) -> bool:
            self._fail_once("has")
            return super().has(batch)

    monkeypatch.setattr(client_savepoints, "StateReader", LateReader)
    assert take(old, tmp_path / "savepoint").batch == 3
    assert failed_calls == (["batch"] if missing == "batch" else ["pointers", "has"])
    # A batch that was requested by its number is not replaced by another one.
    failed_calls.clear()
    with pytest.raises(StorageError):
        take(old, tmp_path / "other", batch=3)


@pytest.mark.soak
@reads_state
def test_any_number_of_queries_start_from_one_savepoint(spark: Any, old: Query, tmp_path: Path) -> None:
    """They share only the bytes of files, which are never written again."""
    take(old, tmp_path / "savepoint")

    def read_contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in (tmp_path / "savepoint").rglob("*") if path.is_file()}

    before = read_contents()
    start = Savepoint(str(tmp_path / "savepoint"))
    queries = [Query(spark, tmp_path / str(number), start_from=start) for number in range(examples(2, 5))]
    rounds = examples(1, 2)
    for round_number in range(rounds):
        for number, query in enumerate(queries):
            query.run([["a"] * (number + 1), [f"of {number}"]])
            expected = {"a": counted(FIRST)["a"] + (round_number + 1) * (number + 1), f"of {number}": round_number + 1}
            assert query.table == expected
    assert read_contents() == before
    # Each query is independent of the savepoint and of the others.
    shutil.rmtree(tmp_path / "savepoint")
    removed(tmp_path / "old")
    for number, query in enumerate(queries):
        shutil.rmtree(tmp_path / str(number) / "local")
        query.run([["a"]])
        assert query.table["a"] == counted(FIRST)["a"] + rounds * (number + 1) + 1
        removed(tmp_path / str(number))


@pytest.mark.soak
@reads_state
def test_a_claimed_savepoint_is_deleted_once_its_query_is_detached(spark: Any, old: Query, tmp_path: Path) -> None:
    take(old, tmp_path / "savepoint")
    (tmp_path / "savepoint" / "tested" / "mine.txt").touch()
    start = Savepoint(str(tmp_path / "savepoint"), mode="claim")
    new = Query(spark, tmp_path / "new", start_from=start).run(NEXT)
    assert new.table["a"] == counted(FIRST, NEXT)["a"]
    # Files that the manifest does not name remain.
    eventually(lambda: [path.name for path in (tmp_path / "savepoint").rglob("*") if path.is_file()] == ["mine.txt"])
    new.run([["a"]])
    assert new.table["a"] == counted(FIRST, NEXT)["a"] + 1
    with pytest.raises(StreamingQueryException, match="there is no savepoint at"):
        Query(spark, tmp_path / "third", start_from=start).run(NEXT)


@reads_state
def test_a_claimed_savepoint_is_refused_to_other_queries(spark: Any, old: Query, tmp_path: Path) -> None:
    take(old, tmp_path / "savepoint")
    start = Savepoint(str(tmp_path / "savepoint"), mode="claim")
    Query(spark, tmp_path / "new", start_from=start, clean_up=False).run(NEXT)
    for mode in ("claim", "no_claim"):
        other = Query(spark, tmp_path / mode, start_from=replace(start, mode=mode))
        with pytest.raises(
            StreamingQueryException, match=r"ClaimedError: the savepoint at .* is claimed by the query at"
        ):
            other.run(NEXT)
    # With clean_up=False, the query deletes nothing of the savepoint.
    assert read_manifest(Folder(str(tmp_path / "savepoint"))).buckets


@pytest.mark.soak
@reads_state
def test_a_query_whose_backend_is_not_a_file_system_starts_from_a_savepoint(
    spark: Any, old: Query, tmp_path: Path
) -> None:
    take(old, tmp_path / "savepoint")
    backend = Backend(name="other", kind="sqlite", options={"path": str(tmp_path / "states.sqlite")})
    start = Savepoint(str(tmp_path / "savepoint"))
    new = Query(spark, tmp_path / "new", start_from=start, backends=["changelog", backend]).run(NEXT[:1])
    removed(tmp_path / "savepoint")
    removed(tmp_path / "new" / "local")
    new.run(NEXT[1:])
    assert new.table["a"] == counted(FIRST, NEXT)["a"]
    assert new.table["c"] == counted(FIRST, NEXT)["c"]


@reads_state
def test_a_query_starts_from_the_retained_checkpoint_of_another_query(spark: Any, old: Query, tmp_path: Path) -> None:
    start = RetainedCheckpoint(str(tmp_path / "old" / "root"), str(old.job.checkpoint))
    new = Query(spark, tmp_path / "new", start_from=start).run(NEXT)
    assert new.table["a"] == counted(FIRST, NEXT)["a"]
    eventually(lambda: is_detached(new.files))
    eventually(lambda: old.files.child("holds").names() == [])
    # Both queries continue independently.
    old.run([["a"]])
    assert old.table["a"] == counted(FIRST)["a"] + 1
    removed(tmp_path / "old")
    new.run([["a"]])
    assert new.table["a"] == counted(FIRST, NEXT)["a"] + 1
    record = read_start(new.files)
    assert record is not None
    assert (record.kind, record.batch) == ("retained_checkpoint", 3)


@reads_state
def test_a_start_from_a_batch_that_cannot_be_read_leaves_no_hold(spark: Any, old: Query, tmp_path: Path) -> None:
    start = RetainedCheckpoint(str(tmp_path / "old" / "root"), str(old.job.checkpoint), batch=99)
    with pytest.raises(StreamingQueryException, match=r"batch 99 of .* cannot be read"):
        Query(spark, tmp_path / "new", start_from=start).run(NEXT)
    assert old.files.child("holds").names() == []


@pytest.mark.soak
@reads_state
def test_a_query_starts_from_an_older_batch_of_another_query(spark: Any, old: Query, tmp_path: Path) -> None:
    start = RetainedCheckpoint(str(tmp_path / "old" / "root"), str(old.job.checkpoint), batch=1)
    new = Query(spark, tmp_path / "new", start_from=start).run(NEXT)
    assert new.table["a"] == counted(FIRST[:2], NEXT)["a"]


@reads_state
def test_a_claimed_checkpoint_belongs_to_the_new_query_and_is_refused_to_others(
    spark: Any, old: Query, tmp_path: Path
) -> None:
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), mode="claim")
    new = Query(spark, tmp_path / "new", start_from=start, root=root).run([["a"]])
    wait_for_uploads(tmp_path / "old" / "root", tmp_path / "new" / "local")
    # Its only batch changed one bucket. For the others, the files do not prove what the old query committed, but Spark does.
    with pytest.raises(MissingCheckpointError, match="read what Spark committed"):
        open_state(root)
    with open_committed(spark, root, new.job.checkpoint) as state:
        rows = state.scan(["key", "n"]).read_all().to_pylist()
    assert {row["key"]: row["n"] for row in rows} == counted(FIRST, [["a"]])
    new.run(NEXT)
    assert new.table["a"] == counted(FIRST, NEXT)["a"] + 1
    # The driver also releases the lease of the claimed folder, whose name is that of the old query.
    eventually(lambda: read_lease(old).released)
    assert read_lease(old).claim is not None
    with pytest.raises(StreamingQueryException, match=r"ClaimedError: the state at .* belongs to"):
        old.run([["a"]])
    new.run([["a"]])
    assert new.table["a"] == counted(FIRST, NEXT)["a"] + 2
    with pytest.raises(StreamingQueryException, match="ClaimedError"):
        Query(spark, tmp_path / "third", start_from=start, root=root).run(NEXT)


@pytest.mark.soak
@reads_state
def test_the_checkpoint_of_a_running_query_cannot_be_claimed(spark: Any, tmp_path: Path) -> None:
    old = Query(spark, tmp_path / "old", lease_ms=10_000)
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), mode="claim")
    new = Query(spark, tmp_path / "new", start_from=start, root=root)

    def upsert(df: Any, batch: int) -> None:
        old.table.update({row.key: row.n for row in df.collect()})

    old.job.feed(*[keyed(*keys) for keys in FIRST[:2]])
    with old.job.configured():
        writer = old.job.planned().writeStream.foreachBatch(upsert)
        running_query = writer.option("checkpointLocation", str(old.job.checkpoint)).start()
        try:
            eventually(lambda: old.table == counted(FIRST[:2]))
            with pytest.raises(StreamingQueryException, match="top the old query first"):
                new.run(NEXT)
            # What the old query commits after the refused query was planned is not lost.
            old.job.feed(*[keyed(*keys) for keys in FIRST[2:]])
            # The batch must be committed, not only given to the sink.
            eventually(lambda: (old.job.checkpoint / "commits" / str(len(FIRST) - 1)).exists())
        finally:
            running_query.stop()
    new.run([])
    assert new.table["a"] == counted(FIRST, NEXT)["a"]
    assert new.table["b"] == counted(FIRST, NEXT)["b"]


@reads_state
def test_a_query_that_cannot_use_the_state_claims_nothing(spark: Any, old: Query, tmp_path: Path) -> None:
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), mode="claim")
    wrong = Query(spark, tmp_path / "wrong", start_from=start, root=root)
    wrong.job.state = "m bigint"
    with pytest.raises(StreamingQueryException, match="SchemaChangedError"):
        wrong.run(NEXT)
    assert read_lease(old).claim is None
    take(old, tmp_path / "savepoint")
    wrong = Query(spark, tmp_path / "other", start_from=Savepoint(str(tmp_path / "savepoint"), mode="claim"))
    wrong.job.state = "m bigint"
    with pytest.raises(StreamingQueryException, match="SchemaChangedError"):
        wrong.run(NEXT)
    assert read_claim(Folder(str(tmp_path / "savepoint"))) is None
    old.run([["a"]])
    assert old.table["a"] == counted(FIRST)["a"] + 1


@pytest.mark.soak
@reads_state
def test_a_claim_can_be_released_by_force_if_the_new_query_committed_no_batch(
    spark: Any, old: Query, tmp_path: Path
) -> None:
    def fail(key: Any, frames: Any, state: Any) -> Any:
        raise ValueError("not today")

    root = str(tmp_path / "old" / "root")
    new = Query(
        spark,
        tmp_path / "new",
        start_from=RetainedCheckpoint(root, str(old.job.checkpoint), mode="claim"),
        root=root,
    )
    new.job.function = fail
    with pytest.raises(StreamingQueryException, match="not today"):
        new.run(NEXT)
    with pytest.raises(StreamingQueryException, match=r"ClaimedError: the state at .* belongs to"):
        old.run([["a"]])
    # Tasks without rows may have returned pointers before the batch failed. Only Spark knows that it failed, hence `--force`.
    assert main(["savepoint", "release", old.files.root, "--force"]) == 0
    old.run([["a"]])
    assert old.table["a"] == counted(FIRST)["a"] + 2
    # Once the new query is fixed, it may claim the checkpoint again.
    new.job.function = count
    new.run([])
    assert new.table["a"] == counted(FIRST, NEXT)["a"] + 2


@pytest.mark.soak
@reads_state
def test_a_claim_cannot_be_released_after_a_batch_of_the_new_query(
    spark: Any, old: Query, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), mode="claim")
    new = Query(spark, tmp_path / "new", start_from=start, root=root).run(NEXT[:1])
    assert main(["savepoint", "release", old.files.root]) == 3
    assert "its first batch was handed to Spark, and may be committed" in capsys.readouterr().err
    new.run(NEXT[1:])
    assert main(["savepoint", "release", old.files.root, "--force"]) == 3
    assert "a batch of it is committed, and it may have deleted what the old query needs" in capsys.readouterr().err
    new.run([["a"]])
    assert new.table["a"] == counted(FIRST, NEXT)["a"] + 1


@reads_state
def test_a_checkpoint_that_later_batches_need_can_only_be_claimed_by_force(
    spark: Any, old: Query, tmp_path: Path
) -> None:
    root = str(tmp_path / "old" / "root")
    start = RetainedCheckpoint(root, str(old.job.checkpoint), batch=1, mode="claim")
    with pytest.raises(StreamingQueryException, match=r"the later batches 2, 3 need its files"):
        Query(spark, tmp_path / "new", start_from=start, root=root).run(NEXT)
    old.run([["a"]])
    forced = replace(start, force=True)
    new = Query(spark, tmp_path / "forced", start_from=forced, root=root).run(NEXT)
    assert new.table["a"] == counted(FIRST[:2], NEXT)["a"]


@pytest.mark.soak
@reads_state
def test_an_operator_that_the_snapshot_does_not_have_is_refused_when_the_query_is_planned(
    spark: Any, old: Query, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    take(old, tmp_path / "savepoint")
    start = Savepoint(str(tmp_path / "savepoint"), operator="other")
    retained = RetainedCheckpoint(str(tmp_path / "old" / "root"), str(old.job.checkpoint), operator="other")
    for snapshot in (start, retained):
        query = Query(spark, tmp_path / f"new-{type(snapshot).__name__}", start_from=snapshot)
        query.job.feed(keyed("a"))
        with pytest.raises(OperatorChangedError, match=r"has no operator 'other'.* tested"):
            query.job.planned()
        # Nothing was written, and no hold was placed.
        assert not (query.job.folder / "root").exists()
    assert old.files.child("holds").names() == []
    # Problems that only matter to a query without state are logged: this query may have state already.
    with caplog.at_level(logging.WARNING):
        right_start = replace(start, operator="tested")
        for job in (
            Query(spark, tmp_path / "gone", start_from=replace(start, path=str(tmp_path / "gone"))).job,
            replace(Query(spark, tmp_path / "other-state", start_from=right_start).job, state="m bigint"),
        ):
            job.feed(keyed("a"))
            job.planned()
    missing, other_state = (record.getMessage() for record in caplog.records if "start from" in record.getMessage())
    assert "which operator 'tested' may start from, could not be read when the query was planned" in missing
    assert "column 'n' was removed" in other_state
    assert "a query without state fails in its first batch" in other_state
    new = Query(spark, tmp_path / "empty", start_from=replace(start, allow_non_restored=True)).run(NEXT)
    assert new.table == counted(NEXT)


def test_a_table_becomes_the_initial_state_and_is_read_back_unchanged(spark: Any, tmp_path: Path) -> None:
    totals = spark.createDataFrame([("a", 10), ("b", 20), (None, 5), ("", 7)], "key string, n bigint")
    savepoint = write_savepoint(
        totals, tmp_path / "savepoint", keys=["key"], state_schema="n bigint", buckets=3, operator="tested"
    )
    assert savepoint.batch == -1
    rows = read_savepoint(spark, tmp_path / "savepoint")
    assert rows.columns == ["key", "n", "timeout_ms"]
    assert sorted(rows.select("key", "n").collect(), key=str) == sorted(totals.collect(), key=str)
    new = Query(spark, tmp_path / "new", start_from=Savepoint(str(tmp_path / "savepoint"))).run([["a", "c"], ["", "a"]])
    assert new.table == {"a": 12, "c": 1, "": 8}


def test_a_table_that_has_a_key_twice_is_refused(spark: Any, tmp_path: Path) -> None:
    totals = spark.createDataFrame([("a", 10), ("a", 20)], "key string, n bigint")
    with pytest.raises(Exception, match=r"the key \{'key': 'a'\} more than once"):
        write_savepoint(totals, tmp_path / "savepoint", keys=["key"], state_schema="n bigint", buckets=3)


@reads_state
def test_reading_a_savepoint_returns_the_state_of_its_query(spark: Any, old: Query, tmp_path: Path) -> None:
    take(old, tmp_path / "savepoint")
    rows = read_savepoint(spark, tmp_path / "savepoint").collect()
    assert {row.key: row.n for row in rows} == counted(FIRST)
    renamed = str(tmp_path / "renamed")
    assert main(["savepoint", "transform", str(tmp_path / "savepoint"), renamed, "--rename", "n=key"]) == 0
    shared = read_savepoint(spark, renamed)
    assert shared.columns == ["key.key", "state.key", "timeout_ms"], "a key and a state column have the same name"
    assert {row["key.key"]: row["state.key"] for row in shared.collect()} == counted(FIRST)
    (names,) = {tuple(table.column_names) for table in savepoint_tables(renamed)}
    assert names == ("key.key", "state.key", "timeout_ms")


def test_a_table_column_is_not_converted_to_another_type_but_to_a_wider_integer(spark: Any, tmp_path: Path) -> None:
    rows = spark.sql(
        "select 'a' key, '1' text, 1 number, 1.5D real, true flag, date'2020-01-01' day, "
        "timestamp_ntz'2020-01-01 12:00:00' local, timestamp'2020-01-01 12:00:00' moment"
    )
    refused_types = [("text", "long"), ("number", "string"), ("real", "long"), ("flag", "long")]
    refused_types += [("day", "timestamp"), ("local", "timestamp"), ("moment", "date")]
    for column, declared in refused_types:
        two_columns = rows.select("key", column)
        with pytest.raises(UsageError, match=f"column '{column}' of the table is"):
            write_savepoint(
                two_columns, str(tmp_path / column), keys=["key"], state_schema=f"{column} {declared}", buckets=1
            )
        assert not (tmp_path / column).exists()
    with pytest.raises(UsageError, match="must be a whole number"):
        write_savepoint(
            rows.select("key", "number", rows.moment.alias("timeout_ms")),
            str(tmp_path / "timeout"),
            keys=["key"],
            state_schema="number int",
            buckets=1,
        )
    numbers = rows.select("key", "number")
    wider = write_savepoint(numbers, str(tmp_path / "wider"), keys=["key"], state_schema="number long", buckets=1)
    assert [tuple(row) for row in read_savepoint(spark, wider.path).collect()] == [("a", 1, None)]


def test_a_table_column_that_is_neither_key_nor_state_is_refused(spark: Any, tmp_path: Path) -> None:
    rows = spark.sql("select 'a' key, 1 n, 5L timeoutMs")
    with pytest.raises(UsageError, match="the column 'timeoutMs', which is neither a key nor a state column, nor"):
        write_savepoint(rows, str(tmp_path / "savepoint"), keys=["key"], state_schema="n int", buckets=1)


def test_a_null_in_a_state_column_that_is_not_null_is_refused(spark: Any, tmp_path: Path) -> None:
    rows = spark.sql("select 'a' key, cast(null as long) n")
    with pytest.raises(PySparkException, match="NOT NULL"):
        write_savepoint(rows, str(tmp_path / "null"), keys=["key"], state_schema="n long not null", buckets=1)


def test_an_empty_table_becomes_a_savepoint_without_state(spark: Any, tmp_path: Path) -> None:
    empty_table = spark.createDataFrame([], "key string, n bigint")
    write_savepoint(
        empty_table, tmp_path / "savepoint", keys=["key"], state_schema="n bigint", buckets=3, operator="tested"
    )
    assert read_savepoint(spark, tmp_path / "savepoint").collect() == []
    new = Query(spark, tmp_path / "new", start_from=Savepoint(str(tmp_path / "savepoint"))).run(NEXT)
    assert new.table == counted(NEXT)


@pytest.mark.connect
def test_savepoints_can_be_taken_and_used_through_spark_connect(connect: Any, tmp_path: Path) -> None:
    """The client passes paths; tasks of the server's application read and write the files."""

    def make_job(name: str, **options: Any) -> Job:
        (tmp_path / name).mkdir()
        return Job(connect, "arrow", tmp_path / name, count, output=COUNTS, options=options)

    old = make_job("old")
    # The query has settings that the client has not set.
    old.conf = conf_of("rocksdb", 2 if SPARK >= (4, 1) else 1)
    old.run(keyed("a", "b"), keyed("a"))
    state = ArrowState(tmp_path / "old" / "root", "tested", buckets=3, local_dir=tmp_path / "local")
    for form in ("native", "canonical"):
        path = tmp_path / form
        savepoint = take_savepoint(connect, path, old.checkpoint, state, form=form)
        assert (savepoint.batch, savepoint.form) == (1, form)
        assert {row.key: row.n for row in read_savepoint(connect, path).collect()} == {"a": 2, "b": 1}
        new = make_job(
            f"from-{form}", start_from=Savepoint(str(path), mode="claim" if form == "canonical" else "no_claim")
        )
        assert new.run(keyed("a", "c"), keyed("b")) == {0: [("a", 3), ("c", 1)], 1: [("b", 2)]}
    eventually(lambda: not (tmp_path / "canonical").exists())
    assert (tmp_path / "native" / "savepoint.arrow").exists()
    retained = RetainedCheckpoint(str(tmp_path / "old" / "root"), str(old.checkpoint))
    assert make_job("from-what-is-left", start_from=retained).run(keyed("a", "c")) == {0: [("a", 3), ("c", 1)]}
    stopped_job = make_job("stopped")
    stopped_job.feed(keyed("a"))
    with stopped_job.running() as query:
        eventually(lambda: emitted(stopped_job.sink) and (stopped_job.checkpoint / "commits" / "0").exists())
        state = ArrowState(tmp_path / "stopped" / "root", "tested", buckets=3, local_dir=tmp_path / "local")
        savepoint = stop_with_savepoint(
            query, tmp_path / "stopped-savepoint", stopped_job.checkpoint, state, spark=connect
        )
        assert not query.isActive
    assert {row.key: row.n for row in read_savepoint(connect, savepoint.path).collect()} == {"a": 1}


@pytest.mark.skipif(SPARK >= (4, 0), reason="newer releases have a reader of state")
def test_pyspark_3_5_explains_how_to_take_a_savepoint_with_a_newer_release(spark: Any, tmp_path: Path) -> None:
    query = Query(spark, tmp_path / "old").run(FIRST)
    with pytest.raises(UsageError, match=r"Stop the query, and take the snapshot with PySpark 4\.0 or newer"):
        take_savepoint(spark, str(tmp_path / "savepoint"), str(query.job.checkpoint), query.state)
    assert not (tmp_path / "savepoint").exists()
