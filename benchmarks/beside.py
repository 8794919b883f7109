"""A process beside a benchmark's own, which does what a file tells it, turn by turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import BenchmarkError

__all__ = ["Beside"]

_WAIT_S = 600.0


class Beside:
    """The process, killed at the end of a block at the latest.

    Parameters
    ----------
    work
        Folder of the benchmark: the file ``turn`` tells what to do, and ``end`` to come to an end.
    module, arguments
        What it runs: ``python -m MODULE ARGUMENTS``. It prints a JSON object when it ends.
    turn
        The first turn.
    """

    def __init__(self, work: Path, module: str, arguments: Sequence[str], turn: str) -> None:
        self._turn, self._end = work / "turn", work / "end"
        self.turn(turn)
        root = Path(__file__).resolve().parent.parent
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        self._module = module

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def turn(self, how: str) -> None:
        """Have it do something else."""
        written = self._turn.with_suffix(".new")
        written.write_text(how)
        written.replace(self._turn)

    def over(self) -> dict[str, Any]:
        """Have it end; returns what it found.

        Raises
        ------
        BenchmarkError
            When it failed.
        """
        self._end.touch()
        out, _ = self._process.communicate(timeout=_WAIT_S)
        if self._process.returncode:
            raise BenchmarkError(f"the process {self._module} ended with {self._process.returncode}")
        found: dict[str, Any] = json.loads(out)
        return found
