"""The matrix of savepoints: a few of its cases, in the soak a covering choice with batches enough for clean-up.

``make soak`` has all cases, by ``tests/spark/savepoint_runs.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import reads_state
from savepoint_cases import CASES, COVERING, EACH_ONCE, NOTHING, Case

from tests.helpers.soak import SOAK

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("parts", [*itertools.combinations(("mode", "form", "store"), 2), ("mode", "perturbation")])
def test_what_is_chosen_covers(parts: tuple[str, str]) -> None:
    """Any two of mode, form and store come together; and all that happens does in both modes."""

    def pairs(cases: Sequence[Case]) -> set[tuple[str, ...]]:
        meant = [case for case in cases if not case.meaningless]
        return {tuple(getattr(case, part) for part in parts) for case in meant}

    assert {pair for pair in pairs(CASES) if NOTHING not in pair} == pairs(COVERING)


@pytest.mark.parametrize("part", ["mode", "form", "store", "perturbation"])
def test_what_the_suite_has_comes_to_each_once(part: str) -> None:
    assert {getattr(case, part) for case in EACH_ONCE} == {getattr(case, part) for case in CASES} - {NOTHING}


@pytest.mark.spark
@pytest.mark.slow
@reads_state
@pytest.mark.timeout(14_400 if SOAK else 900)
def test_the_matrix(tmp_path: Path) -> None:
    # In a process of its own: its state is watched from the start of the session.
    program = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("savepoint_runs.py")),
        "--folder",
        str(tmp_path),
    ]
    few = ["--short", "--provider", "hdfs", "--only", *(case.name for case in EACH_ONCE)]
    program += ["--covering", *([] if SOAK else few)]
    paths = [str(ROOT), str(ROOT / "tests" / "core"), str(ROOT / "tests" / "cluster")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = {line["case"]: line["wrong"] for line in lines if "wrong" in line}
    assert not wrong
    assert done.returncode == 0, done.stderr[-4_000:]
    assert lines[-1]["ran"] == len(COVERING if SOAK else EACH_ONCE)
    assert all(line["equal"] for line in lines[:-1] if "seconds" in line)
