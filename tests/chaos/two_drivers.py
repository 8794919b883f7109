"""Two drivers on one query's state, as after a copy of a Spark checkpoint: exactly one of them ever commits.

Everything but Spark is real: processes, clocks, LMDB, files, servers of object stores. Each driver commits batch after
batch from its own copy of the pointer and cleans up; sometimes it is idle for longer than the lease, which its keeper
renews. The refused driver is planned and started again each time.

``PYTHONPATH=.:tests/core python tests/chaos/two_drivers.py --seconds 600`` runs it on every kind of store of the suite.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from core_support import WRITER, buffer_of, clean_up_at, first_pointer

from arrow_schemas import Pointer
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.errors import LiveRunError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.retention import clean_up
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_record import RunIdentity
from spark_state_ext.spark.client.lease_keeper import KeptLeases
from spark_state_ext.store import LocalStore
from spark_state_ext.testing.model import KEYS, SCHEMA, Model, Row, apply_changes, scan
from tests.helpers.object_store import azure_server, azurite, s3_server
from tests.helpers.waiting import WAIT_S

QUERY, RETAINED = "query", 2
_STORES = ("s3", "azure", "path", "smb", "webhdfs")


@dataclass(frozen=True)
class DriverResult:
    """The result of a driver.

    Parameters
    ----------
    commits, refusals, deleted
        Number of its commits, of its refusals, and of the files that its clean-ups deleted.
    pointer, model
        The pointer that it committed last, and the state at that pointer.
    """

    commits: int
    refusals: int
    deleted: int
    pointer: Pointer
    model: Model


@dataclass(frozen=True)
class Start:
    """The arguments of both drivers."""

    root: str
    options: Mapping[str, Any]
    pointer: Pointer
    model: Model
    lease_ms: int
    seconds: float
    at_least: int


def open_query_folder(start: Start) -> Folder:
    return Folder(start.root, start.options).child("counts", QUERY)


def drive(name: str, start: Start, results: Connection, both: Barrier) -> None:
    """Run a driver with its executor and its keeper; the query ends when both drivers have had their time."""
    query_folder, application = open_query_folder(start), f"app of {name}"
    draw, ended = random.Random(name), threading.Event()
    kept = KeptLeases(Folder(start.root, start.options).child("counts"), application, start.lease_ms)

    def keep() -> None:
        while not ended.wait(start.lease_ms / 3000):
            kept.poll([QUERY], time.monotonic(), int(time.time() * 1000))

    threading.Thread(target=keep, daemon=True).start()
    pointer, model, commits, refusals, deleted = start.pointer, dict(start.model), 0, 0, 0
    deadline_s = time.monotonic() + start.seconds
    with tempfile.TemporaryDirectory() as scratch:
        store, lease = LocalStore.at(Path(scratch) / "store", SCHEMA), None
        while time.monotonic() < deadline_s or not (refusals or commits >= start.at_least):
            # A driver that starts again has a new plan.
            lease = lease or Lease(
                query_folder, RunIdentity(application, uuid.uuid4().hex, QUERY, name), start.lease_ms
            )
            try:
                lease.hold()
                changes = {KEYS[commits % 9]: Row(commits, name)}
                bucket = Bucket(
                    store,
                    sole_replica(query_folder.child("3"), Path(scratch)),
                    pointer,
                    WRITER,
                    CommitContext(Path(scratch), batches_retained=RETAINED),
                )
                new_pointer = bucket.commit(buffer_of(changes, Path(scratch))).pointer
                lease.hold()
                pointer, model, commits = new_pointer, apply_changes(model, changes), commits + 1
                if commits % 10 == 0:
                    request = clean_up_at(pointer, RETAINED, lease.check)
                    deleted += clean_up(query_folder.child("3"), request, Path(scratch), time.time() + 700)
                if not start.seconds:
                    time.sleep(0.05)  # further commits would prove nothing new
                elif draw.random() < 0.01:
                    time.sleep(1.2 * start.lease_ms / 1000)
            except LiveRunError:
                refusals, lease = refusals + 1, None
        both.wait(WAIT_S)
        ended.set()
        store.close()
    results.send(DriverResult(commits, refusals, deleted, pointer, model))


def run(root: str, options: Mapping[str, Any], seconds: float, lease_ms: int, at_least: int = 1) -> dict[str, int]:
    """Run both drivers for that long and until one has committed that often and the other was refused.

    Returns
    -------
    dict
        Numbers of commits, refusals and deleted files.

    Raises
    ------
    AssertionError
        If both committed, or the committed state cannot be restored.
    """
    with tempfile.TemporaryDirectory() as scratch:
        start = Start(root, options, first_pointer(), {}, lease_ms, seconds, at_least)
        query_folder, pointer, model = open_query_folder(start), start.pointer, start.model
        with contextlib.closing(LocalStore.at(Path(scratch) / "common", SCHEMA)) as store:
            for at in range(5):
                changes = {KEYS[at]: Row(at, "before")}
                bucket = Bucket(
                    store,
                    sole_replica(query_folder.child("3"), Path(scratch)),
                    pointer,
                    WRITER,
                    CommitContext(Path(scratch), batches_retained=RETAINED),
                )
                pointer, model = bucket.commit(buffer_of(changes, Path(scratch))).pointer, apply_changes(model, changes)
        start = Start(root, options, pointer, model, lease_ms, seconds, at_least)
        context = multiprocessing.get_context("spawn")
        both = context.Barrier(2)
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        drivers = [
            context.Process(target=drive, args=(name, start, pipe[1], both))
            for name, pipe in zip(("one", "two"), pipes, strict=True)
        ]
        for driver in drivers:
            driver.start()
        for _, child in pipes:
            # Close this end, so that the failure of a driver ends `recv`.
            child.close()
        results: list[DriverResult] = [pipe[0].recv() for pipe in pipes]
        for driver in drivers:
            driver.join()
        committed = [result for result in results if result.commits]
        assert len(committed) == 1, f"both committed: {[result.commits for result in results]}"
        (winner,) = committed
        with contextlib.closing(LocalStore.at(Path(scratch) / "fresh", SCHEMA)) as fresh:
            replicas = sole_replica(query_folder.child("3"), Path(scratch))
            state = Bucket(
                fresh, replicas, winner.pointer, WRITER, CommitContext(Path(scratch), batches_retained=RETAINED)
            ).read(scan)
        assert state == winner.model
    return {
        "commits": winner.commits,
        "refusals": sum(result.refusals for result in results),
        "files_deleted": sum(result.deleted for result in results),
    }


def main() -> None:
    """Run both drivers on every kind of store, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds for each kind of store")
    parser.add_argument("--lease-ms", type=int, default=5_000)
    parser.add_argument("--stores", nargs="+", choices=_STORES, default=_STORES, help="kinds of stores")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, tuple[str, dict[str, Any]]] = {
            "path": (f"{folder}/path", {}),
            "smb": (f"{folder}/smb", {"implementation": "shares.Share"}),
            "webhdfs": (f"{folder}/webhdfs", {"implementation": "shares.ByNameNode"}),
        }
        if "s3" in arguments.stores:
            with s3_server() as s3:
                print_counts("s3", run(s3.root("two"), s3.options, arguments.seconds, arguments.lease_ms))
        if "azure" in arguments.stores and azurite() is not None:
            with azure_server(Path(folder) / "azurite") as azure:
                print_counts("azure", run(azure.root("two"), azure.options, arguments.seconds, arguments.lease_ms))
        for kind, (root, options) in stores.items():
            if kind in arguments.stores:
                print_counts(kind, run(root, options, arguments.seconds, arguments.lease_ms))


def print_counts(store: str, counts: Mapping[str, int]) -> None:
    print(json.dumps({"store": store, **counts}), flush=True)


if __name__ == "__main__":
    main()
