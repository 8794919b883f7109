"""Functions that the commands of this folder share: a folder for a run, and an end that leaves no process behind."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["end_with_the_cluster", "run_folder"]


def end_with_the_cluster() -> None:
    """Let signals that end this process end its cluster too."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))


@contextmanager
def run_folder(name: str, kept: Path | None) -> Iterator[Path]:
    """Make a new folder for logs and state.

    Parameters
    ----------
    name
        Prefix of the name of a folder that is removed afterwards.
    kept
        Parent of a folder that is kept, made if absent; None to remove the folder afterwards.
    """
    with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as temporary:
        parent = kept or Path(temporary)
        parent.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(dir=parent)).resolve()
