"""Commands import jobs, export savepoints, and check the packages of executors."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from jobs import reads_state
from native_job import FIRST, NEXT, NativeJob, conf_of

from spark_state_ext import Savepoint, read_savepoint
from spark_state_ext.__main__ import main

pytestmark = [pytest.mark.spark, reads_state]


def test_commands_import_a_job_and_export_its_savepoint(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").mkdir()
    job = NativeJob(spark, tmp_path / "job", conf_of("hdfs", 1))
    job.run(FIRST)
    savepoint, new, files = tmp_path / "savepoint", job.folder / "new", tmp_path / "files"
    command = ["import-native", str(job.checkpoint), str(savepoint), str(new), "--operator", "tested", "--buckets", "3"]
    import_options = ["--operator", "tested", "--buckets", "3", "--idle-s", "0"]
    assert main(command) == 3
    assert capsys.readouterr().err.startswith("spark-state-ext import-native: LiveRunError: ")
    assert main([*command, "--idle-s", "0", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["savepoint"], report["batch"], report["replays"]) == (str(savepoint), job.last_batch(), False)
    assert json.loads((new / "metadata").read_text())["id"] == report["query_id"]
    # The command refuses a location that is not empty before Spark does anything.
    assert main([*command, "--idle-s", "0"]) == 2
    assert capsys.readouterr().err.startswith("spark-state-ext import-native: UsageError: ")

    rows = sorted(read_savepoint(spark, str(savepoint)).collect(), key=repr)
    assert len(rows) == report["rows"] > 3
    command = ["export-native", str(savepoint), str(files)]
    assert main([*command, "--for", "applyInPandasWithState"]) == 2
    assert "UnsupportedPlanError: " in capsys.readouterr().err
    assert not files.exists()
    assert main([*command, "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["operator"], report["key"], report["rows"]) == ("tested", ["key"], len(rows))
    assert sorted(spark.read.parquet(str(files)).collect(), key=repr) == rows
    assert main(command) == 2
    assert f"UsageError: {files} exists already" in capsys.readouterr().err

    # Spark has other file systems than fsspec, and PySpark has no class for this error of its JVM.
    assert main([*command[:2], "nosuch://there/files"]) == 3
    assert main(["import-native", str(job.checkpoint), str(tmp_path / "other"), "memory://there", *import_options]) == 3
    errors = capsys.readouterr().err
    assert "spark-state-ext export-native: StorageError: Spark failed: " in errors
    assert "import-native: StorageError: Spark could not write the state of the new query to memory://there" in errors
    for scheme in ("nosuch", "memory"):
        assert f'No FileSystem for scheme "{scheme}"' in errors
    assert "Traceback" not in errors

    job.run(NEXT, Savepoint(str(savepoint)), "new")
    assert len(job.emitted()) > len(FIRST)


def test_doctor_reports_the_packages_of_executors_and_other_releases(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", str(tmp_path / "root"), "--spark", "--all", "-o", "jsonl"]
    assert main(command) == 0
    rows = {row["what"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert f"({sys.executable})" in rows["executors"]["seen"]
    for name in ("pyarrow", "pandas", "lmdb"):
        assert rows[f"executors: {name}"]["seen"].startswith(f"{metadata.version(name)} on ")
    # The client now has another release than the executors.
    monkeypatch.setattr("spark_state_ext.cli.configuration.version_and_build", lambda: "9.9.9")
    assert main(command) == 1
    rows = {row["what"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [what for what, row in rows.items() if row["problem"]] == ["executors: spark_state_ext"]
    assert "the client 9.9.9" in rows["executors: spark_state_ext"]["problem"]
