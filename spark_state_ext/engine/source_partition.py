"""`SourcePartition`: rows are in buckets by the partition of the source that they come from, as the user says it."""

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
    shown_counts,
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
    """Buckets that are the partitions of the source, which its producer fills by key, as those of a Kafka topic.

    A source may grow, while the query runs and from one start to the next, without a key losing its state: rows of a
    new partition go to the bucket of the partition that held their keys before
    (``docs/operating/source-partitions.md``).

    Parameters
    ----------
    column
        Name of the input's column with the index of the row's partition, of any integer type.
    counts
        How many partitions the source has; or a list: first how many it had when the query began, then the numbers that
        it has grown to, or may grow to, in ascending order. With `stream`, a mapping of these by the stream's name.
    stream
        Name of the input's column, of strings, that tells the streams of a union apart; None: there is one stream.
    group_by
        ``"partition"``: partition *i* of every stream is in bucket *i*, for streams whose rows of one key belong
        together; they all began with the same number of partitions. ``"stream_and_partition"``: each stream has buckets
        of its own, and a key has a state for each stream.
    before_expansion
        Import path, ``"package.module:function"``, of a function of a partition's index, the number of partitions and
        that of the beginning, which gives the partition that held its keys then. None: `partition_before_expansion`,
        the index modulo the number of the beginning; each count is then a multiple of the first one.
    reached
        One of the counts that the source certainly has had by now, for a source that has grown and whose rows do not
        show it yet; with `stream`, a mapping by the stream's name. None: rows prove a count by its last partition.
    checkpoint_location
        The query's own checkpointLocation, for Kafka: in every batch, the number of partitions that the source really
        has is read from Spark's offsets there, and compared before any row reaches a function. Executors read it with
        fsspec, by the `storage_options` of the state. None: only the rows show how many partitions there are.

    Raises
    ------
    UsageError
        When an argument cannot work, or the function gives what cannot be.

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
        for name, given in (("column", self.column), ("stream", self.stream)):
            if (given is not None or name == "column") and (not isinstance(given, str) or not given):
                raise UsageError(f"{name} of SourcePartition must be the name of a column, not {given!r}")
        by_stream = _by_stream(self.counts, self.stream)
        object.__setattr__(self, "counts", by_stream if self.stream is not None else by_stream[""])
        initial = {stream: counts[0] for stream, counts in by_stream.items()}
        bucket_map = BucketMap.of_partitions(initial, self.group_by)
        if self.group_by == BY_PARTITION:
            _refuse_unequal(initial)
        before = None if self.before_expansion is None else _imported(self.before_expansion)
        reached = _reached(self.reached, self.stream, by_stream)
        object.__setattr__(self, "assignment", PartitionAssignment.declared(bucket_map, by_stream, before, reached))
        if self.checkpoint_location is not None:
            object.__setattr__(self, "checkpoint_location", _location(self.checkpoint_location))

    @property
    def bucket_map(self) -> BucketMap:
        """What of it never changes, as it stands in the operator file."""
        return BucketMap.of_partitions(dict(self.assignment.initial), self.group_by)

    def buckets_of(
        self, partitions: pa.ChunkedArray, streams: pa.ChunkedArray | None
    ) -> tuple[IndexArray, dict[str, int]]:
        """The bucket of each row, and which new partitions rows come from.

        Parameters
        ----------
        partitions
            Index of its partition, int64.
        streams
            Name of its stream; None where nothing tells streams apart.

        Returns
        -------
        buckets
            int64, as many.
        largest
            The largest partition of each stream that has rows of one beyond the count which the plan knows it to have
            reached; no other streams.

        Raises
        ------
        UsageError
            When a row has no partition, or no stream.
        PartitionsChangedError
            When a row comes from a partition, or a stream, that is not declared.
        """
        if partitions.null_count:
            raise UsageError(_nothing_told(self.column, partitions.null_count))
        told = self.assignment.streams
        if streams is None:
            codes: IndexArray = np.zeros(len(partitions), np.int64)
        else:
            if streams.null_count:
                raise UsageError(_nothing_told(str(self.stream), streams.null_count))
            found = pc.index_in(streams, value_set=pa.array([it.stream for it in told], streams.type))
            if found.null_count:
                unknown = streams.filter(pc.is_null(found))[0].as_py()
                raise PartitionsChangedError(
                    f"a row comes from stream {unknown!r}, and the plan declares "
                    f"{', '.join(it.stream for it in told)}: a state belongs to its streams for life. Leave such rows "
                    f"out ({PARTITIONS_PAGE})"
                )
            codes = found.to_numpy().astype(np.int64)
        indices = partitions.to_numpy().astype(np.int64)
        largest = np.array([it.counts[-1] for it in told], np.int64)
        beyond = np.flatnonzero((indices < 0) | (indices >= largest[codes]))
        if len(beyond):
            raise self._undeclared(int(indices[beyond[0]]), told[int(codes[beyond[0]])])
        first = np.cumsum(largest) - largest
        table: IndexArray = np.array([bucket for it in told for bucket in it.buckets], np.int64)
        buckets: IndexArray = table[first[codes] + indices]
        return buckets, self._new_partitions(codes, indices)

    def _new_partitions(self, codes: IndexArray, indices: IndexArray) -> dict[str, int]:
        told = self.assignment.streams
        new = indices >= np.array([it.reached for it in told], np.int64)[codes]
        if not new.any():
            return {}
        largest = np.full(len(told), -1, np.int64)
        np.maximum.at(largest, codes[new], indices[new])
        return {it.stream: int(index) for it, index in zip(told, largest, strict=True) if index >= 0}

    def refuse_counts(self, topics: Mapping[str, int], unread: bool, where: str) -> None:
        """Refuse a batch whose source has a number of partitions that the plan cannot follow.

        Parameters
        ----------
        topics
            How many partitions each topic of the query has.
        unread
            The query has sources that have read nothing yet, whose topics are not known.
        where
            How to call what the numbers are from, in messages.

        Raises
        ------
        UsageError
            When the topics are not the plan's streams, or there is none.
        PartitionsChangedError
            When a topic has such a number.
        """
        streams = {it.stream: it for it in self.assignment.streams}
        unknown = sorted(streams.keys() - topics.keys()) if self.stream is not None else []
        if not unread and (not topics or unknown):
            needed = f"a stream {unknown[0]!r}" if unknown else "the source's partitions"
            raise UsageError(
                f"{where} does not name {needed}, so checkpoint_location cannot be used to compare the number of "
                f"partitions: it has the Kafka topics {', '.join(sorted(topics)) or 'none'}. Leave checkpoint_location "
                "out for other sources; for Kafka, name streams by its column 'topic'"
            )
        for topic, count in sorted(topics.items()):
            stream = streams.get(topic if self.stream is not None else "")
            if stream is not None and not self._follows(stream, count):
                raise self._other_count(topic, count, stream, where)

    def _follows(self, stream: StreamPartitions, count: int) -> bool:
        """Whether rows of a source with so many partitions go to the buckets of their keys."""
        if count in stream.counts:
            return True
        by_rest = self.before_expansion is None and count % stream.counts[0] == 0
        return by_rest and stream.counts[0] <= count < stream.counts[-1]

    def _other_count(self, topic: str, count: int, stream: StreamPartitions, where: str) -> PartitionsChangedError:
        which = f" of stream {stream.stream!r}" if stream.stream else ""
        larger = shown_counts((*stream.counts, count))
        if count < stream.counts[-1]:
            larger = shown_counts(sorted({*stream.counts, count}))
        if self.before_expansion is not None:
            advice = f"If before_expansion is right for {count}, start the query again with counts={larger}{which}. "
            advice += f"If not, {count} cannot be followed: {_WAY_OUT}"
        elif count % stream.counts[0]:
            advice = f"{count} is no multiple of {stream.counts[0]}, so it cannot be followed: {_WAY_OUT}"
        else:
            advice = f"Start the query again with counts={larger}{which}"
        return PartitionsChangedError(
            f"topic {topic!r} has {count} partitions now, and the plan declares "
            f"counts={shown_counts(stream.counts)}{which}. Nothing of this batch was written. {advice} (the number is "
            f"from {where})"
        )

    def _undeclared(self, index: int, of: StreamPartitions) -> UsageError | PartitionsChangedError:
        if index < 0:
            return UsageError(f"column {self.column!r} has {index} in a row: partitions are numbered from 0")
        which = f" of stream {of.stream!r}" if of.stream else ""
        count, first = of.counts[-1], of.counts[0]
        # As many as there may be now, if the source has grown as it must.
        grown = count * (index // count + 1)
        right = f"a multiple of {first}" if self.before_expansion is None else "one that before_expansion is right for"
        return PartitionsChangedError(
            f"a row comes from partition {index}{which}, and the plan declares {count} partitions: the source has "
            f"grown. Nothing of this batch was written. Look up how many partitions the source has now. If the number "
            f"is {right}, start the query again with it at the end, such as "
            f"counts={shown_counts((*of.counts, grown))}{which} for {grown}. Any other number cannot be followed: "
            f"{_WAY_OUT}"
        )


def bucket_by_to_plain(bucket_by: BucketMap | SourcePartition | None) -> dict[str, Any] | None:
    """As builtin values. A function is not among them, but what it gave: executors need not have it."""
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
    """Inverse of `bucket_by_to_plain`, on an executor."""
    if plain is None:
        return None
    if plain[_KIND] != _SOURCE_PARTITION:
        return BucketMap.from_plain(plain)
    made = object.__new__(SourcePartition)
    # As the client has checked it.
    for name in ("column", "counts", "stream", "group_by", "before_expansion", "reached", "checkpoint_location"):
        object.__setattr__(made, name, plain[name])
    object.__setattr__(made, "assignment", PartitionAssignment.from_plain(plain["assignment"]))
    return made


def _nothing_told(column: str, rows: int) -> str:
    return f"column {column!r} is NULL in {rows} rows: it tells which partition of the source a row comes from"


def _by_stream(counts: Any, stream: str | None) -> dict[str, tuple[int, ...]]:
    if isinstance(counts, Mapping) != (stream is not None):
        raise UsageError(
            "counts is a mapping of streams to numbers of partitions where stream names the column that tells them "
            f"apart, and else it is none: counts={counts!r}, stream={stream!r}"
        )
    given = dict(counts) if isinstance(counts, Mapping) else {"": counts}
    if stream is not None and (not given or not all(isinstance(name, str) and name for name in given)):
        raise UsageError(f"counts names the streams of the source, not {counts!r}")
    return {name: _listed(given[name], name) for name in sorted(given)}


def _listed(counts: Any, stream: str) -> tuple[int, ...]:
    listed = counts if isinstance(counts, (list, tuple)) else (counts,)
    whole = all(isinstance(it, (int, np.integer)) and not isinstance(it, bool) and it > 0 for it in listed)
    if not listed or not whole:
        which = f" of stream {stream!r}" if stream else ""
        raise UsageError(f"counts{which} must be a number of partitions, from 1 on, or a list of them, not {counts!r}")
    return tuple(int(it) for it in listed)


def _refuse_unequal(initial: Mapping[str, int]) -> None:
    """Refuse streams that are counted together and began with different numbers of partitions."""
    (one, first), *others = initial.items()
    other = next((stream for stream, count in others if count != first), None)
    if other is not None:
        raise UsageError(
            f"stream {one!r} began with {first} partitions and stream {other!r} with {initial[other]}, so a key that "
            f"both have would lie in two buckets and have two states. Streams with group_by={BY_PARTITION!r} begin "
            f"with the same number. Give group_by={BY_STREAM_AND_PARTITION!r} if each stream is to have its own "
            f"states, or leave bucket_by out, so that buckets go by the hash of the key ({PARTITIONS_PAGE})"
        )


def _reached(reached: Any, stream: str | None, by_stream: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    if reached is None:
        return {}
    if isinstance(reached, Mapping) != (stream is not None):
        wanted = "one number, because counts is for one stream"
        if stream is not None:
            wanted = f"a dict by stream, such as {{{next(iter(by_stream))!r}: 4}}, because counts is one"
        raise UsageError(f"reached must be {wanted}; it is {reached!r}")
    given = dict(reached) if isinstance(reached, Mapping) else {"": reached}
    for name, count in given.items():
        whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
        if name not in by_stream:
            raise UsageError(
                f"reached names the stream {name!r}, which counts does not have: it has {', '.join(by_stream)}"
            )
        if not whole or count not in by_stream[name]:
            which = f" of stream {name!r}" if name else ""
            raise UsageError(
                f"reached{which} must be one of counts={shown_counts(by_stream.get(name, ()))}, which the source "
                f"certainly has had, not {count!r}"
            )
    return {name: int(count) for name, count in given.items()}


def _location(given: Any) -> str:
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise UsageError(f"checkpoint_location must be the query's checkpointLocation, not {given!r}")
    location = _LOCAL_URI.sub("/", os.fspath(given), count=1) if str(given).startswith("file:") else os.fspath(given)
    refuse_relative(location, "checkpoint_location")
    return location.rstrip("/") or location


def _imported(path: Any) -> BeforeExpansion:
    if not isinstance(path, str) or path.count(":") != 1:
        raise UsageError(f"before_expansion must be an import path, 'package.module:function', not {path!r}")
    try:
        found = pkgutil.resolve_name(path)
    except (AttributeError, ImportError, ValueError) as error:
        raise UsageError(f"before_expansion={path!r} cannot be imported here: {error}") from error
    if not callable(found):
        raise UsageError(f"before_expansion={path!r} is {found!r}, and no function")
    imported: BeforeExpansion = found
    return imported
