"""The horizon of clean-up: how old, in heartbeats, what a pointer names may be that Spark may still hand out."""

from __future__ import annotations

from dataclasses import replace

from arrow_schemas.pointer import Pointer

__all__ = ["DELTAS_MAX", "counted", "recent_heartbeats"]

# However small deltas are, so many files make a restore slow and the pointer long.
DELTAS_MAX = 100


def counted(pointer: Pointer, heartbeat: bool, batches_retained: int) -> Pointer:
    """The pointer with one more call counted.

    Clean-up goes by the most batches that Spark was told to retain, until every pointer which Spark may hand out was
    made under the smaller number: so many heartbeats later as a checkpoint may be old that one names.
    """
    heartbeats = pointer.heartbeats + heartbeat
    made = replace(pointer, calls=pointer.calls + 1, heartbeats=heartbeats)
    if batches_retained >= pointer.retained or heartbeats > pointer.retained_heartbeat + recent_heartbeats(
        pointer.retained
    ):
        return replace(made, retained=batches_retained, retained_heartbeat=heartbeats)
    return made


def recent_heartbeats(batches_retained: int) -> int:
    """How many heartbeats old a checkpoint may be that is named by a pointer which Spark may still hand out.

    Of those that are in files: what the pointer holds inline is no file yet. The pointers are so many batches old at
    most, and one more where a late attempt at the oldest of these batches is still at work. Their oldest inline delta
    was made as many heartbeats before at most (`commit.lags`). And the checkpoint before that one, or the pointer's own
    where nothing is inline, was made or renewed as many and one before.
    """
    return 3 * batches_retained + 2
