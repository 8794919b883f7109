"""What a measured program is told, and what it leaves behind.

Peers and floors are programs of their own, so that none pays for the memory or the threads of another. Each gets a
folder of batches and a folder to work in, and leaves a JSON file with its times and a parquet file with its state.
This module runs in every peer's Python: it may import what all of those have, PyArrow and NumPy, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["Task", "leave", "read_task", "write_batches"]

_BATCH, _PART = "batch-{:05d}", "part-{:05d}.parquet"


@dataclass(frozen=True)
class Task:
    """What a program is told.

    Parameters
    ----------
    batches
        Folder of batches, as `write_batches` makes it.
    work
        Folder for its state and whatever else it keeps; empty, and on the disk that is measured.
    result
        JSON file to write.
    answer
        Parquet file to write.
    variant
        Which way of several.
    """

    batches: Path
    work: Path
    result: Path
    answer: Path
    variant: str

    def files(self) -> list[list[Path]]:
        """The files of each batch."""
        return [sorted(folder.glob("*.parquet")) for folder in sorted(self.batches.iterdir())]

    def arguments(self) -> list[str]:
        """The command line that `read_task` understands."""
        named = {"--batches": self.batches, "--work": self.work, "--result": self.result, "--answer": self.answer}
        return [self.variant, *(word for name, path in named.items() for word in (name, str(path)))]


def read_task(variants: Sequence[str], description: str | None = None) -> Task:
    """Read the command line of a program that knows these variants."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("variant", choices=variants)
    for name in ("batches", "work", "result", "answer"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return Task(**vars(parser.parse_args()))


def write_batches(folder: Path, batches: Sequence[pa.Table], files: int) -> None:
    """Write each batch as a folder of equally large parquet files, uncompressed.

    Parameters
    ----------
    folder
        Folder to make.
    batches
        The batches: ``key`` (int64) and ``value`` (double).
    files
        Files a batch.
    """
    for number, table in enumerate(batches):
        into = folder / _BATCH.format(number)
        into.mkdir(parents=True)
        step = -(-table.num_rows // files)
        for part in range(files):
            pq.write_table(table.slice(part * step, step), into / _PART.format(part), compression="none")


def leave(
    task: Task,
    seconds: Sequence[float],
    keys: Sequence[int] | np.ndarray[Any, Any],
    n: Sequence[int] | np.ndarray[Any, Any],
    total: Sequence[float] | np.ndarray[Any, Any],
    details: Mapping[str, Any],
) -> None:
    """Write what was measured.

    Parameters
    ----------
    task
        What the program was told.
    seconds
        Seconds of each batch, the first included.
    keys, n, total
        The state of each key at the end, in any order.
    details
        More to note in the report, as JSON values: durability, rows put out, versions.
    """
    order = np.argsort(np.asarray(keys, dtype=np.int64))
    columns = {
        "key": np.asarray(keys, dtype=np.int64)[order],
        "n": np.asarray(n, dtype=np.int64)[order],
        "total": np.asarray(total, dtype=np.float64)[order],
    }
    pq.write_table(pa.table(columns), task.answer, compression="none")
    told = {"seconds": list(seconds), "details": {**details, "python": platform.python_version()}}
    task.result.write_text(json.dumps(told, indent=1) + "\n")
