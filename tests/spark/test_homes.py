"""A folder that only the pointers in a Spark checkpoint name is not taken for abandoned."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from jobs import COUNTS, Job, count, keyed, reads_state

from spark_state_ext.cli.abandoned import main

pytestmark = [pytest.mark.spark, reads_state]


def test_pointers_tell_the_home_of_a_query_whose_id_is_another(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(spark, "arrow", tmp_path, count, output=COUNTS)
    job.run(keyed("a", "b"))
    (query_folder,) = (it for it in (tmp_path / "root" / "tested").iterdir() if it.name != "starting")
    metadata = job.checkpoint / "metadata"
    (job.checkpoint / ".metadata.crc").unlink()
    metadata.write_text(json.dumps({"id": str(uuid.uuid4())}))
    command = [str(tmp_path / "root"), "--checkpoint", str(job.checkpoint)]
    later_s = time.time() + 40 * 86_400

    assert main(command, clock_s=lambda: later_s) == 0
    assert f"abandoned operator=tested query={query_folder.name}" in capsys.readouterr().out, (
        "as far as that can be told"
    )
    assert main([*command, "--spark", "--remove"], clock_s=lambda: later_s) == 0
    assert f"named operator=tested query={query_folder.name}" in capsys.readouterr().out
    assert query_folder.exists()
