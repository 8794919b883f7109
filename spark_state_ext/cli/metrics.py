"""What executors noted of their calls, printed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from spark_state_ext.worker.metrics import FILES, by_batch, read

__all__ = ["main"]


def _shown(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _nothing_to_read(folder: Path) -> str | None:
    """Why there is nothing to read in a folder, if so."""
    if not folder.is_dir():
        return f"there is no folder {folder}{', that is a file' if folder.exists() else ''}"
    if next(folder.rglob(FILES), None) is None:
        return f"no {FILES} files below {folder}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Print the batches of a folder; 2 where there is none, or no file of metrics."""
    parser = argparse.ArgumentParser(prog="spark_state_ext metrics", description="Sums over the buckets of each batch.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calls", action="store_true", help="every call of every bucket")
    options = parser.parse_args(arguments)
    missing = _nothing_to_read(options.folder)
    if missing is not None:
        print(f"{parser.prog}: {missing}", file=sys.stderr)
        return 2
    table = read(options.folder)
    table = table if options.calls else by_batch(table)
    for row in table.to_pylist():
        print(" ".join(f"{name}={_shown(value)}" for name, value in row.items()))
    return 0
