"""The one tree of errors, grouped by what the caller would do.

======================  ===========================================================================
`UsageError`            change the call or the plan; nothing was run
`ChangedJobError`       go back to the old job, or start from a new checkpoint location
`OwnershipError`        stop the other run
`CorruptError`          bytes are damaged: restore the file, or go back to an older checkpoint
`MissingError`          bring the file back
`StorageError`          make room, or mend permissions or the network; then restart
`EnvironmentSetupError` install the package where the executors' Python looks for it
`UserFunctionError`     mend the function; names key, bucket and batch
======================  ===========================================================================

All are `StateError`. Where a builtin says the same, the class is one too.
"""

from __future__ import annotations

from arrow_schemas.errors import (
    BucketCountChangedError,
    BucketMapChangedError,
    ChangedJobError,
    CorruptError,
    CorruptFileError,
    CorruptPointerError,
    FunctionChangedError,
    LineageError,
    PartitionsChangedError,
    SchemaChangedError,
    StateError,
    StateValueError,
    UnsupportedTypeError,
    UsageError,
    VersionSkewError,
)
from arrow_schemas.lineage import CheckpointRef

__all__ = [
    "BucketCountChangedError",
    "BucketMapChangedError",
    "CannotHoldError",
    "ChangedJobError",
    "ClaimedError",
    "CleanUpFailedError",
    "ClosedEnvironmentError",
    "CommitTimeoutError",
    "CorruptError",
    "CorruptFileError",
    "CorruptPointerError",
    "CorruptStoreError",
    "EnvironmentSetupError",
    "ExecutorPackageError",
    "ExistingStateError",
    "ForkedProcessError",
    "FunctionChangedError",
    "InterruptedRestoreError",
    "LineageError",
    "LiveRunError",
    "LostFilesError",
    "MissingCheckpointError",
    "MissingError",
    "MissingRunError",
    "NotClaimableError",
    "OperatorChangedError",
    "OwnershipError",
    "PartitionsChangedError",
    "PeerError",
    "PeerGoneError",
    "ResultTypeError",
    "SchemaChangedError",
    "StateElsewhereError",
    "StateError",
    "StateGoneError",
    "StateValueError",
    "StorageError",
    "StoreFullError",
    "TooManyOpenFilesError",
    "UnsafeFolderError",
    "UnsupportedPlanError",
    "UnsupportedTypeError",
    "UploadFailedError",
    "UsageError",
    "UserFunctionError",
    "VersionSkewError",
]


class UnsupportedPlanError(UsageError):
    """The query has a shape that Spark or this package cannot run."""


class ForkedProcessError(UsageError):
    """A child that the user's function forked uses state, which only the worker process may do."""


class ResultTypeError(StateValueError, TypeError):
    """The user's function gave something that is neither a frame nor rows, or rows that the output cannot hold."""


class ExistingStateError(ChangedJobError):
    """`strict=True` and the operator already has state of another query."""


class OperatorChangedError(ChangedJobError):
    """The Spark checkpoint holds the state of an operator of another name."""


class StateElsewhereError(ChangedJobError):
    """The state lies in a place that the job does not name: its root was changed, and the files were not moved."""


class OwnershipError(StateError, PermissionError):
    """The state belongs to somebody else."""


class LiveRunError(OwnershipError):
    """Another run of the same query is writing this state, or has taken it over."""


class ClaimedError(OwnershipError):
    """A snapshot, or the folder that a query keeps its state in, belongs to another query, which has claimed it."""


class NotClaimableError(OwnershipError):
    """A snapshot cannot be claimed: later ones need its files, or its store cannot make a claim that only one has."""


class CorruptStoreError(CorruptError):
    """The local store is damaged. It is a cache: it is set aside and built anew from the checkpoint files."""


class MissingError(StateError, FileNotFoundError):
    """Something that must be there is not."""


class MissingCheckpointError(MissingError):
    """Checkpoint files that a committed pointer needs are gone or all damaged."""


class LostFilesError(MissingError):
    """A backend lacks files that it had confirmed: somebody else deleted them. It gets a fresh full backup."""


class MissingRunError(MissingError):
    """The local store lacks a run of the lineage; it can be fetched from the checkpoint files.

    Parameters
    ----------
    message
        What is missing.
    ref
        The checkpoint at which no run ends.
    """

    def __init__(self, message: str, ref: CheckpointRef) -> None:
        super().__init__(message)
        self.ref = ref


class StateGoneError(MissingError):
    """A running job's state is not on this host, or not any more: the bucket moved, or its local store was removed."""


class StorageError(StateError, OSError):
    """A disk, file system or object store failed."""


class StoreFullError(StorageError):
    """The disk of the local store is full, or the address space for its map is used up."""


class UnsafeFolderError(StorageError):
    """A folder is a symbolic link, or others may write to it, so nothing is written there or removed behind it."""


class CannotHoldError(StorageError):
    """A reader cannot keep clean-up away from the files that it reads, as it cannot write to the query folder."""


class ClosedEnvironmentError(StorageError):
    """Another user of this process closed the local store's environment; nothing was done, and it is opened again."""


class TooManyOpenFilesError(StorageError):
    """The worker process has as many files open as it may; the text names the limit and what holds them."""


class UploadFailedError(StorageError):
    """An upload of an earlier commit failed, and trying again does not help. The cause is attached or in the text."""


class CleanUpFailedError(StorageError):
    """Files that nothing needs any more cannot be deleted."""


class CommitTimeoutError(StorageError, TimeoutError):
    """A backend did not confirm a commit within ``commit_timeout_ms``."""


class PeerError(StorageError):
    """Another host's standby service does not give what it is asked for; the store has it too."""


class PeerGoneError(PeerError):
    """It does not have that any more, or not yet, or has too much to do."""


class InterruptedRestoreError(StateError, InterruptedError):
    """A restore was told to stop."""


class EnvironmentSetupError(StateError):
    """A machine is not set up for the job."""


class ExecutorPackageError(EnvironmentSetupError, ImportError):
    """The executors' Python lacks this package. (Raised there under this name without the package itself.)"""


class UserFunctionError(StateError, RuntimeError):
    """The user's function raised; the cause is attached, the text names key, bucket and batch."""


def _publish() -> None:
    """One name for each error, also for those that are defined below this package: tracebacks print where a class says
    that it is from, and that is where users look for it."""
    for name in __all__:
        globals()[name].__module__ = __name__


_publish()
