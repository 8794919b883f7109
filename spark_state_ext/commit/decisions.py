"""Decisions of a commit: where a new delta goes, and what the pointer may state. Pure functions over values.

A commit seals the delta first. When Spark commits the pointer that names the delta, the delta is inline in that pointer
or every backend has confirmed it: within the call, or before the last call of the task ends (`docs/design/003`). The
phases and limits are those of Samza's asynchronous commit (SAMZA-2591): snapshots exclude processing, uploads run next
to it. A commit whose predecessor still uploads continues for a while; a later one waits, and finally fails.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import V2, InlineDelta, Pointer, ReplicationStatus
from spark_state_ext.backends import Markers
from spark_state_ext.backends.replication import get_version

__all__ = [
    "CommitOptions",
    "DeltaHandling",
    "assume_confirmed",
    "list_sufficient_snapshots",
    "choose_handling",
    "has_overdue_delta",
    "list_pending",
    "settle",
]


@dataclass(frozen=True)
class CommitOptions:
    """Options of commits.

    Parameters
    ----------
    journal
        True: the changelog is configured, so that deltas may go inline.
    commit_delay_ms_max
        How long an upload may take before commits wait for it, milliseconds.
    commit_timeout_ms
        How long an upload may take before the commit fails, milliseconds.
    inline_bytes_max, task_inline_bytes_max
        Maximum inline bytes of a bucket, and of all buckets of a task.
    pointer_write
        `V1`, `V2` or `BOTH`.
    erase_window_ms
        Part of the time within which bytes of removed keys must be erased (`erasure`). If it is set, no delta goes
        inline. None: there is no such time.
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
        """True if pointers, snapshots and leases must be readable for releases that only know format 1."""
        return self.pointer_write != V2

    @property
    def inline(self) -> bool:
        """True if deltas may go inline."""
        return self.journal and not self.format_1_too


class DeltaHandling(enum.Enum):
    """How a new delta becomes durable."""

    INLINE = "is inline in the pointer"
    DEFERRED = "is confirmed before the task ends"
    WAITED = "is confirmed within the call"


def choose_handling(
    size_bytes: int, inline_bytes: int, room_bytes: int, may_defer: bool, options: CommitOptions
) -> DeltaHandling:
    """Return how a new delta becomes durable."""
    if not options.inline:
        return DeltaHandling.WAITED
    fits = inline_bytes + size_bytes <= options.inline_bytes_max and size_bytes <= room_bytes
    # With an erase window no delta goes inline, because Spark may keep pointers for longer than that.
    if fits and options.erase_window_ms is None:
        return DeltaHandling.INLINE
    return DeltaHandling.DEFERRED if may_defer else DeltaHandling.WAITED


def settle(pointer: Pointer, confirmed: Mapping[tuple[str, str], Markers]) -> Pointer:
    """Return the pointer with everything that backends have confirmed since it was made."""
    replication: dict[str, ReplicationStatus] = {}
    markers = {name: dict(backend_markers) for name, backend_markers in pointer.markers.items()}
    for name, status in pointer.replication.items():
        through, since = status.through, status.since
        for delta in pointer.inline:
            if delta.ref.version <= get_version(through):
                continue
            delta_markers = confirmed.get((name, delta.name))
            if delta_markers is None:
                break
            through, markers[name] = delta.ref, dict(delta_markers)
        if since is not None and any(
            (name, file_name(ref, SNAPSHOT)) in confirmed and ref.version <= get_version(through)
            for ref in list_sufficient_snapshots(pointer, since)
        ):
            since = None
        replication[name] = ReplicationStatus(through, since)
    # As long as a backend has confirmed no delta, all inline deltas are needed.
    floor = min((get_version(status.through) for status in replication.values()), default=0)
    inline = tuple(delta for delta in pointer.inline if delta.ref.version > floor)
    return replace(pointer, replication=replication, markers=markers, inline=inline)


def list_sufficient_snapshots(pointer: Pointer, since: CheckpointRef) -> list[CheckpointRef]:
    """Return the snapshots of which any one completes a backend that has all deltas since a checkpoint."""
    later = [entry.ref for entry in pointer.lineage[:1] if entry.ref.version > since.version]
    return [since, *later]


def assume_confirmed(pointer: Pointer, markers: Mapping[str, Markers]) -> Pointer:
    """Return the pointer as it is once every backend with a replication status has confirmed its checkpoint."""
    replication = {name: ReplicationStatus(pointer.ref, status.since) for name, status in pointer.replication.items()}
    all_markers = {name: dict(markers.get(name, pointer.markers.get(name, {}))) for name in replication}
    return replace(pointer, replication=replication, markers=all_markers, inline=())


def has_overdue_delta(pointer: Pointer, batches_retained: int) -> bool:
    """True if the current call would make an unconfirmed delta too old for clean-up to rely on.

    A pointer that Spark may hand out needs only those files of a backend that are older than its oldest inline delta.
    Clean-up keeps these files for `batches_retained` heartbeats.
    """
    return any(delta.heartbeat + batches_retained <= pointer.heartbeats for _, delta in list_pending(pointer))


def list_pending(pointer: Pointer) -> list[tuple[str, InlineDelta]]:
    """Return pairs of a backend and an inline delta that it has not confirmed, oldest delta first for each backend."""
    return [
        (name, delta)
        for name, status in pointer.replication.items()
        for delta in pointer.inline
        if delta.ref.version > get_version(status.through)
    ]
