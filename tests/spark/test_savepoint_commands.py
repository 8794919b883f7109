"""Savepoints by command, on real queries: taken, looked at, made into others, and started from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, keyed, reads_state

from spark_state_ext import Savepoint
from spark_state_ext.__main__ import main

pytestmark = [pytest.mark.spark, reads_state]


def test_a_query_starts_from_what_commands_made_of_another_ones_state(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    job = Job(spark, "arrow", tmp_path / "old", count, output=COUNTS)
    job.run(keyed("a", "b"), keyed("a"), keyed("a", "b", "c"))
    root, savepoint, few = tmp_path / "old" / "root", tmp_path / "savepoint", tmp_path / "few"
    command = ["savepoint", "create", str(savepoint), "--checkpoint", str(job.checkpoint), "--root", str(root)]
    assert main([*command, "-o", "json"]) == 0
    taken = json.loads(capsys.readouterr().out)
    assert (taken["path"], taken["form"], taken["batch"], taken["operators"]) == (
        str(savepoint),
        "native",
        2,
        ["tested"],
    )
    # A place that is not free is found in a task, and a file system that Spark lacks in its JVM.
    assert main(command) in (2, 3)
    elsewhere = ["savepoint", "create", f"{savepoint}-2", "--checkpoint", "memory://there", "--root", str(root)]
    assert main(elsewhere) == 3
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("spark-state-ext savepoint create: ") for line in said] == [True, True], said
    assert 'No FileSystem for scheme "memory"' in said[1]
    assert main(["savepoint", "verify", str(savepoint)]) == 0
    capsys.readouterr()
    assert main(["get", str(savepoint), "a", "-o", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 3

    # By the pointers that Spark has, and by files alone.
    (folder,) = (it for it in (root / "tested").iterdir() if it.name.count("-") == 4)
    for more in (["--checkpoint", str(job.checkpoint)], []):
        assert main(["gc", str(folder), "--dry-run", "-o", "jsonl", *more]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert rows
        assert {row["does"] for row in rows} == {"stays"}

    assert main(["savepoint", "transform", str(savepoint), str(few), "--keep", "n > 2 or key == 'c'"]) == 0
    new = Job(spark, "arrow", tmp_path / "new", count, output=COUNTS, options={"start_from": Savepoint(str(few))})
    rows = [row for batch in new.run(keyed("a", "b", "c")).values() for row in batch]
    assert sorted(rows) == [("a", 4), ("b", 1), ("c", 2)]
