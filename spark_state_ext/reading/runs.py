"""Which files of a query count, where several of its runs have left some: those that the last run went on from.

A run makes batches anew from where it began, and what the runs before it had made of these is given up. Each run that
the last one was built on may have done so, and a restart comes between as often as not. A file tells who made it, in
which batch, and on what. So these things are certain:

* Runs do not come back: one that built on a file of another is the later of the two.
* Where the last run was built on what another run had made of a batch, in any bucket, all that this one did up to there
  counts, in every bucket.
* What a run did before every later run began, counts as well, unless it went back itself and nothing says that the last
  run was built on it. A run began no later than its first file says.

Where lineages do not tell which of two runs came first, file times do. Of files that were written anew the times say
nothing, and `files.last_run` says which these may be. What is not certain then is said to be unsure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.files.last_run import LastRun
from spark_state_ext.reading.history import BucketFiles, read_side_by_side

__all__ = ["START", "Heads", "heads_by_run"]

# The batch of what a query began with.
START = -1


@dataclass(frozen=True)
class Heads:
    """The newest checkpoints of a bucket.

    Parameters
    ----------
    certain
        Those that count; several where attempts were made side by side.
    unsure
        Later ones, which may be given up or not.
    """

    certain: tuple[CheckpointRef, ...]
    unsure: tuple[CheckpointRef, ...] = ()


def heads_by_run(
    buckets: Sequence[BucketFiles],
    latest: LineageHeader,
    at: Callable[[LineageHeader], int],
    noted: LastRun | None,
) -> dict[int, Heads]:
    """The newest checkpoints of each bucket that the last run made, or went on from.

    All headers are read of those buckets alone in which another run has files of the newest version.
    """
    run_id = latest.writer.run_id
    mixed = [
        files
        for files in buckets
        if any(files.header(ref).writer.run_id != run_id for ref in files.of_newest_version())
    ]
    read_side_by_side([(files, ref) for files in mixed for ref in files.kinds])
    runs = _Runs(run_id, at, noted)
    for files in mixed:
        runs.see_all(files)
    wanted = frozenset(files.header(ref).writer.run_id for files in mixed for ref in files.kinds) - {run_id}
    found: dict[int, Heads] = {}
    for files in buckets:
        refs = files.kinds if files in mixed else files.of_newest_version()
        made = _newest(ref for ref in refs if files.header(ref).writer.run_id == run_id)
        found[files.bucket] = Heads(made)
        for ref in made:
            runs.follow(files, ref, wanted)
    for files in mixed:
        if not found[files.bucket].certain:
            found[files.bucket] = runs.heads(files)
    return found


class _Runs:
    """What is known of the runs."""

    def __init__(self, last: str, at: Callable[[LineageHeader], int], noted: LastRun | None) -> None:
        self._last = last
        self._at = at
        self._noted = frozenset[str]() if noted is None else noted.runs
        # The batch of the first file, of runs of this query; that run began no later.
        self._first: dict[str, int] = {}
        # That of its last file.
        self._latest: dict[str, int] = {}
        # The last batch of a run that the last run was built on.
        self._reach: dict[str, int] = {}
        self._built_on: dict[str, set[str]] = {}
        self._times: dict[str, tuple[float, float]] = {}
        self._all_before: dict[str, frozenset[str]] = {}

    def see_all(self, files: BucketFiles) -> None:
        """Take note of all files of a bucket."""
        for ref in files.kinds:
            header = files.header(ref)
            self._see(files, header)
            built_on = {files.header(it).writer.run_id for it in header.lineage if it in files}
            self._built_on[header.writer.run_id] |= built_on - {header.writer.run_id}

    def follow(self, files: BucketFiles, head: CheckpointRef, wanted: frozenset[str]) -> None:
        """Take note of the runs that a checkpoint of the last one was built on, until the wanted ones are found."""
        left, later = set(wanted), ""
        newest: LineageHeader | None = files.header(head)
        while newest is not None:
            run_id = newest.writer.run_id
            self._see(files, newest)
            self._reach[run_id] = max(self._at(newest), self._reach.get(run_id, START))
            if later:
                self._built_on[later].add(run_id)
            oldest = _first_of_run(files, newest)
            self._see(files, oldest)
            left.discard(run_id)
            before = [ref for ref in oldest.lineage if ref in files]
            newest = files.header(before[-1]) if before and left else None
            later = run_id

    def _see(self, files: BucketFiles, header: LineageHeader) -> None:
        run_id, at, time_s = header.writer.run_id, self._at(header), files.modified_s(header.ref)
        self._built_on.setdefault(run_id, set())
        if at > START:
            self._first[run_id] = min(at, self._first.get(run_id, at))
            self._latest[run_id] = max(at, self._latest.get(run_id, at))
        begun_s, ended_s = self._times.get(run_id, (time_s, time_s))
        self._times[run_id] = (min(begun_s, time_s), max(ended_s, time_s))

    def heads(self, files: BucketFiles) -> Heads:
        """The newest checkpoints of a bucket in which the last run has made none."""
        headers = [files.header(ref) for ref in files.kinds]
        certain = [it for it in headers if self._counts(it)]
        newest = max((self._at(it) for it in certain), default=START)
        refs = [it.ref for it in certain if self._at(it) == newest]
        unsure = [it for it in headers if self._at(it) >= newest and not (self._counts(it) or self._is_given_up(it))]
        built_on = {ref for it in unsure for ref in it.lineage}
        return Heads(
            # What a query began with is of one time, and the last of it counts.
            _newest(refs) if newest == START else tuple(refs),
            tuple(it.ref for it in unsure if it.ref not in built_on),
        )

    def _counts(self, header: LineageHeader) -> bool:
        """Whether a file was made on what the last run went on from, for certain."""
        run_id, at = header.writer.run_id, self._at(header)
        if at == START or at <= self._reach.get(run_id, START):
            return True
        if any(
            first <= at and other != run_id and not self._is_before(other, run_id)
            for other, first in self._first.items()
        ):
            return False
        return not any(self._is_doubtful(it) for it in {run_id, *self._before(run_id)} if it not in self._reach)

    def _is_doubtful(self, run_id: str) -> bool:
        """Whether a run went back, and the last run may have gone on from before that all the same.

        A checkpoint that was copied before a query went back can be gone on from later.
        """
        first = self._first.get(run_id)
        return first is not None and any(
            (latest > first or self._reach.get(other, START) >= first) and self._is_before(other, run_id)
            for other, latest in self._latest.items()
            if other != run_id
        )

    def _is_given_up(self, header: LineageHeader) -> bool:
        """Whether a file counts no more, for certain."""
        run_id, at = header.writer.run_id, self._at(header)
        return any(
            (self._is_before(run_id, other) and self._first.get(other, at + 1) <= at)
            or (self._is_before(other, run_id) and reach > at)
            for other, reach in self._reach.items()
            if other != run_id
        )

    def _is_before(self, one: str, other: str) -> bool:
        """Whether a run was over when another began, for certain."""
        if self._last in (one, other):
            return other == self._last
        earlier, later = one in self._before(other), other in self._before(one)
        if earlier or later:
            return earlier and not later
        if one in self._noted or other in self._noted:
            # A run that is not in the record has written since.
            return other not in self._noted
        return self._times[one][1] < self._times[other][0]

    def _before(self, run_id: str) -> frozenset[str]:
        """The runs that a run was built on."""
        if run_id not in self._all_before:
            found: set[str] = set()
            left = [run_id]
            while left:
                new = self._built_on[left.pop()] - found
                found |= new
                left.extend(new)
            self._all_before[run_id] = frozenset(found)
        return self._all_before[run_id]


def _first_of_run(files: BucketFiles, newest: LineageHeader) -> LineageHeader:
    """The first checkpoint that a checkpoint's run made on its lineage, as far back as there are files."""
    first = newest

    def is_mine(ref: CheckpointRef) -> bool:
        return files.header(ref).writer.run_id == newest.writer.run_id

    while True:
        refs = [it for it in first.lineage if it in files]
        # Where a run is longer than a lineage, the first look says so; where it is as short as a batch, the second.
        if refs and is_mine(refs[0]):
            first = files.header(refs[0])
            continue
        if not refs or not is_mine(refs[-1]):
            return first
        low, high = 1, len(refs) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_mine(refs[middle]) else (middle + 1, high)
        return files.header(refs[low])


def _newest(refs: Iterable[CheckpointRef]) -> tuple[CheckpointRef, ...]:
    """Those of the highest version."""
    kept = list(refs)
    version = max((ref.version for ref in kept), default=0)
    return tuple(ref for ref in kept if ref.version == version)
