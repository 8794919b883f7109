"""The retention horizon: the age, in heartbeats, up to which a pointer that Spark may hand out names checkpoints."""

from __future__ import annotations

from dataclasses import replace

from arrow_schemas.pointer import Pointer

__all__ = ["DELTAS_MAX", "count_call", "recent_heartbeats"]

# With more deltas than this, however small, a restore is slow and the pointer is long.
DELTAS_MAX = 100


def count_call(pointer: Pointer, heartbeat: bool, batches_retained: int) -> Pointer:
    """Return the pointer with one more call counted.

    After `batches_retained` was lowered, clean-up uses the larger number until every pointer that Spark may hand out
    was made under the smaller one: for as many heartbeats as the retention horizon of the larger number.
    """
    heartbeats = pointer.heartbeats + heartbeat
    counted_pointer = replace(pointer, calls=pointer.calls + 1, heartbeats=heartbeats)
    if batches_retained >= pointer.retained or heartbeats > pointer.retained_heartbeat + recent_heartbeats(
        pointer.retained
    ):
        return replace(counted_pointer, retained=batches_retained, retained_heartbeat=heartbeats)
    return counted_pointer


def recent_heartbeats(batches_retained: int) -> int:
    """Return the retention horizon: the age in heartbeats of the oldest file that a pointer from Spark may name.

    With R batches retained, such a pointer is at most R batches old, and R + 1 while a late attempt at the oldest batch
    is at work. Its oldest inline delta, which is not a file yet, is at most R heartbeats older (`commit.decisions`).
    The checkpoint before that delta, or the pointer's own if it has no inline delta, was made or renewed at most R + 1
    heartbeats earlier.
    """
    return 3 * batches_retained + 2
