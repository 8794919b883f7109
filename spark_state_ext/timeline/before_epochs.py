"""Judge files without a recorded epoch: files of releases without epochs, or copies of another query's files.

Their headers name the run that made them, the batch, and their ancestors. If a run built on a file of another run, it
is the later of the two; and files that runs made at different times were not given up. If two runs have made the same
batches, and neither built on the other, it is unknown which of them went back.

A task that does not know its batch counts its bucket's calls instead. Then only heartbeats compare it with another
bucket, and a batch without data has the heartbeat of the batch before. So the order of two files with the same
heartbeat is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.timeline.epochs import Verdict

__all__ = ["EarlierRuns"]

_BATCHES_MAX = 2**63
_Time = tuple[int, int]


class EarlierRuns:
    """The runs of a query that have left files without a recorded epoch."""

    def __init__(self, headers: Iterable[LineageHeader], query_id: str, renamed: bool = False) -> None:
        self._query_id = query_id
        self._renamed = renamed
        # By run of the query: the earliest and the latest time at which it may have begun, and its last time.
        self._first: dict[str, tuple[_Time, _Time]] = {}
        self._last: dict[str, _Time] = {}
        # By run: the runs that it built on.
        self._built_on: dict[str, set[str]] = {}
        own = [header for header in headers if not self._is_initial_copy(header)]
        run_of: dict[tuple[int, CheckpointRef], str] = {
            (header.bucket, header.ref): header.writer.run_id for header in own
        }
        for header in own:
            run_id, (low, high) = header.writer.run_id, _time_range(header)
            low_before, high_before = self._first.get(run_id, (low, high))
            self._first[run_id] = min(low, low_before), min(high, high_before)
            self._last[run_id] = max(high, self._last.get(run_id, high))
            earlier_runs = {run_of.get((header.bucket, ref), run_id) for ref in header.lineage} - {run_id}
            self._built_on.setdefault(run_id, set()).update(earlier_runs)

    def judge(self, header: LineageHeader) -> Verdict:
        """Return whether a file counts; `UNKNOWN` if that cannot be decided."""
        if self._is_initial_copy(header):
            return Verdict.UNKNOWN if self._renamed and not header.writer.epoch else Verdict.COUNTS
        run_id, (low, high) = header.writer.run_id, _time_range(header)
        others = [(other, first) for other, first in self._first.items() if other != run_id]
        if any(latest <= low and self._is_before(run_id, other) for other, (_, latest) in others):
            return Verdict.GIVEN_UP
        is_separate = all(
            earliest > high or self._last[other] < self._first[run_id][0] or self._is_before(other, run_id)
            for other, (earliest, _) in others
        )
        return Verdict.COUNTS if is_separate else Verdict.UNKNOWN

    def place(self, header: LineageHeader) -> tuple[int, ...]:
        """Return a sort key for when a file was made, among its bucket's files; it is before all recorded epochs."""
        if self._is_initial_copy(header):
            # The files that a query began with are of one time, and the last of them counts.
            return -1, header.ref.version, 0
        return 0, header.writer.heartbeat, header.writer.batch

    def _is_initial_copy(self, header: LineageHeader) -> bool:
        """True if the file is a copy of another query's file that this query began with."""
        return header.writer.query_id != self._query_id

    def _is_before(self, run: str, later: str) -> bool:
        """True if one run certainly ended before the other began."""
        return run in self._built_on[later] and later not in self._built_on[run]


def _time_range(header: LineageHeader) -> tuple[_Time, _Time]:
    """Return the earliest and the latest time at which a file may have been made."""
    writer = header.writer
    if writer.told:
        return (writer.heartbeat, writer.batch), (writer.heartbeat, writer.batch)
    return (writer.heartbeat, -1), (writer.heartbeat, _BATCHES_MAX)
