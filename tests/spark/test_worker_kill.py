"""Python workers that are killed at random points of a batch: once in a query, and twenty times in the soak."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kill_job import BATCHES, values
from killed_jobs import killed

from tests.helpers.soak import examples
from tests.helpers.waiting import WAIT_S

KILLS = examples(1, 20)


@pytest.mark.spark
@pytest.mark.slow
def test_a_query_whose_workers_are_killed_counts_every_row_once(operator: str, tmp_path: Path) -> None:
    # A process of its own is needed: its session must allow many failures of a task, but the shared session must not.
    script = Path(__file__).with_name("kill_job.py")
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path), operator, str(KILLS)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert killed(tmp_path) == KILLS
    expected = Counter(key for batch in range(BATCHES) for key in values(batch)["key"].to_pylist())
    assert json.loads(process.stdout.splitlines()[-1]) == {str(key): n for key, n in expected.items()}
