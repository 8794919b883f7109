"""Decides by file headers alone which files of a bucket the query builds upon. No I/O.

A file's parent was the input of the call that wrote it, so Spark had committed the parent. The newest run of the query
(highest epoch, `timeline.epochs`) decides where the query stands: a file of an earlier run that it did not build upon
was given up, or was written by a late task (a zombie). Within one run, the higher version is newer.
"""

from __future__ import annotations

from dataclasses import dataclass

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.timeline.epochs import Epochs, MadeAt, Verdict

__all__ = ["Line", "judge"]


@dataclass(frozen=True)
class Line:
    """The lineage that a bucket is on, as far as its files show.

    Parameters
    ----------
    head
        The newest file's header.
    """

    head: LineageHeader

    @property
    def committed(self) -> CheckpointRef | None:
        """The newest checkpoint that is known to be committed; None if there is no state."""
        return self.head.parent


def judge(line: Line | None, header: LineageHeader, epochs: Epochs) -> tuple[Line, bool]:
    """Return the line after seeing a file, and whether the file is on it. Files may be seen in any order."""
    # A release without epochs may have built on the newest file: its file is newer whatever its epoch.
    continues = line is not None and line.head.ref in header.lineage and _rank(header, epochs)[0]
    if line is None or continues or _rank(header, epochs) >= _rank(line.head, epochs):
        return Line(header), True
    return line, header.ref in line.head.lineage


def _rank(header: LineageHeader, epochs: Epochs) -> tuple[bool, int, int]:
    """Return a sort key for how new a file is."""
    writer = MadeAt.of(header)
    return epochs.judge(writer) is not Verdict.GIVEN_UP, epochs.rank(writer), header.ref.version
