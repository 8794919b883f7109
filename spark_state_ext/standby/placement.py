"""The steps of an assignment, computed on matrices: a row for each bucket, a column for each host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from arrow_schemas.standby import BucketKey, MemberRecord

__all__ = ["Placing"]

_Bools = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]
_Weights = npt.NDArray[np.uint64]
# A host has at most 5/4 of the mean load, and takes from others if it has less than 4/5.
_MORE, _LESS = 5, 4


@dataclass
class _Placed:
    """All replicas as a list, and how many of each bucket's are in each rack."""

    rows: _Ints
    hosts: _Ints
    rack_counts: npt.NDArray[np.float32]


class Placing:
    """An assignment in the making. Equal records give equal assignments, in whatever order they come."""

    def __init__(self, buckets: Mapping[BucketKey, str | None], members: Iterable[MemberRecord], wanted: int) -> None:
        records = {member.host: member for member in members}
        self.keys = sorted(buckets)
        self.hosts = sorted(records)
        shape = len(self.keys), len(self.hosts)
        column = {host: at for at, host in enumerate(self.hosts)}
        row = {key: at for at, key in enumerate(self.keys)}
        active = np.array([column.get(buckets[key] or "", -1) for key in self.keys], dtype=np.int64)
        self._allowed = np.ones(shape, dtype=bool)
        active_rows = np.flatnonzero(active >= 0)
        self._allowed[active_rows, active[active_rows]] = False
        self._held, self._in_sync = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        for host, at in column.items():
            mine = [(row[replica.key], replica.in_sync) for replica in records[host].replicas if replica.key in row]
            rows = [index for index, _ in mine]
            self._held[rows, at] = True
            self._in_sync[rows, at] = [in_sync for _, in_sync in mine]
        racks = [records[host].rack for host in self.hosts]
        number = {rack: at for at, rack in enumerate(sorted({rack for rack in racks if rack is not None}))}
        # The number of each host's rack and of the rack of each bucket's active task; -1 if there is none.
        self._rack = np.array([-1 if rack is None else number[rack] for rack in racks], dtype=np.int64)
        self._active_rack = np.where(active >= 0, np.append(self._rack, -1)[active], -1)
        self._weight = _compute_weights(self.keys, self.hosts)
        self._placed = np.zeros(shape, dtype=bool)
        self._load = np.zeros(len(self.hosts), dtype=np.int64)
        # A bucket cannot have more replicas than there are hosts that may have one.
        self._want = np.minimum(wanted, self._allowed.sum(axis=1, dtype=np.int64))
        self.total = int(self._want.sum())
        self._moved = 0

    # -- steps ------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Keep what is held. Superfluous replicas of a bucket are taken from the hosts with the highest load."""
        np.logical_and(self._held, self._allowed, out=self._placed)
        self._load = self._placed.sum(axis=0, dtype=np.int64)
        spare = self._placed.sum(axis=1) - self._want
        for row in np.flatnonzero(spare > 0).tolist():
            holders = np.flatnonzero(self._placed[row]).tolist()
            for _ in range(int(spare[row])):
                at = max(
                    holders, key=lambda host: (self._load[host], not self._in_sync[row, host], ~self._weight[row, host])
                )
                holders.remove(at)
                self._remove(row, at)

    def fill(self) -> None:
        """Give missing replicas to the hosts with room and the highest weight, or else to those with the least load."""
        self._fill_below_bound()
        for row in np.flatnonzero(self._count_missing() > 0).tolist():
            for _ in range(int(self._want[row] - self._placed[row].sum())):
                free = np.flatnonzero(self._allowed[row] & ~self._placed[row])
                least = free[self._load[free] == self._load[free].min()]
                conflicts = self._find_conflicts(np.array([row], dtype=np.int64))[0]
                good = least[~conflicts[least]]
                choices = good if good.size else least
                self._add(row, int(choices[np.argmax(self._weight[row, choices])]))

    def level(self) -> None:
        """Let a host with far less than its share take from those with most, until it has its share."""
        share, hosts = self.total // len(self.hosts), len(self.hosts)
        poor = np.flatnonzero(_MORE * self._load * hosts < _LESS * self.total).tolist()
        if poor:
            rows, holders = np.nonzero(self._placed)
            placed = _Placed(rows, holders, self._count_per_rack(np.arange(len(self.keys))))
            for taker in sorted(poor, key=lambda host: (self._load[host], host)):
                self._take_share(taker, share, placed)

    def trim(self) -> None:
        """Let a host above the bound give away what others have room for, a limited number at a time."""
        budget = max(0, -(-self.total // len(self.hosts)) - self._moved)
        over = np.flatnonzero(self._load > self.bound)
        for giver in sorted(over.tolist(), key=lambda host: (-self._load[host], host)):
            rows = np.flatnonzero(self._placed[:, giver])
            rows = rows[np.lexsort((self._weight[rows, giver], self._copy_cost(rows, giver)))]
            while (most := min(budget, int(self._load[giver]) - self.bound)) > 0:
                rows = rows[self._find_room(rows).any(axis=1)]
                leaving, rows = rows[:most], rows[most:]
                if not leaving.size:
                    break
                for row in leaving.tolist():
                    self._remove(row, giver)
                # These replicas cannot return to this host, as it is not below the bound.
                self._fill_below_bound()
                for row in leaving[self._count_missing()[leaving] > 0].tolist():
                    self._add(row, giver)
                budget -= int((~self._placed[leaving, giver]).sum())

    def result(self) -> dict[BucketKey, tuple[str, ...]]:
        """Return the hosts of each bucket."""
        hosts_of: list[list[str]] = [[] for _ in self.keys]
        for row, at in np.argwhere(self._placed).tolist():
            hosts_of[row].append(self.hosts[at])
        return {key: tuple(hosts) for key, hosts in zip(self.keys, hosts_of, strict=True)}

    # -- parts of the steps ------------------------------------------------------------------------

    @cached_property
    def bound(self) -> int:
        """How many replicas a host has at most while others have room."""
        hosts = len(self.hosts)
        return max(-(-self.total // hosts), self.total * _MORE // (_LESS * hosts))

    def _count_missing(self) -> _Ints:
        missing: _Ints = self._want - self._placed.sum(axis=1, dtype=np.int64)
        return missing

    def _add(self, row: int, at: int) -> None:
        self._placed[row, at] = True
        self._load[at] += 1

    def _remove(self, row: int, at: int) -> None:
        self._placed[row, at] = False
        self._load[at] -= 1

    def _find_room(self, rows: _Ints) -> _Bools:
        """Return for each row the hosts that may get the bucket and are below the bound."""
        free: _Bools = np.logical_and(self._allowed[rows] & ~self._placed[rows], self._load < self.bound)
        return free

    def _fill_below_bound(self) -> None:
        """Fill in rounds: every bucket asks for one host, and hosts accept the buckets with the highest weights."""
        rows = np.flatnonzero(self._count_missing() > 0)
        while rows.size:
            free = self._find_room(rows)
            rows, free = rows[free.any(axis=1)], free[free.any(axis=1)]
            if not rows.size:
                return
            good = free & ~self._find_conflicts(rows)
            free = np.where(good.any(axis=1, keepdims=True), good, free)
            weights = np.where(free, self._weight[rows], np.uint64(0))
            asked = weights.argmax(axis=1)
            order = np.lexsort((rows, ~weights[np.arange(len(rows)), asked], asked))
            asked = asked[order]
            # How many buckets with a higher weight asked for the same host.
            before = np.arange(len(asked)) - np.searchsorted(asked, asked)
            accepted = before < (self.bound - self._load)[asked]
            self._placed[rows[order][accepted], asked[accepted]] = True
            np.add.at(self._load, asked[accepted], 1)
            rows = rows[self._count_missing()[rows] > 0]

    def _take_share(self, taker: int, share: int, placed: _Placed) -> None:
        offers = self._list_offers(taker, placed)
        givers = np.array([bool(offer) for offer in offers])
        while self._load[taker] < share:
            rich = np.flatnonzero(givers & (self._load >= self._load[taker] + 2))
            if not rich.size:
                return
            giver = int(rich[np.argmax(self._load[rich])])
            which = offers[giver].pop()
            givers[giver] = bool(offers[giver])
            row = int(placed.rows[which])
            if not self._placed[row, taker]:
                self._moved += int(self._held[row, giver])
                self._remove(row, giver)
                self._add(row, taker)
                placed.hosts[which] = taker
                np.add.at(placed.rack_counts[row], self._rack[[giver, taker]], (-1, 1))
                placed.rack_counts[row, -1] = 0

    def _list_offers(self, taker: int, placed: _Placed) -> list[list[int]]:
        """Return by host the replicas that `taker` could take from it, as indices into `placed`, the best ones last.

        Best are those of which the host has copied least, then those with the highest weight at the taker. A replica
        never moves from a rack where it is the only one of its bucket to a rack that already has one.
        """
        may = self._allowed[:, taker] & ~self._placed[:, taker]
        which = np.flatnonzero(may[placed.rows])
        rows, givers = placed.rows[which], placed.hosts[which]
        mates = (self._rack[givers] == self._rack[taker]) & (self._rack[givers] >= 0)
        worse = (placed.rack_counts[rows, self._rack[taker]] > mates) & (
            placed.rack_counts[rows, self._rack[givers]] <= 1
        )
        which, rows, givers = which[~worse], rows[~worse], givers[~worse]
        order = np.lexsort((self._weight[rows, taker], -self._copy_cost(rows, givers), givers))
        ends = np.searchsorted(givers[order], np.arange(1, len(self.hosts)))
        return [part.tolist() for part in np.split(which[order], ends)]

    def _copy_cost(self, rows: _Ints, at: int | _Ints) -> _Ints:
        """Return how much is lost if a host gives up a replica: 0 if it has not begun, 1 if it has, 2 if in sync."""
        copied: _Ints = self._held[rows, at].astype(np.int64) + self._in_sync[rows, at]
        return copied

    def _find_conflicts(self, rows: _Ints) -> _Bools:
        """Return for each row the hosts in the same rack as the bucket's active task or one of its replicas."""
        conflicts: _Bools = self._count_per_rack(rows)[:, self._rack] > 0
        return conflicts

    def _count_per_rack(self, rows: _Ints) -> npt.NDArray[np.float32]:
        """Return how many of a bucket's active task and replicas are in each rack; the last column (no rack) is 0."""
        racks = int(self._rack.max(initial=-1)) + 1
        rack_of_host = np.zeros((len(self.hosts), racks + 1), dtype=np.float32)
        rack_of_host[np.arange(len(self.hosts)), self._rack] = 1
        counts: npt.NDArray[np.float32] = self._placed[rows].astype(np.float32) @ rack_of_host
        counts[np.arange(len(rows)), self._active_rack[rows]] += 1
        counts[:, -1] = 0
        return counts


def _compute_weights(keys: list[BucketKey], hosts: list[str]) -> _Weights:
    """Return a random number from 1 on for each bucket and host, the same on all hosts: splitmix64 of their digests."""
    key_digests = _digests(f"{key.operator}\0{key.query_folder}\0{key.bucket}" for key in keys)
    mixed = key_digests[:, None] ^ _digests(hosts)[None, :]
    with np.errstate(over="ignore"):
        mixed += np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights: _Weights = np.maximum(mixed ^ (mixed >> np.uint64(31)), np.uint64(1))
    return weights


def _digests(texts: Iterable[str]) -> _Weights:
    data = b"".join(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)
