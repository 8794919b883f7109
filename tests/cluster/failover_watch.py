"""What standby services tell of failovers in their metrics, looked at again and again; and what they should tell."""

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

__all__ = ["Move", "Watch", "by_outcome", "moves_of", "told_in"]

_PREFIX = "spark_state_ext_standby_"
_LINE = re.compile(rf"{_PREFIX}(takeovers|members_lost)_total\{{(.*)\}} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MOVED = re.compile(r"bucket (\d+) of \S+ moved from (\S+) to (\S+): (\w+)")
_EVERY_S, _ANSWER_S_MAX = 0.3, 2.0

# Takeovers by outcome and whether the host before had failed; members lost by role.
Counts = Counter[tuple[str, ...]]


@dataclass(frozen=True, order=True)
class Move:
    """A bucket that another host worked on than in its batch before.

    Parameters
    ----------
    bucket, batch
        Which, and when.
    before, now
        The hosts.
    """

    bucket: int
    batch: int
    before: str
    now: str


def moves_of(folder: Path) -> list[Move]:
    """Moves, by where the tasks ran whose rows were emitted.

    Parameters
    ----------
    folder
        With a file for each batch: the host of each bucket.
    """
    found, last = [], dict[int, str]()
    for path in sorted(folder.glob("*.json")):
        for bucket, host in sorted((int(bucket), host) for bucket, host in json.loads(path.read_text()).items()):
            before = last.get(bucket, host)
            if before != host:
                found.append(Move(bucket, int(path.stem), before, host))
            last[bucket] = host
    return found


def counts_in(text: str) -> Counts:
    """What a service counts, from what it tells to Prometheus."""
    counts: Counts = Counter()
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is not None:
            labels = dict(_LABEL.findall(found[2]))
            kind = (labels["outcome"], labels["failed"]) if found[1] == "takeovers" else (labels["role"],)
            counts[(found[1], *kind)] += int(float(found[3]))
    return counts


class Watch:
    """Looks at the metrics of all services until it is closed.

    Parameters
    ----------
    ports
        By worker, where its service tells them.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = dict(ports)
        # By worker, what was told last.
        self._last: dict[str, Counts] = {worker: Counter() for worker in ports}
        # By worker, the sum of what its earlier services had counted: each begins at 0.
        self._ended: dict[str, Counts] = {worker: Counter() for worker in ports}
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._look, args=(worker,), daemon=True) for worker in ports]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def takeovers(self) -> Counter[tuple[str, str]]:
        """By outcome and whether the host before had failed, the sum over all hosts."""
        total: Counter[tuple[str, str]] = Counter()
        for worker in self._ports:
            for (name, *labels), n in self._counts(worker).items():
                if name == "takeovers":
                    total[labels[0], labels[1]] += n
        return total

    def lost(self, but: str) -> int:
        """How many services all hosts have seen to die, each counted by each; without what one host has seen."""
        return sum(
            n
            for worker in self._ports
            for (name, *_), n in self._counts(worker).items()
            if name == "members_lost" and worker != but
        )

    def _counts(self, worker: str) -> Counts:
        """The increase of a worker's counters over all of its services, as `increase` of Prometheus tells it."""
        return self._ended[worker] + self._last[worker]

    def _look(self, worker: str) -> None:
        url = f"http://127.0.0.1:{self._ports[worker]}/metrics"
        while not self._closed.wait(_EVERY_S):
            try:
                with urllib.request.urlopen(url, timeout=_ANSWER_S_MAX) as answer:
                    found = counts_in(answer.read().decode())
            except (OSError, urllib.error.URLError):
                continue  # it is dead, or stands still
            before = self._last[worker]
            if any(found[kind] < n for kind, n in before.items()):
                self._ended[worker] += before
            self._last[worker] = found


def told_in(log: Path) -> list[tuple[int, str, str, str]]:
    """Moves that a worker's services have counted, from their log: bucket, host before, host now, outcome."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [(int(it[1]), it[2], it[3], it[4]) for it in _MOVED.finditer(text)]


def by_outcome(
    told: Iterable[tuple[int, str, str, str]], moves: Iterable[Move], calls: pa.Table
) -> dict[str, dict[str, int]]:
    """By what services say: how many moves, and of these how many whose tasks fetched nothing from the store.

    Services do not say in which batch a bucket moved. So tasks are looked at only where a bucket moved between two
    hosts as often as services say.

    Parameters
    ----------
    told
        From `told_in`.
    moves
        From `moves_of`.
    calls
        The package's metrics of all hosts; of some that were killed the last ones are missing.
    """
    columns = ("batch", "bucket", "host", "restored_files")
    fetched = {tuple(it[:3]): it[3] for it in zip(*(calls.column(name).to_pylist() for name in columns), strict=True)}
    batches: dict[tuple[int, str, str], list[int]] = {}
    for move in sorted(moves, key=lambda it: it.batch):
        batches.setdefault((move.bucket, move.before, move.now), []).append(move.batch)
    outcomes: dict[tuple[int, str, str], list[str]] = {}
    found: dict[str, dict[str, int]] = {}
    for bucket, before, now, outcome in told:
        outcomes.setdefault((bucket, before, now), []).append(outcome)
        found.setdefault(outcome, {"moves": 0, "fetched_nothing": 0, "fetched": 0})["moves"] += 1
    for (bucket, before, now), its in outcomes.items():
        at = batches.get((bucket, before, now), [])
        for batch, outcome in zip(at, its, strict=True) if len(at) == len(its) else ():
            files = fetched.get((batch, bucket, now))
            if files is not None:
                found[outcome]["fetched" if files else "fetched_nothing"] += 1
    return dict(sorted(found.items()))
