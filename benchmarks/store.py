"""The local store of one bucket, without Spark: times of get, put and load, and of a batch with ten times the state.

Gets, puts and loads are compared with the obvious design, one LMDB entry for each key (`entry_store`): in the same
process, with the same rows, in turns. Both designs take and return columns, because packing values into bytes and back
is part of the cost of a design that needs it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_schemas.lineage import CheckpointRef, new_checkpoint_id
from arrow_schemas.row import RowSchema
from benchmarks.entry_store import VALUE, EntryStore
from benchmarks.options import add_seed
from benchmarks.report import BenchmarkError, Report
from spark_state_ext.store import LocalStore

__all__ = ["add_arguments", "run"]

T = TypeVar("T")

GET_AT_MOST_MS = 25.0
PUT_AT_MOST_MS = 10.0
LOAD_AT_MOST_S = 0.2
GROWTH_AT_MOST = 1.5
_RUNS = 10
_GROWTH_FACTOR = 10
_LOAD_PIECE_ROWS = 1 << 16
_SCHEMA = RowSchema((pa.field("key", pa.int64()),), (pa.field("n", pa.int64()), pa.field("total", pa.float64())))
_OURS, _ENTRIES = "sorted runs", "one entry a key"
# A job's keys arrive in no particular order. Sorted keys suit LMDB best, because neighbouring entries share pages; the
# time of sorting them is not measured.
_UNSORTED, _SORTED = f"{_ENTRIES}, in any order", f"{_ENTRIES}, sorted first"

Keys = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Values = npt.NDArray[np.void]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="keys in the store")
    parser.add_argument("--batch", type=int, default=43_000, metavar="N", help="random keys in each batch")
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="measurements of get with each number of runs"
    )
    parser.add_argument("--loads", type=int, default=7, metavar="N", help="measurements of load")
    parser.add_argument("--growth-batches", type=int, default=40, metavar="N", help="batches with each store size")
    add_seed(parser, "the keys and values")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If a store returns wrong values, or an option is out of range.
    """
    if options.batch > options.rows or min(options.repeats, options.loads, options.growth_batches) < 1:
        raise BenchmarkError("--batch must not exceed --rows, and every count must be at least 1")
    names = ("rows", "batch", "repeats", "loads", "growth_batches", "seed")
    report = Report("store", {name: getattr(options, name) for name in names})
    rng = np.random.default_rng(options.seed)
    truth = _draw_values(rng, options.rows)
    _print_progress("loading")
    ours, entries = _measure_loads(report, truth, options.loads, work)
    _print_progress("get, one run")
    _measure_gets(report, "1 run", ours, entries, truth, rng, options)
    _print_progress("put")
    _measure_puts(report, ours, entries, truth, rng, options)
    _print_progress(f"get, {_RUNS} runs")
    _measure_gets(report, f"{_RUNS} runs", ours, entries, truth, rng, options)
    reopened = ours.reopened()
    keys = _draw_keys(rng, options)
    report.timing(
        f"{_OURS}: first get after opening, {_RUNS} runs, checksums included", [_time_call(reopened.get, keys)[0]]
    )
    reopened.close()
    entries.close()
    del truth
    _print_progress(f"batches at 1 and {_GROWTH_FACTOR} times the state")
    _measure_growth(report, rng, options, work)
    return report


@dataclass
class _Ours:
    """The local store, at its newest checkpoint."""

    store: LocalStore
    ref: CheckpointRef | None = None

    def load(self, sorted_keys: Keys, hashes: Hashes, values: Values) -> None:
        """Restore all rows from a snapshot, as after the loss of an executor."""
        pieces = (
            _make_rows(
                sorted_keys[at : at + _LOAD_PIECE_ROWS],
                hashes[at : at + _LOAD_PIECE_ROWS],
                values[at : at + _LOAD_PIECE_ROWS],
            )
            for at in range(0, len(hashes), _LOAD_PIECE_ROWS)
        )
        ref = CheckpointRef(1, new_checkpoint_id())
        self.store.restore(pieces, ref, None, snapshot=True)
        self.ref = ref

    def get(self, keys: _BatchKeys) -> Values:
        answer = self.store.view(self.ref).lookup(keys.hashes, [pa.array(keys.by_hash)])
        return _take_values(answer.rows, answer.index)

    def put(self, keys: _BatchKeys, values: Values) -> None:
        parent = self.ref
        ref = CheckpointRef(1 if parent is None else parent.version + 1, new_checkpoint_id())
        self.store.apply([_make_rows(keys.by_hash, keys.hashes, values)], ref, parent)
        self.ref = ref

    def batch(self, keys: _BatchKeys) -> tuple[float, float, float]:
        """Get, put, then compact and prune as a commit does; return the seconds of each of these three parts."""
        ref_before = self.ref
        got, values = _time_call(self.get, keys)
        values = _advance(values)
        put, _ = _time_call(self.put, keys, values)

        def compact_and_prune() -> None:
            self.store.compact(ref_before)
            self.store.prune(ref_before)

        return got, put, _time_call(compact_and_prune)[0]

    def reopened(self) -> _Ours:
        """Close the store and open it again, as another process would; return the reopened store."""
        self.store.close()
        return _Ours(LocalStore.at(self.store.folder, _SCHEMA), self.ref)

    def close(self) -> None:
        self.store.close()


@dataclass(frozen=True)
class _BatchKeys:
    """The distinct keys of a batch, sorted by key for the entry store and by hash for the local store."""

    by_key: Keys
    by_hash: Keys
    hashes: Hashes
    # by_key[to_hash_order] == by_hash
    to_hash_order: npt.NDArray[np.intp]

    @staticmethod
    def of(keys: Keys) -> _BatchKeys:
        by_key = np.sort(keys)
        hashes = _hash(by_key)
        order = np.argsort(hashes)
        return _BatchKeys(by_key, by_key[order], hashes[order], order)


# -- the measurements ----------------------------------------------------------------------------------


def _measure_loads(report: Report, truth: Values, repeats: int, work: Path) -> tuple[_Ours, EntryStore]:
    all_keys = _BatchKeys.of(np.arange(len(truth), dtype=np.int64))
    by_hash = truth[all_keys.to_hash_order]
    times: dict[str, list[float]] = {_OURS: [], _ENTRIES: []}
    both: tuple[_Ours, EntryStore] | None = None
    for i in range(repeats):
        if both is not None:
            both[0].close()
            both[1].close()
        ours = _Ours(LocalStore.at(work / f"ours-{i}", _SCHEMA))
        entries = EntryStore(work / f"entries-{i}", max(64 << 20, 400 * len(truth)))
        both = ours, entries
        times[_OURS].append(_time_call(ours.load, all_keys.by_hash, all_keys.hashes, by_hash)[0])
        times[_ENTRIES].append(_time_call(entries.load, all_keys.by_key.view(np.uint64), truth)[0])
    assert both is not None, "repeats is at least 1"
    ours_s, entries_s = (
        report.timing(f"{name}: load of {len(truth):,} rows", times[name]) for name in (_OURS, _ENTRIES)
    )
    report.ratio(f"load: {_ENTRIES} / {_OURS}", entries_s / ours_s)
    report.bar("load", ours_s, "at most", LOAD_AT_MOST_S, "s")
    return both


def _measure_gets(
    report: Report,
    state: str,
    ours: _Ours,
    entries: EntryStore,
    truth: Values,
    rng: np.random.Generator,
    options: argparse.Namespace,
) -> None:
    times: dict[str, list[float]] = {_OURS: [], _UNSORTED: [], _SORTED: []}
    for _ in range(options.repeats):
        keys = _draw_keys(rng, options)
        shuffled = rng.permutation(keys.by_key)
        seconds, answer = _time_call(ours.get, keys)
        times[_OURS].append(seconds)
        _check_values(_OURS, answer, truth[keys.by_hash])
        for name, wanted in ((_UNSORTED, shuffled), (_SORTED, keys.by_key)):
            seconds, answer = _time_call(entries.get, wanted.view(np.uint64))
            times[name].append(seconds)
            _check_values(name, answer, truth[wanted])
    report.check(
        f"{options.repeats} gets with {state} gave the same {options.batch:,} values from both and from an array", True
    )
    medians = {name: report.timing(f"{name}: get, {state}", samples) for name, samples in times.items()}
    for name in (_UNSORTED, _SORTED):
        report.ratio(f"get, {state}: {name} / {_OURS}", medians[name] / medians[_OURS])
    report.bar(f"get, {state}", 1000 * medians[_OURS], "at most", GET_AT_MOST_MS, "ms")


def _measure_puts(
    report: Report,
    ours: _Ours,
    entries: EntryStore,
    truth: Values,
    rng: np.random.Generator,
    options: argparse.Namespace,
) -> None:
    times: dict[str, list[float]] = {_OURS: [], _ENTRIES: []}
    for _ in range(_RUNS - 1):
        keys = _draw_keys(rng, options)
        truth[keys.by_key] = _draw_values(rng, options.batch)
        by_hash, by_key = truth[keys.by_hash], truth[keys.by_key]
        times[_OURS].append(_time_call(ours.put, keys, by_hash)[0])
        times[_ENTRIES].append(_time_call(entries.put, keys.by_key.view(np.uint64), by_key)[0])
    report.check(f"{_RUNS} runs are present after {_RUNS - 1} puts", len(ours.store.view(ours.ref).runs) == _RUNS)
    ours_s, entries_s = (report.timing(f"{name}: put", times[name]) for name in (_OURS, _ENTRIES))
    report.ratio(f"put: {_ENTRIES} / {_OURS}", entries_s / ours_s)
    report.bar("put", 1000 * ours_s, "at most", PUT_AT_MOST_MS, "ms")


def _measure_growth(report: Report, rng: np.random.Generator, options: argparse.Namespace, work: Path) -> None:
    """Time equally large batches on stores of two sizes, in turns; compare means, as only some batches compact."""
    sizes = {1: options.rows, _GROWTH_FACTOR: _GROWTH_FACTOR * options.rows}
    stores, truths = {}, {}
    for factor, rows in sizes.items():
        truths[factor] = _draw_values(rng, rows)
        keys = _BatchKeys.of(np.arange(rows, dtype=np.int64))
        stores[factor] = _Ours(LocalStore.at(work / f"growth-{factor}", _SCHEMA))
        stores[factor].load(keys.by_hash, keys.hashes, truths[factor][keys.to_hash_order])
        del keys
    parts: dict[int, list[tuple[float, float, float]]] = {factor: [] for factor in sizes}
    for _ in range(options.growth_batches):
        for factor, rows in sizes.items():
            keys = _BatchKeys.of(rng.choice(rows, size=options.batch, replace=False, shuffle=False))
            parts[factor].append(stores[factor].batch(keys))
            truths[factor][keys.by_key] = _advance(truths[factor][keys.by_key])
    for factor, rows in sizes.items():
        keys = _BatchKeys.of(rng.choice(rows, size=options.batch, replace=False, shuffle=False))
        _check_values(_OURS, stores[factor].get(keys), truths[factor][keys.by_key[keys.to_hash_order]])
        stores[factor].close()
    report.check(
        f"after {options.growth_batches} batches both sizes hold what an array holds ({options.batch:,} looked at)",
        True,
    )
    means, medians = {}, {}
    for factor, rows in sizes.items():
        label = f"{_OURS}: batch at {rows:,} rows"
        medians[factor] = report.timing(label, [sum(batch_parts) for batch_parts in parts[factor]])
        for i, part in enumerate(("get", "put", "compact and prune")):
            report.timing(f"{label}, {part}", [batch_parts[i] for batch_parts in parts[factor]])
        means[factor] = statistics.mean(sum(batch_parts) for batch_parts in parts[factor])
        report.details[f"{label}: mean seconds"] = means[factor]
    # The median batch compacts nothing, so the bar is on the mean, which includes compaction.
    report.ratio(f"median batch at {_GROWTH_FACTOR} times the state / at 1", medians[_GROWTH_FACTOR] / medians[1])
    growth = report.ratio(f"mean batch at {_GROWTH_FACTOR} times the state / at 1", means[_GROWTH_FACTOR] / means[1])
    report.bar(f"mean batch, {_GROWTH_FACTOR} times the state", growth, "at most", GROWTH_AT_MOST, "times")


# -- helpers -------------------------------------------------------------------------------------------


def _time_call(work: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    start = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - start, result


def _draw_keys(rng: np.random.Generator, options: argparse.Namespace) -> _BatchKeys:
    return _BatchKeys.of(rng.choice(options.rows, size=options.batch, replace=False, shuffle=False))


def _draw_values(rng: np.random.Generator, rows: int) -> Values:
    values = np.empty(rows, dtype=VALUE)
    values["n"] = rng.integers(0, 1000, rows)
    values["total"] = rng.random(rows)
    values["timeout_ms"] = rng.integers(1, 2**41, rows)
    return values


def _advance(values: Values) -> Values:
    """Return the values of a batch's keys as the batch changes them."""
    after = values.copy()
    after["n"] += 1
    after["total"] += 0.5
    return after


def _hash(keys: Keys) -> Hashes:
    """Return the SplitMix64 hashes of keys: they spread as well as Spark's, and are distinct for distinct keys."""
    x = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _make_rows(keys: Keys, hashes: Hashes, values: Values) -> pa.RecordBatch:
    columns = [np.ascontiguousarray(values[name]) for name in VALUE.names or ()]
    count = len(keys)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(hashes),
            pa.array(keys),
            *(pa.array(column) for column in columns),
            pa.array(np.ones(count, dtype=np.bool_)),
            pa.array(np.zeros(count, dtype=np.bool_)),
        ],
        schema=_SCHEMA.arrow,
    )


def _take_values(rows: pa.RecordBatch, index: npt.NDArray[np.int64]) -> Values:
    """Return the values of a lookup in the order of its keys; raise an error if a key was not found."""
    if len(index) and int(index.min()) < 0:
        raise BenchmarkError("the local store did not find a key that had been put into it")
    values = np.empty(len(index), dtype=VALUE)
    for name, column in (("n", "state.n"), ("total", "state.total"), ("timeout_ms", "timeout_ms")):
        values[name] = rows.column(column).to_numpy()[index]
    return values


def _check_values(name: str, answer: Values, expected: Values) -> None:
    if not np.array_equal(answer, expected):
        raise BenchmarkError(f"{name}: get returned wrong values")


def _print_progress(step: str) -> None:
    print(f"{step} …", file=sys.stderr, flush=True)
