"""Half an hour of faults in a minute: a worker process that commits to two stores that fail, and a driver that kills it.

Everything is real but Spark: processes, LMDB, files, uploads in threads. The driver plays Spark: it hands the worker the
pointers of the last committed batch, and keeps what the worker returns, all of it or nothing. Time is compressed: what would
take a minute takes a minute times `SCALE`.
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
# As the defaults are, an upload may take a minute while commits go on, and ten at all.
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
        fate = random.random()
        if fate < 0.08:
            raise ConnectionRefusedError("no connection")
        if fate < 0.12:
            _write(path, value[: random.randrange(len(value))])
            raise BrokenPipeError("the connection broke in the middle")
        if fate < 0.15:
            # And says nothing of it.
            _write(path, value[: random.randrange(len(value))])
            return
        if fate < 0.30:
            time.sleep(random.random() * MINUTE_S)
        elif fate < 0.31:
            time.sleep(5 * MINUTE_S)
        _write(path, value)
        if random.random() < 0.03:
            raise TimeoutError("no answer, though it was done")


def _write(path: Path, value: bytes) -> None:
    hidden = path.parent.parent / f"put-{os.getpid()}-{random.getrandbits(64)}"
    hidden.write_bytes(value)
    hidden.rename(path)


def changes_of(batch: int, bucket: int) -> dict[int, int | None]:
    """What a batch does to a bucket: always the same."""
    numbers = random.Random(f"{batch} {bucket}")
    keys = numbers.sample(range(KEYS), numbers.randrange(1, 8))
    return {key: None if numbers.random() < 0.15 else batch for key in keys}


def expected(batches: int, bucket: int) -> Model:
    """The batch computation: everything from the beginning, without a store."""
    model: Model = {}
    for batch in range(batches):
        for key, value in changes_of(batch, bucket).items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
    return model


def _rows(batch: int, bucket: int, scratch: Path) -> SpillBuffer:
    changes = changes_of(batch, bucket)
    keys, values = list(changes), list(changes.values())
    gone = [value is None for value in values]
    # Now and then a delta that is too large to go inline.
    pad = random.Random(batch * BUCKETS + bucket).randbytes(30_000) if (batch + bucket) % 11 == 0 else b""
    columns = [
        pa.array([key * 0x9E3779B97F4A7C15 % 2**64 for key in keys], pa.uint64()),
        pa.array(keys, pa.int64()),
        pa.array(values, pa.int64()),
        pa.array([None if it else pad for it in gone], pa.binary()),
        pa.nulls(len(keys), pa.int64()),
        pa.array([not it for it in gone]),
        pa.array(gone),
    ]
    rows = SpillBuffer(scratch, 1 << 20)
    rows.append(sort_by_hash(pa.RecordBatch.from_arrays(columns, schema=SCHEMA.arrow)))
    return rows


def _scanned(view: View) -> Model:
    return {
        key: value
        for batch in view.scan()
        for key, value in zip(batch.column(1).to_pylist(), batch.column(2).to_pylist(), strict=True)
    }


# -- the worker ------------------------------------------------------------------------------------


def worker(folder: str, seed: int, pipe: Connection) -> None:
    """Serves batches until it is killed."""
    random.seed(seed)
    logging.getLogger("spark_state_ext").setLevel(logging.CRITICAL)
    base = Path(folder)
    uploads, background = WorkerUploads(), Background()
    stores = {bucket: LocalStore.at(base / "local" / str(bucket), SCHEMA) for bucket in range(BUCKETS)}
    while True:
        batch, pointers, changes = pipe.recv()
        try:
            made = {}
            left: list[Upload] = []
            for bucket, data in pointers.items():
                pointer = Pointer.decode(data)
                replicas = [_replica(base, name, bucket, uploads) for name in STORES]
                one = Bucket(
                    stores[bucket],
                    replicas,
                    pointer,
                    Writer("query", "run", batch, "host"),
                    CommitContext(base, options=OPTIONS, batches_retained=RETAINED, uploads=uploads, runner=background),
                )
                if one.read(_scanned) != expected(batch, bucket):
                    pipe.send(("wrong", f"batch {batch} of bucket {bucket} reads another state"))
                    return
                rows = _rows(batch, bucket, base) if changes else SpillBuffer(base, 1 << 20)
                # All but the last call leave waiting to it.
                new = one.commit(rows, may_defer=bucket < BUCKETS - 1)
                left += new.deferred
                made[bucket] = replace(new.pointer, batch=batch).encode()
                if batch % 7 == bucket % 7:
                    _clean_up(replicas, pointer, one)
            one.committer.await_all(left)
            pipe.send(("done", made))
        except StateError as error:
            pipe.send(("failed", repr(error)))


def _replica(base: Path, name: str, bucket: int, uploads: WorkerUploads) -> Replica:
    options = {"root": str(base / name), "storage_options": {"implementation": "chaos_job.ChaosStore"}}
    context = BackendContext(
        name, options, "counts", "home", bucket, uploads.pool(name), base, OPTIONS.commit_timeout_ms / 1000
    )
    backend = FilesBackend()
    return Replica(name, backend.backup_manager(context), backend.restore_manager(context))


def _clean_up(replicas: list[Replica], pointer: Pointer, bucket: Bucket) -> None:
    for replica in replicas:
        status = pointer.replication.get(replica.name)
        if status is None or not is_complete(status) or status.through is None:
            continue
        # A torn file that nobody owns stops it; that is for a person to see.
        with contextlib.suppress(StateError):
            replica.backup.clean_up(CleanUp(pointer, status.through, RETAINED, lambda: None)).result()


# -- the driver ------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What happened.

    Parameters
    ----------
    batches, kills, failures, disks_lost
        How many batches were committed, workers killed, attempts failed and local disks lost.
    """

    batches: int = 0
    kills: int = 0
    failures: int = 0
    disks_lost: int = 0


class Driver:
    """Spark's part.

    Parameters
    ----------
    folder
        For everything.
    seed
        Of what goes wrong.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.numbers = random.Random(seed)
        self.seen = Seen()
        self.pointers = {
            bucket: Pointer("counts", bucket, BUCKETS, 0, -1, None, query_folder="home").encode()
            for bucket in range(BUCKETS)
        }
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def run(self, minutes: float) -> None:
        """So many minutes of the world outside."""
        ends_s = time.monotonic() + minutes * MINUTE_S
        while time.monotonic() < ends_s:
            self.step()

    def step(self) -> None:
        """A batch, and now and then a kill."""
        self.batch(kills=self.numbers.random() < 0.25)

    def batch(self, kills: bool = False, changes: bool = True) -> None:
        """The next batch, attempt after attempt; one without changes does not count."""
        while True:
            self._pipe.send((self.seen.batches, self.pointers, changes))
            # Most batches are short: so most kills come early.
            if kills and not self._pipe.poll(0.5 * self.numbers.random() ** 4):
                kills = False
                self._kill()
                continue
            try:
                told, what = self._pipe.recv()
            except EOFError as error:
                raise AssertionError("the worker ended by itself") from error
            assert told != "wrong", what
            if told == "failed":
                self.seen.failures += 1
                continue
            self.pointers = what
            self.seen.batches += changes
            return

    def stop(self) -> None:
        """Kill what runs."""
        os.kill(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        seed = self.numbers.getrandbits(32)
        self._process = self._context.Process(target=worker, args=(str(self.folder), seed, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def _kill(self) -> None:
        self.stop()
        self.seen.kills += 1
        if self.seen.kills % 3 == 1:
            shutil.rmtree(self.folder / "local", ignore_errors=True)
            self.seen.disks_lost += 1
        self._start()

    def restored(self, names: tuple[str, ...]) -> Iterator[tuple[int, Model]]:
        """Each bucket's state from some of the stores alone, on an empty disk, with no help from Spark's state."""
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
            yield bucket, reader.read(_scanned)
            store.close()
