"""Spill folders: they hold payloads that are too large for Spark's shuffle."""

from __future__ import annotations

import re

from spark_state_ext.files.layout import SPILL_FOLDER

__all__ = ["spill_folder", "spill_is_stale"]

_STALE_AFTER_S = 86_400
# Batch and time, or only the time; an earlier release named spill folders after the batch alone.
_SPILL, _BATCHLESS_SPILL = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?"), re.compile(r"t(\d{1,18})")


def spill_folder(query_id: str, batch: int | None, now_s: float) -> str:
    """Return the spill folder of a batch, relative to the operator's; queries of unknown id share a parent folder."""
    if query_id and batch is not None:
        return f"{query_id}/{SPILL_FOLDER}/{batch}-{int(now_s)}"
    return f"{SPILL_FOLDER}/t{int(now_s)}"


def spill_is_stale(name: str, batch: int | None, began_s: float, now_s: float) -> bool:
    """True if a spill folder belongs to a batch that has ended.

    Earlier batches are committed, or `batch` would not run. But a task may see an earlier batch number than its own, if
    a sink's thread outlives the batch that created it. So folders made since this batch began are kept. A folder
    without a batch number is stale after a day.
    """
    if match := _BATCHLESS_SPILL.fullmatch(name):
        return int(match[1]) < now_s - _STALE_AFTER_S
    match = _SPILL.fullmatch(name)
    return match is not None and batch is not None and int(match[1]) < batch and int(match[2] or 0) < int(began_s)
