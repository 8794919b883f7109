"""Nothing is lost or doubled by a job that does something else each time it is run, over many restarts and killed workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from killed_jobs import PROVIDERS, killed
from sample_job import ROWS

RESTARTS, KILLS = 50, 25


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_restarts_of_a_job_that_is_not_deterministic(tmp_path: Path) -> None:
    script = Path(__file__).with_name("sample_job.py")
    # Both of Spark's state store providers side by side, each in a process and a session of its own.
    jobs = {}
    for provider in PROVIDERS:
        folder = tmp_path / provider
        folder.mkdir()
        arguments = [str(folder), "arrow", provider, str(RESTARTS), str(KILLS)]
        jobs[provider] = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        for provider, job in jobs.items():
            out, err = job.communicate(timeout=580)
            assert job.returncode == 0, err[-4000:]
            assert json.loads(out.splitlines()[-1]) == list(range(RESTARTS * ROWS))
            assert killed(tmp_path / provider) == KILLS
    finally:
        for job in jobs.values():
            job.kill()
