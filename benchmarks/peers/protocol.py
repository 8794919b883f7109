"""How a measured program gets its task and hands over its results.

Peers and floors are separate programs, so that none pays for the memory or the threads of another. Each gets a folder
of batches and a folder to work in, and writes a JSON file with its times and a Parquet file with its final state. This
module runs in the Python of every peer, so the only packages that it may import are PyArrow and NumPy.
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
    """The task of a measured program.

    Parameters
    ----------
    batches
        Folder of batches that `write_batches` has written.
    work
        Empty folder for the program's state and temporary files, on the disk that is measured.
    result
        JSON file to write: the times and details.
    answer
        Parquet file to write: the final state of each key.
    variant
        The variant of the program to run.
    """

    batches: Path
    work: Path
    result: Path
    answer: Path
    variant: str

    def files(self) -> list[list[Path]]:
        """Return the files of each batch."""
        return [sorted(folder.glob("*.parquet")) for folder in sorted(self.batches.iterdir())]

    def arguments(self) -> list[str]:
        """Return the command line that `read_task` parses."""
        paths = {"--batches": self.batches, "--work": self.work, "--result": self.result, "--answer": self.answer}
        return [self.variant, *(word for name, path in paths.items() for word in (name, str(path)))]


def read_task(variants: Sequence[str], description: str | None = None) -> Task:
    """Parse the command line of a program that has the given variants."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("variant", choices=variants)
    for name in ("batches", "work", "result", "answer"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return Task(**vars(parser.parse_args()))


def write_batches(folder: Path, batches: Sequence[pa.Table], files: int) -> None:
    """Write each batch as a folder of equally large, uncompressed Parquet files.

    Parameters
    ----------
    folder
        Folder to create, with one folder in it for each batch.
    batches
        The batches: ``key`` (int64) and ``value`` (double).
    files
        Number of files of each batch.
    """
    for number, table in enumerate(batches):
        batch_folder = folder / _BATCH.format(number)
        batch_folder.mkdir(parents=True)
        rows_per_file = -(-table.num_rows // files)
        for part in range(files):
            pq.write_table(
                table.slice(part * rows_per_file, rows_per_file), batch_folder / _PART.format(part), compression="none"
            )


def leave(
    task: Task,
    seconds: Sequence[float],
    keys: Sequence[int] | np.ndarray[Any, Any],
    n: Sequence[int] | np.ndarray[Any, Any],
    total: Sequence[float] | np.ndarray[Any, Any],
    details: Mapping[str, Any],
) -> None:
    """Write the times and the final state of a program.

    Parameters
    ----------
    task
        The task of the program.
    seconds
        Seconds of each batch, including the first.
    keys, n, total
        The keys, and the final count and sum of each, in any order.
    details
        JSON values to add to the report, such as durability, number of output rows and versions.
    """
    order = np.argsort(np.asarray(keys, dtype=np.int64))
    columns = {
        "key": np.asarray(keys, dtype=np.int64)[order],
        "n": np.asarray(n, dtype=np.int64)[order],
        "total": np.asarray(total, dtype=np.float64)[order],
    }
    pq.write_table(pa.table(columns), task.answer, compression="none")
    measured = {"seconds": list(seconds), "details": {**details, "python": platform.python_version()}}
    task.result.write_text(json.dumps(measured, indent=1) + "\n")
