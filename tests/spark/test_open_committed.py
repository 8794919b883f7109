"""Reading the exact state of a committed batch with the help of Spark's own reader of state.

`open_committed`, `read_state` and commands with ``--checkpoint`` do this.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, SPARK, Job, configured, count, keyed, reads_state
from native_job import conf_of

from spark_state_ext import OpenState, open_committed, open_state, read_state
from spark_state_ext.__main__ import main
from spark_state_ext.errors import MissingCheckpointError, UsageError
from spark_state_ext.spark.client.settings import open_session_with
from spark_state_ext.spark.source.options import SourceOptions
from tests.helpers.waiting import wait_for_uploads

pytestmark = pytest.mark.spark

# "a" is in every batch; "b" is only in the first.
BATCHES = (("a", "b", "c", "d"), ("a",), ("a", "e"), ("a",), ("a", "f"))


def read_counts(state: OpenState) -> dict[str, int]:
    rows = state.scan(["key", "n"]).read_all().to_pylist()
    return {row["key"]: row["n"] for row in rows}


def expected_counts(batch: int) -> dict[str, int]:
    return dict(Counter(key for keys in BATCHES[: batch + 1] for key in keys))


@reads_state
def test_the_state_of_the_newest_and_of_older_batches_can_be_read(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The reader's session does not have these settings of the query.
    conf = conf_of("rocksdb", 2 if SPARK >= (4, 1) else 1)
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS, conf=conf)
    root, checkpoint, newest = tmp_path / "root", job.checkpoint, len(BATCHES) - 1
    job.run(*(keyed(*keys) for keys in BATCHES))
    wait_for_uploads(root, tmp_path / "local")
    assert ("stateUniqueIds" in (checkpoint / "commits" / "0").read_text()) == (SPARK >= (4, 1))
    (folder,) = (path for path in (root / "tested").iterdir() if path.name.count("-") == 4)
    with open_committed(spark, root, checkpoint) as state:
        assert (state.batch, state.newest_batch, state.proven, state.held) == (newest, newest, True, True)
        assert read_counts(state) == expected_counts(newest)
        assert state.get("a")["n"].to_pylist() == [5]
        oldest = state.oldest_batch
        inline = [(pointer.bucket, delta.name) for pointer in state.files.pointers.values() for delta in pointer.inline]
    assert list((folder / "holds").iterdir()) == []
    for batch in range(oldest, newest):
        with open_committed(spark, folder, str(checkpoint), operator="tested", batch=batch, hold=False) as state:
            assert (state.batch, read_counts(state)) == (batch, expected_counts(batch))

    # As before these were uploaded: only Spark's checkpoint has the changes of the last batch.
    assert inline
    for bucket, name in inline:
        (folder / str(bucket) / name).unlink(missing_ok=True)
    with open_committed(spark, root, checkpoint) as state:
        assert read_counts(state) == expected_counts(newest)
    with open_state(root, unproven=True) as state:
        assert read_counts(state) != expected_counts(newest)

    frame = read_state(spark, root, checkpoint_location=checkpoint, columns=["key", "n"])
    assert {row.key: row.n for row in frame.collect()} == expected_counts(newest)
    changed = read_state(spark, root, checkpoint_location=checkpoint, from_batch=newest - 1).collect()
    assert sorted((row.key, row.n, row._change) for row in changed) == [("a", 5, "update"), ("f", 1, "insert")]

    location = [str(root), "--checkpoint", str(checkpoint)]
    capsys.readouterr()
    assert main(["get", location[0], "a", *location[1:], "-o", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 5
    assert main(["show", *location, "--at", str(newest - 1), "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["batch"], report["newest_batch"], report["begun_batch"]) == (newest - 1, newest, newest)
    assert main(["diff", *location, "--at", str(newest - 1), "-o", "jsonl"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    for options in (["--unproven"], ["--query-folder", folder.name]):
        assert main(["scan", *location, *options]) == 2
        assert "or --checkpoint, not both" in capsys.readouterr().err

    with pytest.raises(MissingCheckpointError, match=r"batch 99 of .* cannot be read: only batches .* are committed"):
        open_committed(spark, root, checkpoint, batch=99)
    with pytest.raises(UsageError, match="has no operator 'other'; it has tested"):
        open_committed(spark, root, checkpoint, operator="other")
    with pytest.raises(UsageError, match="unproven cannot be used with checkpoint_location"):
        read_state(spark, root, checkpoint_location=checkpoint, unproven=True)


@reads_state
def test_opening_a_session_with_other_settings_does_not_change_the_users_session(spark: Any) -> None:
    format_setting, zone_setting = (
        "spark.sql.streaming.stateStore.checkpointFormatVersion",
        "spark.sql.session.timeZone",
    )
    with open_session_with(spark, {format_setting: "1"}) as same_session:
        assert same_session is spark
    with (
        configured(spark, {zone_setting: "Asia/Tokyo"}),
        open_session_with(spark, {format_setting: "2"}) as other_session,
    ):
        assert (other_session.conf.get(format_setting), other_session.conf.get(zone_setting)) == ("2", "Asia/Tokyo")
        # Plans of other threads still have the user's settings.
        assert spark.conf.get(format_setting, "1") == "1"


@pytest.mark.skipif(SPARK >= (4, 0), reason="Spark 4.0 and newer have a reader of state")
def test_pyspark_3_5_refuses_and_names_the_releases_that_can_read(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Read with PySpark 4\.0 or newer"):
        open_committed(spark, tmp_path, tmp_path / "checkpoint")


def test_the_data_source_refuses_a_checkpoint_and_names_read_state() -> None:
    with pytest.raises(UsageError, match=r"use read_state\(spark, path, checkpoint_location=…\)"):
        SourceOptions.of({"path": "/state", "checkpointLocation": "/checkpoints/clicks"})
