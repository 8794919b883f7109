"""A second process of a benchmark, whose work is controlled by files."""

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
    """A second process; it is killed at the end of the `with` block if it still runs.

    Parameters
    ----------
    work
        Folder of the benchmark. The process reads what to do from the file ``turn``, and ends if ``end`` exists.
    module, arguments
        The process runs ``python -m MODULE ARGUMENTS``, and prints a JSON object when it ends.
    turn
        The first content of ``turn``.
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
        """Return whether the process still runs."""
        return self._process.poll() is None

    def turn(self, content: str) -> None:
        """Write a new ``turn``, atomically."""
        new_file = self._turn.with_suffix(".new")
        new_file.write_text(content)
        new_file.replace(self._turn)

    def over(self) -> dict[str, Any]:
        """Make the process end, and return the JSON object that it printed.

        Raises
        ------
        BenchmarkError
            If the process failed.
        """
        self._end.touch()
        out, _ = self._process.communicate(timeout=_WAIT_S)
        if self._process.returncode:
            raise BenchmarkError(f"python -m {self._module} failed with exit status {self._process.returncode}")
        result: dict[str, Any] = json.loads(out)
        return result
