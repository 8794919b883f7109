"""Run pytest, measure what it costs, and leave no process behind: ``python scripts/run_tests.py [--budget FILE] …``.

On Linux this process is a subreaper: each process that the tests start is its descendant, even after the parent of that
process has ended. So the processor seconds at the end include all of these processes, and this script ends all of them
when the run is over or is stopped by SIGTERM, SIGHUP or Ctrl-C. If a finished run has left processes running, the
script reports them, because they are a defect of a test.

All other arguments are passed to pytest. With ``--budget``, which must come first, a run fails if it costs more than
the section ``[tool.spark_state_ext.suite]`` of that file allows. The temporary files of the tests are in memory if
there is room for them, and are removed at the end. ``--basetemp=FOLDER`` puts pytest's own folders elsewhere and keeps
them.
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
# Tests write and sync tens of thousands of small files. They would wait for a disk, and no test can notice a sync.
_MEMORY = Path("/dev/shm")
# The temporary files need 5 GB, and the processes of the tests need another 5 GB.
_FREE_BYTES_MIN, _AVAILABLE_BYTES_MIN = 6 << 30, 12 << 30
# Seconds that processes have to end after they were asked to; then they are killed.
_GRACE_S = 10.0
_OVER_BUDGET = 3
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main(arguments: list[str]) -> int:
    """Run pytest; return its exit code, 130 after a signal, or 3 if it passed but cost more than the budget."""
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
        # pytest runs in a new session, so that Ctrl-C reaches only this process, which then ends the others in order.
        pytest = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env=environment, start_new_session=True)
        try:
            status = pytest.wait()
            left = await_descendants()
        except _StoppedError as stopped:
            # Ignore further signals: a second one would end this script before it has ended all other processes.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            print(f"\nstopped by {stopped}: ending all processes that the tests started", file=sys.stderr, flush=True)
            # On SIGINT pytest tears down the fixtures. It gets a limited time for this.
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
    """Return the folder in memory, or None (the default temporary folder) if it has no room for the files of a run."""
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
    """Iterate over the ids of this process's descendants, parents first, without zombies; none except on Linux."""
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
    """Wait until no descendant is left, at most `_GRACE_S`; return the remaining ones.

    A JVM, for example, ends a little later than its Python process.
    """
    until_s = time.monotonic() + _GRACE_S
    while (left := list(find_descendants())) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


def end_all() -> None:
    """End all descendants by SIGTERM, and after `_GRACE_S` by SIGKILL."""
    number, until_s = signal.SIGTERM, time.monotonic() + _GRACE_S
    while pids := list(find_descendants()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        # Orphans become children of this process, and stay zombies until it asks for their status.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.1)
        if time.monotonic() > until_s:
            number = signal.SIGKILL
    reap_all()


def reap_all() -> None:
    """Wait for all children that are ending, at most `_GRACE_S`, so that their processor seconds count.

    A large process may already be a zombie while some of its threads still end. Waiting for it works only after that.
    """
    until_s = time.monotonic() + _GRACE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until_s:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.05)


def _read_costs(folder: Path) -> dict[str, list[float]]:
    """Return the seconds and processor seconds of each folder of tests, added up over pytest's workers."""
    costs: dict[str, list[float]] = {}
    for path in folder.glob("*.json"):
        for name, cost in json.loads(path.read_text()).items():
            costs[name] = [a + b for a, b in zip(costs.get(name, [0.0, 0.0]), cost, strict=True)]
    return costs


def _report(costs: dict[str, list[float]], seconds: float, budget: dict[str, float]) -> int:
    """Print the costs of the run; return 3 if they are more than the budget, and 0 otherwise."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = used.ru_utime + used.ru_stime
    print(f"\n{'folder':24}{'seconds':>10}{'processor seconds':>20}")
    for name, (clock_s, cpu_s) in sorted(costs.items(), key=lambda item: -item[1][0]):
        print(f"{name:24}{clock_s:10.0f}{cpu_s:20.0f}")
    print(f"{'from start to end':24}{seconds:10.0f}{processor_s:20.0f}")
    over = [
        f"{used_s:.0f} {label} are more than the budget of {budget[key]:.0f}"
        for key, label, used_s in (
            ("seconds", "seconds", seconds),
            ("processor_seconds", "processor seconds", processor_s),
        )
        if used_s > budget.get(key, used_s)
    ]
    for line in over:
        print(line, file=sys.stderr)
    return _OVER_BUDGET if over else 0


def read_budget(path: Path) -> dict[str, float]:
    """Read the budget of a run from its section of a TOML file, without a parser, because Python 3.10 has none."""
    _, _, section = path.read_text().partition("[tool.spark_state_ext.suite]\n")
    lines = [line.split("#")[0].partition("=") for line in section.partition("\n[")[0].splitlines()]
    return {name.strip(): float(value) for name, _, value in lines if value.strip()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
