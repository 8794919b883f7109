"""Jobs come in and savepoints go out by command, and the doctor asks executors."""

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


def test_a_job_is_imported_and_exported_by_command(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").mkdir()
    job = NativeJob(spark, tmp_path / "job", conf_of("hdfs", 1))
    job.run(FIRST)
    savepoint, new, files = tmp_path / "savepoint", job.folder / "new", tmp_path / "files"
    words = ["import-native", str(job.checkpoint), str(savepoint), str(new), "--operator", "tested", "--buckets", "3"]
    at_once = ["--operator", "tested", "--buckets", "3", "--idle-s", "0"]
    assert main(words) == 3
    assert capsys.readouterr().err.startswith("spark-state-ext import-native: LiveRunError: ")
    assert main([*words, "--idle-s", "0", "-o", "json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["savepoint"], told["batch"], told["replays"]) == (str(savepoint), job.last_batch(), False)
    assert json.loads((new / "metadata").read_text())["id"] == told["query_id"]
    # A place that is not free is found before Spark does anything.
    assert main([*words, "--idle-s", "0"]) == 2
    assert capsys.readouterr().err.startswith("spark-state-ext import-native: UsageError: ")

    rows = sorted(read_savepoint(spark, str(savepoint)).collect(), key=repr)
    assert len(rows) == told["rows"] > 3
    words = ["export-native", str(savepoint), str(files)]
    assert main([*words, "--for", "applyInPandasWithState"]) == 2
    assert "UnsupportedPlanError: " in capsys.readouterr().err
    assert not files.exists()
    assert main([*words, "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["operator"], told["key"], told["rows"]) == ("tested", ["key"], len(rows))
    assert sorted(spark.read.parquet(str(files)).collect(), key=repr) == rows
    assert main(words) == 2
    assert f"UsageError: {files} exists already" in capsys.readouterr().err

    # Spark's file systems are not fsspec's, and what its JVM raises then is no error of PySpark's.
    assert main([*words[:2], "nosuch://there/files"]) == 3
    assert main(["import-native", str(job.checkpoint), str(tmp_path / "other"), "memory://there", *at_once]) == 3
    refused = capsys.readouterr().err
    assert "spark-state-ext export-native: StorageError: Spark failed: " in refused
    assert "import-native: StorageError: Spark could not write the state of the new query to memory://there" in refused
    for scheme in ("nosuch", "memory"):
        assert f'No FileSystem for scheme "{scheme}"' in refused
    assert "Traceback" not in refused

    job.run(NEXT, Savepoint(str(savepoint)), "new")
    assert len(job.emitted()) > len(FIRST)


def test_the_doctor_asks_executors(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", str(tmp_path / "root"), "--spark", "--all", "-o", "jsonl"]
    assert main(words) == 0
    rows = {row["what"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert f"({sys.executable})" in rows["executors"]["seen"]
    for name, version in ((n, metadata.version(n)) for n in ("pyarrow", "pandas", "lmdb")):
        assert rows[f"executors: {name}"]["seen"].startswith(f"{version} on ")
    # The client has another release.
    monkeypatch.setattr("spark_state_ext.cli.configuration.version_and_build", lambda: "9.9.9")
    assert main(words) == 1
    rows = {row["what"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [what for what, row in rows.items() if row["problem"]] == ["executors: spark_state_ext"]
    assert "the client 9.9.9" in rows["executors: spark_state_ext"]["problem"]
