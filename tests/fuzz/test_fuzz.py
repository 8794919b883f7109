"""Every fuzz target runs for a number of inputs without a finding; the script `fuzz.py` runs one for any time."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_targets import PLANTED, TARGETS

from tests.helpers.soak import examples

SCRIPT = Path(__file__).with_name("fuzz.py")
# Number of inputs; `make soak` fuzzes each target for a part of an hour.
RUNS = examples(300, 20_000)

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris, the fuzzer, is not installed; its wheels are for Linux on x86_64 and Python 3.10 to 3.13",
)


def run_fuzzer(name: str, folder: Path, runs: int) -> subprocess.CompletedProcess[str]:
    findings = folder / name
    findings.mkdir()
    options = ["--seconds", "0", "--runs", str(runs), "--corpus", str(findings / "corpus"), "--findings", str(findings)]
    return subprocess.run(
        [sys.executable, str(SCRIPT), name, *options],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def find_coverage(output: str, event: str) -> int:
    """Return the number of edges of our code that libFuzzer has reached."""
    match = re.search(rf"^#\d+\s+{event}\s+cov: (\d+) ", output, re.MULTILINE)
    assert match, output
    return int(match[1])


@needs_atheris
@pytest.mark.slow
def test_the_fuzzer_finds_no_errors(tmp_path: Path) -> None:
    done = run_fuzzer("all", tmp_path, RUNS)
    outputs = dict(output.split("\n", 1) for output in re.split("^== ", done.stdout, flags=re.MULTILINE)[1:])
    assert list(outputs) == list(TARGETS)
    for name, output in outputs.items():
        # The end of the output names the exception, and a file with the bytes that cause it.
        executions = re.search(r"^stat::number_of_executed_units: (\d+)$", output, re.MULTILINE)
        assert executions, f"{name}: {output[-6_000:]}"
        assert int(executions[1]) >= RUNS
        assert find_coverage(output, "DONE") > find_coverage(output, "INITED") > 0, (
            f"{name}: the fuzzer must reach more code than the seeds"
        )
    assert done.returncode == 0, done.stdout[-6_000:]


@needs_atheris
@pytest.mark.slow
def test_the_fuzzer_finds_a_planted_mistake(tmp_path: Path) -> None:
    done = run_fuzzer("planted", tmp_path, 10_000_000)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stdout
    (crash,) = (tmp_path / "planted").glob("crash-*")
    with pytest.raises(ZeroDivisionError):
        PLANTED["planted"](crash.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_decodes(name: str) -> None:
    """A seed that does not decode would be useless."""
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    for seed in seeds:
        target.check(seed)


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.change is not None])
def test_changes_by_structure_produce_many_inputs(name: str) -> None:
    target = TARGETS[name]
    assert target.change is not None
    chance = random.Random(1)
    inputs = {target.change(target.seeds()[0], chance, lambda data: data) for _ in range(200)}
    assert len(inputs) > 50
