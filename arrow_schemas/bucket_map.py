"""The bucket map: which bucket a row belongs to.

By the hash of its key, a bucket is a range of hashes: of equal size as long as nothing else is asked for, or between
given bounds, so that a heavy bucket can be split alone. By source partition, a bucket is whatever the assignment of
partitions says, and no hash tells it (Samza SEP-5).
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
# Kinds: equal ranges of the hash, ranges between bounds, and source partitions.
HASH, BOUNDS, PARTITION = "hash", "bounds", "partition"
# How partitions are grouped: partition i of every stream in bucket i, or buckets of its own for each stream.
BY_PARTITION, BY_STREAM_AND_PARTITION = "partition", "stream_and_partition"
# Buckets go by the high 32 bits of the hash.
_BITS = np.uint64(32)
_END = 1 << 32


@dataclass(frozen=True)
class BucketMap:
    """Which bucket a row belongs to.

    Parameters
    ----------
    buckets
        Number of buckets, at least 1.
    kind
        ``"hash"``: a bucket is a range of key hashes, all of one size. ``"bounds"``: a range between bounds.
        ``"partition"``: what a source's partitions are assigned to.
    bounds
        Of kind ``"bounds"``: where the range of each bucket begins, in the high 32 bits of the hash; ascending, the
        first 0. Else empty.
    streams
        Of kind ``"partition"``: the name of each stream of the source, ascending, and how many partitions it had when
        the state began; one stream that nothing tells from others is called ``""``. Else empty.
    group_by
        Of kind ``"partition"``: ``"partition"`` or ``"stream_and_partition"``. Else empty.

    Raises
    ------
    UsageError
        When there is no such map.

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
        whole = all(type(it) is int for it in (self.buckets, *self.bounds))
        if not whole or self.buckets < 1 or self.kind not in (HASH, BOUNDS, PARTITION):
            raise UsageError(f"there is no bucket map of kind {self.kind!r} with {self.buckets!r} buckets")
        if (self.kind == BOUNDS) != bool(self.bounds):
            raise UsageError(f"a bucket map of kind {self.kind!r} cannot have {len(self.bounds)} bounds")
        self._check_streams()
        if not self.bounds:
            return
        ascending = all(low < high for low, high in zip(self.bounds, (*self.bounds[1:], _END), strict=True))
        if len(self.bounds) != self.buckets or self.bounds[0] != 0 or not ascending:
            raise UsageError(
                f"the bounds of {self.buckets} buckets are {self.buckets} whole numbers, ascending from 0 and below "
                f"{_END}, not {len(self.bounds)}: {', '.join(map(str, self.bounds[:8]))}"
                + (", …" if len(self.bounds) > 8 else "")
            )

    def _check_streams(self) -> None:
        if self.kind != PARTITION:
            if self.streams or self.group_by:
                raise UsageError(f"a bucket map of kind {self.kind!r} has neither streams nor a grouping of partitions")
            return
        if self.group_by not in (BY_PARTITION, BY_STREAM_AND_PARTITION):
            raise UsageError(
                f"partitions are grouped by {BY_PARTITION!r} or {BY_STREAM_AND_PARTITION!r}, not {self.group_by!r}"
            )
        names = [name for name, _ in self.streams]
        counted = all(type(name) is str and type(count) is int and count > 0 for name, count in self.streams)
        if not counted or not names or names != sorted(set(names)) or ("" in names and len(names) > 1):
            raise UsageError(
                "the streams of a bucket map have names, ascending, and numbers of partitions from 1 on, not "
                f"{self.streams!r}"
            )
        if self.buckets != _buckets_for(self.streams, self.group_by):
            raise UsageError(f"partitions of {self.streams!r} by {self.group_by!r} are not in {self.buckets} buckets")

    @staticmethod
    def of_partitions(counts: Mapping[str, int], group_by: str = BY_PARTITION) -> BucketMap:
        """The map of a source's partitions.

        Parameters
        ----------
        counts
            How many partitions each stream has as the state begins, by the stream's name; of one stream that nothing
            tells from others by ``""``.
        group_by
            ``"partition"``: partition *i* of every stream is in bucket *i*. ``"stream_and_partition"``: each stream has
            buckets of its own, those of the first one by name first.

        Returns
        -------
        BucketMap
            Of as many buckets as there are.

        Raises
        ------
        UsageError
            When these are no partitions.
        """
        streams = tuple(sorted(counts.items()))
        # Numbers that are none are refused by the map itself.
        numbered = streams if all(type(count) is int for _, count in streams) else ()
        return BucketMap(_buckets_for(numbered, group_by), PARTITION, streams=streams, group_by=group_by)

    @staticmethod
    def split(buckets: int, into: Mapping[int, int]) -> BucketMap:
        """Equal ranges, of which some are split into several, each of the same size.

        Parameters
        ----------
        buckets
            How many equal ranges there are.
        into
            By the number of a range, into how many buckets it is split; the numbers of later buckets move up.

        Returns
        -------
        BucketMap
            The plain one where all its ranges are of equal size.

        Raises
        ------
        UsageError
            When there is no such range, or it cannot be split so.
        """
        equal = BucketMap(buckets)
        if not isinstance(into, Mapping):
            raise UsageError(f"ranges are split as a mapping by number says, such as {{2: 3}}, not {into!r}")
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
        """The map with these bounds; the plain one where all its ranges are of equal size.

        Parameters
        ----------
        bounds
            Where each bucket's range begins, in the high 32 bits of the hash: ascending, the first 0.

        Returns
        -------
        BucketMap
            Of as many buckets.

        Raises
        ------
        UsageError
            When these are no bounds.
        """
        equal = BucketMap(len(bounds)) if bounds else None
        if equal is not None and tuple(bounds) == tuple(equal.range_of(it)[0] for it in range(equal.buckets)):
            return equal
        return BucketMap(len(bounds), BOUNDS, tuple(bounds))

    @property
    def by_hash(self) -> bool:
        """Whether a key's hash tells its bucket."""
        return self.kind != PARTITION

    @property
    def one_state(self) -> bool:
        """Whether a key has one state: not where each stream has buckets of its own."""
        return self.group_by != BY_STREAM_AND_PARTITION or len(self.streams) == 1

    def of(self, hashes: HashArray) -> IndexArray:
        """The bucket of each hash.

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
            When no hash tells the bucket.
        """
        high = hashes >> _BITS
        if self.kind == HASH:
            found: IndexArray = ((high * np.uint64(self.buckets)) >> _BITS).astype(np.int64)
            return found
        if self.kind == BOUNDS:
            borders = np.array(self.bounds, dtype=np.uint64)
            return np.searchsorted(borders, high, side="right").astype(np.int64) - 1
        raise ValueError("rows are in buckets by their source's partition, which no hash tells")

    def first_of(self, stream: str) -> int:
        """The bucket of partition 0 of a stream, where buckets go by partition.

        Parameters
        ----------
        stream
            Its name.

        Returns
        -------
        int
            The bucket's number.
        """
        if self.group_by == BY_PARTITION:
            return 0
        return sum(count for name, count in self.streams if name < stream)

    def candidates(self, key_hash: int) -> range:
        """The buckets that a key may be in: one, where its hash tells it.

        Parameters
        ----------
        key_hash
            The key's hash, unsigned.

        Returns
        -------
        range
            Their numbers.
        """
        if not self.by_hash:
            return range(self.buckets)
        bucket = int(self.of(np.array([key_hash], dtype=np.uint64))[0])
        return range(bucket, bucket + 1)

    def range_of(self, bucket: int) -> tuple[int, int]:
        """The high 32 bits of a bucket's hashes: from the first number up to, and without, the second.

        Parameters
        ----------
        bucket
            Its number.

        Returns
        -------
        tuple of int
            Both numbers.
        """
        if self.kind == HASH:
            return -(-bucket * _END // self.buckets), -(-(bucket + 1) * _END // self.buckets)
        return self.bounds[bucket], (*self.bounds[1:], _END)[bucket]

    def overlapping(self, other: BucketMap, bucket: int) -> range:
        """Which buckets of another map have hashes of one of this map's buckets; they are neighbours.

        Parameters
        ----------
        other
            The other map. Both go by the hash.
        bucket
            The bucket of this one.

        Returns
        -------
        range
            Their numbers.
        """
        low, high = self.range_of(bucket)
        first, last = other.of(np.array([low, high - 1], dtype=np.uint64) << _BITS).tolist()
        return range(first, last + 1)

    @property
    def argument(self) -> str:
        """The argument of `ArrowState` that asks for it; in words where no short one does."""
        if self.kind == HASH:
            return f"buckets={self.buckets}"
        for equal in map(BucketMap, range(self.buckets - 1, 0, -1) if self.kind == BOUNDS else ()):
            # Its second range rules most out.
            if equal.buckets > 1 and equal.range_of(1)[0] not in self.bounds:
                continue
            ends = [bisect_left(self.bounds, equal.range_of(it)[1]) for it in range(equal.buckets)]
            into = {it: parts for it, parts in enumerate(map(sub, ends, [0, *ends])) if parts != 1}
            if 0 not in into.values() and BucketMap.split(equal.buckets, into) == self:
                return f"bucket_by=BucketMap.split({equal.buckets}, {into})"
        return "bucket_by as it was"

    def __str__(self) -> str:
        if self.kind == PARTITION:
            return f"{self.buckets} buckets by source partition"
        return f"{self.buckets} buckets" + (" of unequal ranges" if self.bounds else "")

    def to_plain(self) -> dict[str, Any]:
        """As builtin values.

        Returns
        -------
        dict
            With ``buckets`` and ``kind``; ``streams`` and ``group_by`` where buckets go by partition, else ``bounds``.
        """
        if self.kind == PARTITION:
            streams = dict(self.streams)
            return {"buckets": self.buckets, "kind": self.kind, "streams": streams, "group_by": self.group_by}
        return {"buckets": self.buckets, "kind": self.kind, "bounds": list(self.bounds)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> BucketMap:
        """Inverse of `to_plain`.

        Parameters
        ----------
        plain
            What that gave.

        Returns
        -------
        BucketMap
            The map.

        Raises
        ------
        CorruptFileError
            When there is no such map.
        """
        try:
            if plain["kind"] == PARTITION:
                streams = tuple(sorted(plain["streams"].items()))
                return BucketMap(plain["buckets"], PARTITION, streams=streams, group_by=plain["group_by"])
            return BucketMap(plain["buckets"], plain["kind"], tuple(plain["bounds"]))
        except UsageError as error:
            raise CorruptFileError(f"no bucket map: {error}") from error


def _buckets_for(streams: tuple[tuple[str, int], ...], group_by: str) -> int:
    counts = [count for _, count in streams]
    return sum(counts) if group_by == BY_STREAM_AND_PARTITION else max(counts, default=0)
