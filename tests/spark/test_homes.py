"""The command `abandoned` keeps a query folder that only the pointers in a Spark checkpoint name."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import COUNTS, Job, count, keyed, reads_state

from spark_state_ext.__main__ import main

pytestmark = [pytest.mark.spark, reads_state]


def test_with_spark_a_folder_named_only_by_pointers_is_not_abandoned(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS)
    job.run(keyed("a", "b"))
    (query_folder,) = (path for path in (tmp_path / "root" / "tested").iterdir() if path.name != "starting")
    metadata = job.checkpoint / "metadata"
    (job.checkpoint / ".metadata.crc").unlink(missing_ok=True)
    metadata.write_text(json.dumps({"id": str(uuid.uuid4())}))
    command = ["abandoned", str(tmp_path / "root"), "--checkpoint", str(job.checkpoint), "-o", "jsonl"]
    later_s = time.time() + 40 * 86_400
    monkeypatch.setattr("spark_state_ext.cli.abandoned.time", SimpleNamespace(time=lambda: later_s))

    def verdict_of_command(*more: str) -> str:
        assert main([*command, *more]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["operator"], row["query"]) == ("tested", query_folder.name)
        return str(row["verdict"])

    assert verdict_of_command() == "abandoned", "without Spark, the command cannot read the pointers"
    assert verdict_of_command("--spark", "--remove") == "named"
    assert query_folder.exists()
