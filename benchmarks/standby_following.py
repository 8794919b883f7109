"""A host that follows a bucket: what that costs it beside the commits of the active, and what the active notices.

Two actives commit the same rows without Spark, each batch a share of their keys, to roots on a local disk. One of them
is followed by another process, which pauses while the other one commits; whose turn is first is drawn for each batch.
So each batch is measured twice, with the same rows to merge. Processor time is that of a process, all threads counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arrow_schemas.lineage import DELTA, Writer, file_name
from arrow_schemas.operator import OperatorFile, operator_file_name
from arrow_schemas.pointer import Pointer
from arrow_schemas.row import DEFINED, DELETED, KEY_HASH, TIMEOUT_MS
from arrow_schemas.standby import BucketKey
from benchmarks.beside import Beside
from benchmarks.options import add_quick, add_seed
from benchmarks.report import BenchmarkError, Report
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.standby.follower import BucketFollower, SharedStores
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.store import LocalStore
from spark_state_ext.worker.spill import SpillBuffer

__all__ = ["add_arguments", "run"]

CPU_AT_MOST, NOTICED_AT_MOST = 1.5, 1.02
_OPERATOR, _QUERY = "followed", "query"
_FOLLOWED, _ALONE = _TURNS = ("followed", "left alone")
_WARM_UP = 4
_STEP_S = 0.02
_WAIT_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line."""
    parser.add_argument("--keys", type=int, default=2_000_000, metavar="N", help="keys of the bucket")
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help="rows that a batch changes")
    parser.add_argument("--batches", type=int, default=64, metavar="N", help="batches; the first four are a warm-up")
    add_quick(parser, "few keys and batches")
    add_seed(parser, "keys and values")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run it.

    Raises
    ------
    BenchmarkError
        When the copy is not what the active has.
    """
    keys, rows, batches = (100_000, 20_000, 24) if options.quick else (options.keys, options.rows, options.batches)
    if batches <= _WARM_UP or rows > keys:
        raise BenchmarkError(f"--batches must be more than {_WARM_UP}, and --rows no more than --keys")
    report = Report("standby_following", {"keys": keys, "rows": rows, "batches": batches, "seed": options.seed})
    actives = {turn: _Active(work / turn.replace(" ", "-"), keys, rows, options.seed) for turn in _TURNS}
    active = actives[_FOLLOWED]
    draws = np.random.default_rng(options.seed)
    took: dict[str, list[float]] = {turn: [] for turn in _TURNS}
    delta_bytes = 0
    with _Other(active.work) as other:
        for number in range(batches):
            for turn in draws.permutation(_TURNS).tolist():
                other.turn(turn)
                took[turn].append(actives[turn].batch())
            delta_bytes += active.delta_bytes
            spent = ", ".join(f"{turn} {seconds[-1]:.3f} s" for turn, seconds in took.items())
            print(f"batch {number}: {spent} of processor", file=sys.stderr, flush=True)
        told = other.over()
    ref = active.pointer.ref
    assert ref is not None, "batches have made checkpoints"
    report.check("the copy has the newest checkpoint", told["newest"] == str(ref))
    report.check("a task on the copy's host fetches no file, and finds the rows of the active", active.is_same())
    active_s = sum(took[_ALONE])
    mib = delta_bytes / 2**20
    report.details["deltas, MiB"] = mib
    report.details["active: processor seconds of a MiB of delta"] = active_s / mib
    report.details["follower: processor seconds of a MiB of delta"] = told["cpu_s"] / mib
    report.details["follower: steps"] = told["steps"]
    for turn, seconds in took.items():
        report.timing(f"commit, processor, {turn}", seconds[_WARM_UP:])
    pairs = list(zip(took[_FOLLOWED], took[_ALONE], strict=True))[_WARM_UP:]
    noticed = statistics.median(followed / alone for followed, alone in pairs)
    report.bar("follower / active, processor", told["cpu_s"] / active_s, "at most", CPU_AT_MOST, "times")
    report.bar("active, followed / left alone", noticed, "at most", NOTICED_AT_MOST, "times")
    # A snapshot is read too where the store is too large to be merged (`compaction.is_outgrown`), one a cadence.
    report.ratio("bytes read / bytes of deltas", told["bytes"] / delta_bytes)
    return report


def _operator_file() -> OperatorFile:
    def schema(**columns: str) -> str:
        fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in columns.items()]
        return json.dumps({"type": "struct", "fields": fields})

    return OperatorFile(_OPERATOR, _QUERY, 1, schema(key="long"), schema(n="long", total="double", note="string"))


class _Active:
    """A bucket's task, one call after the other."""

    def __init__(self, work: Path, keys: int, rows: int, seed: int) -> None:
        self.work = work
        self._scratch = work / "scratch"
        self._scratch.mkdir(parents=True)
        self._rows = rows
        self._schema = _operator_file().row_schema()
        self._draws = np.random.default_rng(seed)
        self._hashes = np.sort(self._draws.integers(0, 2**64, keys, dtype=np.uint64))
        query_folder = FollowedRoot(str(work / "root")).folder.child(_OPERATOR, _QUERY)
        query_folder.put(operator_file_name(0), _operator_file().encode())
        self._files = query_folder.child("0")
        self._store = LocalStore.at(work / "active", self._schema)
        self.pointer = Pointer(_OPERATOR, 0, 1, 0, -1, None, query_folder=_QUERY)
        self.delta_bytes = 0

    def batch(self) -> float:
        """Commit changes of some keys; returns its processor time."""
        changed = self._changes()
        buffer = SpillBuffer(self._scratch, 64 << 20)
        buffer.append(changed)
        begun_s = time.process_time()
        made = self._bucket(self._store).commit(buffer).pointer
        spent_s = time.process_time() - begun_s
        self.pointer = replace(made, batch=self.pointer.batch + 1)
        assert made.ref is not None, "a commit makes a checkpoint"
        self.delta_bytes = self._files.size(file_name(made.ref, DELTA))
        return spent_s

    def is_same(self) -> bool:
        """Whether a task on the other host fetches nothing and finds the same rows."""
        root = FollowedRoot(str(self.work / "root"), local_dir=str(self.work / "other"))
        store = LocalStore.at(root.store_folder(BucketKey(_OPERATOR, _QUERY, 0), 0), self._schema)
        there = self._bucket(store)
        same = pa.Table.from_batches(there.scan()).equals(pa.Table.from_batches(self._bucket(self._store).scan()))
        return same and there.fetched_files == 0

    def _bucket(self, store: LocalStore) -> Bucket:
        writer = Writer(_QUERY, "run", self.pointer.batch + 1, "active")
        return Bucket(
            store, sole_replica(self._files, self._scratch), self.pointer, writer, CommitContext(self._scratch)
        )

    def _changes(self) -> pa.RecordBatch:
        at = np.sort(self._draws.choice(len(self._hashes), self._rows, replace=False))
        hashes = self._hashes[at]
        n = self._draws.integers(0, 1_000, self._rows)
        columns = {
            KEY_HASH: pa.array(hashes),
            "key.key": pa.array(hashes.view(np.int64)),
            "state.n": pa.array(n),
            "state.total": pa.array(self._draws.random(self._rows)),
            "state.note": pa.array(np.char.add("note ", n.astype(str))),
            TIMEOUT_MS: pa.nulls(self._rows, pa.int64()),
            DEFINED: pa.array(np.ones(self._rows, np.bool_)),
            DELETED: pa.array(np.zeros(self._rows, np.bool_)),
        }
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._schema.arrow.names], schema=self._schema.arrow
        )


class _Other(Beside):
    """The other process: follows while a file says so."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, "benchmarks.standby_following", [str(work)], _ALONE)
        self._ready = work / "ready"

    def __enter__(self) -> _Other:
        # What it missed before it began it would load from a snapshot.
        while not self._ready.exists() and self.is_running():
            time.sleep(_STEP_S)
        return self


def following(work: Path) -> dict[str, Any]:
    """Follow, while that is wanted.

    Parameters
    ----------
    work
        Folder of the benchmark.
    """
    (work / "other").mkdir()
    root = FollowedRoot(str(work / "root"), local_dir=str(work / "other"))
    stores = SharedStores()
    follower = BucketFollower(root, BucketKey(_OPERATOR, _QUERY, 0), _operator_file(), stores)
    cpu_s, steps, size_bytes = 0.0, 0, 0
    (work / "ready").touch()
    while True:
        ends = (work / "end").exists()
        if ends or (work / "turn").read_text() == _FOLLOWED:
            begun_s = time.process_time()
            found = follower.step()
            cpu_s += time.process_time() - begun_s
            if found.error is not None:
                raise found.error
            steps += 1
            size_bytes += found.bytes_read
        if ends:
            stores.close()
            return {"cpu_s": cpu_s, "steps": steps, "bytes": size_bytes, "newest": str(found.newest)}
        time.sleep(_STEP_S)


if __name__ == "__main__":
    print(json.dumps(following(Path(sys.argv[1]))))
