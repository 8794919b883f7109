"""What each backend has of a bucket, as pointers tell it."""

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
    "is_held",
    "needs_parents",
    "taken_over",
    "version_of",
]


class Restorable(Protocol):
    """A backend as far as one reads from it."""

    @property
    def name(self) -> str:
        """What pointers call it."""
        ...

    @property
    def root(self) -> bool:
        """As of `Replica`."""
        ...

    def files(self, checkpoint: Checkpoint | None = None) -> Readable:
        """Its files; those of a checkpoint, where one is to be restored."""
        ...

    def stop(self) -> None:
        """Have reads end, and whoever waits for them; from any thread."""
        ...

    def close(self) -> None:
        """Nobody reads from it any more."""
        ...


@dataclass(frozen=True)
class Replica:
    """A backend as configured for a bucket.

    Parameters
    ----------
    name
        What pointers call it.
    backup, restore
        Its managers.
    root
        It is what pointers of format 1 mean, which do not name it.
    """

    name: str
    backup: BackupManager
    restore: RestoreManager
    root: bool = False

    def files(self, checkpoint: Checkpoint | None = None) -> Readable:
        """As of `Restorable`."""
        if checkpoint is not None:
            self.restore.init(checkpoint)
        return self.restore.restore()

    def stop(self) -> None:
        """As of `Restorable`."""
        self.restore.close()

    def close(self) -> None:
        """Close its managers."""
        self.restore.close()
        self.backup.close()


@dataclass(frozen=True)
class ReadOnly:
    """Files that lie somewhere, such as a savepoint's, to be read as those of a backend.

    Parameters
    ----------
    name
        What pointers call it.
    where
        Who has them.
    """

    name: str
    where: Readable
    root: bool = True

    def files(self, checkpoint: Checkpoint | None = None) -> Readable:
        """They are found by their names."""
        return self.where

    def stop(self) -> None:
        """Reads end when the file that is read does."""

    def close(self) -> None:
        """Nothing is kept."""


def close_all(replicas: Iterable[Restorable]) -> None:
    """Close what nobody keeps, such as backends of another query that was only read."""
    for replica in replicas:
        replica.close()


def is_complete(status: ReplicationStatus | None) -> bool:
    """Whether a backend holds a state as far as its replication status says."""
    return status is not None and status.since is None


def is_held(pointer: Pointer) -> bool:
    """Whether a pointer's backends hold its state: one of them alone, or with a rescaled bucket's parents."""
    return any(
        is_complete(status) or (pointer.parents is not None and status.since == pointer.parents)
        for status in pointer.replication.values()
    )


def needs_parents(pointer: Pointer) -> bool:
    """Whether no backend holds all of a rescaled bucket's state without its parents."""
    return pointer.parents is not None and not any(is_complete(status) for status in pointer.replication.values())


def taken_over(pointer: Pointer, replicas: Sequence[Restorable]) -> Pointer:
    """An input pointer as the configured backends have to see it: those it does not know have nothing of it."""
    names = [replica.name for replica in replicas]
    if pointer.ref is None:
        # There is nothing to hold yet, and everyone does.
        return replace(pointer, replication={name: ReplicationStatus(None) for name in names}, markers={})
    replication = pointer.replication or {
        replica.name: ReplicationStatus(pointer.ref) for replica in replicas if replica.root
    }
    replication = {name: replication[name] for name in names if name in replication}
    return replace(
        pointer, replication=replication, markers={n: m for n, m in pointer.markers.items() if n in replication}
    )


def version_of(ref: CheckpointRef | None) -> int:
    return 0 if ref is None else ref.version
