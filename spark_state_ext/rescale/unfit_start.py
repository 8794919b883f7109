"""What a snapshot's own files tell of a start from it, before any batch runs."""

from __future__ import annotations

from spark_state_ext.engine.job import Job
from spark_state_ext.rescale.dividing import DividingStarts

__all__ = ["refuse_unfit_start"]


class _Starts(DividingStarts):
    """As in a task, but without a word of what begins without state: the query may have some."""

    def _say_without(self, job: Job, why: str) -> None:
        return


def refuse_unfit_start(job: Job) -> None:
    """Raise what a query without state would raise in its first batch, as far as the snapshot tells."""
    beginning = _Starts().of(job, 0)
    if beginning is not None:
        beginning.begins(job, "")
