"""The bucket map: which bucket a row belongs to.

A bucket is either a range of key hashes, or a set of source partitions. Ranges have equal sizes by default, or the
bounds that the user gives, so that one heavy bucket can be split alone. If buckets go by source partition, the
assignment of partitions says which bucket a row is in, whatever the hash of its key (Samza SEP-5).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from operator import sub
from typing import Any

import numpy as np

from arrow_schemas.equality import HashArray, IndexArray
from arrow_schemas.errors import CorruptFileError, UsageError

__all__ = ["BOUNDS", "BUCKETS_MAX", "BY_PARTITION", "BY_STREAM_AND_PARTITION", "HASH", "PARTITION", "BucketMap"]

# The most buckets that an operator may have.
BUCKETS_MAX = 1 << 15
# Kinds of maps: equal ranges of the hash, ranges between bounds, and source partitions.
HASH, BOUNDS, PARTITION = "hash", "bounds", "partition"
# How partitions are grouped: partition i of every stream is in bucket i, or each stream has buckets of its own.
BY_PARTITION, BY_STREAM_AND_PARTITION = "partition", "stream_and_partition"
# The high 32 bits of the hash decide the bucket.
_BITS = np.uint64(32)
_END = 1 << 32


@dataclass(frozen=True)
class BucketMap:
    """Decides which bucket a row belongs to.

    Parameters
    ----------
    buckets
        Number of buckets, at least 1.
    kind
        ``"hash"``: each bucket is a range of key hashes, all of the same size. ``"bounds"``: each bucket is a range
        between bounds. ``"partition"``: source partitions are assigned to buckets.
    bounds
        For kind ``"bounds"``: the start of each bucket's range, in the high 32 bits of the hash; ascending, the first
        is 0. Otherwise empty.
    streams
        For kind ``"partition"``: the name of each stream of the source, ascending, and how many partitions it had when
        the state began; the only stream of a source without stream names is called ``""``. Otherwise empty.
    group_by
        For kind ``"partition"``: ``"partition"`` or ``"stream_and_partition"``. Otherwise empty.

    Raises
    ------
    UsageError
        If the arguments do not describe a valid map.

    Examples
    --------
    >>> BucketMap(4).range_of(1)
    (1073741824, 2147483648)
    >>> BucketMap.split(4, {1: 2}).buckets
    5
    """

    buckets: int
    kind: str = HASH
    bounds: tuple[int, ...] = ()
    streams: tuple[tuple[str, int], ...] = ()
    group_by: str = ""

    def __post_init__(self) -> None:
        whole = all(type(number) is int for number in (self.buckets, *self.bounds))
        if not whole or self.buckets < 1 or self.kind not in (HASH, BOUNDS, PARTITION):
            raise UsageError(f"a bucket map cannot be of kind {self.kind!r} with {self.buckets!r} buckets")
        if (self.kind == BOUNDS) != bool(self.bounds):
            raise UsageError(f"a bucket map of kind {self.kind!r} cannot have {len(self.bounds)} bounds")
        self._check_streams()
        if not self.bounds:
            return
        ascending = all(low < high for low, high in zip(self.bounds, (*self.bounds[1:], _END), strict=True))
        if len(self.bounds) != self.buckets or self.bounds[0] != 0 or not ascending:
            raise UsageError(
                f"the bounds of {self.buckets} buckets must be {self.buckets} whole numbers, ascending from 0 and "
                f"below {_END}, not {len(self.bounds)}: {', '.join(map(str, self.bounds[:8]))}"
                + (", …" if len(self.bounds) > 8 else "")
            )

    def _check_streams(self) -> None:
        if self.kind != PARTITION:
            if self.streams or self.group_by:
                raise UsageError(f"a bucket map of kind {self.kind!r} cannot have streams or group_by")
            return
        if self.group_by not in (BY_PARTITION, BY_STREAM_AND_PARTITION):
            raise UsageError(f"group_by must be {BY_PARTITION!r} or {BY_STREAM_AND_PARTITION!r}, not {self.group_by!r}")
        names = [name for name, _ in self.streams]
        valid = all(type(name) is str and type(count) is int and count > 0 for name, count in self.streams)
        if not valid or not names or names != sorted(set(names)) or ("" in names and len(names) > 1):
            raise UsageError(
                "the streams of a bucket map must be pairs of a name and a number of partitions of at least 1, "
                f"ascending by name, not {self.streams!r}"
            )
        if self.buckets != _count_buckets(self.streams, self.group_by):
            raise UsageError(f"the partitions {self.streams!r} by {self.group_by!r} do not make {self.buckets} buckets")

    @staticmethod
    def of_partitions(counts: Mapping[str, int], group_by: str = BY_PARTITION) -> BucketMap:
        """Return the map of a source's partitions.

        Parameters
        ----------
        counts
            How many partitions each stream has when the state begins, by the stream's name; a source without stream
            names has one stream, ``""``.
        group_by
            ``"partition"``: partition *i* of every stream is in bucket *i*. ``"stream_and_partition"``: each stream has
            buckets of its own; streams are in the order of their names.

        Returns
        -------
        BucketMap
            The map, with as many buckets as the partitions need.

        Raises
        ------
        UsageError
            If the counts or `group_by` are not valid.
        """
        streams = tuple(sorted(counts.items()))
        # BucketMap itself refuses counts that are not numbers.
        countable = streams if all(type(count) is int for _, count in streams) else ()
        return BucketMap(_count_buckets(countable, group_by), PARTITION, streams=streams, group_by=group_by)

    @staticmethod
    def split(buckets: int, into: Mapping[int, int]) -> BucketMap:
        """Return a map of equal ranges, some of which are split into several buckets of equal size.

        Parameters
        ----------
        buckets
            How many equal ranges there are before the split.
        into
            Maps the number of a range to how many buckets it is split into; the numbers of later buckets move up.

        Returns
        -------
        BucketMap
            The map; of kind ``"hash"`` if all its ranges have the same size.

        Raises
        ------
        UsageError
            If a range does not exist, or cannot be split into that many buckets.
        """
        equal = BucketMap(buckets)
        if not isinstance(into, Mapping):
            raise UsageError(f"into must map numbers of ranges to numbers of buckets, such as {{2: 3}}, not {into!r}")
        for bucket, parts in into.items():
            if not 0 <= bucket < buckets or type(parts) is not int or parts < 1:
                raise UsageError(f"bucket {bucket!r} of {buckets} cannot be split into {parts!r}")
        bounds: list[int] = []
        for bucket in range(buckets):
            low, high = equal.range_of(bucket)
            parts = into.get(bucket, 1)
            bounds += [low + (high - low) * part // parts for part in range(parts)]
        return BucketMap.between(bounds)

    @staticmethod
    def between(bounds: list[int] | tuple[int, ...]) -> BucketMap:
        """Return the map with the given bounds.

        Parameters
        ----------
        bounds
            The start of each bucket's range, in the high 32 bits of the hash: ascending, the first is 0.

        Returns
        -------
        BucketMap
            The map, with a bucket for each bound; of kind ``"hash"`` if all its ranges have the same size.

        Raises
        ------
        UsageError
            If the bounds are not valid.
        """
        equal = BucketMap(len(bounds)) if bounds else None
        if equal is not None and tuple(bounds) == tuple(equal.range_of(number)[0] for number in range(equal.buckets)):
            return equal
        return BucketMap(len(bounds), BOUNDS, tuple(bounds))

    @property
    def by_hash(self) -> bool:
        """True if a key's hash decides its bucket."""
        return self.kind != PARTITION

    @property
    def one_state(self) -> bool:
        """True if a key has only one state, and not one for each stream."""
        return self.group_by != BY_STREAM_AND_PARTITION or len(self.streams) == 1

    def of(self, hashes: HashArray) -> IndexArray:
        """Return the bucket of each hash.

        Parameters
        ----------
        hashes
            Unsigned 64-bit hashes, n of them.

        Returns
        -------
        numpy.ndarray
            int64, n of them.

        Raises
        ------
        ValueError
            If buckets go by source partition.
        """
        high = hashes >> _BITS
        if self.kind == HASH:
            bucket_numbers: IndexArray = ((high * np.uint64(self.buckets)) >> _BITS).astype(np.int64)
            return bucket_numbers
        if self.kind == BOUNDS:
            borders = np.array(self.bounds, dtype=np.uint64)
            return np.searchsorted(borders, high, side="right").astype(np.int64) - 1
        raise ValueError("a row's source partition decides its bucket, not the hash of its key")

    def first_of(self, stream: str) -> int:
        """Return the bucket of a stream's partition 0; buckets must go by source partition.

        Parameters
        ----------
        stream
            The stream's name.

        Returns
        -------
        int
            The bucket's number.
        """
        if self.group_by == BY_PARTITION:
            return 0
        return sum(count for name, count in self.streams if name < stream)

    def candidates(self, key_hash: int) -> range:
        """Return the buckets that a key may be in: only one if its hash decides the bucket.

        Parameters
        ----------
        key_hash
            The key's hash, unsigned.

        Returns
        -------
        range
            The buckets' numbers.
        """
        if not self.by_hash:
            return range(self.buckets)
        bucket = int(self.of(np.array([key_hash], dtype=np.uint64))[0])
        return range(bucket, bucket + 1)

    def range_of(self, bucket: int) -> tuple[int, int]:
        """Return the range of a bucket's hashes, in the high 32 bits of the hash.

        Parameters
        ----------
        bucket
            The bucket's number.

        Returns
        -------
        tuple of int
            The start of the range, and its end, which is exclusive.
        """
        if self.kind == HASH:
            return -(-bucket * _END // self.buckets), -(-(bucket + 1) * _END // self.buckets)
        return self.bounds[bucket], (*self.bounds[1:], _END)[bucket]

    def overlapping(self, other: BucketMap, bucket: int) -> range:
        """Return the buckets of another map that share hashes with one bucket of this map.

        Parameters
        ----------
        other
            The other map. Both maps must go by the hash.
        bucket
            The number of this map's bucket.

        Returns
        -------
        range
            The numbers of the other map's buckets, which are adjacent.
        """
        low, high = self.range_of(bucket)
        first, last = other.of(np.array([low, high - 1], dtype=np.uint64) << _BITS).tolist()
        return range(first, last + 1)

    @property
    def argument(self) -> str:
        """The argument of `ArrowState` that asks for this map; in words if it cannot be written briefly."""
        if self.kind == HASH:
            return f"buckets={self.buckets}"
        for equal in map(BucketMap, range(self.buckets - 1, 0, -1) if self.kind == BOUNDS else ()):
            # The bounds of most candidates do not include their second range's start.
            if equal.buckets > 1 and equal.range_of(1)[0] not in self.bounds:
                continue
            ends = [bisect_left(self.bounds, equal.range_of(number)[1]) for number in range(equal.buckets)]
            into = {number: parts for number, parts in enumerate(map(sub, ends, [0, *ends])) if parts != 1}
            if 0 not in into.values() and BucketMap.split(equal.buckets, into) == self:
                return f"bucket_by=BucketMap.split({equal.buckets}, {into})"
        return "the same bucket_by as before"

    def __str__(self) -> str:
        if self.kind == PARTITION:
            return f"{self.buckets} buckets by source partition"
        return f"{self.buckets} buckets" + (" of unequal ranges" if self.bounds else "")

    def to_plain(self) -> dict[str, Any]:
        """Return the map as builtin values.

        Returns
        -------
        dict
            ``buckets`` and ``kind``; also ``streams`` and ``group_by`` if buckets go by partition, else ``bounds``.
        """
        if self.kind == PARTITION:
            streams = dict(self.streams)
            return {"buckets": self.buckets, "kind": self.kind, "streams": streams, "group_by": self.group_by}
        return {"buckets": self.buckets, "kind": self.kind, "bounds": list(self.bounds)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> BucketMap:
        """Return the map that `to_plain` converted.

        Parameters
        ----------
        plain
            What `to_plain` returned.

        Returns
        -------
        BucketMap
            The map.

        Raises
        ------
        CorruptFileError
            If the values do not describe a valid map.
        """
        try:
            if plain["kind"] == PARTITION:
                streams = tuple(sorted(plain["streams"].items()))
                return BucketMap(plain["buckets"], PARTITION, streams=streams, group_by=plain["group_by"])
            return BucketMap(plain["buckets"], plain["kind"], tuple(plain["bounds"]))
        except UsageError as error:
            raise CorruptFileError(f"not a valid bucket map: {error}") from error


def _count_buckets(streams: tuple[tuple[str, int], ...], group_by: str) -> int:
    counts = [count for _, count in streams]
    return sum(counts) if group_by == BY_STREAM_AND_PARTITION else max(counts, default=0)
