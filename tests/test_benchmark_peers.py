from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from benchmarks.counting import event_batches, expected, same_answer
from benchmarks.floors import FLOORS, PACKAGES
from benchmarks.peers import compare, environments
from benchmarks.peers.compare import Program, Workload, measure
from benchmarks.peers.environments import Environment, PeerUnavailableError
from benchmarks.peers.protocol import Task, leave, write_batches
from benchmarks.report import BenchmarkError, Report
from tests.helpers.waiting import WAIT_S

# Benchmarks and the demo are not part of the package, so the suite leaves their tests to `make soak`.
pytestmark = pytest.mark.soak

_SMALL = Workload("few events", 300, 50)


def make_report() -> Report:
    return Report("sample", {})


def run_measurement(work: Path, *programs: Program, timeout_s: float = WAIT_S) -> Report:
    report = make_report()
    measure(report, _SMALL, work, batches=3, programs=list(programs), timeout_s=timeout_s)
    return report


def make_task(folder: Path, variant: str = "cp") -> Task:
    return Task(folder / "in", folder / "work", folder / "result.json", folder / "answer.parquet", variant)


def test_written_batches_equal_the_given_frames(tmp_path: Path) -> None:
    frames = event_batches(2, 101, 20, seed=1)
    write_batches(tmp_path / "in", [pa.Table.from_pandas(frame, preserve_index=False) for frame in frames], files=2)
    files = make_task(tmp_path).files()
    assert [len(batch_files) for batch_files in files] == [2, 2]
    read = [pd.concat([pd.read_parquet(path) for path in batch_files], ignore_index=True) for batch_files in files]
    for frame_read, frame in zip(read, frames, strict=True):
        pd.testing.assert_frame_equal(frame_read, frame)


def test_an_answer_is_written_in_the_order_of_keys(tmp_path: Path) -> None:
    leave(make_task(tmp_path), [0.5, 0.25], [3, -1], np.array([1, 2]), [0.5, 1.5], {"durability": "none"})
    answer = pd.read_parquet(tmp_path / "answer.parquet")
    assert answer.to_dict("list") == {"key": [-1, 3], "n": [2, 1], "total": [1.5, 0.5]}


@pytest.mark.parametrize("variant", FLOORS)
def test_each_floor_gives_the_right_answer(variant: str, tmp_path: Path) -> None:
    package = PACKAGES[variant]
    if package is not None:
        pytest.importorskip(package)
    report = run_measurement(tmp_path, Program("it", "benchmarks.floors", variant, package=package))
    assert "left out" not in report.details
    assert len(report.timings["it: few events"]) == 2  # the first of three batches is not counted
    assert len(report.checks) == 1
    assert report.details["it: few events"]["durability"]


def test_a_floor_accepts_negative_keys(tmp_path: Path) -> None:
    frames = [pd.DataFrame({"key": [-5, 7, -5], "value": [0.5, 1.0, 2.0]}), pd.DataFrame({"key": [-5], "value": [1.0]})]
    write_batches(tmp_path / "in", [pa.Table.from_pandas(frame, preserve_index=False) for frame in frames], files=1)
    (tmp_path / "state").mkdir()
    floor = FLOORS["LMDB"](tmp_path / "state")
    for files in make_task(tmp_path).files():
        floor.batch(files)
    floor.close()
    keys, values = floor.answer()
    answer = pd.DataFrame({"key": keys, "n": values["n"], "total": values["total"]})
    assert same_answer(answer, expected(frames))


@pytest.mark.parametrize(
    ("program", "timeout_s", "reason"),
    [
        (
            Program("it", "benchmarks.floors", "cp", package="no_such_package"),
            WAIT_S,
            "no_such_package is not installed",
        ),
        (Program("it", "benchmarks.floors", "no such floor"), WAIT_S, "it ended with exit code 2: .*invalid choice"),
        (Program("it", "benchmarks.no_such_module", "cp"), WAIT_S, "it ended with exit code 1: .*no_such_module"),
        (Program("it", "benchmarks.floors", "cp"), 0.01, "it was not done after 0 s"),
    ],
)
def test_a_program_that_cannot_run_is_left_out_with_the_reason(
    program: Program, timeout_s: float, reason: str, tmp_path: Path
) -> None:
    report = run_measurement(tmp_path, program, timeout_s=timeout_s)
    assert not report.timings
    with pytest.raises(PeerUnavailableError, match=reason):
        raise PeerUnavailableError(report.details["left out"]["it: few events"])


def test_a_wrong_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "expected", lambda batches: expected(batches[:-1]))
    with pytest.raises(BenchmarkError, match="not so: it: few events: final count and sum"):
        run_measurement(tmp_path, Program("it", "benchmarks.floors", "cp"))


def test_the_table_lists_programs_that_were_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "PROGRAMS", (Program("it", "benchmarks.floors", "cp", package="no_such_package"),))
    monkeypatch.setattr(compare, "_QUICK", _SMALL)
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    report = compare.run(parser.parse_args(["--quick"]), tmp_path)
    assert report.table().endswith("left out: it: few events: the package no_such_package is not installed here")


def test_programs_have_different_names_and_known_environments() -> None:
    names = [program.name for program in compare.PROGRAMS]
    assert len(names) == len(set(names))
    assert {program.environment for program in compare.PROGRAMS} - {None} == set(environments.ENVIRONMENTS)
    floors = [program for program in compare.PROGRAMS if program.module == "benchmarks.floors"]
    assert {program.variant for program in floors} == set(FLOORS)
    assert all(program.environment is None for program in floors)


def test_the_error_of_an_environment_that_cannot_be_made_has_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_FAILED", {})
    old = Environment("old", (), pythons=(1,))
    with pytest.raises(PeerUnavailableError, match=r"packages for Python 3\.1, and none of these"):
        old.python(tmp_path)
    with pytest.raises(PeerUnavailableError, match=r"packages for Python 3\.1, and none of these"):
        old.python(tmp_path)
    monkeypatch.setattr(environments, "java_version", lambda: None)
    with pytest.raises(PeerUnavailableError, match="beans runs on Java 17; here is none"):
        Environment("beans", (), pythons=(11,), java=(17,)).python(tmp_path)


def test_an_environment_is_made_once_and_again_when_its_packages_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "_FAILED", {})
    commands: list[list[str]] = []
    run = Environment._run

    def record_and_run(self: Environment, command: list[str]) -> None:
        commands.append(command)
        # Make the environment itself; its packages cannot be installed.
        if "pip" not in command:
            run(self, command)

    monkeypatch.setattr(Environment, "_run", record_and_run)
    pythons = tuple(range(10, 15))
    python = Environment("it", ("one==1",), pythons).python(tmp_path)
    assert python == tmp_path / "it" / "bin" / "python"
    assert [("pip" in command) for command in commands] == [False, True]
    assert Environment("it", ("one==1",), pythons).python(tmp_path) == python
    assert len(commands) == 2
    Environment("it", ("one==2",), pythons).python(tmp_path)
    assert commands[-1][-1] == "one==2"


def test_the_error_of_a_failed_pip_has_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_FAILED", {})
    wheel = tmp_path / "no_such_file-1-py3-none-any.whl"
    with pytest.raises(PeerUnavailableError, match=r"could not be made: .* exit code 1: .*no_such_file"):
        Environment("it", (str(wheel),), tuple(range(10, 15))).python(tmp_path)
