"""What it costs a host to follow a bucket, compared with the active task's commits, and whether these become slower.

Two active tasks commit the same rows without Spark, to roots on a local disk; each batch changes some of the keys.
Another process follows the first task, and pauses while the second one commits. The order of the two is drawn at random
for each batch. So each batch is measured with and without a follower, with the same rows to merge. Processor time is
that of all threads of a process.
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
    parser.add_argument("--keys", type=int, default=2_000_000, metavar="N", help="number of keys of the bucket")
    parser.add_argument("--rows", type=int, default=200_000, metavar="N", help="number of rows that a batch changes")
    parser.add_argument(
        "--batches", type=int, default=64, metavar="N", help="number of batches; the first four are a warm-up"
    )
    add_quick(parser, "few keys and batches")
    add_seed(parser, "keys and values")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark with the options of the command line.

    Raises
    ------
    BenchmarkError
        If an option is wrong, or if the follower's copy is not equal to the active task's state.
    """
    keys, rows, batches = (100_000, 20_000, 24) if options.quick else (options.keys, options.rows, options.batches)
    if batches <= _WARM_UP or rows > keys:
        raise BenchmarkError(f"--batches must be more than {_WARM_UP}, and --rows must not be more than --keys")
    report = Report("standby_following", {"keys": keys, "rows": rows, "batches": batches, "seed": options.seed})
    actives = {turn: _Active(work / turn.replace(" ", "-"), keys, rows, options.seed) for turn in _TURNS}
    active = actives[_FOLLOWED]
    rng = np.random.default_rng(options.seed)
    commit_s: dict[str, list[float]] = {turn: [] for turn in _TURNS}
    delta_bytes = 0
    with _Follower(active.work) as follower_process:
        for number in range(batches):
            for turn in rng.permutation(_TURNS).tolist():
                follower_process.turn(turn)
                commit_s[turn].append(actives[turn].batch())
            delta_bytes += active.delta_bytes
            spent = ", ".join(f"{turn} {seconds[-1]:.3f} s" for turn, seconds in commit_s.items())
            print(f"batch {number}: {spent} of processor", file=sys.stderr, flush=True)
        result = follower_process.over()
    ref = active.pointer.ref
    assert ref is not None, "batches have made checkpoints"
    report.check("the copy has the newest checkpoint", result["newest"] == str(ref))
    report.check("a task on the copy's host fetches no file, and finds the rows of the active", active.copy_is_same())
    active_s = sum(commit_s[_ALONE])
    mib = delta_bytes / 2**20
    report.details["deltas, MiB"] = mib
    report.details["active: processor seconds of a MiB of delta"] = active_s / mib
    report.details["follower: processor seconds of a MiB of delta"] = result["cpu_s"] / mib
    report.details["follower: steps"] = result["steps"]
    for turn, seconds in commit_s.items():
        report.timing(f"commit, processor, {turn}", seconds[_WARM_UP:])
    pairs = list(zip(commit_s[_FOLLOWED], commit_s[_ALONE], strict=True))[_WARM_UP:]
    slowdown = statistics.median(followed / alone for followed, alone in pairs)
    report.bar("follower / active, processor", result["cpu_s"] / active_s, "at most", CPU_AT_MOST, "times")
    report.bar("active, followed / left alone", slowdown, "at most", NOTICED_AT_MOST, "times")
    # If the store is too large to be merged (`compaction.is_outgrown`), the follower also reads the task's snapshots.
    report.ratio("bytes read / bytes of deltas", result["bytes"] / delta_bytes)
    return report


def _operator_file() -> OperatorFile:
    def schema(**columns: str) -> str:
        fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in columns.items()]
        return json.dumps({"type": "struct", "fields": fields})

    return OperatorFile(_OPERATOR, _QUERY, 1, schema(key="long"), schema(n="long", total="double", note="string"))


class _Active:
    """The active task of a bucket, without Spark: each batch is one call."""

    def __init__(self, work: Path, keys: int, rows: int, seed: int) -> None:
        self.work = work
        self._scratch = work / "scratch"
        self._scratch.mkdir(parents=True)
        self._rows = rows
        self._schema = _operator_file().row_schema()
        self._rng = np.random.default_rng(seed)
        self._hashes = np.sort(self._rng.integers(0, 2**64, keys, dtype=np.uint64))
        query_folder = FollowedRoot(str(work / "root")).folder.child(_OPERATOR, _QUERY)
        query_folder.put(operator_file_name(0), _operator_file().encode())
        self._files = query_folder.child("0")
        self._store = LocalStore.at(work / "active", self._schema)
        self.pointer = Pointer(_OPERATOR, 0, 1, 0, -1, None, query_folder=_QUERY)
        self.delta_bytes = 0

    def batch(self) -> float:
        """Commit changes of some keys; return the processor seconds of the commit."""
        changed = self._changes()
        buffer = SpillBuffer(self._scratch, 64 << 20)
        buffer.append(changed)
        begun_s = time.process_time()
        committed = self._bucket(self._store).commit(buffer).pointer
        spent_s = time.process_time() - begun_s
        self.pointer = replace(committed, batch=self.pointer.batch + 1)
        assert committed.ref is not None, "a commit makes a checkpoint"
        self.delta_bytes = self._files.size(file_name(committed.ref, DELTA))
        return spent_s

    def copy_is_same(self) -> bool:
        """Return whether a task on the follower's host fetches no file and finds the same rows."""
        root = FollowedRoot(str(self.work / "root"), local_dir=str(self.work / "other"))
        store = LocalStore.at(root.store_folder(BucketKey(_OPERATOR, _QUERY, 0), 0), self._schema)
        copy = self._bucket(store)
        same = pa.Table.from_batches(copy.scan()).equals(pa.Table.from_batches(self._bucket(self._store).scan()))
        return same and copy.fetched_files == 0

    def _bucket(self, store: LocalStore) -> Bucket:
        writer = Writer(_QUERY, "run", self.pointer.batch + 1, "active")
        return Bucket(
            store, sole_replica(self._files, self._scratch), self.pointer, writer, CommitContext(self._scratch)
        )

    def _changes(self) -> pa.RecordBatch:
        at = np.sort(self._rng.choice(len(self._hashes), self._rows, replace=False))
        hashes = self._hashes[at]
        n = self._rng.integers(0, 1_000, self._rows)
        columns = {
            KEY_HASH: pa.array(hashes),
            "key.key": pa.array(hashes.view(np.int64)),
            "state.n": pa.array(n),
            "state.total": pa.array(self._rng.random(self._rows)),
            "state.note": pa.array(np.char.add("note ", n.astype(str))),
            TIMEOUT_MS: pa.nulls(self._rows, pa.int64()),
            DEFINED: pa.array(np.ones(self._rows, np.bool_)),
            DELETED: pa.array(np.zeros(self._rows, np.bool_)),
        }
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._schema.arrow.names], schema=self._schema.arrow
        )


class _Follower(Beside):
    """The process that follows the bucket, in the turns in which the file ``turn`` says so."""

    def __init__(self, work: Path) -> None:
        super().__init__(work, "benchmarks.standby_following", [str(work)], _ALONE)
        self._ready = work / "ready"

    def __enter__(self) -> _Follower:
        # It must follow before the first commit, because it would load earlier commits from a snapshot.
        while not self._ready.exists() and self.is_running():
            time.sleep(_STEP_S)
        return self


def follow(work: Path) -> dict[str, Any]:
    """Follow the bucket while the file ``turn`` asks for it, until the file ``end`` exists; return what it cost.

    Parameters
    ----------
    work
        Folder of the benchmark.
    """
    (work / "other").mkdir()
    root = FollowedRoot(str(work / "root"), local_dir=str(work / "other"))
    stores = SharedStores()
    follower = BucketFollower(root, BucketKey(_OPERATOR, _QUERY, 0), _operator_file(), stores)
    cpu_s, steps, read_bytes = 0.0, 0, 0
    (work / "ready").touch()
    while True:
        must_end = (work / "end").exists()
        if must_end or (work / "turn").read_text() == _FOLLOWED:
            begun_s = time.process_time()
            step_result = follower.step()
            cpu_s += time.process_time() - begun_s
            if step_result.error is not None:
                raise step_result.error
            steps += 1
            read_bytes += step_result.bytes_read
        if must_end:
            stores.close()
            return {"cpu_s": cpu_s, "steps": steps, "bytes": read_bytes, "newest": str(step_result.newest)}
        time.sleep(_STEP_S)


if __name__ == "__main__":
    print(json.dumps(follow(Path(sys.argv[1]))))
