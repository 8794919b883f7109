"""How fast a host restores, and how long what it lacks will take: pure functions over what its steps have read."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from arrow_schemas.standby import MemberRecord, StandbyReplica

__all__ = ["Reading", "Readings", "RestoreRate", "recover_all_s", "recover_host_s", "recover_s", "restore_rate"]

# The figure moves with the last minute of reading, however long ago that was.
_BUSY_S_MAX = 60.0
_READINGS_MAX = 1_000


@dataclass(frozen=True)
class Reading:
    """A time in which a host has read checkpoint files of a bucket, and loaded them.

    Parameters
    ----------
    begun_s, ended_s
        When, by a clock that only goes forward.
    size_bytes, rows
        What was read.
    """

    begun_s: float
    ended_s: float
    size_bytes: int
    rows: int


@dataclass(frozen=True)
class RestoreRate:
    """What a host restores in a second, while it does.

    Parameters
    ----------
    bytes_per_s, rows_per_s
        Of checkpoint files, all threads together; None where that was not measured.
    """

    bytes_per_s: float | None = None
    rows_per_s: float | None = None


def restore_rate(ended: Collection[Reading], under_way: Collection[Reading] = ()) -> RestoreRate:
    """The rate over some readings. Time in which nothing was read does not count, and time of several counts once."""
    brought = [it for it in (*ended, *under_way) if it.size_bytes]
    return RestoreRate(
        _over(sum(it.size_bytes for it in brought), brought),
        _over(sum(it.rows for it in ended), [it for it in ended if it.size_bytes]),
    )


def _over(amount: int, readings: Iterable[Reading]) -> float | None:
    busy_s = _busy_s(readings)
    return amount / busy_s if busy_s > 0 else None


def _busy_s(readings: Iterable[Reading]) -> float:
    """For how long at least one of them went on."""
    busy_s, until_s = 0.0, float("-inf")
    for it in sorted(readings, key=lambda it: (it.begun_s, it.ended_s)):
        busy_s += max(0.0, it.ended_s - max(it.begun_s, until_s))
        until_s = max(until_s, it.ended_s)
    return busy_s


class Readings:
    """The last readings of a host: those of the last minute in which it has read."""

    def __init__(self) -> None:
        self._ended: deque[Reading] = deque(maxlen=_READINGS_MAX)
        self._sum_s = 0.0

    def add(self, reading: Reading) -> None:
        """Note one that has ended; the oldest ones are let go where the others make up a minute."""
        if len(self._ended) == self._ended.maxlen:
            self._let_go()
        self._ended.append(reading)
        self._sum_s += reading.ended_s - reading.begun_s
        while len(self._ended) > 1 and self._sum_s - (self._ended[0].ended_s - self._ended[0].begun_s) >= _BUSY_S_MAX:
            self._let_go()

    def rate(self, under_way: Collection[Reading] = ()) -> RestoreRate:
        """The rate over these and those under way."""
        return restore_rate(self._ended, under_way)

    def _let_go(self) -> None:
        gone = self._ended.popleft()
        self._sum_s -= gone.ended_s - gone.begun_s


def recover_s(replica: StandbyReplica, bytes_per_s: float | None) -> float | None:
    """How long a host needs until a replica has caught up, if it restores nothing else."""
    if not replica.lag_versions:
        return 0.0 if replica.in_sync else None
    return replica.lag_bytes / bytes_per_s if bytes_per_s else None


def recover_host_s(replicas: Iterable[StandbyReplica], bytes_per_s: float | None) -> float | None:
    """How long a host needs until all of some replicas have caught up: they share its rate."""
    total_s = 0.0
    for replica in replicas:
        each_s = recover_s(replica, bytes_per_s)
        if each_s is None:
            return None
        total_s += each_s
    return total_s


def recover_all_s(held: Iterable[tuple[MemberRecord, Iterable[StandbyReplica]]]) -> float | None:
    """How long until the last replica has caught up, as hosts restore side by side."""
    longest_s = 0.0
    for record, replicas in held:
        host_s = recover_host_s(replicas, record.restore_bytes_per_s)
        if host_s is None:
            return None
        longest_s = max(longest_s, host_s)
    return longest_s
