"""Run pytest, count what it costs, and leave no process behind: ``python scripts/run_tests.py [--budget FILE] …``.

Everything that the tests start is a descendant of this process, even after its parent ended (on Linux this process is a
subreaper). So the processor seconds at the end are those of all of it, and all of it is ended when the run is over or
is stopped by SIGTERM, SIGHUP or Ctrl-C. Processes that a finished run left behind are reported, as they are a defect.

The other arguments are pytest's. With ``--budget`` a run that costs more than ``[tool.spark_state_ext.suite]`` of that
file allows fails. The tests' temporary files are in memory if there is room for them, and are removed at the end;
``--basetemp FOLDER`` puts them elsewhere and keeps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COSTS = "SPARK_STATE_EXT_COSTS"
_PR_SET_CHILD_SUBREAPER = 36
# Tests write and sync tens of thousands of small files. A disk makes them wait, and no test can notice a sync.
_MEMORY = Path("/dev/shm")
# The files need 5 GB, and so do the processes of the tests.
_FREE_BYTES_MIN, _AVAILABLE_BYTES_MIN = 6 << 30, 12 << 30
# Processes that were asked to end are killed after this time.
_GRACE_S = 10.0
_OVER_BUDGET = 3
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main(arguments: list[str]) -> int:
    """Run pytest with `arguments`; return its exit code, or 3 if the run passed but cost more than the budget."""
    budget: dict[str, float] = {}
    if arguments[:1] == ["--budget"]:
        budget, arguments = read_budget(Path(arguments[1])), arguments[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=find_memory(), prefix="tests-", ignore_cleanup_errors=True) as folder:
        costs_folder = Path(folder) / "costs"
        costs_folder.mkdir()
        environment = {**os.environ, COSTS: str(costs_folder), "TMPDIR": folder}
        if not any(argument.startswith("--basetemp") for argument in arguments):
            arguments = [f"--basetemp={folder}/tests", *arguments]
        # A session of its own: Ctrl-C reaches this process alone, which then ends the others in order.
        pytest = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env=environment, start_new_session=True)
        try:
            status = pytest.wait()
            left = await_descendants()
        except _StoppedError as stopped:
            # Once is enough: a second signal would leave behind what is not ended yet.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            print(f"\nended by {stopped}: ending what the tests started", file=sys.stderr, flush=True)
            # pytest's own way of ending: fixtures are torn down, as far as the time goes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(_GRACE_S)
            status, left = 130, []
        end_all()
        costs = _read_costs(costs_folder)
    for pid in left:
        print(f"left running by a test, and ended now: process {pid}", file=sys.stderr)
    exceeded = _report(costs, time.monotonic() - started_s, budget)
    return status or exceeded


def find_memory() -> Path | None:
    """Return the folder in memory if it has room for the files of a run, or None: the usual folder on a disk."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available_bytes = int(lines["MemAvailable"].split()[0]) << 10
        has_room = shutil.disk_usage(_MEMORY).free >= _FREE_BYTES_MIN and available_bytes >= _AVAILABLE_BYTES_MIN
    except (OSError, KeyError, ValueError):
        return None
    return _MEMORY if has_room else None


class _StoppedError(Exception):
    """A signal asked this run to end."""


def _stop(number: int, _: object) -> None:
    raise _StoppedError(signal.Signals(number).name)


def find_descendants() -> Iterator[int]:
    """Iterate over ids of the processes that descend from this one, parents first; zombies are left out."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            yield pid
            waiting.append(pid)


def await_descendants() -> list[int]:
    """Wait a while until no descendant is left, as a JVM ends after its Python process; return those that stay."""
    until_s = time.monotonic() + _GRACE_S
    while (left := list(find_descendants())) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


def end_all() -> None:
    """End every descendant: by SIGTERM, and by SIGKILL those that are still there after a while."""
    number, until_s = signal.SIGTERM, time.monotonic() + _GRACE_S
    while pids := list(find_descendants()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        # Orphans are children of this process, and are zombies until it asks for their status.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.1)
        if time.monotonic() > until_s:
            number = signal.SIGKILL
    reap_all()


def reap_all() -> None:
    """Wait for all children that have ended, so that their processor seconds count.

    A large process is a zombie some time before its last thread has ended, and only then can it be waited for.
    """
    until_s = time.monotonic() + _GRACE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until_s:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.05)


def _read_costs(folder: Path) -> dict[str, list[float]]:
    """Add up the seconds and processor seconds of each folder of tests over pytest's workers."""
    costs: dict[str, list[float]] = {}
    for path in folder.glob("*.json"):
        for name, cost in json.loads(path.read_text()).items():
            costs[name] = [a + b for a, b in zip(costs.get(name, [0.0, 0.0]), cost, strict=True)]
    return costs


def _report(costs: dict[str, list[float]], seconds: float, budget: dict[str, float]) -> int:
    """Print what the run cost; return 3 if that is more than the budget, else 0."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = used.ru_utime + used.ru_stime
    print(f"\n{'folder':24}{'seconds':>10}{'processor seconds':>20}")
    for name, (clock_s, cpu_s) in sorted(costs.items(), key=lambda item: -item[1][0]):
        print(f"{name:24}{clock_s:10.0f}{cpu_s:20.0f}")
    print(f"{'from start to end':24}{seconds:10.0f}{processor_s:20.0f}")
    over = [
        f"{used_s:.0f} {what} are more than the budget of {budget[key]:.0f}"
        for key, what, used_s in (
            ("seconds", "seconds", seconds),
            ("processor_seconds", "processor seconds", processor_s),
        )
        if used_s > budget.get(key, used_s)
    ]
    for line in over:
        print(line, file=sys.stderr)
    return _OVER_BUDGET if over else 0


def read_budget(path: Path) -> dict[str, float]:
    """Read what a run may cost from the section of a TOML file, by hand: Python 3.10 has no parser for it."""
    _, _, section = path.read_text().partition("[tool.spark_state_ext.suite]\n")
    lines = [line.split("#")[0].partition("=") for line in section.partition("\n[")[0].splitlines()]
    return {name.strip(): float(value) for name, _, value in lines if value.strip()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
