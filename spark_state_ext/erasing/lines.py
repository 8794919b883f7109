"""The lineages of a query that may have gone back: which one is committed, and which others Spark may go back to yet.

A query that goes back gives up what it did since, and makes the same batches anew. Files of both stay for a while, and
those that were given up may have the higher versions. Which are which is told as readers of open state tell it
(`reading.committed`); where that cannot be told, each of them counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader
from spark_state_ext.erasing.past import BucketPast, FilePast
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.committed import Line, may_be_renamed, read_timeline
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.timeline.records import epochs_of

__all__ = ["BucketLines", "QueryLines", "query_lines"]


@dataclass(frozen=True)
class BucketLines:
    """The lineages of a bucket.

    Parameters
    ----------
    past
        Its files, in all backends.
    heads
        The newest checkpoints of the committed lineage, and of any that may be it as far as files tell: one of them is
        committed, or one that they were built on.
    given_up
        The newest ones of lineages that were given up in batches which are not known to be made anew: Spark's state may
        have pointers to them still.
    """

    past: BucketPast
    heads: tuple[CheckpointRef, ...]
    given_up: tuple[CheckpointRef, ...]

    @property
    def heartbeat(self) -> int:
        """One that the committed lineage has reached for certain, or begun."""
        headers = self.past.headers
        return min((headers[it].writer.heartbeat for it in self.heads), default=0)

    @property
    def tombstone_heartbeat(self) -> int | None:
        """Heartbeat of the newest tombstone on a line that Spark may have pointers to; None: there is none."""
        lines = _with_ancestors(self.past.headers, (*self.heads, *self.given_up))
        return max(
            (it.header.writer.heartbeat for it in self.past.files if it.ref in lines and False in it.rows.values()),
            default=None,
        )

    def went_on_elsewhere(self, heartbeat: int) -> bool:
        """Whether another lineage than the committed one has reached a heartbeat."""
        line = _with_ancestors(self.past.headers, self.heads)
        return any(it.writer.heartbeat >= heartbeat for ref, it in self.past.headers.items() if ref not in line)

    def living(self, erased: Set[int], committed: int) -> set[int]:
        """Numbers of the keys that live in what may be the committed checkpoint.

        Which one is, only Spark knows. An attempt makes the checkpoint after the committed one, and none further. So it
        is one of the heads, or of those that they were built on.
        """
        headers = self.past.headers
        living: set[int] = set().union(*(self._living_at([it]) for it in self.heads))
        earlier: set[int] = set().union(*(self._living_at(headers[it].lineage) for it in self.heads))
        known = all(headers[it].writer.heartbeat <= committed for it in self.heads)
        return living | (earlier - erased if known else earlier)

    def living_elsewhere(self) -> set[int]:
        """Numbers of the keys that live where a line was given up."""
        return set().union(*(self._living_at([it]) for it in self.given_up))

    def _living_at(self, line: Sequence[CheckpointRef]) -> set[int]:
        """Keys that live in the last checkpoint of a lineage."""
        by_ref: dict[CheckpointRef, list[FilePast]] = {}
        for it in self.past.files:
            by_ref.setdefault(it.ref, []).append(it)
        found: dict[int, bool] = {}
        left = list(line)
        while left:
            files = by_ref.get(left.pop(), [])
            for it in files:
                for key, lives in it.rows.items():
                    found.setdefault(key, lives)
            if any(it.kind == SNAPSHOT for it in files):
                # It has all that lives, so what it lacks is gone.
                break
            if files:
                # What lacks a file may be inline in Spark's state: the ones before it count all the same.
                left = list(files[0].header.lineage)
        return {key for key, lives in found.items() if lives}


@dataclass(frozen=True)
class QueryLines:
    """The lineages of all buckets.

    Parameters
    ----------
    buckets
        By bucket.
    newest_given_up
        When the newest checkpoint of `given_up` was made, for people: ``"batch 19"``; None: there is none.
    """

    buckets: tuple[BucketLines, ...]
    newest_given_up: str | None

    @property
    def heartbeat(self) -> int:
        """The last one that the committed lineage has reached or begun: in a batch every bucket has the same."""
        return max((it.heartbeat for it in self.buckets), default=0)

    def committed(self, done: int) -> int:
        """Batches up to this heartbeat are committed."""
        # Somebody has begun the batch after those.
        newest_with_file = self.heartbeat - 1
        return (
            newest_with_file
            if any(it.went_on_elsewhere(newest_with_file) for it in self.buckets)
            else max(newest_with_file, done)
        )


def query_lines(query_folder: Folder, buckets: Sequence[BucketPast]) -> QueryLines:
    """Tell the lineages of a query from all its files."""
    files = [
        # Of a file that several backends have, the root's tells when it was written: its time comes last.
        BucketFiles.read_before(
            query_folder.child(str(bucket)), bucket, [(it.entry, it.header) for it in reversed(past.files)]
        )
        for bucket, past in enumerate(buckets)
    ]
    found = read_timeline(files, query_folder.name, epochs_of(query_folder), renamed=may_be_renamed(query_folder))
    lines = tuple(
        BucketLines(
            past,
            (*line.heads, *line.unsure),
            () if found.newest_with_file is None else _tips(line, found.newest_with_file),
        )
        for past, line in zip(buckets, found.lines, strict=True)
    )
    given_up = [found.clock.at(it.past.headers[ref]) for it in lines for ref in it.given_up]
    return QueryLines(lines, f"{found.clock.unit} {max(given_up)}" if given_up else None)


def _tips(line: Line, newest_with_file: int) -> tuple[CheckpointRef, ...]:
    """The newest checkpoints of lines that were given up in batches that may not have been made anew."""
    files = line.files
    headers = {ref: files.header(ref) for ref in files.kinds}
    trunk = _with_ancestors(headers, (*line.heads, *line.unsure))
    return tuple(
        ref for ref in _leaves(headers) if ref not in trunk and line.clock.at(headers[ref]) >= newest_with_file
    )


def _leaves(headers: Mapping[CheckpointRef, LineageHeader]) -> list[CheckpointRef]:
    """Checkpoints that none was built on."""
    built_on = {ref for header in headers.values() for ref in header.lineage}
    return [ref for ref in headers if ref not in built_on]


def _with_ancestors(
    headers: Mapping[CheckpointRef, LineageHeader], refs: Iterable[CheckpointRef]
) -> set[CheckpointRef]:
    """Checkpoints and all that they were built on, as far back as there are files."""
    found: set[CheckpointRef] = set()
    left = list(refs)
    while left:
        ref = left.pop()
        if ref not in found:
            found.add(ref)
            if ref in headers:
                left.extend(headers[ref].lineage)
    return found
