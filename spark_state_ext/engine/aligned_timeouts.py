"""When Spark calls a bucket for timeouts: with the other buckets of its partition, where that matters.

Spark's state of a partition is one thing: it goes on from one attempt at the batch before. But with its checkpoint
format 1 an executor goes on from what it has in memory, which another attempt's file may have replaced meanwhile, and
writes only what changed. Whoever then reads the files finds what was called on the lineage of the one attempt, and
what was not on that of the other. Where the job's function or input draws keys at random, a row may have gone to one
bucket in the one attempt, and to another in the other: it is lost, or counted twice. A batch with data calls every
bucket; one without calls those whose time has come. So under processing-time timeouts every bucket asks to be called in
the next batch, whatever its own timeouts are, and rests where none is over: it hands its pointer on as it is. Then what
a batch writes of a partition holds all of its buckets, or none.

(Under event-time timeouts it is so anyway: all ask to be called when the watermark next advances. And format 2 names
the attempt, and finds it.)
"""

from __future__ import annotations

from arrow_schemas.pointer import Pointer

__all__ = ["next_call_ms", "has_nothing_due"]


def next_call_ms(earliest_timeout_ms: int | None, now_ms: int, *, alone: bool) -> int | None:
    """In how many milliseconds a bucket asks Spark to call it, under processing-time timeouts; None for never."""
    if not alone:
        return 1
    return None if earliest_timeout_ms is None else max(1, earliest_timeout_ms - now_ms)


def has_nothing_due(pointer: Pointer, now_ms: int) -> bool:
    """Whether a call for timeouts finds nothing to do, and hands the pointer on as it is."""
    due = pointer.earliest_timeout_ms is not None and pointer.earliest_timeout_ms < now_ms
    return not due and not pointer.inline
