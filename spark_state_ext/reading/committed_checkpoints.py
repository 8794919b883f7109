"""Finds out from the headers of files which checkpoints are committed.

A checkpoint that another one names as its parent was the input of a call, so Spark had committed it. If a bucket's
newest file was made in batch *b*, the state after batch *b* - 1 is certainly its parent; the newest file itself may be
from a failed attempt. All buckets are read as of the same batch: the newest one that is certain for each of them.

If tasks did not know their batch, heartbeats are counted instead: in each batch all buckets get one, or no bucket does.
If several runs of a query left files, the room `timeline` decides which of them count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader
from spark_state_ext.errors import MissingCheckpointError
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import PARENTS_FOLDER, START_NAME
from spark_state_ext.files.operator_catalog import is_new_query_folder
from spark_state_ext.rescale.folders import first_folder
from spark_state_ext.rescale.parents import Origins
from spark_state_ext.timeline.bucket_files import BucketFiles
from spark_state_ext.timeline.epochs import Epochs, MadeAt
from spark_state_ext.timeline.heads import find_heads

__all__ = ["BATCH", "HEARTBEAT", "START", "Clock", "Line", "Timeline", "may_be_renamed", "read_timeline"]

BATCH, HEARTBEAT = "batch", "heartbeat"
# The batch number of the state that a query began with.
START = -1


@dataclass(frozen=True)
class Clock:
    """The clock that orders checkpoints of different buckets.

    Parameters
    ----------
    unit
        `BATCH`, or `HEARTBEAT` if tasks did not know their batch.
    query_id
        Query whose batches count; earlier checkpoints of other queries have the time `START`.
    renamed
        True if releases without epochs may have written another query id (`find_heads`).
    """

    unit: str
    query_id: str
    renamed: bool = False

    @staticmethod
    def of(latest: LineageHeader, renamed: bool = False) -> Clock:
        """Return the clock of the query that wrote a file."""
        writer = latest.writer
        return Clock(BATCH if writer.query_id and writer.told else HEARTBEAT, writer.query_id, renamed)

    def at(self, header: LineageHeader) -> int:
        """Return the batch or heartbeat in which a checkpoint was made."""
        if self.unit == HEARTBEAT:
            return header.writer.heartbeat
        return header.writer.batch if header.writer.query_id == self.query_id else START


@dataclass(frozen=True)
class Line:
    """The lineage of a bucket.

    Parameters
    ----------
    files
        The bucket's files.
    heads
        Its newest checkpoints: several if attempts ran side by side. At most one of them is committed.
    clock
        The query's clock.
    copied
        True if every file of another query here belongs to the state that this query began with.
    unsure
        Later checkpoints of earlier runs: the files do not show whether the last run gave them up.
    initial_batch
        The time of the bucket's initial state, if that is made of parts of other buckets; else None.
    origin
        The checkpoint of that initial state; None: it was empty.
    """

    files: BucketFiles
    heads: tuple[CheckpointRef, ...]
    clock: Clock
    copied: bool
    unsure: tuple[CheckpointRef, ...] = ()
    initial_batch: int | None = None
    origin: CheckpointRef | None = None

    @property
    def last_certain_batch(self) -> int | None:
        """The last batch after which the bucket's state is certain; None if it has no files."""
        if not self.heads:
            if self.unsure:
                raise self._unsure_error()
            return None
        return min(self._last_certain_batch_before(self.files.header(head)) for head in self.heads)

    def _last_certain_batch_before(self, head: LineageHeader) -> int:
        at = self.clock.at(head)
        if self._is_start(head):
            return START
        if head.parent is None or head.parent in self.files or SNAPSHOT in self.files.kinds[head.ref]:
            return at - 1
        # The parent's file is not uploaded yet, or was deleted, so the time of the parent is unknown.
        present = [ref for ref in head.lineage if ref in self.files]
        if present:
            return self.clock.at(self.files.header(present[-1]))
        if self.initial_batch is not None and self.origin in head.lineage and head.parent != self.origin:
            return self.initial_batch
        return at - 1

    def _is_start(self, header: LineageHeader) -> bool:
        return self.clock.unit == BATCH and header.writer.query_id != self.clock.query_id

    def state_at(self, batch: int, unproven: bool) -> CheckpointRef | None:
        """Return the bucket's checkpoint after a batch; None if it had no state."""
        if any(not self.heads or self.clock.at(self.files.header(ref)) <= batch for ref in self.unsure):
            raise self._unsure_error()
        for head in self.heads:
            header = self.files.header(head)
            if self.clock.at(header) > batch:
                return self._find_ancestor_at(header, batch)
            if unproven or (self.copied and self._is_start(header)):
                self._refuse_unknown_batch(header, batch)
                return head
            raise MissingCheckpointError(
                f"the files in {self.files.folder.root} do not show whether checkpoint {head}, with which the query "
                "began, was committed: wait until the query has changed the bucket, read what Spark committed with "
                "open_committed (--checkpoint), or read with unproven=True"
            )
        return self._initial_state_at(batch)

    def _initial_state_at(self, batch: int) -> CheckpointRef | None:
        """Return the checkpoint that the bucket had before its first change; None if it was empty."""
        if self.initial_batch is not None and batch < self.initial_batch:
            raise MissingCheckpointError(
                f"the files of bucket {self.files.bucket} in {self.files.folder.root} do not reach back to "
                f"{self.clock.unit} {batch}: the query was rescaled later, and the earliest state there is the one "
                f"after {self.clock.unit} {self.initial_batch}. Choose a later {self.clock.unit}, or read what Spark "
                "committed with open_committed (--checkpoint)"
            )
        return self.origin

    def _unsure_error(self) -> MissingCheckpointError:
        return MissingCheckpointError(
            f"the files in {self.files.folder.root} do not show whether the query gave up checkpoint "
            f"{max(self.unsure)}, which an earlier run made: read what Spark committed with open_committed "
            "(--checkpoint), or wait until the query has changed the bucket"
        )

    def _find_ancestor_at(self, head: LineageHeader, batch: int) -> CheckpointRef | None:
        """Return the newest ancestor that was made in the batch or before it."""
        while True:
            refs = [ref for ref in head.lineage if ref in self.files]
            # Times ascend along a lineage, and mostly the result is one of the last few refs.
            low, high, step = 0, len(refs), 1
            while low < high:
                probe = max(low, high - step)
                if self.clock.at(self.files.header(refs[probe])) <= batch:
                    low = probe + 1
                    step = max(1, (high - low) // 2)
                else:
                    high = probe
                    step *= 2
            if low:
                ancestor = refs[low - 1]
                self._refuse_gap(head, ancestor, batch)
                self._refuse_unknown_batch(self.files.header(ancestor), batch)
                return ancestor
            if head.parent is None:
                return self._initial_state_at(batch)
            if not refs and self.origin is not None and self.origin in head.lineage:
                if head.parent != self.origin and batch != self.initial_batch:
                    raise self._gap_error(head.lineage[1], self.origin, batch)
                return self._initial_state_at(batch)
            if not refs:
                raise MissingCheckpointError(
                    f"the files of bucket {self.files.bucket} in {self.files.folder.root} do not reach back to "
                    f"{self.clock.unit} {batch}: the files before checkpoint {head.ref} were cleaned up, or are "
                    "from before the query was rescaled. Wait for a later batch, or read what Spark committed with "
                    "open_committed (--checkpoint)"
                )
            head = self.files.header(refs[0])

    def _refuse_gap(self, head: LineageHeader, ancestor: CheckpointRef, batch: int) -> None:
        """Raise if the next checkpoint has no file, so that it may also have been made before the batch ended."""
        later = head.lineage[head.lineage.index(ancestor) + 1 :]
        if later and later[0] not in self.files and self.clock.at(self.files.header(ancestor)) != batch:
            raise self._gap_error(later[0], ancestor, batch)

    def _refuse_unknown_batch(self, header: LineageHeader, batch: int) -> None:
        """Raise if a checkpoint's batch is unknown.

        A task that did not know its batch counted the calls of its bucket; there are fewer of these than batches.
        """
        if self.clock.unit == BATCH and self.clock.renamed and self._is_start(header) and not header.writer.epoch:
            raise MissingCheckpointError(
                f"checkpoint {header.ref} in {self.files.folder.root} was made by an earlier release, which may have "
                f"used another query id, so it may not be the state after batch {batch}: read what Spark committed "
                "with open_committed (--checkpoint), or wait until the query has changed the bucket"
            )
        if self.clock.unit == BATCH and not header.writer.told and not self._is_start(header):
            raise MissingCheckpointError(
                f"checkpoint {header.ref} in {self.files.folder.root} was made by a task that did not know its batch, "
                f"so it may not be the state after batch {batch}: choose another batch, or read what Spark committed "
                "with open_committed (--checkpoint)"
            )

    def _gap_error(self, missing: CheckpointRef, ancestor: CheckpointRef, batch: int) -> MissingCheckpointError:
        return MissingCheckpointError(
            f"there is no file of checkpoint {missing} in {self.files.folder.root}, so the state after "
            f"{self.clock.unit} {batch} may be {ancestor} or {missing}: try again in a moment"
        )

    def oldest(self) -> int:
        """Return the first batch whose state can be loaded; without files, the batch of the initial state."""
        start = START if self.initial_batch is None else self.initial_batch
        oldest = start
        for head in self.heads[:1]:
            header = self.files.header(head)
            oldest = self.clock.at(header)
            while True:
                for ref in (header.ref, *reversed(header.lineage)):
                    if ref == self.origin:
                        return start
                    if ref not in self.files:
                        return oldest
                    ancestor = self.files.header(ref)
                    if ancestor.parent is None and DELTA in self.files.kinds[ref]:
                        return start
                    if SNAPSHOT in self.files.kinds[ref]:
                        oldest = self.clock.at(ancestor)
                if not header.lineage:
                    return oldest
                header = self.files.header(header.lineage[0])
        return oldest


@dataclass(frozen=True)
class Timeline:
    """The lineages of all buckets of a query folder.

    Parameters
    ----------
    lines
        One for each bucket.
    clock
        The query's clock.
    newest_with_file
        The newest batch that has a file; None if there are no files.
    initial_batch
        As in `Line`.
    """

    lines: tuple[Line, ...]
    clock: Clock
    newest_with_file: int | None
    initial_batch: int | None = None

    def newest(self, unproven: bool) -> int | None:
        """Return the newest batch after which all buckets can be read; None if none is certainly committed."""
        if self.newest_with_file is None:
            return self.initial_batch
        certain = [batch for line in self.lines if (batch := line.last_certain_batch) is not None]
        newest = max(START, self.newest_with_file - 1) if unproven else min(certain)
        return newest if newest > START or self._has_start() else None

    def oldest(self) -> int:
        """Return the first batch that the files of all buckets reach back to."""
        return max(line.oldest() for line in self.lines)

    def state_at(self, batch: int, unproven: bool) -> dict[int, CheckpointRef | None]:
        """Return the checkpoint of each bucket after a batch."""
        return {line.files.bucket: line.state_at(batch, unproven) for line in self.lines}

    def _has_start(self) -> bool:
        """True if the query began with the state of another query."""
        if self.initial_batch is not None:
            return True
        heads = [line.files.header(head) for line in self.lines for head in line.heads]
        if self.clock.unit == HEARTBEAT:
            return False
        before = (line.files.header(ref) for line in self.lines for ref in line.files.kinds)
        return any(header.writer.query_id != self.clock.query_id for header in (*heads, *before))


def may_be_renamed(query_folder: Folder) -> bool:
    """True if releases without epochs may have written another query id for this query.

    Tasks of its first batch did not know the query's id; later tasks may have known it. A query that started from a
    savepoint is excluded: its folder has copies of other queries' files.
    """
    return is_new_query_folder(first_folder(query_folder.name)) and not query_folder.exists(START_NAME)


def read_timeline(
    buckets: Sequence[BucketFiles],
    query_folder: str,
    epochs: Epochs,
    origins: Origins | None = None,
    renamed: bool = False,
) -> Timeline:
    """Return the lineages of a query, found from its files; `renamed` is as in `find_heads`."""
    heads = find_heads(buckets, epochs, renamed)
    newest = [
        files.header(ref) for files in buckets for ref in heads[files.bucket].certain or heads[files.bucket].unsure
    ]
    if not newest:
        initial_batch = _initial_batch(Clock(BATCH, ""), origins)
        empty_lines = [
            Line(files, (), Clock(BATCH, ""), False, (), initial_batch, _find_origin(origins, files))
            for files in buckets
        ]
        return Timeline(tuple(empty_lines), Clock(BATCH, ""), None, initial_batch)
    # If several queries wrote to the folder, the last one's clock is used.
    latest = max(
        newest, key=lambda header: (epochs.rank(MadeAt.of(header)), header.writer.heartbeat, header.writer.batch)
    )
    clock = Clock.of(latest, renamed)
    copied = query_folder == clock.query_id
    initial_batch = _initial_batch(clock, origins)
    lines = tuple(
        Line(
            files,
            heads[files.bucket].certain,
            clock,
            copied,
            heads[files.bucket].unsure,
            initial_batch,
            _find_origin(origins, files),
        )
        for files in buckets
    )
    return Timeline(lines, clock, max(clock.at(header) for header in newest), initial_batch)


def _initial_batch(clock: Clock, origins: Origins | None) -> int | None:
    """Return the time of the buckets' initial state; None if that is not made of parts of other buckets."""
    if origins is None:
        return None
    if clock.unit == HEARTBEAT:
        return origins.heartbeat
    return origins.batch if origins.in_place else START


def _find_origin(origins: Origins | None, files: BucketFiles) -> CheckpointRef | None:
    if origins is None or files.bucket in origins.refs or files.kinds:
        return None if origins is None else origins.refs.get(files.bucket)
    raise MissingCheckpointError(
        f"bucket {files.bucket} begins with parts of other buckets, but {PARENTS_FOLDER}/ next to "
        f"{files.folder.root} does not have all of them: the rescaling did not finish, or somebody removed them. Read "
        "the folder that the query was rescaled from, or restore them"
    )
