"""The cost of each folder of tests: seconds, and processor seconds of pytest's worker and its descendants.

``scripts/run_tests.py`` names a folder in an environment variable; each worker leaves a file there, and the script adds
them up.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

__all__ = ["Costs"]

_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


class Costs:
    """A pytest plugin that adds up the costs by folder.

    Parameters
    ----------
    results
        Folder for this worker's file.
    """

    def __init__(self, results: Path) -> None:
        self._results = results
        self._by_folder: dict[str, list[float]] = {}
        self._folder = ""
        self._before = (time.monotonic(), count_processor_seconds())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, location: tuple[str, int | None, str]) -> None:
        """Add the costs so far to the previous folder when another folder begins."""
        path = Path(location[0])
        folder = str(path.parent if path.parent.name != "tests" else path.parent / "*.py")
        if folder != self._folder:
            self._count()
            self._folder = folder

    def pytest_sessionfinish(self) -> None:
        """Write the file. The teardown of session fixtures comes later; only the script's total includes it."""
        self._count()
        self._by_folder.pop("", None)
        if self._by_folder:
            (self._results / f"{os.getpid()}.json").write_text(json.dumps(self._by_folder))

    def _count(self) -> None:
        now = (time.monotonic(), count_processor_seconds())
        spent = self._by_folder.setdefault(self._folder, [0.0, 0.0])
        for at in (0, 1):
            # A negative difference means that a process ended whose parent does not collect its usage.
            spent[at] += max(0.0, now[at] - self._before[at])
        self._before = now


def count_processor_seconds() -> float:
    """Return the processor seconds of this process and its descendants so far; 0 on systems without ``/proc``."""
    stats: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            # The parent's id, and the time of the process and of its children that have ended.
            stats[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])) * _TICKS_S)
    me, total = os.getpid(), 0.0
    for pid in stats:
        ancestor = pid
        while ancestor != me and ancestor in stats:
            ancestor = stats[ancestor][0]
        total += stats[pid][1] if ancestor == me else 0.0
    return total
