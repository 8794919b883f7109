"""Two counts of failovers: from the metrics of standby services, and from the hosts that processed each bucket."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

__all__ = ["Move", "Watch", "count_by_outcome", "read_counted_moves", "read_moves"]

_PREFIX = "spark_state_ext_standby_"
_LINE = re.compile(rf"{_PREFIX}(takeovers|members_lost)_total\{{(.*)\}} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MOVED = re.compile(r"bucket (\d+) of \S+ moved from (\S+) to (\S+): (\w+)")
_EVERY_S, _ANSWER_S_MAX = 0.3, 2.0

# Takeovers by outcome and by whether the previous host had failed; members lost by role.
Counts = Counter[tuple[str, ...]]


@dataclass(frozen=True, order=True)
class Move:
    """A bucket that another host processed than in its previous batch.

    Parameters
    ----------
    bucket, batch
        The bucket, and the first batch on the new host.
    before, now
        The previous and the new host.
    """

    bucket: int
    batch: int
    before: str
    now: str


def read_moves(folder: Path) -> list[Move]:
    """Return the moves of buckets between the hosts of tasks whose rows were emitted.

    Parameters
    ----------
    folder
        Folder with a file for each batch, which has the host of each bucket.
    """
    moves, last = [], dict[int, str]()
    for path in sorted(folder.glob("*.json")):
        for bucket, host in sorted((int(bucket), host) for bucket, host in json.loads(path.read_text()).items()):
            before = last.get(bucket, host)
            if before != host:
                moves.append(Move(bucket, int(path.stem), before, host))
            last[bucket] = host
    return moves


def parse_counts(text: str) -> Counts:
    """Return a service's counters from its metrics for Prometheus."""
    counts: Counts = Counter()
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None:
            labels = dict(_LABEL.findall(match[2]))
            kind = (labels["outcome"], labels["failed"]) if match[1] == "takeovers" else (labels["role"],)
            counts[(match[1], *kind)] += int(float(match[3]))
    return counts


class Watch:
    """Polls the metrics of all services until it is closed.

    Parameters
    ----------
    ports
        The port of each worker's metrics.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = dict(ports)
        # The last counters of each worker's current service.
        self._last: dict[str, Counts] = {worker: Counter() for worker in ports}
        # The sums of the counters of each worker's earlier services, because each service begins at 0.
        self._ended: dict[str, Counts] = {worker: Counter() for worker in ports}
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._poll, args=(worker,), daemon=True) for worker in ports]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop polling."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def takeovers(self) -> Counter[tuple[str, str]]:
        """Return the takeovers of all hosts by outcome and by whether the previous host had failed."""
        total: Counter[tuple[str, str]] = Counter()
        for worker in self._ports:
            for (name, *labels), n in self._counts(worker).items():
                if name == "takeovers":
                    total[labels[0], labels[1]] += n
        return total

    def lost(self, but: str) -> int:
        """Return the sum of the lost members that all hosts except one have counted."""
        return sum(
            n
            for worker in self._ports
            for (name, *_), n in self._counts(worker).items()
            if name == "members_lost" and worker != but
        )

    def _counts(self, worker: str) -> Counts:
        """Return the increase of a worker's counters over all of its services, as Prometheus's `increase` does."""
        return self._ended[worker] + self._last[worker]

    def _poll(self, worker: str) -> None:
        url = f"http://127.0.0.1:{self._ports[worker]}/metrics"
        while not self._closed.wait(_EVERY_S):
            try:
                with urllib.request.urlopen(url, timeout=_ANSWER_S_MAX) as answer:
                    counts = parse_counts(answer.read().decode())
            except (OSError, urllib.error.URLError):
                continue  # the service is dead or stopped
            before = self._last[worker]
            if any(counts[kind] < n for kind, n in before.items()):
                self._ended[worker] += before
            self._last[worker] = counts


def read_counted_moves(log: Path) -> list[tuple[int, str, str, str]]:
    """Return the moves that a worker's services have counted, from their log: bucket, old host, new host, outcome."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [(int(match[1]), match[2], match[3], match[4]) for match in _MOVED.finditer(text)]


def count_by_outcome(
    counted_moves: Iterable[tuple[int, str, str, str]], moves: Iterable[Move], calls: pa.Table
) -> dict[str, dict[str, int]]:
    """Return for each outcome the number of moves, and of those whose tasks fetched no files or some files from the store.

    Services do not log the batch of a move. So tasks are included only if a bucket moved between two hosts as often as the
    services have counted.

    Parameters
    ----------
    counted_moves
        Result of `read_counted_moves`.
    moves
        Result of `read_moves`.
    calls
        The package's metrics of all hosts; the last ones of killed hosts may be missing.
    """
    columns = ("batch", "bucket", "host", "restored_files")
    fetched = {
        tuple(call[:3]): call[3] for call in zip(*(calls.column(name).to_pylist() for name in columns), strict=True)
    }
    batches: dict[tuple[int, str, str], list[int]] = {}
    for move in sorted(moves, key=lambda move: move.batch):
        batches.setdefault((move.bucket, move.before, move.now), []).append(move.batch)
    outcomes: dict[tuple[int, str, str], list[str]] = {}
    counts: dict[str, dict[str, int]] = {}
    for bucket, before, now, outcome in counted_moves:
        outcomes.setdefault((bucket, before, now), []).append(outcome)
        counts.setdefault(outcome, {"moves": 0, "fetched_nothing": 0, "fetched": 0})["moves"] += 1
    for (bucket, before, now), move_outcomes in outcomes.items():
        move_batches = batches.get((bucket, before, now), [])
        for batch, outcome in (
            zip(move_batches, move_outcomes, strict=True) if len(move_batches) == len(move_outcomes) else ()
        ):
            files = fetched.get((batch, bucket, now))
            if files is not None:
                counts[outcome]["fetched" if files else "fetched_nothing"] += 1
    return dict(sorted(counts.items()))
