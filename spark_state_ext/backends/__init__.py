"""State backends: places that keep checkpoint files. (Samza's StateBackendFactory, SAMZA-2591, in our words.)

A backend is made by a factory and has three sides: a backup manager, to which commits hand their files, a restore
manager, and an admin. Two come with the package, ``fsspec`` and ``changelog``; other packages register theirs as entry
points of the group ``spark_state_ext.backends``, and test them with `spark_state_ext.testing.backends`.

One bucket of an operator has one store, `STATE`. Checkpoint files are immutable, and their names are unique for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from arrow_schemas.lineage import CheckpointRef
from spark_state_ext.files.folder import Readable
from spark_state_ext.files.retention import CleanUp
from spark_state_ext.files.sealed import SealedFile

__all__ = [
    "STATE",
    "BackendAdmin",
    "BackendContext",
    "BackendFactory",
    "BackupManager",
    "Checkpoint",
    "CleanUp",
    "Markers",
    "RestoreManager",
]

# The one store of a bucket.
STATE = "state"

# What a backend says of a store's files in a checkpoint, by store: enough for it to find them again.
Markers = Mapping[str, str]


@dataclass(frozen=True)
class BackendContext:
    """What a backend is made for.

    Parameters
    ----------
    name
        The backend's name, unique within an operator; it is what pointers call it.
    options
        As configured: plain values.
    operator, query_folder
        The operator, and the folder of its state below it.
    bucket
        The bucket; None for an admin, which is there for all.
    executor
        Where uploads run, beside batches. It has few threads.
    scratch
        Local folder for temporary files.
    timeout_s
        After this time nobody waits for an upload any more.
    resources
        Files that every backend keeps for the operator as a whole, by name, the one in force last; for an admin, which
        has to store them.
    cleaner
        Where clean-up runs: one that hangs takes no thread from uploads then. None: with the uploads.
    """

    name: str
    options: Mapping[str, Any]
    operator: str
    query_folder: str
    bucket: int | None
    executor: Executor
    scratch: Path
    timeout_s: float
    resources: Mapping[str, bytes] = field(default_factory=dict)
    cleaner: Executor | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, apart from Spark's input offsets (Samza's CheckpointV2).

    Parameters
    ----------
    ref
        The checkpoint.
    markers
        ``{backend: {store: marker}}``.
    """

    ref: CheckpointRef
    markers: Mapping[str, Markers] = field(default_factory=dict)


class BackupManager(Protocol):
    """Keeps the files of one bucket.

    For each checkpoint, `snapshot` and then `upload` are called, one checkpoint after the other; `clean_up` only after
    Spark has committed a pointer that has the markers.
    """

    def init(self, checkpoint: Checkpoint | None) -> None:
        """Begin a call of the bucket: comes with each batch that the bucket has a part in, before the rest.

        Parameters
        ----------
        checkpoint
            The last committed checkpoint, with the markers of all backends; None when there is none.
        """
        ...

    def snapshot(self, ref: CheckpointRef, files: Mapping[str, SealedFile]) -> Markers:
        """Take hold of a checkpoint's file of each store. No row is processed meanwhile, so it must be quick.

        Parameters
        ----------
        ref
            The checkpoint.
        files
            Its file of each store.

        Returns
        -------
        dict
            For `upload`.
        """
        ...

    def upload(self, ref: CheckpointRef, markers: Markers) -> Future[Markers]:
        """Store what `snapshot` took hold of, beside processing. When the future is done, it can be restored from
        there, on any machine, for certain: what was stored has been compared with what was to be.

        Parameters
        ----------
        ref
            The checkpoint. It may come a second time, also while its first upload hangs.
        markers
            What `snapshot` gave for it.

        Returns
        -------
        Future
            Of the markers that pointers keep, by which a `RestoreManager` finds the files. It fails with
            `StorageError`.
        """
        ...

    def clean_up(self, request: CleanUp) -> Future[int]:
        """Remove what no pointer needs that Spark may still hand out. May be repeated, and stopped.

        Parameters
        ----------
        request
            What to go by, as for `spark_state_ext.files.retention.clean_up`.

        Returns
        -------
        Future
            Of how many files were removed.
        """
        ...

    def close(self) -> None:
        """Let go of everything. Uploads that are under way may be given up."""
        ...


class RestoreManager(Protocol):
    """Gives the files of one bucket back."""

    def init(self, checkpoint: Checkpoint) -> None:
        """Begin a restore; there may be several, one after the other.

        Parameters
        ----------
        checkpoint
            The one that is to be restored, with the markers of all backends.
        """
        ...

    def restore(self) -> Readable:
        """The files, by name. They are read from several threads, in any order, and not all of them.

        Also asked for without `init`, while nothing is restored: whether a file is there is looked up by its size, and
        a snapshot that another machine has sent is read back.

        Returns
        -------
        Readable
            Reading what is not there raises `MissingCheckpointError`.
        """
        ...

    def close(self) -> None:
        """Have reads end soon with `InterruptedRestoreError`, those under way too; from any thread."""
        ...


class BackendAdmin(Protocol):
    """Looks after what all buckets of an operator share."""

    def create_resources(self) -> None:
        """Store what all buckets share, the files in `BackendContext.resources`, unless they are there."""
        ...

    def validate_resources(self) -> None:
        """Raise `StorageError` or `ChangedJobError` when what is needed is not there, or cannot be written."""
        ...


class BackendFactory(Protocol):
    """Makes the sides of a backend. The class of an entry point, called without arguments."""

    def backup_manager(self, context: BackendContext) -> BackupManager:
        """Make what keeps the files of a bucket. A worker does so once for a bucket and plan, and anew if it forgot.

        Parameters
        ----------
        context
            The backend's name and options, the operator and its bucket.
        """
        ...

    def restore_manager(self, context: BackendContext) -> RestoreManager:
        """Make what gives the files of a bucket back: right after `backup_manager`, with the same context.

        Parameters
        ----------
        context
            The backend's name and options, the operator and its bucket.
        """
        ...

    def admin(self, context: BackendContext) -> BackendAdmin:
        """Make what looks after the operator as a whole: once a worker, and anew when the schema changed.

        Parameters
        ----------
        context
            The backend's name and options, the operator and its files (`resources`); the bucket is None.
        """
        ...
