"""Each input or output operation of a five-batch job fails once or kills the process.

The state must be the old or the new one. In the suite, every nineteenth operation fails, with another offset in each
case; in the soak, every operation fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.soak import SOAK
from tests.helpers.waiting import WAIT_S

HERE = Path(__file__).parent


SHARES = 2
NTH = 1 if SOAK else 19


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fate", "when", "first"),
    [
        ("counting", "kill", "before", 0),
        ("counting", "raise", "before", 5),
        ("counted", "kill", "after", 10),
        ("counted", "raise", "after", 15),
    ],
)
def test_a_job_survives_a_failure_at_every_step_of_five_batches(
    kind: str, fate: str, when: str, first: int, tmp_path: Path
) -> None:
    """The job writes to a disk (`counting`) or under the rules of an object store (`counted`)."""
    command = [sys.executable, str(HERE / "step_job.py"), str(tmp_path), kind, fate, when]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}{os.pathsep}{HERE}"}
    jobs = [
        subprocess.Popen(
            [*command, str(first % NTH + share * NTH), str(SHARES * NTH)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for share in range(SHARES)
    ]
    failed: Counter[str] = Counter()
    try:
        for job in jobs:
            out, err = job.communicate(timeout=WAIT_S)
            assert job.returncode == 0, err[-4000:]
            failed.update(json.loads(out))
    finally:
        for job in jobs:
            job.kill()
    # The failed steps include each kind of step, and those of snapshots and clean-up.
    assert failed["Environment.write"] >= 10 // NTH
    assert failed["ls"] >= 3 // NTH
    assert sum(failed.values()) >= 50 // NTH
    if SOAK:
        assert failed["rm_file"] >= 1
        assert failed["put_file"] >= 2
        assert failed["os.fsync" if kind == "counting" else "pipe_file"] >= 5
