"""What standby services tell of failovers in their metrics, looked at again and again; and what they should tell."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Move", "Watch", "moves_of", "told_in"]

_PREFIX = "spark_state_ext_standby_"
_LINE = re.compile(rf"{_PREFIX}(takeovers|members_lost)_total\{{(.*)\}} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MOVED = re.compile(r"\('(?:[^']*)', '(?:[^']*)', (\d+)\)|bucket=(\d+)")
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
            counts[found[1], *kind] += int(float(found[3]))
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
        self.looks, self.shrunk = 0, list[str]()
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
        for counts in list(self._last.values()):
            for (name, *labels), n in counts.items():
                if name == "takeovers" and n:
                    total[labels[0], labels[1]] += n
        return total

    def lost(self, but: str) -> int:
        """How many services all hosts have seen to die, each counted by each; without what one host has seen."""
        return sum(
            n
            for worker, counts in list(self._last.items())
            for (name, *_), n in counts.items()
            if name == "members_lost" and worker != but
        )

    def _look(self, worker: str) -> None:
        url = f"http://127.0.0.1:{self._ports[worker]}/metrics"
        while not self._closed.wait(_EVERY_S):
            try:
                with urllib.request.urlopen(url, timeout=_ANSWER_S_MAX) as answer:
                    found = counts_in(answer.read().decode())
            except (OSError, urllib.error.URLError):
                continue  # it is dead, or stands still
            self.looks += 1
            before, self._last[worker] = self._last[worker], found
            # A service that has just come has not read yet what the one before had counted.
            fewer = [kind for kind, n in before.items() if found[kind] < n]
            if fewer:
                self.shrunk.append(f"{worker}: {fewer[0]} {before[fewer[0]]} -> {found[fewer[0]]}")


def told_in(log: Path) -> list[tuple[float, str]]:
    """Moves as a service's log tells them: when, and what."""
    if not log.exists():
        return []
    return [(0.0, line) for line in log.read_text(errors="replace").splitlines() if " moved from " in line]
