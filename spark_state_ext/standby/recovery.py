"""How fast a host restores, and how long it will take to catch up: pure functions over what its steps have read."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from arrow_schemas.standby import MemberRecord, StandbyReplica

__all__ = [
    "Reading",
    "Readings",
    "RestoreRate",
    "recover_all_s",
    "estimate_host_recovery_s",
    "estimate_recovery_s",
    "restore_rate",
]

# The rate is that of the last minute of reading, however long ago that was.
_BUSY_S_MAX = 60.0
_READINGS_MAX = 1_000


@dataclass(frozen=True)
class Reading:
    """A period in which a host has read and loaded checkpoint files of a bucket.

    Parameters
    ----------
    begun_s, ended_s
        Start and end, by a monotonic clock.
    size_bytes, rows
        Bytes and rows that were read.
    """

    begun_s: float
    ended_s: float
    size_bytes: int
    rows: int


@dataclass(frozen=True)
class RestoreRate:
    """How much a host restores per second while it restores.

    Parameters
    ----------
    bytes_per_s, rows_per_s
        Of checkpoint files, all threads together; None if not measured.
    """

    bytes_per_s: float | None = None
    rows_per_s: float | None = None


def restore_rate(ended: Collection[Reading], under_way: Collection[Reading] = ()) -> RestoreRate:
    """Return the rate over some readings. Idle time is left out, and time in which several overlap is counted once."""
    with_bytes = [reading for reading in (*ended, *under_way) if reading.size_bytes]
    return RestoreRate(
        _divide_by_busy_time(sum(reading.size_bytes for reading in with_bytes), with_bytes),
        _divide_by_busy_time(
            sum(reading.rows for reading in ended), [reading for reading in ended if reading.size_bytes]
        ),
    )


def _divide_by_busy_time(amount: int, readings: Iterable[Reading]) -> float | None:
    busy_s = _busy_s(readings)
    return amount / busy_s if busy_s > 0 else None


def _busy_s(readings: Iterable[Reading]) -> float:
    """Return for how many seconds at least one of the readings was going on."""
    busy_s, until_s = 0.0, float("-inf")
    for reading in sorted(readings, key=lambda reading: (reading.begun_s, reading.ended_s)):
        busy_s += max(0.0, reading.ended_s - max(reading.begun_s, until_s))
        until_s = max(until_s, reading.ended_s)
    return busy_s


class Readings:
    """The last readings of a host, about one minute of reading."""

    def __init__(self) -> None:
        self._ended: deque[Reading] = deque(maxlen=_READINGS_MAX)
        self._sum_s = 0.0

    def add(self, reading: Reading) -> None:
        """Add a reading that has ended, and drop the oldest ones that are not needed for a minute of reading."""
        if len(self._ended) == self._ended.maxlen:
            self._drop_oldest()
        self._ended.append(reading)
        self._sum_s += reading.ended_s - reading.begun_s
        while len(self._ended) > 1 and self._sum_s - (self._ended[0].ended_s - self._ended[0].begun_s) >= _BUSY_S_MAX:
            self._drop_oldest()

    def rate(self, under_way: Collection[Reading] = ()) -> RestoreRate:
        """Return the rate over the kept readings and running ones."""
        return restore_rate(self._ended, under_way)

    def _drop_oldest(self) -> None:
        oldest = self._ended.popleft()
        self._sum_s -= oldest.ended_s - oldest.begun_s


def estimate_recovery_s(replica: StandbyReplica, bytes_per_s: float | None) -> float | None:
    """Return estimated seconds until a replica has caught up, if the host restores nothing else; None if unknown."""
    if not replica.lag_versions:
        return 0.0 if replica.in_sync else None
    return replica.lag_bytes / bytes_per_s if bytes_per_s else None


def estimate_host_recovery_s(replicas: Iterable[StandbyReplica], bytes_per_s: float | None) -> float | None:
    """Return estimated seconds until all of a host's replicas have caught up, which share its rate; None if unknown."""
    total_s = 0.0
    for replica in replicas:
        each_s = estimate_recovery_s(replica, bytes_per_s)
        if each_s is None:
            return None
        total_s += each_s
    return total_s


def recover_all_s(held: Iterable[tuple[MemberRecord, Iterable[StandbyReplica]]]) -> float | None:
    """Return estimated seconds until the last host has caught up, as hosts restore in parallel; None if unknown."""
    longest_s = 0.0
    for record, replicas in held:
        host_s = estimate_host_recovery_s(replicas, record.restore_bytes_per_s)
        if host_s is None:
            return None
        longest_s = max(longest_s, host_s)
    return longest_s
