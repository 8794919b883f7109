"""When Spark calls a bucket for timeouts: together with the other buckets of its partition if that matters.

Spark keeps one state per partition, and each batch continues from one attempt at the batch before. But with checkpoint
format 1 an executor continues from the state in its memory and writes only what changed, although another attempt's
file may have replaced that state meanwhile. A later reader of the files then finds the called buckets on one attempt's
lineage and the other buckets on another attempt's. If the job's function or input draws keys at random, the two
attempts may have sent the same row to different buckets: the row is lost or counted twice. A batch with data calls
every bucket; a batch without data calls only buckets that have a due timeout. So under processing-time timeouts every
bucket asks to be called in the next batch, whatever its own timeouts are. If no timeout is due, the call does no work
and returns its pointer unchanged. A batch then writes either all buckets of a partition or none of them.

(Under event-time timeouts all buckets ask to be called when the watermark next advances, so they are aligned anyway.
Checkpoint format 2 names the attempt, so a reader finds the right one.)
"""

from __future__ import annotations

from arrow_schemas.pointer import Pointer

__all__ = ["compute_next_call_ms", "has_nothing_due"]


def compute_next_call_ms(earliest_timeout_ms: int | None, now_ms: int, *, alone: bool) -> int | None:
    """Return after how many milliseconds Spark should call a bucket again (processing time); None for never."""
    if not alone:
        return 1
    return None if earliest_timeout_ms is None else max(1, earliest_timeout_ms - now_ms)


def has_nothing_due(pointer: Pointer, now_ms: int) -> bool:
    """True if a call for timeouts has no work, so that it returns its pointer unchanged."""
    is_due = pointer.earliest_timeout_ms is not None and pointer.earliest_timeout_ms < now_ms
    return not is_due and not pointer.inline
