"""Which files of a bucket the query builds upon, told by their headers alone: decisions over values.

A file's parent was the input of the call that wrote it, so Spark had committed that. A file that goes on from the
committed checkpoint of the line may count. One that branches off below is of a task that was late (a zombie), unless
its run is a new one: then the query went back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from arrow_schemas.lineage import CheckpointRef, LineageHeader

__all__ = ["Line", "judged"]

_PAST_RUNS_MAX = 100
_IGNORED_MAX = 1000


@dataclass(frozen=True)
class Line:
    """The lineage that a bucket is on, as far as its files tell.

    Parameters
    ----------
    head
        The newest file's header.
    past
        Runs that a newer one has followed.
    ignored
        Files of tasks that were late. If another file names one as its parent, it was none of these.
    """

    head: LineageHeader
    past: tuple[str, ...] = ()
    ignored: tuple[CheckpointRef, ...] = ()

    @property
    def committed(self) -> CheckpointRef | None:
        """The newest checkpoint that is known to be committed; None: no state."""
        return self.head.parent

    def continued(self, header: LineageHeader) -> Line:
        """The line with a newer head."""
        before, run = self.head.writer.run_id, header.writer.run_id
        past = tuple(it for it in self.past if it not in (run, before))
        # Runs that come back are none: user code can change what tasks are told of them.
        if run != before and run not in self.past:
            past = (*past, before)
        return replace(self, head=header, past=past[-_PAST_RUNS_MAX:])

    def without(self, header: LineageHeader) -> Line:
        """The line, and one more file that is ignored."""
        kept = (it for it in self.ignored if it != header.ref)
        return replace(self, ignored=(*kept, header.ref)[-_IGNORED_MAX:])


def judged(line: Line | None, header: LineageHeader) -> tuple[Line, bool]:
    """The line once a file was seen, and whether the file may count.

    Files are to be judged in the order in which they were written, as far as that is known.
    """
    if line is None:
        return Line(header), True
    run, newer = header.writer.run_id, header.ref.version >= line.head.ref.version
    if _goes_on(line, header):
        # What a run wrote before a newer one has followed it may be seen again, where a copy begins anew.
        is_last = run not in line.past or header.parent in line.ignored or line.head.ref in header.lineage
        return (line.continued(header) if newer and is_last else line), True
    if run == line.head.writer.run_id:
        # Attempts whose lineages part for longer: format 1 lets Spark follow either.
        may_count = newer
    else:
        may_count = run not in line.past
    return (line.continued(header), True) if may_count else (line.without(header), False)


def _goes_on(line: Line, header: LineageHeader) -> bool:
    if line.committed is None or header.parent in line.ignored:
        return True
    if line.committed in (header.ref, *header.lineage):
        return True
    # Lineages begin with the last snapshot; what lies before it is not told.
    told = not header.lineage or header.lineage[0].version <= line.committed.version
    return not told and header.writer.run_id not in line.past
