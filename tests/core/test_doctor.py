"""``doctor`` finds each mistake in a configuration, and reports no problem in a right one."""

from __future__ import annotations

import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_state_ext.__main__ import main
from spark_state_ext.cli.configuration import read_properties
from tests.helpers.waiting import WAIT_S

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_GOOD = {
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.shuffle.partitions": "16",
}
# Wrong settings, and the name of the finding that reports them.
_MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "provider": (
        {"spark.sql.streaming.stateStore.providerClass": "org.example.Mine"},
        "spark.sql.streaming.stateStore.providerClass",
    ),
    "format": (
        {"spark.sql.streaming.stateStore.checkpointFormatVersion": "1"},
        "spark.sql.streaming.stateStore.checkpointFormatVersion",
    ),
    "changelog": (
        {"spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "false"},
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled",
    ),
    "arrow bytes": (
        {"spark.sql.execution.arrow.maxBytesPerBatch": "64MB"},
        "spark.sql.execution.arrow.maxBytesPerBatch",
    ),
    "arrow rows": (
        {"spark.sql.execution.arrow.maxRecordsPerBatch": "10"},
        "spark.sql.execution.arrow.maxRecordsPerBatch",
    ),
    "unbounded": (
        {"spark.sql.execution.arrow.maxRecordsPerBatch": "0"},
        "spark.sql.execution.arrow.maxRecordsPerBatch",
    ),
    "partitions": ({"spark.sql.shuffle.partitions": "200"}, "spark.sql.shuffle.partitions"),
    "retained": ({"spark.sql.streaming.minBatchesToRetain": "1"}, "spark.sql.streaming.minBatchesToRetain"),
    "reuse": ({"spark.python.worker.reuse": "false"}, "spark.python.worker.reuse"),
    "memory": ({"spark.executor.pyspark.memory": "1g"}, "spark.executor.pyspark.memory"),
    "speculation": ({"spark.speculation": "true"}, "spark.speculation"),
    "no data": (
        {"spark.sql.streaming.noDataMicroBatches.enabled": "false"},
        "spark.sql.streaming.noDataMicroBatches.enabled",
    ),
    "misspelt": ({"spark.sql.streaming.minBatchToRetain": "50"}, "spark.sql.streaming.minBatchToRetain"),
    "cluster": ({"spark.master": "spark://host:7077"}, "root"),
}


def _conf_arguments(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


def _find_problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    status = main(["doctor", *arguments, "-o", "jsonl"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == (1 if rows else 0)
    assert all(row["problem"] and row["change"] for row in rows), "each finding says what to change"
    return rows


def test_a_right_configuration_has_no_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    assert _find_problems(capsys, str(root), *_conf_arguments(_GOOD)) == []
    assert not root.exists(), "doctor removed what it wrote"
    assert main(["doctor", str(root), "--all", "-o", "jsonl", *_conf_arguments(_GOOD)]) == 0
    output = capsys.readouterr()
    assert len(output.out.splitlines()) > 25
    assert " checks: " in output.err


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_wrong_setting_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, finding = _MISTAKES[name]
    (row,) = _find_problems(capsys, str(tmp_path / "root"), *_conf_arguments({**_GOOD, **settings}))
    assert row["what"] == finding


def test_several_mistakes_are_found_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong settings in a file, a root that is a file, and a local folder that does not exist."""
    mistakes = [
        "arrow bytes",
        "arrow rows",
        "partitions",
        "retained",
        "reuse",
        "memory",
        "speculation",
        "no data",
        "misspelt",
    ]
    lines = [f"{name}   {value}" for key in mistakes for name, value in _MISTAKES[key][0].items()]
    defaults = tmp_path / "spark-defaults.conf"
    defaults.write_text("\n".join(["# ours", "", *lines, f"spark.sql.streaming.stateStore.providerClass={_ROCKSDB}"]))
    (tmp_path / "root").write_text("a file")
    rows = _find_problems(
        capsys,
        *(str(tmp_path / "root"), "--local-dir", str(tmp_path / "nothing")),
        *("--properties-file", str(defaults)),
    )
    expected = {_MISTAKES[key][1] for key in [*mistakes, "format", "changelog"]} | {"root", "local store"}
    assert {row["what"] for row in rows} == expected
    assert len(rows) == 13


@pytest.mark.parametrize(
    ("root", "text"), [("relative", "must be a URL or an absolute path"), ("nothing://x", "cannot be opened")]
)
def test_an_impossible_root_is_found(root: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = _find_problems(capsys, root)
    assert row["what"] == "root"
    assert text in row["problem"]


def test_a_missing_package_is_reported_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Python then regards these packages as not installed.
    for name in ("s3fs", "adlfs", "gcsfs"):
        monkeypatch.setitem(sys.modules, name, None)
    for scheme, extra in (("s3", "s3"), ("abfs", "azure"), ("gs", "gcs")):
        # fsspec caches the classes that it has imported.
        monkeypatch.setattr(importlib.import_module("fsspec.registry"), "registry", {})
        (row,) = _find_problems(capsys, f"{scheme}://bucket/root")
        assert f"pip install 'spark_state_ext[{extra}]', on the client and where the workers run" in row["problem"]
    assert list(tmp_path.iterdir()) == []


def test_doctor_creates_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """doctor only checks whether a root that does not exist yet can be created."""
    there = tmp_path / "there"
    there.mkdir()
    for root in (f"{there}/new/root", f"file://{there}/new/root", str(there)):
        assert _find_problems(capsys, root) == []
        assert list(tmp_path.rglob("*")) == [there]
    (there / "file").write_text("")
    (row,) = _find_problems(capsys, f"{there}/file/root")
    assert "A root must be a folder that every executor can create" in row["problem"]


def test_a_low_limit_of_open_files_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    (row,) = _find_problems(capsys, str(tmp_path / "root"), "--buckets", str(limit))
    assert row["what"] == "open files of buckets"


def test_a_limit_of_the_address_space_is_found(tmp_path: Path) -> None:
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
from spark_state_ext.__main__ import main
sys.exit(main(["doctor", sys.argv[1], "-o", "jsonl"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "root")],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert [json.loads(line)["what"] for line in done.stdout.splitlines()] == ["address space"]


def test_a_store_whose_conditional_create_overwrites_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ignores If-None-Match tells each caller that it created the file."""
    from spark_state_ext.files.folder import Folder

    def create(self: Folder, name: str, data: bytes) -> bool:
        self.put(name, data)
        return True

    monkeypatch.setattr(Folder, "create", create)
    (row,) = _find_problems(capsys, str(tmp_path / "root"))
    assert row["what"] == "conditional create"


def test_a_root_in_s3_is_not_reported(s3: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _find_problems(capsys, s3.root("doctor"), "--storage-options", json.dumps(s3.options))
    assert [row["what"] for row in rows if row["what"] == "root"] == []


def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "root")
    assert main(["doctor", root, "--conf", "spark.x"]) == 2
    assert main(["doctor", root, "--conf", "spark.sql.shuffle.partitions=many"]) == 2
    assert main(["doctor", root, "--properties-file", str(tmp_path / "nothing")]) == 3
    (tmp_path / "file").write_text("spark.name\n")
    assert main(["doctor", root, "--properties-file", str(tmp_path / "file")]) == 2
    assert "line 1 of" in capsys.readouterr().err


def test_properties_are_read_as_java_does(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("# c\nspark.a 1\n  spark.b = x y\nspark.c:z\n\nspark.d\tw=v\n")
    assert read_properties(tmp_path / "file") == {"spark.a": "1", "spark.b": "x y", "spark.c": "z", "spark.d": "w=v"}
