"""The local store of one bucket, without Spark: get, put, load, and what ten times the state does to a batch.

Against it stands the obvious design, one LMDB entry a key (`entry_store`), in the same process, with the same rows, in
turn. Both begin and end with columns: packing values into bytes and back is part of a design that needs it.
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
_GROWN = 10
_LOAD_PIECE_ROWS = 1 << 16
_SCHEMA = RowSchema((pa.field("key", pa.int64()),), (pa.field("n", pa.int64()), pa.field("total", pa.float64())))
_OURS, _ENTRIES = "sorted runs", "one entry a key"
# A job's keys arrive in no order. Sorting them first makes the most of neighbouring entries; it is not on the clock.
_UNSORTED, _SORTED = f"{_ENTRIES}, in any order", f"{_ENTRIES}, sorted first"

Keys = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Values = npt.NDArray[np.void]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="keys in the store")
    parser.add_argument("--batch", type=int, default=43_000, metavar="N", help="random keys a batch")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="measurements of get")
    parser.add_argument("--loads", type=int, default=7, metavar="N", help="measurements of load")
    parser.add_argument("--growth-batches", type=int, default=40, metavar="N", help="batches to compare store sizes by")
    add_seed(parser, "keys and values")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When the answers differ.
    """
    if options.batch > options.rows or min(options.repeats, options.loads, options.growth_batches) < 1:
        raise BenchmarkError("--batch must not exceed --rows, and every count must be at least 1")
    names = ("rows", "batch", "repeats", "loads", "growth_batches", "seed")
    report = Report("store", {name: getattr(options, name) for name in names})
    rng = np.random.default_rng(options.seed)
    truth = _values(rng, options.rows)
    _tell("loading")
    ours, entries = _loads(report, truth, options.loads, work)
    _tell("get, one run")
    _gets(report, "1 run", ours, entries, truth, rng, options)
    _tell("put")
    _puts(report, ours, entries, truth, rng, options)
    _tell(f"get, {_RUNS} runs")
    _gets(report, f"{_RUNS} runs", ours, entries, truth, rng, options)
    reopened = ours.reopened()
    keys = _some(rng, options)
    report.timing(
        f"{_OURS}: first get after opening, {_RUNS} runs, checksums included", [_timed(reopened.get, keys)[0]]
    )
    reopened.close()
    entries.close()
    del truth
    _tell(f"batches at 1 and {_GROWN} times the state")
    _growth(report, rng, options, work)
    return report


@dataclass
class _Ours:
    """Our store, at its newest checkpoint."""

    store: LocalStore
    ref: CheckpointRef | None = None

    def load(self, sorted_keys: Keys, hashes: Hashes, values: Values) -> None:
        """Restore a snapshot, as after the loss of an executor."""
        pieces = (
            _rows(
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
        found = self.store.view(self.ref).lookup(keys.hashes, [pa.array(keys.by_hash)])
        return _columns(found.rows, found.index)

    def put(self, keys: _BatchKeys, values: Values) -> None:
        parent = self.ref
        ref = CheckpointRef(1 if parent is None else parent.version + 1, new_checkpoint_id())
        self.store.apply([_rows(keys.by_hash, keys.hashes, values)], ref, parent)
        self.ref = ref

    def batch(self, keys: _BatchKeys) -> tuple[float, float, float]:
        """Get, put and the housekeeping of one commit; returns the seconds of each."""
        before = self.ref
        got, values = _timed(self.get, keys)
        values = _advanced(values)
        put, _ = _timed(self.put, keys, values)

        def keep_house() -> None:
            self.store.compact(before)
            self.store.prune(before)

        return got, put, _timed(keep_house)[0]

    def reopened(self) -> _Ours:
        """The same state as another process would find it."""
        self.store.close()
        return _Ours(LocalStore.at(self.store.folder, _SCHEMA), self.ref)

    def close(self) -> None:
        self.store.close()


@dataclass(frozen=True)
class _BatchKeys:
    """Distinct keys, in the order that each store likes best."""

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


def _loads(report: Report, truth: Values, repeats: int, work: Path) -> tuple[_Ours, EntryStore]:
    all_keys = _BatchKeys.of(np.arange(len(truth), dtype=np.int64))
    by_hash = truth[all_keys.to_hash_order]
    times: dict[str, list[float]] = {_OURS: [], _ENTRIES: []}
    made: tuple[_Ours, EntryStore] | None = None
    for i in range(repeats):
        if made is not None:
            made[0].close()
            made[1].close()
        ours = _Ours(LocalStore.at(work / f"ours-{i}", _SCHEMA))
        entries = EntryStore(work / f"entries-{i}", max(64 << 20, 400 * len(truth)))
        made = ours, entries
        times[_OURS].append(_timed(ours.load, all_keys.by_hash, all_keys.hashes, by_hash)[0])
        times[_ENTRIES].append(_timed(entries.load, all_keys.by_key.view(np.uint64), truth)[0])
    assert made is not None, "repeats is at least 1"
    ours_s, entries_s = (
        report.timing(f"{name}: load of {len(truth):,} rows", times[name]) for name in (_OURS, _ENTRIES)
    )
    report.ratio(f"load: {_ENTRIES} / {_OURS}", entries_s / ours_s)
    report.bar("load", ours_s, "at most", LOAD_AT_MOST_S, "s")
    return made


def _gets(
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
        keys = _some(rng, options)
        shuffled = rng.permutation(keys.by_key)
        seconds, found = _timed(ours.get, keys)
        times[_OURS].append(seconds)
        _compare(_OURS, found, truth[keys.by_hash])
        for name, asked in ((_UNSORTED, shuffled), (_SORTED, keys.by_key)):
            seconds, found = _timed(entries.get, asked.view(np.uint64))
            times[name].append(seconds)
            _compare(name, found, truth[asked])
    report.check(
        f"{options.repeats} gets with {state} gave the same {options.batch:,} values from both and from an array", True
    )
    medians = {name: report.timing(f"{name}: get, {state}", each) for name, each in times.items()}
    for name in (_UNSORTED, _SORTED):
        report.ratio(f"get, {state}: {name} / {_OURS}", medians[name] / medians[_OURS])
    report.bar(f"get, {state}", 1000 * medians[_OURS], "at most", GET_AT_MOST_MS, "ms")


def _puts(
    report: Report,
    ours: _Ours,
    entries: EntryStore,
    truth: Values,
    rng: np.random.Generator,
    options: argparse.Namespace,
) -> None:
    times: dict[str, list[float]] = {_OURS: [], _ENTRIES: []}
    for _ in range(_RUNS - 1):
        keys = _some(rng, options)
        truth[keys.by_key] = _values(rng, options.batch)
        by_hash, by_key = truth[keys.by_hash], truth[keys.by_key]
        times[_OURS].append(_timed(ours.put, keys, by_hash)[0])
        times[_ENTRIES].append(_timed(entries.put, keys.by_key.view(np.uint64), by_key)[0])
    report.check(f"{_RUNS} runs are present after {_RUNS - 1} puts", len(ours.store.view(ours.ref).runs) == _RUNS)
    ours_s, entries_s = (report.timing(f"{name}: put", times[name]) for name in (_OURS, _ENTRIES))
    report.ratio(f"put: {_ENTRIES} / {_OURS}", entries_s / ours_s)
    report.bar("put", 1000 * ours_s, "at most", PUT_AT_MOST_MS, "ms")


def _growth(report: Report, rng: np.random.Generator, options: argparse.Namespace, work: Path) -> None:
    """Batches of one size on stores of two sizes, in turn; compaction is part of a batch, so means are compared."""
    sizes = {1: options.rows, _GROWN: _GROWN * options.rows}
    stores, truths = {}, {}
    for factor, rows in sizes.items():
        truths[factor] = _values(rng, rows)
        keys = _BatchKeys.of(np.arange(rows, dtype=np.int64))
        stores[factor] = _Ours(LocalStore.at(work / f"growth-{factor}", _SCHEMA))
        stores[factor].load(keys.by_hash, keys.hashes, truths[factor][keys.to_hash_order])
        del keys
    parts: dict[int, list[tuple[float, float, float]]] = {factor: [] for factor in sizes}
    for _ in range(options.growth_batches):
        for factor, rows in sizes.items():
            keys = _BatchKeys.of(rng.choice(rows, size=options.batch, replace=False, shuffle=False))
            parts[factor].append(stores[factor].batch(keys))
            truths[factor][keys.by_key] = _advanced(truths[factor][keys.by_key])
    for factor, rows in sizes.items():
        keys = _BatchKeys.of(rng.choice(rows, size=options.batch, replace=False, shuffle=False))
        _compare(_OURS, stores[factor].get(keys), truths[factor][keys.by_key[keys.to_hash_order]])
        stores[factor].close()
    report.check(
        f"after {options.growth_batches} batches both sizes hold what an array holds ({options.batch:,} looked at)",
        True,
    )
    means, medians = {}, {}
    for factor, rows in sizes.items():
        named = f"{_OURS}: batch at {rows:,} rows"
        medians[factor] = report.timing(named, [sum(one) for one in parts[factor]])
        for i, part in enumerate(("get", "put", "compact and prune")):
            report.timing(f"{named}, {part}", [one[i] for one in parts[factor]])
        means[factor] = statistics.mean(sum(one) for one in parts[factor])
        report.details[f"{named}: mean seconds"] = means[factor]
    # The median batch merges nothing; the bar is on the mean, where merging counts.
    report.ratio(f"median batch at {_GROWN} times the state / at 1", medians[_GROWN] / medians[1])
    growth = report.ratio(f"mean batch at {_GROWN} times the state / at 1", means[_GROWN] / means[1])
    report.bar(f"mean batch, {_GROWN} times the state", growth, "at most", GROWTH_AT_MOST, "times")


# -- helpers -------------------------------------------------------------------------------------------


def _timed(work: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    start = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - start, result


def _some(rng: np.random.Generator, options: argparse.Namespace) -> _BatchKeys:
    return _BatchKeys.of(rng.choice(options.rows, size=options.batch, replace=False, shuffle=False))


def _values(rng: np.random.Generator, rows: int) -> Values:
    values = np.empty(rows, dtype=VALUE)
    values["n"] = rng.integers(0, 1000, rows)
    values["total"] = rng.random(rows)
    values["timeout_ms"] = rng.integers(1, 2**41, rows)
    return values


def _advanced(values: Values) -> Values:
    """What a batch does to the values it touches."""
    after = values.copy()
    after["n"] += 1
    after["total"] += 0.5
    return after


def _hash(keys: Keys) -> Hashes:
    """SplitMix64: as good a hash as Spark's, and distinct for distinct keys."""
    x = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _rows(keys: Keys, hashes: Hashes, values: Values) -> pa.RecordBatch:
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


def _columns(rows: pa.RecordBatch, index: npt.NDArray[np.int64]) -> Values:
    """Values in the order asked for, all of which must have been found."""
    if len(index) and int(index.min()) < 0:
        raise BenchmarkError("a key that was put is not there")
    values = np.empty(len(index), dtype=VALUE)
    for name, column in (("n", "state.n"), ("total", "state.total"), ("timeout_ms", "timeout_ms")):
        values[name] = rows.column(column).to_numpy()[index]
    return values


def _compare(name: str, found: Values, right: Values) -> None:
    if not np.array_equal(found, right):
        raise BenchmarkError(f"{name}: a get gave wrong values")


def _tell(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)
