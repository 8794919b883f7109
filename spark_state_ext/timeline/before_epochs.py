"""What is known of files without a recorded epoch: of releases that had none, or copies of another query's.

Their headers tell the run that made them, the batch, and what they were built on. A run that built on a file of another
is the later of the two; and what runs did at different times was not given up. Where two runs have made the same
batches, and neither built on the other, nobody can tell which of them went back.
"""

from __future__ import annotations

from collections.abc import Iterable

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.timeline.epochs import Verdict

__all__ = ["EarlierRuns"]


class EarlierRuns:
    """The runs that have left files without a recorded epoch."""

    def __init__(self, headers: Iterable[LineageHeader], query_id: str, renamed: bool = False) -> None:
        self._query_id = query_id
        self._renamed = renamed
        # First and last time of each run of the query.
        self._first: dict[str, tuple[int, int]] = {}
        self._last: dict[str, tuple[int, int]] = {}
        # By run, those that it built on.
        self._built_on: dict[str, set[str]] = {}
        own = [it for it in headers if not self._is_begun_with(it)]
        run_of: dict[tuple[int, CheckpointRef], str] = {(it.bucket, it.ref): it.writer.run_id for it in own}
        for header in own:
            run_id, at = header.writer.run_id, self._at(header)
            self._first[run_id] = min(at, self._first.get(run_id, at))
            self._last[run_id] = max(at, self._last.get(run_id, at))
            before = {run_of.get((header.bucket, ref), run_id) for ref in header.lineage} - {run_id}
            self._built_on.setdefault(run_id, set()).update(before)

    def judge(self, header: LineageHeader) -> Verdict:
        """Whether a file counts; `UNTOLD` where that is not known."""
        if self._is_begun_with(header):
            return Verdict.UNTOLD if self._renamed and not header.writer.epoch else Verdict.COUNTS
        run_id, at = header.writer.run_id, self._at(header)
        others = [(other, first) for other, first in self._first.items() if other != run_id]
        if any(first <= at and self._is_before(run_id, other) for other, first in others):
            return Verdict.GIVEN_UP
        apart = all(
            first > at or self._last[other] < self._first[run_id] or self._is_before(other, run_id)
            for other, first in others
        )
        return Verdict.COUNTS if apart else Verdict.UNTOLD

    def place(self, header: LineageHeader) -> tuple[int, ...]:
        """When it was made, compared with others of its bucket: before all that has a recorded epoch."""
        if self._is_begun_with(header):
            # What a query began with is of one time, and the last of it counts.
            return -1, header.ref.version, 0
        return 0, *self._at(header)

    def _is_begun_with(self, header: LineageHeader) -> bool:
        """Whether it is a copy of another query's, with which this one began."""
        return header.writer.query_id != self._query_id

    def _is_before(self, one: str, other: str) -> bool:
        """Whether a run was over when another began, for certain."""
        return one in self._built_on[other] and other not in self._built_on[one]

    @staticmethod
    def _at(header: LineageHeader) -> tuple[int, int]:
        return header.writer.heartbeat, header.writer.batch
