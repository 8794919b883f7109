"""Folders of rows in transit: payloads that are too many for Spark's shuffle."""

from __future__ import annotations

import re

from spark_state_ext.files.layout import SPILL_FOLDER

__all__ = ["spill_folder", "spill_is_stale"]

_STALE_AFTER_S = 86_400
# Batch and time; an earlier release named them after the batch alone.
_SPILL, _UNTOLD_SPILL = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?"), re.compile(r"t(\d{1,18})")


def spill_folder(query_id: str, batch: int | None, now_s: float) -> str:
    """Folder of a batch's spill files below the operator's: the query's, or one of all queries whose tasks are not told
    theirs; named after the time, too."""
    if query_id and batch is not None:
        return f"{query_id}/{SPILL_FOLDER}/{batch}-{int(now_s)}"
    return f"{SPILL_FOLDER}/t{int(now_s)}"


def spill_is_stale(name: str, batch: int | None, began_s: float, now_s: float) -> bool:
    """Whether a folder of spill files belongs to a batch that is over.

    Earlier batches are committed, or `batch` would not run. But a task may be told an earlier batch than its own, where
    a thread of a sink outlives the batch that has made it. So what was made since this batch began stays. Where batches
    are not known, a day must have passed.
    """
    if found := _UNTOLD_SPILL.fullmatch(name):
        return int(found[1]) < now_s - _STALE_AFTER_S
    found = _SPILL.fullmatch(name)
    return found is not None and batch is not None and int(found[1]) < batch and int(found[2] or 0) < int(began_s)
