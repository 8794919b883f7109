"""Which files of a bucket the query builds upon, told by their headers alone: decisions over values.

A file's parent was the input of the call that wrote it, so Spark had committed that. The newest run, by its epoch
(`timeline.epochs`), knows where the query stands: what an earlier run wrote and it did not build upon was given up, or
is of a task that was late (a zombie). Within a run, versions tell which file is the newer one.
"""

from __future__ import annotations

from dataclasses import dataclass

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.timeline.epochs import Epochs, Made, Verdict

__all__ = ["Line", "judged"]


@dataclass(frozen=True)
class Line:
    """The lineage that a bucket is on, as far as its files tell.

    Parameters
    ----------
    head
        The newest file's header.
    """

    head: LineageHeader

    @property
    def committed(self) -> CheckpointRef | None:
        """The newest checkpoint that is known to be committed; None: no state."""
        return self.head.parent


def judged(line: Line | None, header: LineageHeader, epochs: Epochs) -> tuple[Line, bool]:
    """The line once a file was seen, and whether the file may count; files may be seen in any order."""
    # What a release without epochs built on the newest file is newer, whatever its epoch.
    goes_on = line is not None and line.head.ref in header.lineage and _place(header, epochs)[0]
    if line is None or goes_on or _place(header, epochs) >= _place(line.head, epochs):
        return Line(header), True
    return line, header.ref in line.head.lineage


def _place(header: LineageHeader, epochs: Epochs) -> tuple[bool, int, int]:
    """How new a file is."""
    made = Made.of(header)
    return epochs.judge(made) is not Verdict.GIVEN_UP, epochs.rank(made), header.ref.version
