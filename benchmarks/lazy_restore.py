"""Measure the time from an empty disk to the first lookup when the bucket's snapshot is in a remote store.

The snapshot is restored lazily, restored lazily from a peer, or fetched whole. A folder in memory stands in for the
remote store: each request waits, and all requests together get a limited number of bytes per second. The peer answers
over Arrow Flight in this process, and each measurement finds out again which peers have the snapshot.

Lazy restore gains nothing if rows are narrow, because then almost every 16 KiB piece of the snapshot has something
that is wanted, and everything is fetched. It gains if rows are wide or if there are many rows for each wanted key. Each
row has another timeout, so a search for rows that have timed out reads the timeouts of all rows.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader, Writer, file_name, new_checkpoint_id
from arrow_schemas.peers import PeerSecret
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica
from benchmarks.options import add_seed
from benchmarks.report import BenchmarkError, Report
from benchmarks.throttled import Throttled
from spark_state_ext.backends.files import sole_replica
from spark_state_ext.commit.context import CommitContext
from spark_state_ext.engine.bucket import Bucket
from spark_state_ext.files.checkpoint import write_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.sealed_body import read_announced_index
from spark_state_ext.peers.discovery import ADDRESS_KIND
from spark_state_ext.peers.piece_requests import Peers
from spark_state_ext.peers.served_snapshots import SnapshotFile
from spark_state_ext.peers.server import PeerServer
from spark_state_ext.peers.settings import PeerSettings
from spark_state_ext.standby.members import Membership
from spark_state_ext.store import LocalStore
from spark_state_ext.store.lazy_file import LazyOptions
from spark_state_ext.version import __version__
from spark_state_ext.worker.background import Work

__all__ = ["add_arguments", "run"]

WIDE_AT_MOST = 0.5
_PIECE_ROWS = 1 << 16
_LOOKED_UP = 1_000
_SCHEMA = RowSchema((pa.field("key", pa.int64()),), (pa.field("n", pa.int64()), pa.field("text", pa.string())))
_WRITER = Writer("query", "run", 0, "benchmark")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options to a parser."""
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="number of keys")
    parser.add_argument(
        "--text-bytes", type=int, nargs="+", default=[0, 100, 500], metavar="N", help="bytes of text in each row"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="how often each way to restore is measured")
    parser.add_argument(
        "--latency-ms", type=float, default=30.0, metavar="MS", help="how long each request to the store waits"
    )
    parser.add_argument("--megabytes-per-s", type=float, default=50.0, metavar="MB", help="bandwidth of the store")
    add_seed(parser, "keys")


def run(options: argparse.Namespace, work: Path) -> Report:
    """Run the benchmark.

    Raises
    ------
    BenchmarkError
        If an option is invalid, a row that was read is not the one that was written, or the peer gave nothing.
    """
    if options.rows < _LOOKED_UP or options.repeats < 1 or min(options.text_bytes) < 0:
        raise BenchmarkError(f"--rows must be at least {_LOOKED_UP}, --repeats at least 1, and --text-bytes at least 0")
    names = ("rows", "text_bytes", "repeats", "latency_ms", "megabytes_per_s", "seed")
    report = Report("lazy_restore", {name: getattr(options, name) for name in names})
    for text_bytes in options.text_bytes:
        label = f"{options.rows:,} keys, {text_bytes} bytes of text each"
        print(f"{label} …", file=sys.stderr, flush=True)
        measurement = _Measurement(report, label, options, text_bytes, work)
        lazily, whole = measurement.measure_first_lookups(lazily=True), measurement.measure_first_lookups(lazily=False)
        ratio = report.ratio(f"{label}: lazily / whole", lazily / whole)
        lazily_due, whole_due = (
            measurement.measure_first_lookups(lazily=is_lazy, due=True) for is_lazy in (True, False)
        )
        due_ratio = report.ratio(f"{label}, and what is due: lazily / whole", lazily_due / whole_due)
        with measurement.serve_from_peer() as peers:
            report.ratio(
                f"{label}: from a peer / lazily", measurement.measure_first_lookups(lazily=True, peers=peers) / lazily
            )
        if text_bytes == max(options.text_bytes):
            report.bar(f"{label}: lazily, over whole", ratio, "at most", WIDE_AT_MOST, "times")
            report.bar(f"{label}, and what is due: lazily, over whole", due_ratio, "at most", WIDE_AT_MOST, "times")
    return report


class _IdleRunner:
    """A runner that runs nothing, so that nothing is fetched in the background."""

    def submit(self, name: str, work: Work) -> bool:
        return True

    def busy(self, name: str) -> bool:
        return False


class _Root(Throttled):
    """The root with the records of members. Its requests wait like the store's, but its bandwidth is unlimited."""

    def child(self, *names: str) -> Folder:
        return _Root("/".join((self.root, *names)), self._latency_s, self._bytes_per_s)

    def names(self) -> list[str]:
        self._asked(0)
        return super().names()


@dataclass(frozen=True)
class _SingleSnapshot:
    """The snapshots of a peer: it has only one, which it gives whatever is asked for."""

    path: Path
    body_bytes: int

    def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> SnapshotFile | None:
        return SnapshotFile(self.path, self.body_bytes)


class _Measurement:
    """The measurements of one snapshot.

    Parameters
    ----------
    report, label
        The report to which times are added, and the beginning of their names.
    options
        The command line's options.
    text_bytes
        Bytes of text in each row.
    work
        Folder for scratch files.
    """

    def __init__(self, report: Report, label: str, options: argparse.Namespace, text_bytes: int, work: Path) -> None:
        self._report, self._label, self._work, self._repeats = report, label, work, options.repeats
        rng = np.random.default_rng(options.seed)
        self._hashes = np.sort(rng.integers(0, 2**64, options.rows, dtype=np.uint64))
        self._wanted = rng.choice(options.rows, _LOOKED_UP, replace=False)
        self._timeouts = rng.permutation(options.rows)
        self._folder = Throttled(
            f"memory://lazy-restore-{text_bytes}/0", options.latency_ms / 1000, options.megabytes_per_s * 1e6
        )
        ref, parent = CheckpointRef(10, new_checkpoint_id()), CheckpointRef(9, new_checkpoint_id())
        header = LineageHeader(SNAPSHOT, "restored", 0, ref, parent, (parent,), 0, _WRITER, __version__)
        path = work / "made"
        with path.open("wb") as file:
            write_checkpoint(file, header, _SCHEMA, self._make_batches(text_bytes))
        size = path.stat().st_size
        self._folder.put_file(file_name(ref, SNAPSHOT), path)
        self._snapshot = path
        report.details[f"{label}: bytes"] = size
        lineage = (LineageEntry(ref, size, 9),)
        self._pointer = Pointer(
            "restored", 0, 1, 0, 9, None, lineage=lineage, parent=parent, query_folder="query", rows=options.rows
        )
        self._root = _Root(f"memory://lazy-restore-root-{text_bytes}", self._folder._latency_s)

    def _make_batches(self, text_bytes: int) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self._hashes), _PIECE_ROWS):
            hashes = self._hashes[start : start + _PIECE_ROWS]
            n = len(hashes)
            text = pa.array(["x" * text_bytes]).take(pa.array(np.zeros(n, dtype=np.int32)))
            columns = [
                pa.array(hashes),
                pa.array(_make_keys(hashes)),
                pa.array(np.arange(start, start + n)),
                text if text_bytes else pa.nulls(n, pa.string()),
                pa.array(self._timeouts[start : start + n]),
                pa.array(np.ones(n, dtype=np.bool_)),
                pa.array(np.zeros(n, dtype=np.bool_)),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA.arrow)

    @contextmanager
    def serve_from_peer(self) -> Iterator[Callable[[], Peers]]:
        """Serve the snapshot as a peer; yield a function that creates a client which finds the peer."""
        secret = PeerSecret.of("the secret of a benchmark")
        data = self._snapshot.read_bytes()
        _, index = read_announced_index(lambda start, end: data[start:end], len(data), str(self._snapshot))
        assert index is not None, "snapshots of this release have an index"
        server = PeerServer("127.0.0.1", 0, secret, _SingleSnapshot(self._snapshot, index.body_bytes))
        key = BucketKey("restored", "query", 0)
        address = {ADDRESS_KIND: f"grpc://127.0.0.1:{server.port}"}
        Membership(self._root, "peer", 10.0).heartbeat(
            MemberRecord("peer", replicas=(StandbyReplica(key, 10),), addresses=address)
        )
        try:
            yield lambda: Peers(self._root, PeerSettings(secret, answer_s_max=60.0), "benchmark")
        finally:
            server.close()

    def measure_first_lookups(
        self, *, lazily: bool, peers: Callable[[], Peers] | None = None, due: bool = False
    ) -> float:
        """Return the median seconds from an empty disk to the first lookup; with `due`, also to a timeout search."""
        method = "from a peer" if peers is not None else "lazily" if lazily else "whole"
        method += ", and what is due" if due else ""
        times: list[float] = []
        hashes = self._hashes[self._wanted]
        for _ in range(self._repeats):
            self._folder.requests = self._folder.fetched_bytes = 0
            client = None if peers is None else peers()
            lazy = LazyOptions(1, 1 << 40, _IdleRunner(), client) if lazily else None
            context = CommitContext(self._work, lazy=lazy)
            started_s = time.perf_counter()
            store = LocalStore.at(self._work / "local", _SCHEMA)
            bucket = Bucket(store, sole_replica(self._folder, self._work), self._pointer, _WRITER, context)
            matches = bucket.read(lambda view: view.lookup(hashes, [pa.array(_make_keys(hashes))]))
            expired = bucket.read(lambda view: view.expired(_LOOKED_UP)) if due else None
            times.append(time.perf_counter() - started_s)
            if expired is not None:
                numbers = np.sort(expired.column("state.n").to_numpy())
                is_right = np.array_equal(numbers, np.flatnonzero(self._timeouts < _LOOKED_UP))
                self._report.check(
                    f"{self._label}: the rows that are due, {method}, are those that were written", is_right
                )
            values = matches.rows.column("state.n").to_numpy()[matches.index]
            is_same = bool((matches.index >= 0).all() and (values == self._wanted).all())
            self._report.check(f"{self._label}: {_LOOKED_UP:,} values, {method}, are those that were written", is_same)
            store.close()
            if client is not None:
                self._report.check(f"{self._label}: the peer gives", client.given_bytes > 0)
                client.close()
            shutil.rmtree(self._work / "local")
        self._report.details[f"{self._label}: bytes fetched, {method}"] = self._folder.fetched_bytes
        self._report.details[f"{self._label}: requests, {method}"] = self._folder.requests
        return self._report.timing(f"{self._label}: {method}", times)


def _make_keys(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    keys: npt.NDArray[np.int64] = (hashes * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    return keys
