"""A job that is not deterministic loses and duplicates no element, despite restarts, killed workers and timeouts.

``python tests/spark/sample_job.py`` is a longer form, which can also run Spark's own operator.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sample_job import ROWS

from tests.helpers.soak import SOAK, examples

RESTARTS, KILLS = examples(2, 40), examples(1, 10)
BUCKETS = 6
# By checkpoint format; the soak runs both kinds with both formats.
TIMEOUTS = {1: ["event", "processing"], 2: ["event", "processing"]} if SOAK else {1: ["processing"], 2: ["event"]}


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(7_200 if SOAK else 900)
def test_a_job_that_is_not_deterministic_emits_each_element_once_despite_restarts_and_kills(tmp_path: Path) -> None:
    """It runs with both of Spark's checkpoint formats, several buckets in a partition, and timeouts of both kinds."""
    script = Path(__file__).with_name("sample_job.py")
    # The jobs run in parallel, each in its own process and session.
    jobs = {}
    for checkpoint_format in (1, 2):
        arguments = [
            str(tmp_path / str(checkpoint_format)),
            "--format",
            str(checkpoint_format),
            "--timeouts",
            *TIMEOUTS[checkpoint_format],
        ]
        arguments += ["--buckets", str(BUCKETS), "--restarts", str(RESTARTS), "--kills", str(KILLS)]
        jobs[checkpoint_format] = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        for checkpoint_format, job in jobs.items():
            out, err = job.communicate()
            assert job.returncode == 0, out + err[-4000:]
            expected = {"elements": RESTARTS * ROWS, "lost": [], "doubled": [], "kills": KILLS}
            assert json.loads(out.splitlines()[-1]) == dict.fromkeys(TIMEOUTS[checkpoint_format], expected)
            for timeouts in TIMEOUTS[checkpoint_format]:
                folders = (tmp_path / str(checkpoint_format) / timeouts / "root").glob("tested/*/*")
                assert sum(folder.name.isdigit() for folder in folders) == BUCKETS
    finally:
        for job in jobs.values():
            job.kill()
