"""The replicas of a bucket, and what each of them has according to the bucket's pointer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.pointer import Pointer, ReplicationStatus
from spark_state_ext.backends import BackupManager, Checkpoint, RestoreManager
from spark_state_ext.files.readable import Readable

__all__ = [
    "ReadOnly",
    "Replica",
    "Restorable",
    "close_all",
    "is_complete",
    "is_restorable",
    "needs_parents",
    "adapt_to_backends",
    "get_version",
]


class Restorable(Protocol):
    """The reading side of a replica."""

    @property
    def name(self) -> str:
        """The backend's name in pointers."""
        ...

    @property
    def root(self) -> bool:
        """True if pointers of format 1, which name no backend, mean this one."""
        ...

    def files(self, checkpoint: Checkpoint | None = None) -> Readable:
        """Return the replica's files; begin a restore if a checkpoint is given."""
        ...

    def stop(self) -> None:
        """Make reads, and the threads that wait for them, end. Any thread may call this."""
        ...

    def close(self) -> None:
        """Release resources; the replica is no longer read."""
        ...


@dataclass(frozen=True)
class Replica:
    """One backend's copy of a bucket's files, with the managers that write and read it.

    Parameters
    ----------
    name
        The backend's name in pointers.
    backup, restore
        The backend's managers for the bucket.
    root
        True if pointers of format 1, which name no backend, mean this one.
    """

    name: str
    backup: BackupManager
    restore: RestoreManager
    root: bool = False

    def files(self, checkpoint: Checkpoint | None = None) -> Readable:
        """Return the replica's files; begin a restore if a checkpoint is given."""
        if checkpoint is not None:
            self.restore.init(checkpoint)
        return self.restore.restore()

    def stop(self) -> None:
        """Make reads end. Any thread may call this."""
        self.restore.close()

    def close(self) -> None:
        """Close both managers."""
        self.restore.close()
        self.backup.close()


@dataclass(frozen=True)
class ReadOnly:
    """Files in any place, such as a savepoint's, that are read like a replica.

    Parameters
    ----------
    name
        The backend's name in pointers.
    where
        The files.
    """

    name: str
    where: Readable
    root: bool = True

    def files(self, checkpoint: Checkpoint | None = None) -> Readable:
        """Return the files, which are found by their names."""
        return self.where

    def stop(self) -> None:
        """Do nothing: a read ends at the end of its file."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def close_all(replicas: Iterable[Restorable]) -> None:
    """Close replicas that are no longer needed, such as another query's that were only read."""
    for replica in replicas:
        replica.close()


def is_complete(status: ReplicationStatus | None) -> bool:
    """Return True if a replica holds the whole state of its replication status, and does not bootstrap."""
    return status is not None and status.since is None


def is_restorable(pointer: Pointer) -> bool:
    """Return True if one of a pointer's backends holds its state, alone or with a rescaled bucket's parents."""
    return any(
        is_complete(status) or (pointer.parents is not None and status.since == pointer.parents)
        for status in pointer.replication.values()
    )


def needs_parents(pointer: Pointer) -> bool:
    """Return True if no backend holds a rescaled bucket's whole state without the bucket's parents."""
    return pointer.parents is not None and not any(is_complete(status) for status in pointer.replication.values())


def adapt_to_backends(pointer: Pointer, replicas: Sequence[Restorable]) -> Pointer:
    """Return an input pointer with only the configured backends; new ones have no replication status yet."""
    names = [replica.name for replica in replicas]
    if pointer.ref is None:
        # There is no state yet, so every backend is complete.
        return replace(pointer, replication={name: ReplicationStatus(None) for name in names}, markers={})
    replication = pointer.replication or {
        replica.name: ReplicationStatus(pointer.ref) for replica in replicas if replica.root
    }
    replication = {name: replication[name] for name in names if name in replication}
    return replace(
        pointer,
        replication=replication,
        markers={name: markers for name, markers in pointer.markers.items() if name in replication},
    )


def get_version(ref: CheckpointRef | None) -> int:
    """Return a checkpoint's version; 0 for None."""
    return 0 if ref is None else ref.version
