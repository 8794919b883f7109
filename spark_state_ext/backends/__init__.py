"""State backends: places that keep checkpoint files. The design follows Samza's StateBackendFactory (SAMZA-2591).

A factory makes the three sides of a backend: a backup manager, which gets the files of commits; a restore manager,
which reads them back; and an admin. The package has two backends, ``fsspec`` and ``changelog``. Other packages register
theirs as entry points of the group ``spark_state_ext.backends``, and test them with `spark_state_ext.testing.backends`.

Each bucket of an operator has one store, `STATE`. Checkpoint files are immutable, and a file name is never used twice.
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
from spark_state_ext.files.sealed_file import SealedFile

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

# The only store of a bucket.
STATE = "state"

# The place of a checkpoint's file in a backend, by store, in the backend's own words.
Markers = Mapping[str, str]


@dataclass(frozen=True)
class BackendContext:
    """The arguments with which a factory makes a backend's managers and admin.

    Parameters
    ----------
    name
        The backend's name, unique within an operator; pointers use it too.
    options
        The configured options: plain values.
    operator, query_folder
        The operator's name, and the name of its query folder.
    bucket
        The bucket's number; None for an admin, which serves all buckets.
    executor
        The thread pool for uploads, which run in the background. It has few threads.
    scratch
        Local folder for temporary files.
    timeout_s
        After this time, in seconds, a commit no longer waits for an upload.
    resources
        For an admin: the files to store that all buckets of the operator share, by name; the newest one last.
    cleaner
        A separate thread pool for clean-up, so that a clean-up that hangs blocks no upload. None: use `executor`.
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
    """A checkpoint and where backends keep its files (Samza's CheckpointV2, without the input offsets).

    Parameters
    ----------
    ref
        The checkpoint's version and id.
    markers
        ``{backend: {store: marker}}``.
    """

    ref: CheckpointRef
    markers: Mapping[str, Markers] = field(default_factory=dict)


class BackupManager(Protocol):
    """Stores the files of one bucket.

    For each checkpoint, in order, `snapshot` is called and then `upload`; `clean_up` is called only after Spark has
    committed a pointer that has the markers.
    """

    def init(self, checkpoint: Checkpoint | None) -> None:
        """Begin a call of the bucket: the first method called in each batch that calls the bucket.

        Parameters
        ----------
        checkpoint
            The last committed checkpoint, with the markers of all backends; None if there is no checkpoint.
        """
        ...

    def snapshot(self, ref: CheckpointRef, files: Mapping[str, SealedFile]) -> Markers:
        """Take a checkpoint's file of each store, to upload it later. Processing waits for this, so it must be quick.

        Parameters
        ----------
        ref
            The checkpoint.
        files
            The checkpoint's file of each store.

        Returns
        -------
        dict
            The markers to hand to `upload`.
        """
        ...

    def upload(self, ref: CheckpointRef, markers: Markers) -> Future[Markers]:
        """Store the files that `snapshot` took, in the background.

        When the future is done, any machine can restore the files: the backend has compared what it stored with them.

        Parameters
        ----------
        ref
            The checkpoint. It may be uploaded a second time, even while its first upload hangs.
        markers
            What `snapshot` returned for it.

        Returns
        -------
        Future
            Resolves to the markers that pointers keep, by which a `RestoreManager` finds the files; fails with
            `StorageError`.
        """
        ...

    def clean_up(self, request: CleanUp) -> Future[int]:
        """Remove the files that no pointer needs which Spark may still hand out. It may be repeated and interrupted.

        Parameters
        ----------
        request
            What may be removed, as for `spark_state_ext.files.retention.clean_up`.

        Returns
        -------
        Future
            Resolves to the number of removed files.
        """
        ...

    def close(self) -> None:
        """Release all resources. Uploads that are under way may be abandoned."""
        ...


class RestoreManager(Protocol):
    """Reads the files of one bucket back."""

    def init(self, checkpoint: Checkpoint) -> None:
        """Begin a restore; several restores may follow each other.

        Parameters
        ----------
        checkpoint
            The checkpoint to restore, with the markers of all backends.
        """
        ...

    def restore(self) -> Readable:
        """Return the files, by name. Several threads read some of them, in any order.

        This is also called without `init`, when no restore is under way: to probe whether a file exists, by its size,
        and to read back a snapshot that another machine has sent.

        Returns
        -------
        Readable
            The files; reading a missing file raises `MissingCheckpointError`.
        """
        ...

    def close(self) -> None:
        """Make all reads, also those under way, fail soon with `InterruptedRestoreError`. Any thread may call this."""
        ...


class BackendAdmin(Protocol):
    """Manages the files that all buckets of an operator share."""

    def create_resources(self) -> None:
        """Store the files in `BackendContext.resources`, which all buckets share, unless they exist already."""
        ...

    def validate_resources(self) -> None:
        """Raise `StorageError` or `ChangedJobError` if a file is missing or wrong, or files cannot be written."""
        ...


class BackendFactory(Protocol):
    """Makes a backend's managers and admin. An entry point names the class, which is called without arguments."""

    def backup_manager(self, context: BackendContext) -> BackupManager:
        """Make the manager that stores a bucket's files.

        A worker calls this once for each bucket and plan, and again if it has dropped the manager meanwhile.

        Parameters
        ----------
        context
            The backend's name and options, the operator and its bucket.
        """
        ...

    def restore_manager(self, context: BackendContext) -> RestoreManager:
        """Make the manager that reads a bucket's files back, right after `backup_manager` and with the same context.

        Parameters
        ----------
        context
            The backend's name and options, the operator and its bucket.
        """
        ...

    def admin(self, context: BackendContext) -> BackendAdmin:
        """Make the admin of an operator. A worker calls this once, and again when the schema changes.

        Parameters
        ----------
        context
            The backend's name and options, the operator and its files (`resources`); the bucket is None.
        """
        ...
