"""`SourcePartition`: rows are in buckets by the partition of the source that they come from, as the user says it."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arrow_schemas.bucket_map import BY_PARTITION, BucketMap
from arrow_schemas.equality import IndexArray
from arrow_schemas.partitions import BeforeExpansion, PartitionAssignment, StreamPartitions, shown_counts
from spark_state_ext.errors import PartitionsChangedError, UsageError

__all__ = ["SourcePartition", "bucket_by_from_plain", "bucket_by_to_plain"]

_KIND, _SOURCE_PARTITION = "kind", "source_partition"
_PAGE = "docs/operating/source-partitions.md"


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
        it has grown to, or may grow to. With `stream`, a mapping of these by the stream's name.
    stream
        Name of the input's column, of strings, that tells the streams of a union apart; None: there is one stream.
    group_by
        ``"partition"``: partition *i* of every stream is in bucket *i*, for streams whose rows of one key belong
        together. ``"stream_and_partition"``: each stream has buckets of its own, and a key has a state for each stream.
    before_expansion
        Import path, ``"package.module:function"``, of a function of a partition's index, the number of partitions and
        that of the beginning, which gives the partition that held its keys then. None: `partition_before_expansion`,
        the index modulo the number of the beginning; each count is a multiple of the one before then.

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
    assignment: PartitionAssignment = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, given in (("column", self.column), ("stream", self.stream)):
            if (given is not None or name == "column") and (not isinstance(given, str) or not given):
                raise UsageError(f"{name} of SourcePartition must be the name of a column, not {given!r}")
        by_stream = _by_stream(self.counts, self.stream)
        object.__setattr__(self, "counts", by_stream if self.stream is not None else by_stream[""])
        initial = {stream: counts[0] for stream, counts in by_stream.items()}
        bucket_map = BucketMap.of_partitions(initial, self.group_by)
        before = None if self.before_expansion is None else _imported(self.before_expansion)
        object.__setattr__(self, "assignment", PartitionAssignment.declared(bucket_map, by_stream, before))

    @property
    def bucket_map(self) -> BucketMap:
        """What of it never changes, as it stands in the operator file."""
        return BucketMap.of_partitions(dict(self.assignment.initial), self.group_by)

    def buckets_of(self, partitions: pa.ChunkedArray, streams: pa.ChunkedArray | None) -> IndexArray:
        """The bucket of each row.

        Parameters
        ----------
        partitions
            Index of its partition, int64.
        streams
            Name of its stream; None where nothing tells streams apart.

        Returns
        -------
        numpy.ndarray
            int64, as many.

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
                    f"out ({_PAGE})"
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
        return buckets

    def _undeclared(self, index: int, of: StreamPartitions) -> UsageError | PartitionsChangedError:
        if index < 0:
            return UsageError(f"column {self.column!r} has {index} in a row: partitions are numbered from 0")
        which = f" of stream {of.stream!r}" if of.stream else ""
        count = of.counts[-1]
        # As many as there may be now, if the source has grown as it must.
        grown = count * (index // count + 1)
        return PartitionsChangedError(
            f"a row comes from partition {index}{which}, and the plan declares {count} partitions: the source has "
            "grown. Start the query again with its new number of partitions at the end, such as "
            f"counts={shown_counts((*of.counts, grown))}{which} ({_PAGE}). Nothing of this batch was written"
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
    for name in ("column", "counts", "stream", "group_by", "before_expansion"):
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
