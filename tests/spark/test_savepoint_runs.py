"""The savepoint matrix: a few of its cases, and in the soak a covering set of cases with enough batches for clean-up.

``make soak`` runs all cases with ``tests/spark/savepoint_runs.py``.
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
def test_the_covering_cases_contain_every_pair_of_parts(parts: tuple[str, str]) -> None:
    """They contain each pair of values of mode, form and store, and of mode and perturbation, that has a meaning."""

    def pairs(cases: Sequence[Case]) -> set[tuple[str, ...]]:
        meaningful = [case for case in cases if not case.meaningless]
        return {tuple(getattr(case, part) for part in parts) for case in meaningful}

    assert {pair for pair in pairs(CASES) if NOTHING not in pair} == pairs(COVERING)


@pytest.mark.parametrize("part", ["mode", "form", "store", "perturbation"])
def test_the_cases_of_the_suite_contain_every_value_of_each_part(part: str) -> None:
    assert {getattr(case, part) for case in EACH_ONCE} == {getattr(case, part) for case in CASES} - {NOTHING}


@pytest.mark.spark
@pytest.mark.slow
@reads_state
@pytest.mark.timeout(14_400 if SOAK else 900)
def test_the_cases_of_the_suite_give_the_batch_result_and_obey_the_rules(tmp_path: Path) -> None:
    # A process of its own is needed, because the ledger must see its state from the start of the session.
    program = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("savepoint_runs.py")),
        "--folder",
        str(tmp_path),
    ]
    few_cases = ["--short", "--provider", "hdfs", "--only", *(case.name for case in EACH_ONCE)]
    program += ["--covering", *([] if SOAK else few_cases)]
    paths = [str(ROOT), str(ROOT / "tests" / "core"), str(ROOT / "tests" / "cluster")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    wrong = {line["case"]: line["wrong"] for line in lines if "wrong" in line}
    assert not wrong
    assert process.returncode == 0, process.stderr[-4_000:]
    assert lines[-1]["ran"] == len(COVERING if SOAK else EACH_ONCE)
    assert all(line["equal"] for line in lines[:-1] if "seconds" in line)
