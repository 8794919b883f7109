"""Commands on savepoints of real queries: create, verify, read, transform, and start a query from the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, keyed, reads_state

from spark_state_ext import Savepoint
from spark_state_ext.__main__ import main

pytestmark = [pytest.mark.spark, reads_state]


def test_a_query_starts_from_a_savepoint_that_commands_created_and_transformed(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    job = Job(spark, "arrow", tmp_path / "old", count, output=COUNTS)
    job.run(keyed("a", "b"), keyed("a"), keyed("a", "b", "c"))
    root, savepoint, transformed = tmp_path / "old" / "root", tmp_path / "savepoint", tmp_path / "few"
    command = ["savepoint", "create", str(savepoint), "--checkpoint", str(job.checkpoint), "--root", str(root)]
    assert main([*command, "-o", "json"]) == 0
    taken = json.loads(capsys.readouterr().out)
    assert (taken["path"], taken["form"], taken["batch"], taken["operators"]) == (
        str(savepoint),
        "native",
        2,
        ["tested"],
    )
    # A task finds that the path is taken; Spark's JVM finds that a file system is missing.
    assert main(command) in (2, 3)
    command_on_memory = ["savepoint", "create", f"{savepoint}-2", "--checkpoint", "memory://there", "--root", str(root)]
    assert main(command_on_memory) == 3
    errors = capsys.readouterr().err.splitlines()
    assert [line.startswith("spark-state-ext savepoint create: ") for line in errors] == [True, True], errors
    assert 'No FileSystem for scheme "memory"' in errors[1]
    assert main(["savepoint", "verify", str(savepoint)]) == 0
    capsys.readouterr()
    assert main(["get", str(savepoint), "a", "-o", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 3

    # gc goes by the pointers that Spark has, and without a checkpoint by the files alone.
    (folder,) = (path for path in (root / "tested").iterdir() if path.name.count("-") == 4)
    for options in (["--checkpoint", str(job.checkpoint)], []):
        assert main(["gc", str(folder), "--dry-run", "-o", "jsonl", *options]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert rows
        assert {row["does"] for row in rows} == {"stays"}

    assert main(["savepoint", "transform", str(savepoint), str(transformed), "--keep", "n > 2 or key == 'c'"]) == 0
    new = Job(
        spark, "arrow", tmp_path / "new", count, output=COUNTS, options={"start_from": Savepoint(str(transformed))}
    )
    rows = [row for batch in new.run(keyed("a", "b", "c")).values() for row in batch]
    assert sorted(rows) == [("a", 4), ("b", 1), ("c", 2)]
