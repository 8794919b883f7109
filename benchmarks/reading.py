"""State read from its files: one key, looked up by a process that has just begun, and a scan beside PyArrow's reader.

The lookup's floor is a process that imports the same third-party modules, and does nothing with them. Times are of
whole processes, from their start to their end, in turns. The file cache is warm, or a disk would be what is measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas import OperatorFile
from arrow_schemas.labels import find_buckets
from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, Writer, file_name, new_checkpoint_id
from arrow_schemas.operator import operator_file_name
from arrow_schemas.spark_hash import hash_key
from benchmarks.options import add_seed
from benchmarks.report import BenchmarkError, Report
from spark_state_ext import OpenState, open_state
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.version import __version__
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["add_arguments", "run"]

LOOKUP_S_AT_MOST = 0.3
SCAN_AT_LEAST = 0.5
_OPERATOR = "clicks"
_WAIT_S = 600
# Its own imports begin with the first line, so that nothing is imported before.
_LOOKUP = """
import sys
from spark_state_ext import OpenState, open_state
root, key = sys.argv[1], int(sys.argv[2])
with open_state(root) as state:
    [row] = state.get(key).to_pylist()
import json
ours = ("spark_state_ext", "arrow_schemas")
# In the order in which they were imported; without what a library puts there as it goes, which has no file.
known = [
    name for name, module in sys.modules.items()
    if name.partition(".")[0] not in (*sys.stdlib_module_names, *ours, "__main__") and getattr(module, "__file__", None)
]
print(json.dumps({"row": row, "modules": known}))
"""
_FLOOR = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
"""

Hashes = npt.NDArray[np.uint64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--rows", type=int, default=10_000_000, metavar="N", help="keys")
    parser.add_argument("--buckets", type=int, default=64, metavar="N", help="buckets")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="measurements of each")
    add_seed(parser, "which keys are looked up")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When what is read is not what was written.
    """
    if min(options.rows, options.buckets, options.repeats) < 1:
        raise BenchmarkError("every count must be at least 1")
    report = Report("reading", {name: getattr(options, name) for name in ("rows", "buckets", "repeats", "seed")})
    root = work / "root"
    size = _written(root, options.rows, options.buckets)
    report.details["bytes"] = size
    _lookups(report, root, options)
    _scans(report, root, options)
    return report


def _lookups(report: Report, root: Path, options: argparse.Namespace) -> None:
    keys = np.random.default_rng(options.seed).integers(0, options.rows, options.repeats + 1).tolist()
    # To warm up, and to learn what it imports.
    _, modules = _looked_up(root, keys[0])
    report.check("PySpark and pandas are not imported by a lookup", not {"pyspark", "pandas", "py4j"} & set(modules))
    report.details["modules"] = len(modules)
    names = ",".join(modules)
    floor = [sys.executable, "-c", _FLOOR, names]
    _ran(floor)
    lookups, commands, floors, bare = [], [], [], []
    for key in keys[1:]:
        lookups.append(_looked_up(root, key)[0])
        commands.append(_by_command(root, key))
        floors.append(_ran(floor))
        bare.append(_ran([sys.executable, "-c", "pass"]))
    # `_looked_up` raises where one has not.
    report.details["keys that had the values that were written"] = len(keys)
    lookup_s = report.timing("get, a process from start to end", (it.wall_s for it in lookups))
    floor_s = report.timing("floor: a process that imports the same libraries", (it.wall_s for it in floors))
    command_s = report.timing("the command get, a process from start to end", (it.wall_s for it in commands))
    report.timing("a process that does nothing", (it.wall_s for it in bare))
    lookup_cpu_s = report.timing("get, processor time", (it.cpu_s for it in lookups))
    floor_cpu_s = report.timing("floor, processor time", (it.cpu_s for it in floors))
    report.ratio("get / floor", lookup_s / floor_s)
    report.ratio("get / floor, processor time", lookup_cpu_s / floor_cpu_s)
    report.details["get above the floor, ms"] = round((lookup_s - floor_s) * 1000, 1)
    report.bar("get, a process from start to end", lookup_s, "at most", LOOKUP_S_AT_MOST, "s")
    report.bar("the command get, a process from start to end", command_s, "at most", LOOKUP_S_AT_MOST, "s")


def _looked_up(root: Path, key: int) -> tuple[_Ran, list[str]]:
    ran = _ran([sys.executable, "-c", _LOOKUP, str(root), str(key)])
    found = json.loads(ran.said)
    _check_row(key, found["row"])
    modules: list[str] = found["modules"]
    return ran, modules


def _by_command(root: Path, key: int) -> _Ran:
    ran = _ran([sys.executable, "-m", "spark_state_ext", "get", str(root), str(key), "-o", "jsonl"])
    _check_row(key, json.loads(ran.said))
    return ran


def _check_row(key: int, row: Any) -> None:
    if row != {"key": key, "n": key % 100, "total": key / 8, "timeout_ms": None}:
        raise BenchmarkError(f"key {key} has {row}")


@dataclass(frozen=True)
class _Ran:
    """A process that ran.

    Parameters
    ----------
    wall_s, cpu_s
        How long it took from start to end, and its processor time.
    said
        Its output.
    """

    wall_s: float
    cpu_s: float
    said: str


def _ran(command: list[str]) -> _Ran:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT_S)
    elapsed_s = time.perf_counter() - started_s
    if done.returncode:
        raise BenchmarkError(f"a process failed: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Ran(elapsed_s, cpu_s, done.stdout)


def _scans(report: Report, root: Path, options: argparse.Namespace) -> None:
    """Each reader adds up the same columns of all rows: one, and all that have values."""
    numbers = np.arange(options.rows)
    truths = {"key": int(numbers.sum()), "n": int((numbers % 100).sum()), "total": float(numbers.sum()) / 8}
    files = sorted(root.glob(f"{_OPERATOR}/*/*/*.snapshot.arrow"))
    for columns, named, at_least in [(["n"], "one column", None), (list(truths), "all columns", SCAN_AT_LEAST)]:
        took: dict[str, list[float]] = {}

        def timed(name: str, work: Callable[[list[str]], list[float]], columns: list[str] = columns) -> None:
            started_s = time.perf_counter()
            sums = work(columns)
            took.setdefault(name, []).append(time.perf_counter() - started_s)  # noqa: B023 (used at once)
            if not all(math.isclose(it, truths[name]) for it, name in zip(sums, columns, strict=True)):
                raise BenchmarkError(f"{name}: {sums} is not what was written")

        for _ in range(options.repeats):
            with open_state(root) as state:
                timed("scan that checks files", functools.partial(_scanned, state))
                timed("scan again", functools.partial(_scanned, state))
            started_s = time.perf_counter()
            map_in_parallel("floor", len(os.sched_getaffinity(0)), _checksum, files)
            took.setdefault("floor: CRC-32 of the same bytes, on all cores", []).append(time.perf_counter() - started_s)
            timed("PyArrow, mapped", functools.partial(_read_by_arrow, files, as_a_map=True))
            timed("PyArrow, into memory", functools.partial(_read_by_arrow, files, as_a_map=False))
        report.details[f"sums of {named} that were those of what was written"] = 4 * options.repeats
        medians = {name: report.timing(f"{named}: {name}", seconds) for name, seconds in took.items()}
        for ours in ("scan that checks files", "scan again"):
            for theirs in ("PyArrow, mapped", "PyArrow, into memory"):
                report.ratio(f"{named}, speed: {ours} / {theirs}", medians[theirs] / medians[ours])
        if at_least is not None:
            for ours in ("scan that checks files", "scan again"):
                speed = medians["PyArrow, mapped"] / medians[ours]
                report.bar(f"{named}, speed: {ours} / PyArrow, mapped", speed, "at least", at_least, "times")


def _checksum(path: Path) -> int:
    with pa.memory_map(str(path)) as file:
        return zlib.crc32(file.read_buffer())


def _scanned(state: OpenState, columns: list[str]) -> list[float]:
    sums = [0.0] * len(columns)
    for batch in state.scan(columns):
        sums = [total + (pc.sum(it).as_py() or 0) for total, it in zip(sums, batch.columns, strict=True)]
    return sums


def _read_by_arrow(files: list[Path], columns: list[str], *, as_a_map: bool) -> list[float]:
    sums = [0.0] * len(columns)
    for path in files:
        with pa.memory_map(str(path)) if as_a_map else pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
            found = [table.column(f"key.{name}" if name == "key" else f"state.{name}") for name in columns]
            sums = [total + (pc.sum(it).as_py() or 0) for total, it in zip(sums, found, strict=True)]
    return sums


def _written(root: Path, rows: int, buckets: int) -> int:
    """A query folder with a snapshot in each bucket, and a later delta that proves it committed; gives their bytes."""
    operator = OperatorFile(_OPERATOR, "query", buckets, _struct(key="long"), _struct(n="long", total="double"))
    folder = root / _OPERATOR / "query"
    folder.mkdir(parents=True)
    (folder / operator_file_name(0)).write_bytes(operator.encode())
    keys = np.arange(rows, dtype=np.int64)
    hashes = _hashes(keys)
    sample = keys[:: max(1, rows // 100)]
    if [int(hashes[key]) for key in sample] != [hash_key([pa.array([int(key)], pa.int64())]) for key in sample]:
        raise BenchmarkError("keys are hashed otherwise than Spark hashes them")
    order = np.argsort(hashes)
    keys, hashes = keys[order], hashes[order]
    borders = np.searchsorted(find_buckets(hashes, buckets), np.arange(buckets + 1))
    size = 0
    for bucket in range(buckets):
        low, high = int(borders[bucket]), int(borders[bucket + 1])
        size += _bucket(folder / str(bucket), operator, bucket, hashes[low:high], keys[low:high])
    return size


def _bucket(folder: Path, operator: OperatorFile, bucket: int, hashes: Hashes, keys: npt.NDArray[np.int64]) -> int:
    folder.mkdir()
    first, second = CheckpointRef(1, new_checkpoint_id()), CheckpointRef(2, new_checkpoint_id())
    size = 0
    for ref, parent, kind in [(first, None, SNAPSHOT), (second, first, DELTA)]:
        writer = Writer("query", "run", ref.version - 1, "benchmark", ref.version)
        lineage = () if parent is None else (parent,)
        header = LineageHeader(kind, _OPERATOR, bucket, ref, parent, lineage, 0, writer, __version__)
        path = folder / file_name(ref, kind)
        with path.open("wb") as file:
            rows = _batches(operator, hashes, keys) if kind == SNAPSHOT else iter(())
            write_checkpoint(file, header, operator.row_schema(), rows)
        size += path.stat().st_size
    return size


def _batches(operator: OperatorFile, hashes: Hashes, keys: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    n = len(keys)
    if n:
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(hashes),
                pa.array(keys),
                pa.array(keys % 100),
                pa.array(keys / 8),
                pa.nulls(n, pa.int64()),
                pa.array(np.ones(n, dtype=np.bool_)),
                pa.array(np.zeros(n, dtype=np.bool_)),
            ],
            schema=operator.row_schema().arrow,
        )


def _hashes(keys: npt.NDArray[np.int64]) -> Hashes:
    """Spark's ``xxhash64`` of a column of longs."""

    def rotated(values: Hashes, bits: int) -> Hashes:
        return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))

    p1, p2, p3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
    p4, p5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
    with np.errstate(over="ignore"):
        found = (np.uint64(42) + p5 + np.uint64(8)) ^ rotated(keys.view(np.uint64) * p2, 31) * p1
        found = rotated(found, 27) * p1 + p4
        found = (found ^ found >> np.uint64(33)) * p2
        found = (found ^ found >> np.uint64(29)) * p3
        return found ^ found >> np.uint64(32)


def _struct(**columns: Any) -> str:
    fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in columns.items()]
    return json.dumps({"type": "struct", "fields": fields})
