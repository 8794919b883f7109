"""Finds the lineages of a query that may have gone back: the committed one, and given-up ones that Spark may still use.

A query that goes back gives up its later batches and makes them again. Files of both lineages stay for a while, and
given-up files may have the higher versions. `reading.committed_checkpoints` decides which lineage is committed; if it
cannot decide, every lineage counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, LineageHeader
from spark_state_ext.erasing.checkpoint_files import BucketPast, FilePast
from spark_state_ext.files.folder import Folder
from spark_state_ext.reading.committed_checkpoints import Line, may_be_renamed, read_timeline
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.timeline.records import read_epochs

__all__ = ["BucketLines", "QueryLines", "find_lines"]


@dataclass(frozen=True)
class BucketLines:
    """The lineages of a bucket.

    Parameters
    ----------
    past
        The bucket's files in all backends.
    heads
        The newest checkpoints of every lineage that may be the committed one: one of them, or one of their ancestors,
        is committed.
    given_up
        The newest checkpoints of given-up lineages whose batches may not have been made again: Spark's state may still
        have pointers to them.
    """

    past: BucketPast
    heads: tuple[CheckpointRef, ...]
    given_up: tuple[CheckpointRef, ...]

    @property
    def heartbeat(self) -> int:
        """A heartbeat that the committed lineage has certainly reached or begun."""
        headers = self.past.headers
        return min((headers[head].writer.heartbeat for head in self.heads), default=0)

    @property
    def tombstone_heartbeat(self) -> int | None:
        """Heartbeat of the newest tombstone on a lineage that Spark may have pointers to; None: there is none."""
        lines = _add_ancestors(self.past.headers, (*self.heads, *self.given_up))
        return max(
            (
                file.header.writer.heartbeat
                for file in self.past.files
                if file.ref in lines and False in file.rows.values()
            ),
            default=None,
        )

    def went_on_elsewhere(self, heartbeat: int) -> bool:
        """True if a lineage other than the committed one has reached a heartbeat."""
        line = _add_ancestors(self.past.headers, self.heads)
        return any(header.writer.heartbeat >= heartbeat for ref, header in self.past.headers.items() if ref not in line)

    def find_living(self, erased: Set[int], committed: int) -> set[int]:
        """Return the numbers of the keys that live in a checkpoint that may be the committed one.

        Only Spark knows which checkpoint is committed. An attempt makes only the checkpoint after the committed one, so
        the committed one is a head or an ancestor of a head.
        """
        headers = self.past.headers
        living: set[int] = set().union(*(self._find_living_at([head]) for head in self.heads))
        earlier: set[int] = set().union(*(self._find_living_at(headers[head].lineage) for head in self.heads))
        all_committed = all(headers[head].writer.heartbeat <= committed for head in self.heads)
        return living | (earlier - erased if all_committed else earlier)

    def find_living_elsewhere(self) -> set[int]:
        """Return the numbers of the keys that live in given-up lineages."""
        return set().union(*(self._find_living_at([head]) for head in self.given_up))

    def _find_living_at(self, line: Sequence[CheckpointRef]) -> set[int]:
        """Return the keys that live in the last checkpoint of a lineage."""
        by_ref: dict[CheckpointRef, list[FilePast]] = {}
        for file in self.past.files:
            by_ref.setdefault(file.ref, []).append(file)
        lives_by_key: dict[int, bool] = {}
        remaining = list(line)
        while remaining:
            files = by_ref.get(remaining.pop(), [])
            for file in files:
                for key, lives in file.rows.items():
                    lives_by_key.setdefault(key, lives)
            if any(file.kind == SNAPSHOT for file in files):
                # A snapshot has all live keys, so a key that is missing in it is dead.
                break
            if files:
                # A checkpoint without a file may be inline in Spark's state; its ancestors still count.
                remaining = list(files[0].header.lineage)
        return {key for key, lives in lives_by_key.items() if lives}


@dataclass(frozen=True)
class QueryLines:
    """The lineages of all buckets.

    Parameters
    ----------
    buckets
        The lineages of each bucket.
    newest_given_up
        Batch of the newest checkpoint in `given_up`, for messages: ``"batch 19"``; None: there is none.
    """

    buckets: tuple[BucketLines, ...]
    newest_given_up: str | None

    @property
    def heartbeat(self) -> int:
        """The last heartbeat that the committed lineage has reached or begun; all buckets of a batch have the same."""
        return max((bucket.heartbeat for bucket in self.buckets), default=0)

    def find_last_committed(self, done_heartbeat: int) -> int:
        """Return the heartbeat up to which batches are certainly committed; requests give `done_heartbeat`."""
        # The batch of the newest heartbeat has begun, so the batches before it are committed.
        before_newest = self.heartbeat - 1
        return (
            before_newest
            if any(bucket.went_on_elsewhere(before_newest) for bucket in self.buckets)
            else max(before_newest, done_heartbeat)
        )


def find_lines(query_folder: Folder, buckets: Sequence[BucketPast]) -> QueryLines:
    """Find the lineages of a query from all its files."""
    files = [
        # If several backends have a file, the root's time of the file counts, because the root comes last here.
        BucketFiles.read_before(
            query_folder.child(str(bucket)), bucket, [(file.entry, file.header) for file in reversed(past.files)]
        )
        for bucket, past in enumerate(buckets)
    ]
    timeline = read_timeline(files, query_folder.name, read_epochs(query_folder), renamed=may_be_renamed(query_folder))
    lines = tuple(
        BucketLines(
            past,
            (*line.heads, *line.unsure),
            () if timeline.newest_with_file is None else _find_given_up(line, timeline.newest_with_file),
        )
        for past, line in zip(buckets, timeline.lines, strict=True)
    )
    given_up = [timeline.clock.at(line.past.headers[ref]) for line in lines for ref in line.given_up]
    return QueryLines(lines, f"{timeline.clock.unit} {max(given_up)}" if given_up else None)


def _find_given_up(line: Line, newest_with_file: int) -> tuple[CheckpointRef, ...]:
    """Return the newest checkpoints of given-up lineages whose batches may not have been made again."""
    files = line.files
    headers = {ref: files.header(ref) for ref in files.kinds}
    trunk = _add_ancestors(headers, (*line.heads, *line.unsure))
    return tuple(
        ref for ref in _find_leaves(headers) if ref not in trunk and line.clock.at(headers[ref]) >= newest_with_file
    )


def _find_leaves(headers: Mapping[CheckpointRef, LineageHeader]) -> list[CheckpointRef]:
    """Return the checkpoints that are no other checkpoint's ancestor."""
    ancestors = {ref for header in headers.values() for ref in header.lineage}
    return [ref for ref in headers if ref not in ancestors]


def _add_ancestors(headers: Mapping[CheckpointRef, LineageHeader], refs: Iterable[CheckpointRef]) -> set[CheckpointRef]:
    """Return checkpoints with all their ancestors, as far back as there are files."""
    reached: set[CheckpointRef] = set()
    remaining = list(refs)
    while remaining:
        ref = remaining.pop()
        if ref not in reached:
            reached.add(ref)
            if ref in headers:
                remaining.extend(headers[ref].lineage)
    return reached
