"""A folder of metrics, as commands are given it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from spark_state_ext.errors import UsageError
from spark_state_ext.worker.metrics import FILES, read

__all__ = ["read_metrics", "refuse_nothing"]


def refuse_nothing(folder: Path) -> None:
    """Refuse a folder without metrics."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}{', that is a file' if folder.exists() else ''}")
    if next(folder.rglob(FILES), None) is None:
        raise UsageError(f"no {FILES} files below {folder}: give the job's local_dir, where executors write them")


def read_metrics(folder: Path) -> pa.Table:
    """The calls that are noted in a folder and those below it."""
    refuse_nothing(folder)
    return read(folder)
