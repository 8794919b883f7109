"""Measure what it costs to read a whole upload back and compare it, as a backend does with checkpoint files.

    python scripts/measure_confirm.py [--mib 64] [--repeats 7]

The script sends a file to a folder on the local disk and to a folder of an S3 server on this machine (moto). For each
it prints the median, the minimum and the maximum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "core")]

from spark_state_ext.files.folder import Folder  # noqa: E402
from tests.helpers.object_store import s3_server  # noqa: E402

# The backend compares pieces of this size.
PIECE_BYTES = 8 << 20


def measure_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def read_back(folder: Folder, name: str, path: Path) -> None:
    """Compare all bytes of a file in a folder with a local file."""
    size = path.stat().st_size
    assert folder.size(name) == size
    with path.open("rb") as local:
        for at in range(0, size, PIECE_BYTES):
            assert folder.get_range(name, at, min(at + PIECE_BYTES, size)) == local.read(PIECE_BYTES)


def measure(folder: Folder, path: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Send a file under new names and read it back; return the seconds of both, without the first turn."""
    sent, compared = [], []
    for turn in range(repeats + 1):
        name = f"file-{turn}"
        sent.append(measure_seconds(partial(folder.put_file, name, path)))
        compared.append(measure_seconds(partial(read_back, folder, name, path)))
        folder.remove(name)
    return sent[1:], compared[1:]


def main() -> int:
    """Run the measurement with the options of the command line."""
    parser = argparse.ArgumentParser(description="Time an upload, and reading it back.")
    parser.add_argument("--mib", type=int, default=64, help="size of the file in MiB")
    parser.add_argument(
        "--repeats", type=int, default=7, help="number of times that sending and reading back are measured"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, s3_server() as s3:
        path = Path(scratch) / "file"
        path.write_bytes(os.urandom(options.mib << 20))
        places: dict[str, tuple[str, Any]] = {
            "local disk": (f"{scratch}/root", None),
            "S3 (moto, this machine)": (s3.root("root"), s3.options),
        }
        for place, (root, storage_options) in places.items():
            sent, compared = measure(Folder(root, storage_options), path, options.repeats)
            print(
                f"{options.mib} MiB, {place}: sent in {statistics.median(sent):.3f} s "
                f"({min(sent):.3f} to {max(sent):.3f}), read back in {statistics.median(compared):.3f} s "
                f"({min(compared):.3f} to {max(compared):.3f})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
