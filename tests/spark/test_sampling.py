"""Nothing is lost or doubled by a job that does something else each time it is run, over many restarts and killed workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from killed_jobs import PROVIDERS, killed
from sample_job import ROWS

from arrow_schemas.lineage import parse_file_name

# Fewer than these and clean-up has not yet come round to all files of the first batches.
RESTARTS, KILLS = 40, 10


def _check_clean_up(root: Path) -> None:
    """Files of the first batches are gone: each start took one, and few are retained."""
    buckets = [path for path in root.glob("tested/*/*") if path.name.isdigit()]
    assert len(buckets) == 2
    for bucket in buckets:
        versions = [parsed[0].version for path in bucket.iterdir() if (parsed := parse_file_name(path.name))]
        assert max(versions) > RESTARTS // 2
        assert min(versions) > 5


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_restarts_of_a_job_that_is_not_deterministic(tmp_path: Path) -> None:
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
            _check_clean_up(tmp_path / provider / "root")
    finally:
        for job in jobs.values():
            job.kill()
