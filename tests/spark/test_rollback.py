"""Rolling a real query back to an older batch: the command loses nothing, removing offsets and commits by hand does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, SPARK, Job, count, keyed
from pyspark.errors import StreamingQueryException
from streams import finish

from spark_state_ext.__main__ import main
from spark_state_ext.cli.rollback import apply_rollback, plan_from_files
from spark_state_ext.cli.spark_checkpoint import ROLLED_BACK
from spark_state_ext.files.folder import Folder
from tests.helpers.soak import whole
from tests.helpers.waiting import WAIT_S

pytestmark = pytest.mark.spark

_STATE = "spark.sql.streaming.stateStore."
_CLASSES = "org.apache.spark.sql.execution.streaming."
_HDFS = {
    _STATE + "providerClass": _CLASSES + "state.HDFSBackedStateStoreProvider",
    _STATE + "minDeltasForSnapshot": "2",
}
_ROCKSDB = {_STATE + "providerClass": _CLASSES + "state.RocksDBStateStoreProvider"}
_CHANGELOG = {
    **_ROCKSDB,
    _STATE + "rocksdb.changelogCheckpointing.enabled": "true",
    _STATE + "minDeltasForSnapshot": "2",
}
_FORMAT_2 = {_STATE + "checkpointFormatVersion": "2"}
# Spark 4.1 moved these classes.
_MANAGERS = _CLASSES + ("checkpointing." if SPARK >= (4, 1) else "")
_OVERWRITES = {"spark.sql.streaming.checkpointFileManagerClass": _MANAGERS + "FileContextBasedCheckpointFileManager"}
_KEEPS = {"spark.sql.streaming.checkpointFileManagerClass": _MANAGERS + "FileSystemBasedCheckpointFileManager"}

_FIRST = [["a", "b", "c"], ["a", "d"], ["a", "b"], ["a", "e"]]
_LAST = [["a", "b"], ["a", "c"], ["a", "f"]]
_KEPT = 1


class Counts:
    """A job that counts rows by key, and the table of counts that a sink keeps, like a database."""

    def __init__(self, spark: Any, operator: str, folder: Path, conf: dict[str, str]) -> None:
        self.job = Job(spark, operator, folder, count, output=COUNTS, conf=conf)
        self.table: dict[str, int] = {}

    def run(self, batches: list[list[str]]) -> None:
        def upsert(df: Any, batch: int) -> None:
            self.table.update({row.key: row.n for row in df.collect()})

        self.job.feed(*[keyed(*keys) for keys in batches])
        with self.job.configured():
            writer = self.job.planned().writeStream.foreachBatch(upsert)
            finish(writer.option("checkpointLocation", str(self.job.checkpoint)).trigger(availableNow=True).start())

    def stop_maintenance(self) -> None:
        """Stop Spark's maintenance, as the end of an application does; it would upload another snapshot within a minute."""
        getattr(self.job.session.sparkContext._jvm, _CLASSES + "state.StateStore$").__getattr__("MODULE$").stop()

    @property
    def is_right(self) -> bool:
        return self.table == Counter(key for keys in _FIRST + _LAST for key in keys)


def _remove_logs(checkpoint: Path) -> None:
    """Remove offsets and commits of later batches, as a user may do by hand."""
    for log in ("offsets", "commits"):
        for path in [*(checkpoint / log).iterdir()]:
            if int(path.name.removeprefix(".").removesuffix(".crc")) > _KEPT:
                path.unlink()


@pytest.mark.soak
@pytest.mark.parametrize("conf", whole([_HDFS], [_ROCKSDB]), ids=whole(["hdfs"], ["rocksdb"]))
def test_removing_only_offsets_and_commits_silently_loses_counts(
    spark: Any, operator: str, tmp_path: Path, conf: dict[str, str]
) -> None:
    """This is why the command exists. If this test fails, Spark overwrites state by itself, and the docs can be shorter."""
    counts = Counts(spark, operator, tmp_path, {**conf, **_KEEPS})
    counts.run(_FIRST)
    _remove_logs(counts.job.checkpoint)
    # The first batch reads again all rows that the removed batches had counted.
    counts.run(_LAST[:1])
    counts.run(_LAST[1:])
    assert not counts.is_right


@pytest.mark.parametrize(
    "conf",
    [
        pytest.param({**_HDFS, **_OVERWRITES}, id="hdfs-overwrites", marks=pytest.mark.soak),
        pytest.param({**_HDFS, **_KEEPS}, id="hdfs-keeps"),
        pytest.param({**_ROCKSDB, **_OVERWRITES}, id="rocksdb-overwrites", marks=pytest.mark.soak),
        pytest.param({**_ROCKSDB, **_KEEPS}, id="rocksdb-keeps", marks=pytest.mark.soak),
        pytest.param({**_CHANGELOG, **_KEEPS}, id="changelog-keeps", marks=pytest.mark.soak),
        pytest.param(
            {**_CHANGELOG, **_KEEPS, **_FORMAT_2},
            id="changelog-keeps-format-2",
            marks=pytest.mark.skipif(SPARK < (4, 0), reason="checkpoint format 2 came with Spark 4.0"),
        ),
    ],
)
def test_a_query_rolled_back_to_an_older_batch_continues_and_counts_every_row(
    spark: Any, operator: str, tmp_path: Path, conf: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    counts = Counts(spark, operator, tmp_path, conf)
    counts.run(_FIRST)
    counts.stop_maintenance()
    checkpoint, command = counts.job.checkpoint, ["rollback", str(counts.job.checkpoint), "--to-batch", str(_KEPT)]
    before = sorted(path for path in checkpoint.rglob("*"))
    assert main(command) == 0
    assert sorted(path for path in checkpoint.rglob("*")) == before, "a dry run changes nothing"
    assert main([*command, "--apply"]) == 3
    assert "LiveRunError" in capsys.readouterr().err
    assert main([*command, "--apply", "--idle-s", "0"]) == 0
    moved_files = next(checkpoint.glob(f"{ROLLED_BACK}*"))
    assert sorted(path.name for path in (moved_files / "commits").glob("[0-9]*")) == ["2", "3"]
    assert main(command) == 0
    assert "files=0 " in capsys.readouterr().err.splitlines()[-2], "nothing is left to do"
    counts.run(_LAST[:1])
    counts.run(_LAST[1:])
    assert counts.is_right


@pytest.mark.parametrize("conf", whole([_ROCKSDB], [_HDFS]), ids=whole(["rocksdb"], ["hdfs"]))
def test_a_query_fails_after_an_interrupted_rollback_until_the_command_is_repeated(
    spark: Any, operator: str, tmp_path: Path, conf: dict[str, str]
) -> None:
    counts = Counts(spark, operator, tmp_path, {**conf, **_KEEPS})
    counts.run(_FIRST)
    counts.stop_maintenance()
    checkpoint = Folder(str(counts.job.checkpoint))
    plan = plan_from_files(checkpoint, _KEPT)
    # The command was stopped after it had deleted all state of the last batches and the last commit.
    step_kinds = [step[0].kind for step in plan.steps]
    partial_plan = type(plan)(plan.to_batch, plan.steps[: step_kinds.index("commits") + 1], plan.newest_s)
    apply_rollback(checkpoint, partial_plan, None)
    with pytest.raises(Exception, match=r"(?i)state|exist"):
        counts.run([])
    assert main(["rollback", checkpoint.root, "--to-batch", str(_KEPT), "--apply", "--delete", "--idle-s", "0"]) == 0
    counts.run(_LAST)
    assert counts.is_right


_FIRST_APPLICATION = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config(
    "spark.sql.shuffle.partitions", "2").getOrCreate()
import test_rollback
test_rollback.Counts(spark, "arrow", Path(sys.argv[1]), test_rollback._HDFS).run(test_rollback._FIRST)
"""


def test_a_pointer_of_a_later_batch_of_another_application_is_refused(spark: Any, tmp_path: Path) -> None:
    """Within one application this is no error: a thread of a sink may report an earlier batch (`test_sinks`)."""
    command = [sys.executable, "-W", "ignore", "-c", _FIRST_APPLICATION, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)
    counts = Counts(spark, "arrow", tmp_path, _HDFS)
    _remove_logs(counts.job.checkpoint)
    # State files of a later batch under an earlier name, as in a wrong copy.
    for store in (counts.job.checkpoint / "state/0").glob("[0-9]*"):
        for name in ("{}.delta", ".{}.delta.crc"):
            shutil.copy(store / name.format(len(_FIRST)), store / name.format(_KEPT + 1))
    with pytest.raises(StreamingQueryException, match=r"LineageError: Spark handed batch 2 the pointer of batch 3"):
        counts.run(_LAST)
