"""Every input and output of a five-batch job fails once, or kills the process: the state is the one before, or the one after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent


SHARES = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fate", "when"),
    [
        ("counting", "kill", "before"),
        ("counting", "raise", "before"),
        ("counted", "kill", "after"),
        ("counted", "raise", "after"),
    ],
)
def test_every_step_of_five_batches(kind: str, fate: str, when: str, tmp_path: Path) -> None:
    """On a disk (`counting`) and under an object store's rules (`counted`)."""
    command = [sys.executable, str(HERE / "step_job.py"), str(tmp_path), kind, fate, when]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}{os.pathsep}{HERE}"}
    jobs = [
        subprocess.Popen(
            [*command, str(share), str(SHARES)],
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
            out, err = job.communicate(timeout=250)
            assert job.returncode == 0, err[-4000:]
            failed.update(json.loads(out))
    finally:
        for job in jobs:
            job.kill()
    # Each kind of step was among them, and snapshots and clean-up too.
    assert failed["Environment.write"] >= 10
    assert failed["ls"] >= 3
    assert failed["rm_file"] >= 1
    assert failed["put_file"] >= 2
    assert failed["os.fsync" if kind == "counting" else "pipe_file"] >= 5
