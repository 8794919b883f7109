"""Half an hour of faults in a minute: a worker process commits to two stores that fail, and a driver kills it.

Everything but Spark is real: processes, LMDB, files, uploads in threads. The driver plays Spark: it gives the worker the
pointers of the last committed batch, and keeps either all pointers that the worker returns or none. Time is compressed:
a minute is shortened to a minute times `SCALE`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrow_schemas import Pointer, RowSchema, Writer
from benchmarks.slow import ObjectDisk
from spark_state_ext.backends import BackendContext, CleanUp
from spark_state_ext.backends.files import FilesBackend, sole_replica
from spark_state_ext.backends.replication import Replica, is_complete
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.commit.decisions import CommitOptions
from spark_state_ext.commit.uploads import Upload, WorkerUploads
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.store import LocalStore, View
from spark_state_ext.store.runs import sort_by_hash
from spark_state_ext.worker.background import Background
from spark_state_ext.worker.spill import SpillBuffer
from tests.helpers.soak import examples

SCALE = 1 / examples(120, 30)
MINUTE_S = 60 * SCALE
BUCKETS = 6
KEYS = 40
RETAINED = 5
STORES = ("east", "west")
SCHEMA = RowSchema((pa.field("k", pa.int64()),), (pa.field("n", pa.int64()), pa.field("pad", pa.binary())))
# As with the defaults, commits continue during the first minute of an upload, which may take ten minutes.
OPTIONS = CommitOptions(
    commit_delay_ms_max=int(1000 * MINUTE_S), commit_timeout_ms=int(10_000 * MINUTE_S), inline_bytes_max=24 << 10
)

Model = dict[int, int]


class ChaosStore(ObjectDisk):
    """An object store on which every request may fail, be slow, be torn, or hang."""

    protocol = ("chaos", "memory")
    cachable = False

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        if random.random() < 0.02:
            raise ConnectionResetError("the connection was reset while it was read")
        return super().cat_file(path, **kwargs)

    def ls(self, path: str, **kwargs: Any) -> Any:
        if random.random() < 0.05:
            raise TimeoutError("the listing took too long")
        return super().ls(path, **kwargs)

    def _put(self, path: Path, value: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fault = random.random()
        if fault < 0.08:
            raise ConnectionRefusedError("no connection")
        if fault < 0.12:
            _write(path, value[: random.randrange(len(value))])
            raise BrokenPipeError("the connection broke in the middle")
        if fault < 0.15:
            # No error reports the torn file.
            _write(path, value[: random.randrange(len(value))])
            return
        if fault < 0.30:
            time.sleep(random.random() * MINUTE_S)
        elif fault < 0.31:
            time.sleep(5 * MINUTE_S)
        _write(path, value)
        if random.random() < 0.03:
            raise TimeoutError("no answer, though it was done")


def _write(path: Path, value: bytes) -> None:
    hidden = path.parent.parent / f"put-{os.getpid()}-{random.getrandbits(64)}"
    hidden.write_bytes(value)
    hidden.rename(path)


def make_changes(batch: int, bucket: int) -> dict[int, int | None]:
    """Return a batch's changes of a bucket; they are the same in each call."""
    numbers = random.Random(f"{batch} {bucket}")
    keys = numbers.sample(range(KEYS), numbers.randrange(1, 8))
    return {key: None if numbers.random() < 0.15 else batch for key in keys}


def compute_state(batches: int, bucket: int) -> Model:
    """Return the state by the batch computation: all batches from the first one, without a store."""
    model: Model = {}
    for batch in range(batches):
        for key, value in make_changes(batch, bucket).items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
    return model


def make_rows(batch: int, bucket: int, scratch: Path) -> SpillBuffer:
    changes = make_changes(batch, bucket)
    keys, values = list(changes), list(changes.values())
    removed = [value is None for value in values]
    # Some deltas are too large to be inline.
    pad = random.Random(batch * BUCKETS + bucket).randbytes(30_000) if (batch + bucket) % 11 == 0 else b""
    columns = [
        pa.array([key * 0x9E3779B97F4A7C15 % 2**64 for key in keys], pa.uint64()),
        pa.array(keys, pa.int64()),
        pa.array(values, pa.int64()),
        pa.array([None if is_removed else pad for is_removed in removed], pa.binary()),
        pa.nulls(len(keys), pa.int64()),
        pa.array([not is_removed for is_removed in removed]),
        pa.array(removed),
    ]
    rows = SpillBuffer(scratch, 1 << 20)
    rows.append(sort_by_hash(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)))
    return rows


def scan_model(view: View) -> Model:
    return {
        key: value
        for batch in view.scan()
        for key, value in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }


# -- the worker ------------------------------------------------------------------------------------


def worker(folder: str, seed: int, pipe: Connection) -> None:
    """Serve batches until the driver kills this process."""
    random.seed(seed)
    logging.getLogger("spark_state_ext").setLevel(logging.CRITICAL)
    base = Path(folder)
    uploads, background = WorkerUploads(), Background()
    stores = {bucket: LocalStore.at(base / "local" / str(bucket), SCHEMA) for bucket in range(BUCKETS)}
    while True:
        batch, pointers, changes = pipe.recv()
        try:
            pointers_made = {}
            deferred: list[Upload] = []
            for bucket, data in pointers.items():
                pointer = Pointer.decode(data)
                replicas = [make_replica(base, name, bucket, uploads) for name in STORES]
                bucket_of_call = Bucket(
                    stores[bucket],
                    replicas,
                    pointer,
                    Writer("query", "run", batch, "host"),
                    CommitContext(base, options=OPTIONS, batches_retained=RETAINED, uploads=uploads, runner=background),
                )
                if bucket_of_call.read(scan_model) != compute_state(batch, bucket):
                    pipe.send(("wrong", f"batch {batch} of bucket {bucket} reads another state"))
                    return
                rows = make_rows(batch, bucket, base) if changes else SpillBuffer(base, 1 << 20)
                # All calls but the last leave the wait for their uploads to the last one.
                commit = bucket_of_call.commit(rows, may_defer=bucket < BUCKETS - 1)
                deferred += commit.deferred
                pointers_made[bucket] = replace(commit.pointer, batch=batch).encode()
                if batch % 7 == bucket % 7:
                    clean_up_bucket(replicas, pointer, bucket_of_call)
            bucket_of_call.committer.await_all(deferred)
            pipe.send(("done", pointers_made))
        except StateError as error:
            pipe.send(("failed", repr(error)))


def make_replica(base: Path, name: str, bucket: int, uploads: WorkerUploads) -> Replica:
    options = {"root": str(base / name), "storage_options": {"implementation": "chaos_job.ChaosStore"}}
    context = BackendContext(
        name, options, "counts", "home", bucket, uploads.pool(name), base, OPTIONS.commit_timeout_ms / 1000
    )
    backend = FilesBackend()
    return Replica(name, backend.backup_manager(context), backend.restore_manager(context))


def clean_up_bucket(replicas: list[Replica], pointer: Pointer, bucket: Bucket) -> None:
    for replica in replicas:
        status = pointer.replication.get(replica.name)
        if status is None or not is_complete(status) or status.through is None:
            continue
        # A torn file that no pointer refers to stops the clean-up; an operator has to look at it.
        with contextlib.suppress(StateError):
            replica.backup.clean_up(CleanUp(pointer, status.through, RETAINED, lambda: None)).result()


# -- the driver ------------------------------------------------------------------------------------


@dataclass
class Counts:
    """The numbers of events.

    Parameters
    ----------
    batches, kills, failures, disks_lost
        Number of batches that were committed, workers killed, attempts that failed, and local disks lost.
    """

    batches: int = 0
    kills: int = 0
    failures: int = 0
    disks_lost: int = 0


class Driver:
    """The part of Spark.

    Parameters
    ----------
    folder
        Folder for all files.
    seed
        Seed of the faults.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.numbers = random.Random(seed)
        self.counts = Counts()
        self.pointers = {
            bucket: Pointer("counts", bucket, BUCKETS, 0, -1, None, query_folder="home").encode()
            for bucket in range(BUCKETS)
        }
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def run(self, minutes: float) -> None:
        """Run for that many minutes of uncompressed time."""
        deadline_s = time.monotonic() + minutes * MINUTE_S
        while time.monotonic() < deadline_s:
            self.step()

    def step(self) -> None:
        """Run a batch; in a quarter of the calls, kill the worker during it."""
        self.batch(kills=self.numbers.random() < 0.25)

    def batch(self, kills: bool = False, changes: bool = True) -> None:
        """Run attempts at the next batch until one succeeds; a batch without changes is not counted."""
        while True:
            self._pipe.send((self.counts.batches, self.pointers, changes))
            # Most batches are short, so most kills are early.
            if kills and not self._pipe.poll(0.5 * self.numbers.random() ** 4):
                kills = False
                self._kill()
                continue
            try:
                outcome, answer = self._pipe.recv()
            except EOFError as error:
                raise AssertionError("the worker ended by itself") from error
            assert outcome != "wrong", answer
            if outcome == "failed":
                self.counts.failures += 1
                continue
            self.pointers = answer
            self.counts.batches += changes
            return

    def stop(self) -> None:
        """Kill the worker."""
        os.kill(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def _start(self) -> None:
        self._pipe, worker_end = self._context.Pipe()
        seed = self.numbers.getrandbits(32)
        self._process = self._context.Process(target=worker, args=(str(self.folder), seed, worker_end), daemon=True)
        self._process.start()
        worker_end.close()

    def _kill(self) -> None:
        self.stop()
        self.counts.kills += 1
        if self.counts.kills % 3 == 1:
            shutil.rmtree(self.folder / "local", ignore_errors=True)
            self.counts.disks_lost += 1
        self._start()

    def restore(self, names: tuple[str, ...]) -> Iterator[tuple[int, Model]]:
        """Yield each bucket's state, restored only from these stores on an empty disk, without inline deltas."""
        for bucket, data in self.pointers.items():
            pointer = replace(Pointer.decode(data), inline=())
            store = LocalStore.at(self.folder / f"fresh-{'-'.join(names)}" / str(bucket), SCHEMA)
            replicas = [
                replica
                for name in names
                for replica in sole_replica(
                    Folder(str(self.folder / name)).child("counts", "home", str(bucket)), self.folder, name
                )
            ]
            reader = Bucket(store, replicas, pointer, Writer("q", "r", 0, "h"), CommitContext(self.folder))
            yield bucket, reader.read(scan_model)
            store.close()
