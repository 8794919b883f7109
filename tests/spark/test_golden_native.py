"""Every newer release of Spark imports checkpoints of older releases (`tests/golden/make_native.py`)."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from jobs import SPARK, reads_state

from spark_state_ext import import_native, read_savepoint
from spark_state_ext.errors import StorageError, UsageError

pytestmark = [pytest.mark.spark, reads_state]

GOLDEN = Path(__file__).parent.parent / "golden"
reads_format_2 = pytest.mark.skipif(SPARK < (4, 1), reason="the reader of 4.0 reads checkpoint format 1 only")


def import_checkpoint(spark: Any, old: Path, to: Path) -> Any:
    return import_native(spark, old, to / "savepoint", to / "new", buckets=2, operator="golden", idle_s=0)


@pytest.mark.parametrize(
    ("release", "kind"),
    [
        ("3.5", "hdfs"),
        pytest.param("3.5", "rocksdb", marks=pytest.mark.soak),
        pytest.param("4.0", "hdfs", marks=pytest.mark.soak),
        ("4.0", "rocksdb"),
        pytest.param("4.0", "rocksdb-2-changes", marks=reads_format_2),
    ],
)
def test_a_checkpoint_of_an_older_spark_can_be_imported(spark: Any, tmp_path: Path, release: str, kind: str) -> None:
    assert_imported(spark, GOLDEN / f"native-{release}" / kind, tmp_path)


def assert_imported(spark: Any, old: Path, to: Path) -> None:
    job = import_checkpoint(spark, old, to)

    rows = {row.key: (row.n, row.half, row.timeout_ms) for row in read_savepoint(spark, job.savepoint.path).collect()}
    assert rows == {
        "a": (2, 1.0, 2_000_000),
        "b": (1, 0.5, None),
        "c": (1, 0.5, 1_000_000),
        "gone": (None, None, 1_000_000),
    }
    assert (job.rows, job.states, job.timeouts) == (4, 3, 3)
    assert sorted(path.name for path in (to / "new" / "commits").iterdir()) == [str(job.batch)]
    assert json.loads((to / "new" / "metadata").read_text())["id"] == job.query_id
    assert {path.name for path in (to / "new" / "sources" / "0").iterdir()} == {
        path.name for path in (old / "sources" / "0").iterdir()
    }


@pytest.mark.skipif(SPARK >= (4, 1), reason="newer releases read format 2")
@pytest.mark.parametrize("kind", ["rocksdb-2-changes", "rocksdb-2-snapshots"])
def test_pyspark_4_0_refuses_checkpoint_format_2_before_it_reads_or_writes(
    spark: Any, tmp_path: Path, kind: str
) -> None:
    with pytest.raises(UsageError, match=rf"PySpark 4\.0 cannot read the state of .*{kind}: .* with PySpark 4\.1"):
        import_checkpoint(spark, GOLDEN / "native-4.0" / kind, tmp_path)
    assert not list(tmp_path.iterdir())


@reads_format_2
def test_a_version_that_only_spark_4_0_reads_is_an_error_until_it_is_corrected(spark: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(GOLDEN / "native-4.0" / "rocksdb-2-snapshots", copy)

    with pytest.raises(StorageError, match=r"Cannot read RocksDB checkpoint metadata.* marks snapshots .* as v2"):
        import_checkpoint(spark, copy, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    correct_version(copy)
    assert_imported(spark, copy, tmp_path)


def correct_version(checkpoint: Path) -> None:
    """Write version 1 into the metadata of the snapshots, as the page on importing says."""
    for path in checkpoint.glob("state/**/*.zip"):
        with zipfile.ZipFile(path) as old:
            files = {name: old.read(name) for name in old.namelist()}
        assert files["metadata"].startswith(b"v2\n")
        files["metadata"] = b"v1" + files["metadata"][2:]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for name, data in files.items():
                new.writestr(name, data)
