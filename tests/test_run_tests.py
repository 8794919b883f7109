"""The runner of the suite ends all processes of tests and fails if the tests exceed a budget."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.helpers.waiting import eventually, is_running

RUNNER = Path(__file__).parent.parent / "scripts" / "run_tests.py"
# This test starts a process in a separate session, which pytest does not know.
TEST_THAT_LEAVES_A_PROCESS = """
import subprocess, time
from pathlib import Path

def test_it(tmp_path):
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path({pid!r}).write_text(str(sleeper.pid))
    time.sleep({seconds})
"""


def start_runner(folder: Path, test: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "test_left.py").write_text(test)
    command = [sys.executable, str(RUNNER), *arguments, str(folder / "test_left.py"), "-q", "-p", "no:cacheprovider"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_process_that_a_test_leaves_running_is_ended_and_reported(tmp_path: Path) -> None:
    run = start_runner(tmp_path, TEST_THAT_LEAVES_A_PROCESS.format(pid=str(tmp_path / "pid"), seconds=0))
    output, _ = run.communicate(timeout=120)
    pid = int((tmp_path / "pid").read_text())
    assert run.returncode == 0, output
    assert f"left running by a test, and ended now: process {pid}" in output
    assert not is_running(pid)


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        (tmp_path / "pid").unlink(missing_ok=True)
        run = start_runner(tmp_path, TEST_THAT_LEAVES_A_PROCESS.format(pid=str(tmp_path / "pid"), seconds=600))
        eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        run.send_signal(number)
        output, _ = run.communicate(timeout=120)
        assert run.returncode == 130, output
        assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_run_that_exceeds_its_budget_fails(tmp_path: Path) -> None:
    for budget, status in (("processor_seconds = 0.001", 3), ("seconds = 0.001", 3), ("seconds = 1000 # enough", 0)):
        (tmp_path / "budget.toml").write_text(
            f"[tool.other]\nseconds = 0\n[tool.spark_state_ext.suite]\n{budget}\n[x]\n"
        )
        run = start_runner(tmp_path, "def test_it(): pass", "--budget", str(tmp_path / "budget.toml"))
        output, _ = run.communicate(timeout=120)
        assert run.returncode == status, output
        assert ("more than the budget" in output) == (status == 3)


def test_temporary_files_are_removed_after_a_run_unless_their_folder_is_given(tmp_path: Path) -> None:
    test = f"""
import tempfile
from pathlib import Path

def test_it(tmp_path):
    (tmp_path / "file").touch()
    Path({str(tmp_path / "folders")!r}).write_text(f"{{tmp_path}} {{tempfile.gettempdir()}}")
"""
    for arguments, stays in (([], False), ([f"--basetemp={tmp_path / 'kept'}"], True)):
        run = start_runner(tmp_path, test, *arguments)
        output, _ = run.communicate(timeout=120)
        assert run.returncode == 0, output
        base, temporary = map(Path, (tmp_path / "folders").read_text().split())
        assert (base / "file").exists() == stays
        assert not temporary.exists()
