"""`SourcePartition`: assigns rows to buckets by the partition of the source that they come from."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.bucket_map import BY_PARTITION, BY_STREAM_AND_PARTITION, BucketMap
from arrow_schemas.equality import IndexArray
from arrow_schemas.partitions import (
    PARTITIONS_PAGE,
    BeforeExpansion,
    PartitionAssignment,
    StreamPartitions,
    format_counts,
)
from spark_state_ext.errors import PartitionsChangedError, UsageError
from spark_state_ext.files.folder import refuse_relative

__all__ = ["SourcePartition", "bucket_by_from_plain", "bucket_by_to_plain"]

_KIND, _SOURCE_PARTITION = "kind", "source_partition"
_WAY_OUT = f'go on in hashed buckets, see "A number that cannot be followed" in {PARTITIONS_PAGE}'
# Hadoop's way to write a local path as a URL.
_LOCAL_URI = re.compile(r"file:/+")


@dataclass(frozen=True)
class SourcePartition:
    """Assigns rows to buckets by source partition, for a source whose producer partitions by key, such as Kafka.

    The source may get more partitions, during a run or between runs, and every key keeps its state: rows of a new
    partition go to the bucket of the partition that had their keys before (``docs/operating/source-partitions.md``).

    Parameters
    ----------
    column
        Name of the input column with the index of the row's partition, of any integer type.
    counts
        Number of partitions of the source. Or a list in ascending order: the number when the query began, then the
        numbers that it has grown to or may grow to. With `stream`, a mapping from the stream's name to these.
    stream
        Name of the string column that names the stream of a row in a union of streams; None: there is one stream.
    group_by
        ``"partition"``: partition *i* of every stream is in bucket *i*, so that a key has one state for all streams;
        all streams must have begun with the same number of partitions. ``"stream_and_partition"``: each stream has its
        own buckets, so that a key has one state per stream.
    before_expansion
        Import path, ``"package.module:function"``, of a function that returns the partition which had a partition's
        keys when the query began. Its arguments are the partition's index, the number of partitions, and the number
        when the query began. None: `partition_before_expansion`, the index modulo the first count; each count must then
        be a multiple of the first.
    reached
        A number from `counts` that the source has certainly reached, for a source that has grown before any row shows
        it; with `stream`, a mapping by the stream's name. None: a row of a count's last partition proves the count.
    checkpoint_location
        The query's own checkpointLocation, for Kafka: in every batch, the source's real number of partitions is read
        from Spark's offsets there and checked before any row reaches the function. Executors read it with fsspec and
        the `storage_options` of the state. None: only rows show the number of partitions.

    Raises
    ------
    UsageError
        If an argument is invalid, or the function returns an impossible partition.

    Examples
    --------
    >>> SourcePartition("partition", counts=[2, 4]).bucket_map.buckets
    2
    """

    column: str
    counts: int | Sequence[int] | Mapping[str, int | Sequence[int]]
    stream: str | None = field(default=None, kw_only=True)
    group_by: str = field(default=BY_PARTITION, kw_only=True)
    before_expansion: str | None = field(default=None, kw_only=True)
    reached: int | Mapping[str, int] | None = field(default=None, kw_only=True)
    checkpoint_location: str | None = field(default=None, kw_only=True)
    assignment: PartitionAssignment = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("column", self.column), ("stream", self.stream)):
            if (value is not None or name == "column") and (not isinstance(value, str) or not value):
                raise UsageError(f"{name} of SourcePartition must be the name of a column, not {value!r}")
        by_stream = _split_by_stream(self.counts, self.stream)
        object.__setattr__(self, "counts", by_stream if self.stream is not None else by_stream[""])
        initial = {stream: counts[0] for stream, counts in by_stream.items()}
        bucket_map = BucketMap.of_partitions(initial, self.group_by)
        if self.group_by == BY_PARTITION:
            _refuse_unequal(initial)
        function = None if self.before_expansion is None else _import_function(self.before_expansion)
        reached = _check_reached(self.reached, self.stream, by_stream)
        object.__setattr__(self, "assignment", PartitionAssignment.declared(bucket_map, by_stream, function, reached))
        if self.checkpoint_location is not None:
            object.__setattr__(self, "checkpoint_location", _check_location(self.checkpoint_location))

    @property
    def bucket_map(self) -> BucketMap:
        """The bucket map in the operator file, which never changes."""
        return BucketMap.of_partitions(dict(self.assignment.initial), self.group_by)

    def buckets_of(
        self, partitions: pa.ChunkedArray, streams: pa.ChunkedArray | None
    ) -> tuple[IndexArray, dict[str, int]]:
        """Return the bucket of each row, and the new partitions that rows come from.

        Parameters
        ----------
        partitions
            Partition index of each row, int64.
        streams
            Stream name of each row; None if there is one stream.

        Returns
        -------
        buckets
            Bucket of each row, int64.
        largest
            For each stream that has rows beyond the count that the plan knows to be reached: the largest partition of
            such a row.

        Raises
        ------
        UsageError
            If a row has no partition or no stream.
        PartitionsChangedError
            If a row comes from a partition or a stream that is not declared.
        """
        if partitions.null_count:
            raise UsageError(_describe_nulls(self.column, partitions.null_count))
        declared = self.assignment.streams
        if streams is None:
            codes: IndexArray = np.zeros(len(partitions), np.int64)
        else:
            if streams.null_count:
                raise UsageError(_describe_nulls(str(self.stream), streams.null_count))
            stream_indices = pc.index_in(
                streams, value_set=pa.array([entry.stream for entry in declared], streams.type)
            )
            if stream_indices.null_count:
                unknown = streams.filter(pc.is_null(stream_indices))[0].as_py()
                raise PartitionsChangedError(
                    f"a row comes from stream {unknown!r}, but the plan declares "
                    f"{', '.join(entry.stream for entry in declared)}: the streams of a state cannot change. Filter "
                    f"such rows out ({PARTITIONS_PAGE})"
                )
            codes = stream_indices.to_numpy().astype(np.int64)
        indices = partitions.to_numpy().astype(np.int64)
        largest = np.array([entry.counts[-1] for entry in declared], np.int64)
        beyond = np.flatnonzero((indices < 0) | (indices >= largest[codes]))
        if len(beyond):
            raise self._undeclared_error(int(indices[beyond[0]]), declared[int(codes[beyond[0]])])
        first = np.cumsum(largest) - largest
        table: IndexArray = np.array([bucket for entry in declared for bucket in entry.buckets], np.int64)
        buckets: IndexArray = table[first[codes] + indices]
        return buckets, self._new_partitions(codes, indices)

    def _new_partitions(self, codes: IndexArray, indices: IndexArray) -> dict[str, int]:
        declared = self.assignment.streams
        is_new = indices >= np.array([entry.reached for entry in declared], np.int64)[codes]
        if not is_new.any():
            return {}
        largest = np.full(len(declared), -1, np.int64)
        np.maximum.at(largest, codes[is_new], indices[is_new])
        return {entry.stream: int(index) for entry, index in zip(declared, largest, strict=True) if index >= 0}

    def refuse_counts(self, topics: Mapping[str, int], unread: bool, where: str) -> None:
        """Refuse a batch whose source has a number of partitions that the plan does not allow.

        Parameters
        ----------
        topics
            Number of partitions of each topic of the query.
        unread
            True if the query has sources that have not read anything yet, so that their topics are unknown.
        where
            Origin of the numbers, for messages.

        Raises
        ------
        UsageError
            If there are no topics, or a stream of the plan is not among them.
        PartitionsChangedError
            If a topic has such a number.
        """
        streams = {entry.stream: entry for entry in self.assignment.streams}
        unknown = sorted(streams.keys() - topics.keys()) if self.stream is not None else []
        if not unread and (not topics or unknown):
            needed = f"a stream {unknown[0]!r}" if unknown else "the source's partitions"
            raise UsageError(
                f"{where} does not name {needed}, so checkpoint_location cannot be used to check the number of "
                f"partitions. Its Kafka topics: {', '.join(sorted(topics)) or 'none'}. Omit checkpoint_location for "
                "other sources; for Kafka, stream must be the column 'topic'"
            )
        for topic, count in sorted(topics.items()):
            stream = streams.get(topic if self.stream is not None else "")
            if stream is not None and not self._follows(stream, count):
                raise self._count_error(topic, count, stream, where)

    def _follows(self, stream: StreamPartitions, count: int) -> bool:
        """True if every row of a source with `count` partitions goes to its key's bucket."""
        if count in stream.counts:
            return True
        by_rest = self.before_expansion is None and count % stream.counts[0] == 0
        return by_rest and stream.counts[0] <= count < stream.counts[-1]

    def _count_error(self, topic: str, count: int, stream: StreamPartitions, where: str) -> PartitionsChangedError:
        of_stream = f" of stream {stream.stream!r}" if stream.stream else ""
        new_counts = format_counts((*stream.counts, count))
        if count < stream.counts[-1]:
            new_counts = format_counts(sorted({*stream.counts, count}))
        if self.before_expansion is not None:
            advice = (
                f"If before_expansion is right for {count}, start the query again with counts={new_counts}{of_stream}. "
            )
            advice += f"If not, {count} cannot be followed: {_WAY_OUT}"
        elif count % stream.counts[0]:
            advice = f"{count} is not a multiple of {stream.counts[0]}, so it cannot be followed: {_WAY_OUT}"
        else:
            advice = f"Start the query again with counts={new_counts}{of_stream}"
        return PartitionsChangedError(
            f"topic {topic!r} has {count} partitions now, but the plan declares "
            f"counts={format_counts(stream.counts)}{of_stream}. Nothing of this batch was written. {advice} "
            f"(the number is from {where})"
        )

    def _undeclared_error(self, index: int, stream: StreamPartitions) -> UsageError | PartitionsChangedError:
        if index < 0:
            return UsageError(f"column {self.column!r} has {index} in a row: partitions are numbered from 0")
        of_stream = f" of stream {stream.stream!r}" if stream.stream else ""
        count, first = stream.counts[-1], stream.counts[0]
        # The smallest multiple that includes the partition.
        grown = count * (index // count + 1)
        right = f"a multiple of {first}" if self.before_expansion is None else "one that before_expansion is right for"
        return PartitionsChangedError(
            f"a row comes from partition {index}{of_stream}, but the plan declares {count} partitions: the source has "
            "grown. Nothing of this batch was written. Look up how many partitions the source has now. If the number "
            f"is {right}, start the query again with it at the end, such as "
            f"counts={format_counts((*stream.counts, grown))}{of_stream} for {grown}. Any other number cannot be "
            f"followed: {_WAY_OUT}"
        )


def bucket_by_to_plain(bucket_by: BucketMap | SourcePartition | None) -> dict[str, Any] | None:
    """Return builtin values; instead of a function they hold its results, so that executors need not import it."""
    if not isinstance(bucket_by, SourcePartition):
        return None if bucket_by is None else bucket_by.to_plain()
    return {
        _KIND: _SOURCE_PARTITION,
        "column": bucket_by.column,
        "counts": bucket_by.counts,
        "stream": bucket_by.stream,
        "group_by": bucket_by.group_by,
        "before_expansion": bucket_by.before_expansion,
        "reached": bucket_by.reached,
        "checkpoint_location": bucket_by.checkpoint_location,
        "assignment": bucket_by.assignment.to_plain(),
    }


def bucket_by_from_plain(plain: Mapping[str, Any] | None) -> BucketMap | SourcePartition | None:
    """Return `bucket_by` from its plain values, on an executor."""
    if plain is None:
        return None
    if plain[_KIND] != _SOURCE_PARTITION:
        return BucketMap.from_plain(plain)
    source_partition = object.__new__(SourcePartition)
    # Not checked again: the client did.
    for name in ("column", "counts", "stream", "group_by", "before_expansion", "reached", "checkpoint_location"):
        object.__setattr__(source_partition, name, plain[name])
    object.__setattr__(source_partition, "assignment", PartitionAssignment.from_plain(plain["assignment"]))
    return source_partition


def _describe_nulls(column: str, rows: int) -> str:
    return f"column {column!r} is NULL in {rows} rows: it must name the partition of the source that a row comes from"


def _split_by_stream(counts: Any, stream: str | None) -> dict[str, tuple[int, ...]]:
    if isinstance(counts, Mapping) != (stream is not None):
        raise UsageError(
            "counts must be a mapping from streams to numbers of partitions if stream is set, and a number or a list "
            f"if not: counts={counts!r}, stream={stream!r}"
        )
    mapping = dict(counts) if isinstance(counts, Mapping) else {"": counts}
    if stream is not None and (not mapping or not all(isinstance(name, str) and name for name in mapping)):
        raise UsageError(f"counts must be a mapping with the names of the streams as keys, not {counts!r}")
    return {name: _list_counts(mapping[name], name) for name in sorted(mapping)}


def _list_counts(counts: Any, stream: str) -> tuple[int, ...]:
    listed = counts if isinstance(counts, (list, tuple)) else (counts,)
    are_whole = all(
        isinstance(count, (int, np.integer)) and not isinstance(count, bool) and count > 0 for count in listed
    )
    if not listed or not are_whole:
        of_stream = f" of stream {stream!r}" if stream else ""
        raise UsageError(
            f"counts{of_stream} must be a number of partitions, 1 or more, or a list of them, not {counts!r}"
        )
    return tuple(int(count) for count in listed)


def _refuse_unequal(initial: Mapping[str, int]) -> None:
    """Refuse streams that share buckets but began with different numbers of partitions."""
    (first_stream, first), *others = initial.items()
    other = next((stream for stream, count in others if count != first), None)
    if other is not None:
        raise UsageError(
            f"stream {first_stream!r} began with {first} partitions and stream {other!r} with {initial[other]}, so a "
            f"key of both streams would be in two buckets and have two states. Streams with group_by={BY_PARTITION!r} "
            f"must begin with the same number. Set group_by={BY_STREAM_AND_PARTITION!r} for one state per stream, or "
            f"omit bucket_by, so that the key's hash decides the bucket ({PARTITIONS_PAGE})"
        )


def _check_reached(reached: Any, stream: str | None, by_stream: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    if reached is None:
        return {}
    if isinstance(reached, Mapping) != (stream is not None):
        expected = "one number, because counts is for one stream"
        if stream is not None:
            expected = f"a dict by stream, such as {{{next(iter(by_stream))!r}: 4}}, because counts is a dict"
        raise UsageError(f"reached must be {expected}; it is {reached!r}")
    mapping = dict(reached) if isinstance(reached, Mapping) else {"": reached}
    for name, count in mapping.items():
        is_whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
        if name not in by_stream:
            raise UsageError(
                f"reached names the stream {name!r}, which counts does not name: it names {', '.join(by_stream)}"
            )
        if not is_whole or count not in by_stream[name]:
            of_stream = f" of stream {name!r}" if name else ""
            raise UsageError(
                f"reached{of_stream} must be one of counts={format_counts(by_stream.get(name, ()))} that the source "
                f"has certainly reached, not {count!r}"
            )
    return {name: int(count) for name, count in mapping.items()}


def _check_location(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise UsageError(f"checkpoint_location must be the query's checkpointLocation, not {value!r}")
    location = _LOCAL_URI.sub("/", os.fspath(value), count=1) if str(value).startswith("file:") else os.fspath(value)
    refuse_relative(location, "checkpoint_location")
    return location.rstrip("/") or location


def _import_function(path: Any) -> BeforeExpansion:
    if not isinstance(path, str) or path.count(":") != 1:
        raise UsageError(f"before_expansion must be an import path, 'package.module:function', not {path!r}")
    try:
        function = pkgutil.resolve_name(path)
    except (AttributeError, ImportError, ValueError) as error:
        raise UsageError(f"before_expansion={path!r} cannot be imported here: {error}") from error
    if not callable(function):
        raise UsageError(f"before_expansion={path!r} is {function!r}, which is not a function")
    imported: BeforeExpansion = function
    return imported
