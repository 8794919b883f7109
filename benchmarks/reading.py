"""Measure how fast state is read from its files: one key by a new process, and all rows compared with PyArrow's reader.

The floor of a lookup is a process that imports the same third-party modules and does nothing with them. The times of
lookups are those of whole processes, from start to end, and the kinds of processes take turns. The file cache is warm:
otherwise the speed of the disk would be measured.
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
# The script imports only this package, so every third-party module that it has at the end is one that a lookup needs.
_LOOKUP = """
import sys
from spark_state_ext import OpenState, open_state
root, key = sys.argv[1], int(sys.argv[2])
with open_state(root) as state:
    [row] = state.get(key).to_pylist()
import json
ours = ("spark_state_ext", "arrow_schemas")
# In import order, without the modules that a library creates while it runs: they have no file.
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
    """Add the benchmark's options to a parser."""
    parser.add_argument("--rows", type=int, default=10_000_000, metavar="N", help="number of keys")
    parser.add_argument("--buckets", type=int, default=64, metavar="N", help="number of buckets")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="runs of each lookup and scan")
    add_seed(parser, "which keys are looked up")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, a process fails, or the package reads other rows than the benchmark wrote.
    """
    if min(options.rows, options.buckets, options.repeats) < 1:
        raise BenchmarkError("--rows, --buckets and --repeats must be at least 1")
    report = Report("reading", {name: getattr(options, name) for name in ("rows", "buckets", "repeats", "seed")})
    root = work / "root"
    size = _write_root(root, options.rows, options.buckets)
    report.details["bytes"] = size
    _measure_lookups(report, root, options)
    _measure_scans(report, root, options)
    return report


def _measure_lookups(report: Report, root: Path, options: argparse.Namespace) -> None:
    keys = np.random.default_rng(options.seed).integers(0, options.rows, options.repeats + 1).tolist()
    # Warm up, and find out which modules a lookup imports.
    _, modules = _look_up(root, keys[0])
    report.check("PySpark and pandas are not imported by a lookup", not {"pyspark", "pandas", "py4j"} & set(modules))
    report.details["modules"] = len(modules)
    names = ",".join(modules)
    floor = [sys.executable, "-c", _FLOOR, names]
    _run_process(floor)
    lookups, commands, floors, idle_runs = [], [], [], []
    for key in keys[1:]:
        lookups.append(_look_up(root, key)[0])
        commands.append(_look_up_by_command(root, key))
        floors.append(_run_process(floor))
        idle_runs.append(_run_process([sys.executable, "-c", "pass"]))
    # `_look_up` and `_look_up_by_command` raise an error if a row has other values.
    report.details["keys that had the values that were written"] = len(keys)
    lookup_s = report.timing("get, a process from start to end", (item.wall_s for item in lookups))
    floor_s = report.timing("floor: a process that imports the same libraries", (item.wall_s for item in floors))
    command_s = report.timing("the command get, a process from start to end", (item.wall_s for item in commands))
    report.timing("a process that does nothing", (item.wall_s for item in idle_runs))
    lookup_cpu_s = report.timing("get, processor time", (item.cpu_s for item in lookups))
    floor_cpu_s = report.timing("floor, processor time", (item.cpu_s for item in floors))
    report.ratio("get / floor", lookup_s / floor_s)
    report.ratio("get / floor, processor time", lookup_cpu_s / floor_cpu_s)
    report.details["get above the floor, ms"] = round((lookup_s - floor_s) * 1000, 1)
    report.bar("get, a process from start to end", lookup_s, "at most", LOOKUP_S_AT_MOST, "s")
    report.bar("the command get, a process from start to end", command_s, "at most", LOOKUP_S_AT_MOST, "s")


def _look_up(root: Path, key: int) -> tuple[_ProcessRun, list[str]]:
    process = _run_process([sys.executable, "-c", _LOOKUP, str(root), str(key)])
    result = json.loads(process.output)
    _check_row(key, result["row"])
    modules: list[str] = result["modules"]
    return process, modules


def _look_up_by_command(root: Path, key: int) -> _ProcessRun:
    process = _run_process([sys.executable, "-m", "spark_state_ext", "get", str(root), str(key), "-o", "jsonl"])
    _check_row(key, json.loads(process.output))
    return process


def _check_row(key: int, row: Any) -> None:
    if row != {"key": key, "n": key % 100, "total": key / 8, "timeout_ms": None}:
        raise BenchmarkError(f"the row that was read for key {key} is not the one that was written: {row}")


@dataclass(frozen=True)
class _ProcessRun:
    """A process that has ended.

    Parameters
    ----------
    wall_s, cpu_s
        Its time from start to end and its processor time, in seconds.
    output
        Its standard output.
    """

    wall_s: float
    cpu_s: float
    output: str


def _run_process(command: list[str]) -> _ProcessRun:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_s = time.perf_counter()
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT_S)
    elapsed_s = time.perf_counter() - started_s
    if completed.returncode:
        raise BenchmarkError(f"a process failed: {completed.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _ProcessRun(elapsed_s, cpu_s, completed.stdout)


def _measure_scans(report: Report, root: Path, options: argparse.Namespace) -> None:
    """Time readers that add up the same columns of all rows: first one column, then all columns with values."""
    numbers = np.arange(options.rows)
    expected = {"key": int(numbers.sum()), "n": int((numbers % 100).sum()), "total": float(numbers.sum()) / 8}
    files = sorted(root.glob(f"{_OPERATOR}/*/*/*.snapshot.arrow"))
    for columns, label, at_least in [(["n"], "one column", None), (list(expected), "all columns", SCAN_AT_LEAST)]:
        times_s: dict[str, list[float]] = {}

        def time_scan(name: str, work: Callable[[list[str]], list[float]], columns: list[str] = columns) -> None:
            started_s = time.perf_counter()
            sums = work(columns)
            times_s.setdefault(name, []).append(time.perf_counter() - started_s)  # noqa: B023 (called at once)
            if not all(math.isclose(item, expected[name]) for item, name in zip(sums, columns, strict=True)):
                raise BenchmarkError(f"{name}: {sums} are not the sums of the rows that were written")

        for _ in range(options.repeats):
            with open_state(root) as state:
                time_scan("scan that checks files", functools.partial(_sum_scan, state))
                time_scan("scan again", functools.partial(_sum_scan, state))
            started_s = time.perf_counter()
            map_in_parallel("floor", len(os.sched_getaffinity(0)), _compute_checksum, files)
            times_s.setdefault("floor: CRC-32 of the same bytes, on all cores", []).append(
                time.perf_counter() - started_s
            )
            time_scan("PyArrow, mapped", functools.partial(_sum_with_pyarrow, files, mapped=True))
            time_scan("PyArrow, into memory", functools.partial(_sum_with_pyarrow, files, mapped=False))
        report.details[f"sums of {label} that were those of what was written"] = 4 * options.repeats
        medians = {name: report.timing(f"{label}: {name}", seconds) for name, seconds in times_s.items()}
        for ours in ("scan that checks files", "scan again"):
            for theirs in ("PyArrow, mapped", "PyArrow, into memory"):
                report.ratio(f"{label}, speed: {ours} / {theirs}", medians[theirs] / medians[ours])
        if at_least is not None:
            for ours in ("scan that checks files", "scan again"):
                speed = medians["PyArrow, mapped"] / medians[ours]
                report.bar(f"{label}, speed: {ours} / PyArrow, mapped", speed, "at least", at_least, "times")


def _compute_checksum(path: Path) -> int:
    with pa.memory_map(str(path)) as file:
        return zlib.crc32(file.read_buffer())


def _sum_scan(state: OpenState, columns: list[str]) -> list[float]:
    sums = [0.0] * len(columns)
    for batch in state.scan(columns):
        sums = [total + (pc.sum(item).as_py() or 0) for total, item in zip(sums, batch.columns, strict=True)]
    return sums


def _sum_with_pyarrow(files: list[Path], columns: list[str], *, mapped: bool) -> list[float]:
    sums = [0.0] * len(columns)
    for path in files:
        with pa.memory_map(str(path)) if mapped else pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
            result = [table.column(f"key.{name}" if name == "key" else f"state.{name}") for name in columns]
            sums = [total + (pc.sum(item).as_py() or 0) for total, item in zip(sums, result, strict=True)]
    return sums


def _write_root(root: Path, rows: int, buckets: int) -> int:
    """Write a query folder; return the bytes of its checkpoint files.

    Each bucket has a snapshot, and a later delta that proves that the snapshot was committed.
    """
    operator = OperatorFile(
        _OPERATOR, "query", buckets, _make_struct(key="long"), _make_struct(n="long", total="double")
    )
    folder = root / _OPERATOR / "query"
    folder.mkdir(parents=True)
    (folder / operator_file_name(0)).write_bytes(operator.encode())
    keys = np.arange(rows, dtype=np.int64)
    hashes = _compute_hashes(keys)
    sample = keys[:: max(1, rows // 100)]
    if [int(hashes[key]) for key in sample] != [hash_key([pa.array([int(key)], pa.int64())]) for key in sample]:
        raise BenchmarkError("the benchmark and the package hash keys differently: correct `_compute_hashes`")
    order = np.argsort(hashes)
    keys, hashes = keys[order], hashes[order]
    borders = np.searchsorted(find_buckets(hashes, buckets), np.arange(buckets + 1))
    size = 0
    for bucket in range(buckets):
        low, high = int(borders[bucket]), int(borders[bucket + 1])
        size += _write_bucket(folder / str(bucket), operator, bucket, hashes[low:high], keys[low:high])
    return size


def _write_bucket(
    folder: Path, operator: OperatorFile, bucket: int, hashes: Hashes, keys: npt.NDArray[np.int64]
) -> int:
    folder.mkdir()
    first, second = CheckpointRef(1, new_checkpoint_id()), CheckpointRef(2, new_checkpoint_id())
    size = 0
    for ref, parent, kind in [(first, None, SNAPSHOT), (second, first, DELTA)]:
        writer = Writer("query", "run", ref.version - 1, "benchmark", ref.version)
        lineage = () if parent is None else (parent,)
        header = LineageHeader(kind, _OPERATOR, bucket, ref, parent, lineage, 0, writer, __version__)
        path = folder / file_name(ref, kind)
        with path.open("wb") as file:
            rows = _make_batches(operator, hashes, keys) if kind == SNAPSHOT else iter(())
            write_checkpoint(file, header, operator.row_schema(), rows)
        size += path.stat().st_size
    return size


def _make_batches(operator: OperatorFile, hashes: Hashes, keys: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
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


def _compute_hashes(keys: npt.NDArray[np.int64]) -> Hashes:
    """Return Spark's ``xxhash64`` of a column of longs."""

    def rotate(values: Hashes, bits: int) -> Hashes:
        return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))

    p1, p2, p3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
    p4, p5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
    with np.errstate(over="ignore"):
        result = (np.uint64(42) + p5 + np.uint64(8)) ^ rotate(keys.view(np.uint64) * p2, 31) * p1
        result = rotate(result, 27) * p1 + p4
        result = (result ^ result >> np.uint64(33)) * p2
        result = (result ^ result >> np.uint64(29)) * p3
        return result ^ result >> np.uint64(32)


def _make_struct(**columns: Any) -> str:
    fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in columns.items()]
    return json.dumps({"type": "struct", "fields": fields})
