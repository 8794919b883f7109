"""Commit phases of a bucket: what a pointer may claim, how long a commit goes on, waits, and gives up.

A delta is sealed first. By the time Spark commits the pointer that names it, it is inline in that pointer, or every
backend has confirmed it: within the call, or before the last call of the task ends (`docs/design/003`). The phases and
their limits are those of Samza's asynchronous commit (SAMZA-2591): snapshot exclusive with processing, upload beside
it; a commit that finds the one before still uploading goes on for a while, then waits, then fails.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import V2, InlineDelta, Pointer, ReplicationStatus
from spark_state_ext.backends import Markers
from spark_state_ext.backends.replication import version_of

__all__ = [
    "CommitOptions",
    "How",
    "assured",
    "catching_up",
    "decide",
    "lags",
    "pending",
    "settled",
]


@dataclass(frozen=True)
class CommitOptions:
    """How commits are made.

    Parameters
    ----------
    journal
        The changelog is configured: deltas may go inline.
    commit_delay_ms_max
        How long an upload may be under way while commits go on, milliseconds.
    commit_timeout_ms
        How long it may be under way at all.
    inline_bytes_max, task_inline_bytes_max
        Most inline bytes of a bucket, and of all buckets of a task.
    pointer_write
        `V1`, `V2` or `BOTH`.
    erase_window_ms
        Removed keys' bytes have to be gone within a time, of which this is a part (`erasure`): nothing goes inline.
    """

    journal: bool = True
    commit_delay_ms_max: int = 60_000
    commit_timeout_ms: int = 600_000
    inline_bytes_max: int = 256 << 10
    task_inline_bytes_max: int = 4 << 20
    pointer_write: str = V2
    erase_window_ms: int | None = None

    @property
    def format_1_too(self) -> bool:
        """Whether all is written as releases read it that know format 1 only: pointers, snapshots, leases."""
        return self.pointer_write != V2

    @property
    def inline(self) -> bool:
        """Whether deltas may go inline."""
        return self.journal and not self.format_1_too


class How(enum.Enum):
    """What becomes of a new delta."""

    INLINE = "goes into the pointer"
    DEFERRED = "is confirmed before the task ends"
    WAITED = "is confirmed within the call"


def decide(size_bytes: int, inline_bytes: int, room_bytes: int, may_defer: bool, options: CommitOptions) -> How:
    """What becomes of a new delta."""
    if not options.inline:
        return How.WAITED
    fits = inline_bytes + size_bytes <= options.inline_bytes_max and size_bytes <= room_bytes
    # Spark keeps pointers for as long as it likes.
    if fits and options.erase_window_ms is None:
        return How.INLINE
    return How.DEFERRED if may_defer else How.WAITED


def settled(pointer: Pointer, done: Mapping[tuple[str, str], Markers]) -> Pointer:
    """The pointer with what backends have confirmed since it was made."""
    replication: dict[str, ReplicationStatus] = {}
    markers = {name: dict(said) for name, said in pointer.markers.items()}
    for name, status in pointer.replication.items():
        through, since = status.through, status.since
        for delta in pointer.inline:
            if delta.ref.version <= version_of(through):
                continue
            said = done.get((name, delta.name))
            if said is None:
                break
            through, markers[name] = delta.ref, dict(said)
        if since is not None and any(
            (name, file_name(it, SNAPSHOT)) in done and it.version <= version_of(through)
            for it in catching_up(pointer, since)
        ):
            since = None
        replication[name] = ReplicationStatus(through, since)
    # While nobody has anything, what is inline is all there is.
    floor = min((version_of(status.through) for status in replication.values()), default=0)
    inline = tuple(delta for delta in pointer.inline if delta.ref.version > floor)
    return replace(pointer, replication=replication, markers=markers, inline=inline)


def catching_up(pointer: Pointer, since: CheckpointRef) -> list[CheckpointRef]:
    """Snapshots of which any is enough for a backend that has all deltas since a checkpoint: that one's, and a later
    one that the lineage begins with."""
    later = [entry.ref for entry in pointer.lineage[:1] if entry.ref.version > since.version]
    return [since, *later]


def assured(pointer: Pointer, markers: Mapping[str, Markers]) -> Pointer:
    """The pointer as it is when every backend with a replication status has confirmed its checkpoint."""
    replication = {name: ReplicationStatus(pointer.ref, it.since) for name, it in pointer.replication.items()}
    said = {name: dict(markers.get(name, pointer.markers.get(name, {}))) for name in replication}
    return replace(pointer, replication=replication, markers=said, inline=())


def lags(pointer: Pointer, batches_retained: int) -> bool:
    """Whether a delta that not every backend has would, with the call that begins, be too old for clean-up to rely on.

    What a pointer that Spark may hand out needs of a backend's files ends below its oldest inline delta. Clean-up keeps
    that for so many heartbeats.
    """
    return any(delta.heartbeat + batches_retained <= pointer.heartbeats for _, delta in pending(pointer))


def pending(pointer: Pointer) -> list[tuple[str, InlineDelta]]:
    """Backends and the inline deltas that they have not confirmed, for each backend oldest first."""
    return [
        (name, delta)
        for name, status in pointer.replication.items()
        for delta in pointer.inline
        if delta.ref.version > version_of(status.through)
    ]
