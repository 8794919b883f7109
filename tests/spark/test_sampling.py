"""Nothing is lost or doubled by a job that does something else each time it is run, over restarts, killed workers and timeouts.

A longer form is ``python tests/spark/sample_job.py``, for Spark's own operator too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sample_job import ROWS

from tests.helpers.soak import SOAK, examples

RESTARTS, KILLS = examples(3, 40), examples(1, 10)
BUCKETS = 6
# By checkpoint format; the long form has both with both.
TIMEOUTS = {1: ["event", "processing"], 2: ["event", "processing"]} if SOAK else {1: ["processing"], 2: ["event"]}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(7_200 if SOAK else 900)
def test_restarts_of_a_job_that_is_not_deterministic(tmp_path: Path) -> None:
    """With both of Spark's checkpoint formats, several buckets a partition, and timeouts of both kinds."""
    script = Path(__file__).with_name("sample_job.py")
    # Side by side, each in a process and a session of its own.
    jobs = {}
    for number in (1, 2):
        arguments = [str(tmp_path / str(number)), "--format", str(number), "--timeouts", *TIMEOUTS[number]]
        arguments += ["--buckets", str(BUCKETS), "--restarts", str(RESTARTS), "--kills", str(KILLS)]
        jobs[number] = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        for number, job in jobs.items():
            out, err = job.communicate()
            assert job.returncode == 0, out + err[-4000:]
            whole = {"elements": RESTARTS * ROWS, "lost": [], "doubled": [], "kills": KILLS}
            assert json.loads(out.splitlines()[-1]) == dict.fromkeys(TIMEOUTS[number], whole)
            for timeouts in TIMEOUTS[number]:
                folders = (tmp_path / str(number) / timeouts / "root").glob("tested/*/*")
                assert sum(folder.name.isdigit() for folder in folders) == BUCKETS
    finally:
        for job in jobs.values():
            job.kill()
