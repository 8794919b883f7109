"""``partitions_<n>.json``: which bucket each source partition is in, for operators whose buckets go by partition.

Like an operator file, a file is immutable and byte-identical from every writer. When the source grows, a file with the
next number is written; no partition ever moves to another bucket (Samza SEP-5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from arrow_schemas.bucket_map import PARTITION, BucketMap
from arrow_schemas.checksum import open_document, report_damage, seal_document
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
    "format_counts",
]

PARTITIONS_FORMAT = 1
PARTITIONS_PAGE = "docs/operating/source-partitions.md"
# More than any source has; a plan's declaration becomes a table of all partitions, so it needs a limit.
_PARTITIONS_MAX = 1 << 17
_NAME = re.compile(r"partitions_(0|[1-9][0-9]{0,8})\.json")

# Maps a partition, the number of partitions, and the initial number to the partition that held its keys initially.
BeforeExpansion = Callable[[int, int, int], int]


def partition_before_expansion(current_index: int, current_count: int, initial_count: int) -> int:
    """Return the partition that held a partition's keys when the query began, if producers use hash % count.

    Parameters
    ----------
    current_index
        The partition's index.
    current_count
        How many partitions there are now: a multiple of `initial_count`.
    initial_count
        How many partitions there were when the query began.

    Returns
    -------
    int
        The index of the partition that held the keys, below `initial_count`.

    Examples
    --------
    >>> [partition_before_expansion(index, 4, 2) for index in range(4)]
    [0, 1, 0, 1]
    """
    return current_index % initial_count


def partitions_name(number: int) -> str:
    """Return the file name of assignment number `number`."""
    return f"partitions_{number}.json"


def parse_partitions_name(name: str) -> int | None:
    """Return the number of an assignment with that file name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def format_counts(counts: Sequence[int]) -> str:
    """Return counts as the user writes them: ``[2, 4]``."""
    return f"[{', '.join(map(str, counts))}]"


@dataclass(frozen=True)
class StreamPartitions:
    """The partitions of one stream.

    Parameters
    ----------
    stream
        The stream's name; empty for a source without stream names.
    counts
        How many partitions the stream had when the query began, and the numbers it has grown to or may grow to;
        ascending.
    buckets
        The bucket of every partition below the last count.
    reached
        The largest count that the stream is known to have had; 0: the first count.
    """

    stream: str
    counts: tuple[int, ...]
    buckets: tuple[int, ...]
    reached: int = 0

    def __post_init__(self) -> None:
        _check_counts(self.counts, _format_stream(self.stream))
        if self.reached == 0:
            object.__setattr__(self, "reached", self.counts[0])
        if type(self.reached) is not int or self.reached not in self.counts:
            raise UsageError(
                f"reached{_format_stream(self.stream)} must be one of counts={format_counts(self.counts)}, "
                f"not {self.reached!r}"
            )
        if len(self.buckets) != self.counts[-1] or not all(
            type(bucket) is int and bucket >= 0 for bucket in self.buckets
        ):
            raise UsageError(
                f"{self.counts[-1]} partitions{_format_stream(self.stream)} cannot be in buckets {self.buckets[:8]}"
            )

    def grown_to(self, declared: StreamPartitions) -> StreamPartitions:
        """Return these partitions with the counts that a plan declares added to the known counts."""
        which = _format_stream(self.stream)
        if declared.counts[-1] < self.counts[-1]:
            raise PartitionsChangedError(
                f"the source has had up to {self.counts[-1]} partitions{which}, but the plan declares at most "
                f"{declared.counts[-1]}: give counts={format_counts(self.counts)}{which}, because partitions are never "
                "removed"
            )
        moved = next((at for at, bucket in enumerate(self.buckets) if declared.buckets[at] != bucket), None)
        if moved is not None:
            raise PartitionsChangedError(
                f"partition {moved}{which} has its keys in bucket {self.buckets[moved]}, but the plan puts them in "
                f"bucket {declared.buckets[moved]}, which has no state for them: give the old before_expansion"
            )
        counts = tuple(sorted({*self.counts, *declared.counts}))
        return StreamPartitions(self.stream, counts, declared.buckets, max(self.reached, declared.reached))

    def reached_by(self, largest: int) -> StreamPartitions:
        """Return these partitions after a batch whose rows come from partitions up to `largest`.

        A partition beyond the known count proves that the stream has grown, but not to which number. Only the last
        partition of a declared count counts as proof of that count.
        """
        if largest < self.reached:
            return self
        count = next(larger for larger in self.counts if larger > largest)
        if largest == count - 1:
            return replace(self, reached=count)
        which, first = _format_stream(self.stream), self.counts[0]
        reached = f"{{{self.stream!r}: {count}}}" if self.stream else str(count)
        raise PartitionsChangedError(
            f"rows come from partition {largest}{which}, but not from partition {count - 1}: the source has grown "
            f"from {self.reached} partitions, but the rows do not show whether to {count}, as the plan declares. "
            f"This batch was not written. Look up how many partitions the source has now. If it has {count}, start the "
            f"query again with reached={reached}. If it has another multiple of {first}, add that number to counts and "
            "give it as reached. Any other number cannot be followed, unless before_expansion is right for it: see "
            f'"A number that cannot be followed" in {PARTITIONS_PAGE}'
        )


@dataclass(frozen=True)
class PartitionAssignment:
    """The bucket of every partition of a source.

    Parameters
    ----------
    streams
        The source's streams, ascending by name.

    Raises
    ------
    UsageError
        If there are no streams, or they are not in order.
    """

    streams: tuple[StreamPartitions, ...]

    def __post_init__(self) -> None:
        names = [partitions.stream for partitions in self.streams]
        if not names or names != sorted(set(names)):
            raise UsageError(f"the streams of an assignment must be distinct and ascend by name, not {names!r}")

    @staticmethod
    def declared(
        bucket_map: BucketMap,
        counts: Mapping[str, Sequence[int]],
        before: BeforeExpansion | None,
        reached: Mapping[str, int] | None = None,
    ) -> PartitionAssignment:
        """Return the assignment for the counts that a plan declares.

        Parameters
        ----------
        bucket_map
            The map by source partition, with each stream's first count.
        counts
            All counts of each stream, by the stream's name.
        before
            The function that returns the partition that held a partition's keys when the query began; None:
            `partition_before_expansion`, and each count must be a multiple of the first one.
        reached
            The count that a stream is known to have had, by the stream's name; by default the first count.

        Returns
        -------
        PartitionAssignment
            The bucket of every partition below the last counts.

        Raises
        ------
        UsageError
            If counts do not ascend, or `before` does not return valid partitions.
        """
        if bucket_map.kind != PARTITION:
            raise UsageError(f"partitions cannot be assigned to {bucket_map}")
        partitions = []
        for stream, initial in bucket_map.streams:
            own_counts = tuple(counts[stream])
            _check_counts(own_counts, _format_stream(stream))
            indices = (
                _map_by_remainder(own_counts, _format_stream(stream))
                if before is None
                else _map_by_function(own_counts, before, _format_stream(stream))
            )
            first = bucket_map.first_of(stream)
            assert own_counts[0] == initial, "a map has the first counts"
            buckets = tuple(first + index for index in indices)
            partitions.append(StreamPartitions(stream, own_counts, buckets, (reached or {}).get(stream, 0)))
        return PartitionAssignment(tuple(partitions))

    @property
    def initial(self) -> tuple[tuple[str, int], ...]:
        """The name of each stream, and how many partitions it had when the state began."""
        return tuple((partitions.stream, partitions.counts[0]) for partitions in self.streams)

    def grown_to(self, declared: PartitionAssignment) -> PartitionAssignment:
        """Return the assignment to use if a plan declares `declared` and this one is recorded.

        Parameters
        ----------
        declared
            The assignment that the plan declares.

        Returns
        -------
        PartitionAssignment
            The grown assignment; this one if no stream grew.

        Raises
        ------
        PartitionsChangedError
            If the streams differ, a stream has shrunk, or a partition would move to another bucket.
        """
        if self.initial != declared.initial:
            raise PartitionsChangedError(
                f"the state has the streams {dict(self.initial)} (names and first numbers of partitions), but the plan "
                f"declares {dict(declared.initial)}: give the old streams and first counts"
            )
        grown = tuple(mine.grown_to(theirs) for mine, theirs in zip(self.streams, declared.streams, strict=True))
        return self if grown == self.streams else PartitionAssignment(grown)

    def knows(self, largest: Mapping[str, int]) -> bool:
        """Return True if each stream's largest partition is below the count that the stream is known to have had."""
        return all(largest.get(partitions.stream, -1) < partitions.reached for partitions in self.streams)

    def reached_by(self, largest: Mapping[str, int]) -> PartitionAssignment:
        """Return the assignment after a batch.

        Parameters
        ----------
        largest
            The largest partition of each stream that the batch has rows of, by the stream's name.

        Returns
        -------
        PartitionAssignment
            The assignment with the counts that the batch proves; this one if it proves no new count.

        Raises
        ------
        PartitionsChangedError
            If a stream has grown, but the rows do not prove a declared count.
        """
        if self.knows(largest):
            return self
        return PartitionAssignment(
            tuple(partitions.reached_by(largest.get(partitions.stream, -1)) for partitions in self.streams)
        )

    def encode(self) -> bytes:
        """Return the file's bytes; equal contents give equal bytes."""
        streams: dict[str, dict[str, Any]] = {}
        for partitions in self.streams:
            streams[partitions.stream] = {"counts": list(partitions.counts), "buckets": list(partitions.buckets)}
            if partitions.reached != partitions.counts[0]:
                streams[partitions.stream]["reached"] = partitions.reached
        return seal_document({"format": PARTITIONS_FORMAT, "streams": streams})

    @staticmethod
    def decode(data: bytes, where: str) -> PartitionAssignment:
        """Decode an assignment's file.

        Parameters
        ----------
        data
            The file's bytes.
        where
            Name of the file for messages.

        Raises
        ------
        CorruptFileError
            If the bytes are damaged.
        VersionSkewError
            If a newer release wrote them.
        """
        mend = "Bring it back from a copy of the query folder"
        with report_damage(where, "assignment of partitions", mend):
            fields = open_document(data, where, PARTITIONS_FORMAT, mend)
            try:
                return PartitionAssignment(
                    tuple(
                        StreamPartitions(
                            stream,
                            tuple(stream_fields["counts"]),
                            tuple(stream_fields["buckets"]),
                            stream_fields.get("reached", stream_fields["counts"][0]),
                        )
                        for stream, stream_fields in fields["streams"].items()
                    )
                )
            except UsageError as error:
                raise CorruptFileError(f"{where} is not a valid assignment of partitions: {error}. {mend}") from error

    def to_plain(self) -> dict[str, Any]:
        """Return the assignment as builtin values."""
        return {
            partitions.stream: [list(partitions.counts), list(partitions.buckets), partitions.reached]
            for partitions in self.streams
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> PartitionAssignment:
        """Return the assignment that `to_plain` converted."""
        return PartitionAssignment(
            tuple(
                StreamPartitions(name, tuple(counts), tuple(buckets), reached)
                for name, (counts, buckets, reached) in plain.items()
            )
        )


def _format_stream(stream: str) -> str:
    return f" of stream {stream!r}" if stream else ""


def _check_counts(counts: tuple[int, ...], which: str) -> None:
    if not counts or not all(type(count) is int and 0 < count <= _PARTITIONS_MAX for count in counts):
        raise UsageError(
            f"counts{which} must be numbers of partitions from 1 to {_PARTITIONS_MAX}, not {format_counts(counts)}"
        )
    if not all(before < after for before, after in pairwise(counts)):
        raise UsageError(f"counts{which} must ascend, because a source only grows, but {format_counts(counts)} do not")


def _map_by_remainder(counts: tuple[int, ...], which: str) -> list[int]:
    first = counts[0]
    for count in counts[1:]:
        if count % first:
            raise UsageError(
                f"counts{which} has {count}, which is not a multiple of the first number, {first}: with {count} "
                "partitions a key may move to a partition whose bucket does not have its state. If the source has not "
                f"grown yet, let it grow to {2 * first} or another multiple. If it already has {count} partitions, it "
                f'cannot be followed: see "A number that cannot be followed" in {PARTITIONS_PAGE}. If the producer '
                "does not partition by hash % count, give before_expansion"
            )
    return [partition_before_expansion(index, counts[-1], counts[0]) for index in range(counts[-1])]


def _map_by_function(counts: tuple[int, ...], before: BeforeExpansion, which: str) -> list[int]:
    initial = counts[0]
    answers: list[int] = []
    for count in counts:
        for index in range(count):
            try:
                answer = before(index, count, initial)
            except Exception as error:
                raise UsageError(
                    f"before_expansion({index}, {count}, {initial}){which} raised {type(error).__name__}: {error}"
                ) from error
            call = f"before_expansion({index}, {count}, {initial}){which} is {answer!r}"
            if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < initial:
                raise UsageError(f"{call}, but must be a whole number from 0 to {initial - 1}")
            if index < initial and answer != index:
                raise UsageError(f"{call}, but must be {index}: a partition that was there at first keeps its index")
            if index < len(answers) and answers[index] != answer:
                raise UsageError(
                    f"{call}, but for a smaller count it was {answers[index]}: rows do not show which count they were "
                    "written under, so a partition must have one answer for all counts"
                )
            if index == len(answers):
                answers.append(answer)
    return answers
