"""``doctor`` finds each mistake that is planted, and nothing where there is none."""

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
# What is set in place of what is right, and which finding tells of it.
_PLANTED: dict[str, tuple[dict[str, str], str]] = {
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


def _conf(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


def _problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    status = main(["doctor", *arguments, "-o", "jsonl"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == (1 if rows else 0)
    assert all(row["problem"] and row["change"] for row in rows), "each says what to change"
    return rows


def test_there_is_nothing_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    assert _problems(capsys, str(root), *_conf(_GOOD)) == []
    assert not root.exists(), "what it wrote is gone"
    assert main(["doctor", str(root), "--all", "-o", "jsonl", *_conf(_GOOD)]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) > 25
    assert " checks: " in said.err


@pytest.mark.parametrize("name", _PLANTED)
def test_a_setting_that_is_wrong_is_found(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, what = _PLANTED[name]
    (row,) = _problems(capsys, str(tmp_path / "root"), *_conf({**_GOOD, **settings}))
    assert row["what"] == what


def test_all_mistakes_at_once_are_all_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten settings in a file, a root that is a file, and a local folder that is not there."""
    planted = [
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
    lines = [f"{name}   {value}" for key in planted for name, value in _PLANTED[key][0].items()]
    defaults = tmp_path / "spark-defaults.conf"
    defaults.write_text("\n".join(["# ours", "", *lines, f"spark.sql.streaming.stateStore.providerClass={_ROCKSDB}"]))
    (tmp_path / "root").write_text("a file")
    rows = _problems(
        capsys,
        *(str(tmp_path / "root"), "--local-dir", str(tmp_path / "nothing")),
        *("--properties-file", str(defaults)),
    )
    expected = {_PLANTED[key][1] for key in [*planted, "format", "changelog"]} | {"root", "local store"}
    assert {row["what"] for row in rows} == expected
    assert len(rows) == 13


@pytest.mark.parametrize(
    ("root", "text"), [("relative", "must be a URL or an absolute path"), ("nothing://x", "cannot be opened")]
)
def test_a_root_that_is_none_is_found(root: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = _problems(capsys, root)
    assert row["what"] == "root"
    assert text in row["problem"]


def test_a_package_that_is_missing_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # As Python has it of what is not installed.
    for name in ("s3fs", "adlfs", "gcsfs"):
        monkeypatch.setitem(sys.modules, name, None)
    for scheme, extra in (("s3", "s3"), ("abfs", "azure"), ("gs", "gcs")):
        # fsspec remembers the classes that it has imported.
        monkeypatch.setattr(importlib.import_module("fsspec.registry"), "registry", {})
        (row,) = _problems(capsys, f"{scheme}://bucket/root")
        assert f"pip install 'spark_state_ext[{extra}]', on the client and where the workers run" in row["problem"]
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a root that does not exist yet, what matters is whether it can be made."""
    there = tmp_path / "there"
    there.mkdir()
    for root in (f"{there}/new/root", f"file://{there}/new/root", str(there)):
        assert _problems(capsys, root) == []
        assert list(tmp_path.rglob("*")) == [there]
    (there / "file").write_text("")
    (row,) = _problems(capsys, f"{there}/file/root")
    assert "A root must be a folder that every executor can create" in row["problem"]


def test_too_few_open_files_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    (row,) = _problems(capsys, str(tmp_path / "root"), "--buckets", str(limit))
    assert row["what"] == "open files of buckets"


def test_a_bound_on_the_address_space_is_found(tmp_path: Path) -> None:
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


def test_a_store_in_which_two_make_one_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server does that passes over If-None-Match: it says that each made the file."""
    from spark_state_ext.files.folder import Folder

    def create(self: Folder, name: str, data: bytes) -> bool:
        self.put(name, data)
        return True

    monkeypatch.setattr(Folder, "create", create)
    (row,) = _problems(capsys, str(tmp_path / "root"))
    assert row["what"] == "conditional create"


def test_s3_is_looked_at(s3: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _problems(capsys, s3.root("doctor"), "--storage-options", json.dumps(s3.options))
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
