"""``partitions_<n>.json``: which bucket each partition of a source is in, where buckets go by partition.

A file is immutable and byte-identical from every writer, as an operator file is. A source that grows makes a file with
the next number; no partition ever goes to another bucket (Samza SEP-5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from arrow_schemas.bucket_map import PARTITION, BucketMap
from arrow_schemas.checksum import opened_document, readable, sealed_document
from arrow_schemas.errors import CorruptFileError, PartitionsChangedError, UsageError

__all__ = [
    "PARTITIONS_FORMAT",
    "PARTITIONS_PAGE",
    "BeforeExpansion",
    "PartitionAssignment",
    "StreamPartitions",
    "parse_partitions_name",
    "partition_before_expansion",
    "partitions_name",
    "shown_counts",
]

PARTITIONS_FORMAT = 1
PARTITIONS_PAGE = "docs/operating/source-partitions.md"
# More than any source has; what a plan declares is a table of all of them.
_PARTITIONS_MAX = 1 << 17
_NAME = re.compile(r"partitions_(0|[1-9][0-9]{0,8})\.json")

# Index of a partition, the count it is one of, and the first count → the partition that held its keys then.
BeforeExpansion = Callable[[int, int, int], int]


def partition_before_expansion(current_index: int, current_count: int, initial_count: int) -> int:
    """Which partition held a partition's keys when the query began, where a row is in the one of its hash % count.

    Parameters
    ----------
    current_index
        The partition.
    current_count
        How many partitions there are now: a multiple of `initial_count`.
    initial_count
        How many there were when the query began.

    Returns
    -------
    int
        Its index, below `initial_count`.

    Examples
    --------
    >>> [partition_before_expansion(index, 4, 2) for index in range(4)]
    [0, 1, 0, 1]
    """
    return current_index % initial_count


def partitions_name(number: int) -> str:
    """Name of the assignment number `number`."""
    return f"partitions_{number}.json"


def parse_partitions_name(name: str) -> int | None:
    """Inverse of `partitions_name`; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def shown_counts(counts: Sequence[int]) -> str:
    """Counts as a user gives them: ``[2, 4]``."""
    return f"[{', '.join(map(str, counts))}]"


@dataclass(frozen=True)
class StreamPartitions:
    """The partitions of one stream.

    Parameters
    ----------
    stream
        Its name; empty where nothing tells streams apart.
    counts
        How many partitions it had when the query began, and has grown to, or may grow to; ascending.
    buckets
        The bucket of every partition below the last count.
    reached
        The largest of the counts that the stream is known to have had; 0: the first one.
    """

    stream: str
    counts: tuple[int, ...]
    buckets: tuple[int, ...]
    reached: int = 0

    def __post_init__(self) -> None:
        _check_counts(self.counts, _of(self.stream))
        if self.reached == 0:
            object.__setattr__(self, "reached", self.counts[0])
        if type(self.reached) is not int or self.reached not in self.counts:
            raise UsageError(
                f"reached{_of(self.stream)} must be one of counts={shown_counts(self.counts)}, not {self.reached!r}"
            )
        if len(self.buckets) != self.counts[-1] or not all(type(it) is int and it >= 0 for it in self.buckets):
            raise UsageError(f"{self.counts[-1]} partitions{_of(self.stream)} cannot be in buckets {self.buckets[:8]}")

    def grown_to(self, wanted: StreamPartitions) -> StreamPartitions:
        """The same with the counts of a plan beside those that are known."""
        which = _of(self.stream)
        if wanted.counts[-1] < self.counts[-1]:
            raise PartitionsChangedError(
                f"the source has had up to {self.counts[-1]} partitions{which}, and the plan declares "
                f"{wanted.counts[-1]} at most: give counts={shown_counts(self.counts)}{which}. Partitions never go away"
            )
        moved = next((at for at, bucket in enumerate(self.buckets) if wanted.buckets[at] != bucket), None)
        if moved is not None:
            raise PartitionsChangedError(
                f"partition {moved}{which} has its keys in bucket {self.buckets[moved]}, and by the plan they would be "
                f"in bucket {wanted.buckets[moved]}, where there is no state of them: give before_expansion as it was"
            )
        counts = tuple(sorted({*self.counts, *wanted.counts}))
        return StreamPartitions(self.stream, counts, wanted.buckets, max(self.reached, wanted.reached))

    def reached_by(self, largest: int) -> StreamPartitions:
        """The same after a batch in which `largest` is the largest partition that rows come from.

        A partition beyond the known count proves that the stream has grown, but not to which number. Only the last
        partition of a declared count is taken as proof of that count.
        """
        if largest < self.reached:
            return self
        count = next(it for it in self.counts if it > largest)
        if largest == count - 1:
            return replace(self, reached=count)
        which, first = _of(self.stream), self.counts[0]
        reached = f"{{{self.stream!r}: {count}}}" if self.stream else str(count)
        raise PartitionsChangedError(
            f"rows come from partition {largest}{which}, and none from partition {count - 1}: the source has grown "
            f"from {self.reached} partitions, and the rows do not show whether to {count}, as the plan declares. "
            f"Nothing of this batch was written. Look up how many partitions the source has now. If it has {count}, "
            f"start the query again with reached={reached}. If it has another multiple of {first}, add that to counts "
            "and give it as reached. Any other number cannot be followed, unless before_expansion is right for it: see "
            f'"A number that cannot be followed" in {PARTITIONS_PAGE}'
        )


@dataclass(frozen=True)
class PartitionAssignment:
    """The bucket of every partition of a source.

    Parameters
    ----------
    streams
        Its streams, ascending by name.

    Raises
    ------
    UsageError
        When there is none, or they are in no order.
    """

    streams: tuple[StreamPartitions, ...]

    def __post_init__(self) -> None:
        names = [it.stream for it in self.streams]
        if not names or names != sorted(set(names)):
            raise UsageError(f"the streams of an assignment are there once each and ascend by name, not {names!r}")

    @staticmethod
    def declared(
        bucket_map: BucketMap,
        counts: Mapping[str, Sequence[int]],
        before: BeforeExpansion | None,
        reached: Mapping[str, int] | None = None,
    ) -> PartitionAssignment:
        """The assignment by the counts that a plan declares.

        Parameters
        ----------
        bucket_map
            By partition, with the first count of each stream.
        counts
            All counts of each stream, by its name.
        before
            Which partition held a partition's keys when the query began; None: `partition_before_expansion`, and each
            count is a multiple of the first one.
        reached
            The count that a stream is known to have had, by its name; by default the first one.

        Returns
        -------
        PartitionAssignment
            With every partition below the last counts.

        Raises
        ------
        UsageError
            When a count is not more than the one before, or `before` is no such function.
        """
        if bucket_map.kind != PARTITION:
            raise UsageError(f"partitions cannot be assigned to {bucket_map}")
        found = []
        for stream, initial in bucket_map.streams:
            mine = tuple(counts[stream])
            _check_counts(mine, _of(stream))
            held = _by_rest(mine, _of(stream)) if before is None else _by_function(mine, before, _of(stream))
            first = bucket_map.first_of(stream)
            assert mine[0] == initial, "a map has the first counts"
            buckets = tuple(first + it for it in held)
            found.append(StreamPartitions(stream, mine, buckets, (reached or {}).get(stream, 0)))
        return PartitionAssignment(tuple(found))

    @property
    def initial(self) -> tuple[tuple[str, int], ...]:
        """Each stream, and how many partitions it had when the state began."""
        return tuple((it.stream, it.counts[0]) for it in self.streams)

    def grown_to(self, wanted: PartitionAssignment) -> PartitionAssignment:
        """The assignment to use when a plan asks for `wanted` and this one is recorded.

        Parameters
        ----------
        wanted
            What the plan declares.

        Returns
        -------
        PartitionAssignment
            This one when nothing grew.

        Raises
        ------
        PartitionsChangedError
            When the streams are others, one has shrunk, or a partition would go to another bucket.
        """
        if self.initial != wanted.initial:
            raise PartitionsChangedError(
                f"the state has an assignment of the streams {dict(self.initial)} (name and first number of "
                f"partitions), and the plan declares {dict(wanted.initial)}: give streams and first counts as they were"
            )
        grown = tuple(mine.grown_to(asked) for mine, asked in zip(self.streams, wanted.streams, strict=True))
        return self if grown == self.streams else PartitionAssignment(grown)

    def knows(self, largest: Mapping[str, int]) -> bool:
        """Whether all these partitions, the largest of each stream, are below the counts that are known."""
        return all(largest.get(it.stream, -1) < it.reached for it in self.streams)

    def reached_by(self, largest: Mapping[str, int]) -> PartitionAssignment:
        """The assignment after a batch with rows of these partitions.

        Parameters
        ----------
        largest
            The largest partition of each stream that rows of the batch come from.

        Returns
        -------
        PartitionAssignment
            This one when no count is newly proven.

        Raises
        ------
        PartitionsChangedError
            When a stream has grown, and the rows do not prove a declared count.
        """
        if self.knows(largest):
            return self
        return PartitionAssignment(tuple(it.reached_by(largest.get(it.stream, -1)) for it in self.streams))

    def encode(self) -> bytes:
        """The file's bytes; equal contents give equal bytes."""
        streams: dict[str, dict[str, Any]] = {}
        for it in self.streams:
            streams[it.stream] = {"counts": list(it.counts), "buckets": list(it.buckets)}
            if it.reached != it.counts[0]:
                streams[it.stream]["reached"] = it.reached
        return sealed_document({"format": PARTITIONS_FORMAT, "streams": streams})

    @staticmethod
    def decode(data: bytes, where: str) -> PartitionAssignment:
        """Inverse of `encode`.

        Parameters
        ----------
        data
            The bytes.
        where
            How to call them in messages.

        Raises
        ------
        CorruptFileError
            When they are damaged.
        VersionSkewError
            When a newer release wrote them.
        """
        mend = "Bring it back from a copy of the query folder"
        with readable(where, "assignment of partitions", mend):
            fields = opened_document(data, where, PARTITIONS_FORMAT, mend)
            try:
                return PartitionAssignment(
                    tuple(
                        StreamPartitions(
                            stream,
                            tuple(told["counts"]),
                            tuple(told["buckets"]),
                            told.get("reached", told["counts"][0]),
                        )
                        for stream, told in fields["streams"].items()
                    )
                )
            except UsageError as error:
                raise CorruptFileError(f"{where} is no assignment of partitions: {error}. {mend}") from error

    def to_plain(self) -> dict[str, Any]:
        """As builtin values."""
        return {it.stream: [list(it.counts), list(it.buckets), it.reached] for it in self.streams}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> PartitionAssignment:
        """Inverse of `to_plain`."""
        return PartitionAssignment(
            tuple(
                StreamPartitions(name, tuple(counts), tuple(buckets), reached)
                for name, (counts, buckets, reached) in plain.items()
            )
        )


def _of(stream: str) -> str:
    return f" of stream {stream!r}" if stream else ""


def _check_counts(counts: tuple[int, ...], which: str) -> None:
    if not counts or not all(type(it) is int and 0 < it <= _PARTITIONS_MAX for it in counts):
        raise UsageError(
            f"counts{which} are numbers of partitions, from 1 to {_PARTITIONS_MAX}, not {shown_counts(counts)}"
        )
    if not all(before < after for before, after in pairwise(counts)):
        raise UsageError(f"counts{which} ascend, as a source only grows, and {shown_counts(counts)} do not")


def _by_rest(counts: tuple[int, ...], which: str) -> list[int]:
    first = counts[0]
    for count in counts[1:]:
        if count % first:
            raise UsageError(
                f"counts{which} has {count}, which is no multiple of the first number, {first}: with {count} "
                "partitions a key may move to a partition whose bucket does not have its state. If the source has not "
                f"grown, let it grow to {2 * first} or another multiple. If it has {count} partitions already, it "
                f'cannot be followed: see "A number that cannot be followed" in {PARTITIONS_PAGE}. Give '
                "before_expansion if the producer partitions otherwise"
            )
    return [partition_before_expansion(index, counts[-1], counts[0]) for index in range(counts[-1])]


def _by_function(counts: tuple[int, ...], before: BeforeExpansion, which: str) -> list[int]:
    initial = counts[0]
    held: list[int] = []
    for count in counts:
        for index in range(count):
            try:
                found = before(index, count, initial)
            except Exception as error:
                raise UsageError(
                    f"before_expansion({index}, {count}, {initial}){which} raised {type(error).__name__}: {error}"
                ) from error
            told = f"before_expansion({index}, {count}, {initial}){which} is {found!r}"
            if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < initial:
                raise UsageError(f"{told}, and must be a whole number from 0 to {initial - 1}")
            if index < initial and found != index:
                raise UsageError(f"{told}, and must be {index}: what was there when the query began is where it was")
            if index < len(held) and held[index] != found:
                raise UsageError(
                    f"{told}, and for a smaller count it was {held[index]}: no row tells which count it was written "
                    "under, so a partition has one answer for all of them"
                )
            if index == len(held):
                held.append(found)
    return held
