"""What is known of files without a recorded epoch: of releases that had none, or copies of another query's.

Their headers tell the run that made them, the batch, and what they were built on. A run that built on a file of another
is the later of the two; and what runs did at different times was not given up. Where two runs have made the same
batches, and neither built on the other, nobody can tell which of them went back.

A task that was not told its batch counts its bucket's calls instead. Then only heartbeats compare it with another
bucket, and a batch without data has the heartbeat of the one before. So the order of two files with one heartbeat is
not known.
"""

from __future__ import annotations

from collections.abc import Iterable

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.timeline.epochs import Verdict

__all__ = ["EarlierRuns"]

_BATCHES_MAX = 2**63
_Time = tuple[int, int]


class EarlierRuns:
    """The runs that have left files without a recorded epoch."""

    def __init__(self, headers: Iterable[LineageHeader], query_id: str, renamed: bool = False) -> None:
        self._query_id = query_id
        self._renamed = renamed
        # Of each run of the query, the earliest and the latest time at which it may have begun, and its last one.
        self._first: dict[str, tuple[_Time, _Time]] = {}
        self._last: dict[str, _Time] = {}
        # By run, those that it built on.
        self._built_on: dict[str, set[str]] = {}
        own = [it for it in headers if not self._is_begun_with(it)]
        run_of: dict[tuple[int, CheckpointRef], str] = {(it.bucket, it.ref): it.writer.run_id for it in own}
        for header in own:
            run_id, (low, high) = header.writer.run_id, _between(header)
            low_before, high_before = self._first.get(run_id, (low, high))
            self._first[run_id] = min(low, low_before), min(high, high_before)
            self._last[run_id] = max(high, self._last.get(run_id, high))
            before = {run_of.get((header.bucket, ref), run_id) for ref in header.lineage} - {run_id}
            self._built_on.setdefault(run_id, set()).update(before)

    def judge(self, header: LineageHeader) -> Verdict:
        """Whether a file counts; `UNTOLD` where that is not known."""
        if self._is_begun_with(header):
            return Verdict.UNTOLD if self._renamed and not header.writer.epoch else Verdict.COUNTS
        run_id, (low, high) = header.writer.run_id, _between(header)
        others = [(other, first) for other, first in self._first.items() if other != run_id]
        if any(latest <= low and self._is_before(run_id, other) for other, (_, latest) in others):
            return Verdict.GIVEN_UP
        apart = all(
            earliest > high or self._last[other] < self._first[run_id][0] or self._is_before(other, run_id)
            for other, (earliest, _) in others
        )
        return Verdict.COUNTS if apart else Verdict.UNTOLD

    def place(self, header: LineageHeader) -> tuple[int, ...]:
        """When it was made, compared with others of its bucket: before all that has a recorded epoch."""
        if self._is_begun_with(header):
            # What a query began with is of one time, and the last of it counts.
            return -1, header.ref.version, 0
        return 0, header.writer.heartbeat, header.writer.batch

    def _is_begun_with(self, header: LineageHeader) -> bool:
        """Whether it is a copy of another query's, with which this one began."""
        return header.writer.query_id != self._query_id

    def _is_before(self, one: str, other: str) -> bool:
        """Whether a run was over when another began, for certain."""
        return one in self._built_on[other] and other not in self._built_on[one]


def _between(header: LineageHeader) -> tuple[_Time, _Time]:
    """When a file was made: the earliest time and the latest."""
    writer = header.writer
    if writer.told:
        return (writer.heartbeat, writer.batch), (writer.heartbeat, writer.batch)
    return (writer.heartbeat, -1), (writer.heartbeat, _BATCHES_MAX)
