"""What is committed, told from the headers of files alone.

A checkpoint that another one names as its parent was the input of a call, so Spark had committed it. Of a bucket whose
newest file was made in batch *b* on a parent, the state after batch *b* - 1 is that parent's, for certain; what the
newest file says may be an attempt that failed. All buckets are read as of one batch, the newest of which that is known.

Where tasks were not told their batch, heartbeats are counted in its place: every bucket gets one in a batch, or none.
Which files count, where several runs of a query have left some, `timeline` tells.
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
from spark_state_ext.timeline.epochs import Epochs, Made
from spark_state_ext.timeline.heads import heads_of

__all__ = ["BATCH", "HEARTBEAT", "START", "Clock", "Line", "Timeline", "may_be_renamed", "timeline"]

BATCH, HEARTBEAT = "batch", "heartbeat"
# The batch of what a query began with.
START = -1


@dataclass(frozen=True)
class Clock:
    """By what checkpoints of different buckets are compared.

    Parameters
    ----------
    unit
        `BATCH`, or `HEARTBEAT` where tasks were not told their batch.
    query_id
        Whose batches count; what other queries made before is of `START`.
    renamed
        Releases without epochs may have called the query otherwise (`heads_of`).
    """

    unit: str
    query_id: str
    renamed: bool = False

    @staticmethod
    def of(latest: LineageHeader, renamed: bool = False) -> Clock:
        """The clock of the query that wrote a file."""
        writer = latest.writer
        return Clock(BATCH if writer.query_id and writer.told else HEARTBEAT, writer.query_id, renamed)

    def at(self, header: LineageHeader) -> int:
        """When a checkpoint was made."""
        if self.unit == HEARTBEAT:
            return header.writer.heartbeat
        return header.writer.batch if header.writer.query_id == self.query_id else START


@dataclass(frozen=True)
class Line:
    """The lineage that a bucket is on.

    Parameters
    ----------
    files
        The bucket's.
    heads
        Its newest checkpoints; several where attempts were made side by side, and one of them may be committed.
    clock
        The query's.
    copied
        Files of other queries here are what this one began with, and nothing else.
    unsure
        Later checkpoints of runs before the last one, which it has given up or not: files do not tell.
    since
        When the bucket had the state that it began with, where that is made of parts of others; None: it is not.
    origin
        What the bucket began with then; None: without state.
    """

    files: BucketFiles
    heads: tuple[CheckpointRef, ...]
    clock: Clock
    copied: bool
    unsure: tuple[CheckpointRef, ...] = ()
    since: int | None = None
    origin: CheckpointRef | None = None

    @property
    def through(self) -> int | None:
        """The last batch as of which the bucket's state is certain; None where it has no file."""
        if not self.heads:
            if self.unsure:
                raise self._untold()
            return None
        return min(self._through(self.files.header(head)) for head in self.heads)

    def _through(self, head: LineageHeader) -> int:
        at = self.clock.at(head)
        if self._is_start(head):
            return START
        if head.parent is None or head.parent in self.files or SNAPSHOT in self.files.kinds[head.ref]:
            return at - 1
        # The parent's file is on its way still, or gone: when it was made is not known.
        known = [ref for ref in head.lineage if ref in self.files]
        if known:
            return self.clock.at(self.files.header(known[-1]))
        if self.since is not None and self.origin in head.lineage and head.parent != self.origin:
            return self.since
        return at - 1

    def _is_start(self, header: LineageHeader) -> bool:
        return self.clock.unit == BATCH and header.writer.query_id != self.clock.query_id

    def state_at(self, batch: int, unproven: bool) -> CheckpointRef | None:
        """The checkpoint that the bucket had after a batch; None where it had no state."""
        if any(not self.heads or self.clock.at(self.files.header(it)) <= batch for it in self.unsure):
            raise self._untold()
        for head in self.heads:
            header = self.files.header(head)
            if self.clock.at(header) > batch:
                return self._ancestor_at(header, batch)
            if unproven or (self.copied and self._is_start(header)):
                self._refuse_untold_batch(header, batch)
                return head
            raise MissingCheckpointError(
                f"the files in {self.files.folder.root} do not tell whether checkpoint {head}, with which the query "
                "began, was committed: wait until the query has changed the bucket, have Spark say it, with "
                "open_committed (--checkpoint), or read with unproven=True"
            )
        return self._begun_with(batch)

    def _begun_with(self, batch: int) -> CheckpointRef | None:
        """What the bucket had before its first change."""
        if self.since is not None and batch < self.since:
            raise MissingCheckpointError(
                f"the files of bucket {self.files.bucket} in {self.files.folder.root} do not reach back to "
                f"{self.clock.unit} {batch}: the query was rescaled since, and has the state after {self.clock.unit} "
                f"{self.since} there at the earliest. Choose a later one, or have Spark say what is committed, with "
                "open_committed (--checkpoint)"
            )
        return self.origin

    def _untold(self) -> MissingCheckpointError:
        return MissingCheckpointError(
            f"the files in {self.files.folder.root} do not tell whether the query went back from checkpoint "
            f"{max(self.unsure)}, which a run before the last one made: have Spark say what is committed, with "
            "open_committed (--checkpoint), or wait until the query has changed the bucket"
        )

    def _ancestor_at(self, head: LineageHeader, batch: int) -> CheckpointRef | None:
        """The newest ancestor from that batch or before."""
        while True:
            refs = [ref for ref in head.lineage if ref in self.files]
            # Times ascend along a lineage, and mostly one of the last few is wanted.
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
                found = refs[low - 1]
                self._refuse_gap(head, found, batch)
                self._refuse_untold_batch(self.files.header(found), batch)
                return found
            if head.parent is None:
                return self._begun_with(batch)
            if not refs and self.origin is not None and self.origin in head.lineage:
                if head.parent != self.origin and batch != self.since:
                    raise self._gap(head.lineage[1], self.origin, batch)
                return self._begun_with(batch)
            if not refs:
                raise MissingCheckpointError(
                    f"the files of bucket {self.files.bucket} in {self.files.folder.root} do not reach back to "
                    f"{self.clock.unit} {batch}: what came before checkpoint {head.ref} was cleaned up, or is from "
                    "before the query was rescaled. Wait for a later batch, or have Spark say what is committed, with "
                    "open_committed (--checkpoint)"
                )
            head = self.files.header(refs[0])

    def _refuse_gap(self, head: LineageHeader, found: CheckpointRef, batch: int) -> None:
        """What came next must be known to be later, unless the checkpoint is of that very batch."""
        after = head.lineage[head.lineage.index(found) + 1 :]
        if after and after[0] not in self.files and self.clock.at(self.files.header(found)) != batch:
            raise self._gap(after[0], found, batch)

    def _refuse_untold_batch(self, header: LineageHeader, batch: int) -> None:
        """A task that was not told its batch has counted calls of its bucket, which are fewer."""
        if self.clock.unit == BATCH and self.clock.renamed and self._is_start(header) and not header.writer.epoch:
            raise MissingCheckpointError(
                f"checkpoint {header.ref} in {self.files.folder.root} was made by an earlier release, which may have "
                f"called the query otherwise, so it is not known whether it is the state after batch {batch}: have "
                "Spark say what is committed, with open_committed (--checkpoint), or wait until the query has changed "
                "the bucket"
            )
        if self.clock.unit == BATCH and not header.writer.told and not self._is_start(header):
            raise MissingCheckpointError(
                f"checkpoint {header.ref} in {self.files.folder.root} was made by a task that was not told its batch, "
                f"so it is not known whether it is the state after batch {batch}: choose another batch, or have Spark "
                "say what is committed, with open_committed (--checkpoint)"
            )

    def _gap(self, missing: CheckpointRef, found: CheckpointRef, batch: int) -> MissingCheckpointError:
        return MissingCheckpointError(
            f"there is no file of checkpoint {missing} in {self.files.folder.root}, so it is not known whether "
            f"{found} or that one is the state after {self.clock.unit} {batch}: try again in a moment"
        )

    def oldest(self) -> int:
        """The first batch whose state can be loaded from what is there; of a bucket without files, any."""
        start = START if self.since is None else self.since
        found = start
        for head in self.heads[:1]:
            header = self.files.header(head)
            found = self.clock.at(header)
            while True:
                for ref in (header.ref, *reversed(header.lineage)):
                    if ref == self.origin:
                        return start
                    if ref not in self.files:
                        return found
                    made = self.files.header(ref)
                    if made.parent is None and DELTA in self.files.kinds[ref]:
                        return start
                    if SNAPSHOT in self.files.kinds[ref]:
                        found = self.clock.at(made)
                if not header.lineage:
                    return found
                header = self.files.header(header.lineage[0])
        return found


@dataclass(frozen=True)
class Timeline:
    """The lineages of all buckets of a query folder.

    Parameters
    ----------
    lines
        By bucket.
    clock
        The query's.
    begun
        The newest batch of which there is a file; None where there is no file at all.
    since
        As of `Line`.
    """

    lines: tuple[Line, ...]
    clock: Clock
    begun: int | None
    since: int | None = None

    def newest(self, unproven: bool) -> int | None:
        """The newest batch as of which all buckets can be read; None where nothing is known to be committed."""
        if self.begun is None:
            return self.since
        known = [through for line in self.lines if (through := line.through) is not None]
        newest = max(START, self.begun - 1) if unproven else min(known)
        return newest if newest > START or self._has_start() else None

    def oldest(self) -> int:
        """The first batch that files of all buckets reach back to."""
        return max(line.oldest() for line in self.lines)

    def state_at(self, batch: int, unproven: bool) -> dict[int, CheckpointRef | None]:
        """The checkpoint of each bucket after a batch."""
        return {line.files.bucket: line.state_at(batch, unproven) for line in self.lines}

    def _has_start(self) -> bool:
        """Whether the query began with the state of another one."""
        if self.since is not None:
            return True
        heads = [line.files.header(head) for line in self.lines for head in line.heads]
        if self.clock.unit == HEARTBEAT:
            return False
        before = (line.files.header(ref) for line in self.lines for ref in line.files.kinds)
        return any(it.writer.query_id != self.clock.query_id for it in (*heads, *before))


def may_be_renamed(query_folder: Folder) -> bool:
    """Whether a query may have had another name under releases without epochs.

    Tasks of its first batch were not told the query, and later ones may have been. A start from a savepoint copies
    files of other queries, which are none of its own.
    """
    return is_new_query_folder(first_folder(query_folder.name)) and not query_folder.exists(START_NAME)


def timeline(
    buckets: Sequence[BucketFiles],
    query_folder: str,
    epochs: Epochs,
    origins: Origins | None = None,
    renamed: bool = False,
) -> Timeline:
    """Tell from files which lineages a query is on; `renamed` as of `heads_of`."""
    heads = heads_of(buckets, epochs, renamed)
    newest = [it.header(ref) for it in buckets for ref in heads[it.bucket].certain or heads[it.bucket].unsure]
    if not newest:
        since = _since(Clock(BATCH, ""), origins)
        none = [Line(files, (), Clock(BATCH, ""), False, (), since, _origin(origins, files)) for files in buckets]
        return Timeline(tuple(none), Clock(BATCH, ""), None, since)
    # Of several queries that wrote in the folder, the one that did last.
    latest = max(newest, key=lambda it: (epochs.rank(Made.of(it)), it.writer.heartbeat, it.writer.batch))
    clock = Clock.of(latest, renamed)
    copied = query_folder == clock.query_id
    since = _since(clock, origins)
    lines = tuple(
        Line(it, heads[it.bucket].certain, clock, copied, heads[it.bucket].unsure, since, _origin(origins, it))
        for it in buckets
    )
    return Timeline(lines, clock, max(clock.at(it) for it in newest), since)


def _since(clock: Clock, origins: Origins | None) -> int | None:
    """When the parents had the state that buckets began with, by a clock."""
    if origins is None:
        return None
    if clock.unit == HEARTBEAT:
        return origins.heartbeat
    return origins.batch if origins.in_place else START


def _origin(origins: Origins | None, files: BucketFiles) -> CheckpointRef | None:
    if origins is None or files.bucket in origins.refs or files.kinds:
        return None if origins is None else origins.refs.get(files.bucket)
    raise MissingCheckpointError(
        f"bucket {files.bucket} begins with parts of other buckets, which are not all in {PARENTS_FOLDER}/ beside "
        f"{files.folder.root}: the rescaling did not come to its end, or somebody has removed them. Read the folder "
        "that the query was rescaled from, or bring them back"
    )
