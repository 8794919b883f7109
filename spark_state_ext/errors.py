"""All error classes, grouped by what the caller has to do.

======================  ===========================================================================
`UsageError`            change the call or the plan; nothing was run
`ChangedJobError`       go back to the old job, or start from a new checkpoint location
`OwnershipError`        stop the other run
`CorruptError`          bytes are damaged: restore the file, or go back to an older checkpoint
`MissingError`          bring the file back
`StorageError`          make room, or repair permissions or the network; then restart
`EnvironmentSetupError` install the package for the executors' Python
`UserFunctionError`     repair the function; the message names key, bucket and batch
======================  ===========================================================================

Every class is a `StateError`, and also a builtin exception if there is one with the same meaning.
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
    """Spark or this package cannot run a query of this shape."""


class ForkedProcessError(UsageError):
    """A child process that the user's function forked uses state, which only the worker process may do."""


class ResultTypeError(StateValueError, TypeError):
    """The user's function returned neither a frame nor rows, or rows that do not fit the output schema."""


class ExistingStateError(ChangedJobError):
    """`strict=True`, and another query already has state under the operator's name."""


class OperatorChangedError(ChangedJobError):
    """The Spark checkpoint holds the state of an operator with another name."""


class StateElsewhereError(ChangedJobError):
    """The state is not where the job looks for it: the job's root was changed and the files were not moved."""


class OwnershipError(StateError, PermissionError):
    """The state belongs to another run or query."""


class LiveRunError(OwnershipError):
    """Another run of the same query is writing this state, or has taken it over."""


class ClaimedError(OwnershipError):
    """Another query has claimed this snapshot, or the folder in which a query keeps its state."""


class NotClaimableError(OwnershipError):
    """A snapshot cannot be claimed: later snapshots need its files, or its store cannot make a claim exclusive."""


class CorruptStoreError(CorruptError):
    """The local store is damaged. It is a cache: it is set aside and rebuilt from the checkpoint files."""


class MissingError(StateError, FileNotFoundError):
    """Something that must exist is missing."""


class MissingCheckpointError(MissingError):
    """Every copy of a checkpoint file that a committed pointer needs is missing or damaged."""


class LostFilesError(MissingError):
    """Files that a backend had confirmed were deleted by somebody else. The backend gets a new full backup."""


class MissingRunError(MissingError):
    """A run of the lineage is missing from the local store; it can be fetched from the checkpoint files.

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
    """This host does not have the running job's state: the bucket moved, or its local store was removed."""


class StorageError(StateError, OSError):
    """A disk, file system or object store failed."""


class StoreFullError(StorageError):
    """The disk of the local store is full, or the store's memory map cannot grow."""


class UnsafeFolderError(StorageError):
    """A folder is a symbolic link, or other users may write to it: files are neither written nor removed there."""


class CannotHoldError(StorageError):
    """A reader cannot write to the query folder, so it cannot keep clean-up away from the files that it reads."""


class ClosedEnvironmentError(StorageError):
    """Another user of this process closed the local store's environment. Nothing was changed; it is opened again."""


class TooManyOpenFilesError(StorageError):
    """The worker process has reached its limit of open files; the message names the limit and the open files."""


class UploadFailedError(StorageError):
    """An upload of an earlier commit failed and retries do not help. The cause is attached or in the message."""


class CleanUpFailedError(StorageError):
    """Files that are no longer needed cannot be deleted."""


class CommitTimeoutError(StorageError, TimeoutError):
    """A backend did not confirm a commit within ``commit_timeout_ms``."""


class PeerError(StorageError):
    """Another host's standby service did not send the requested data, which can be read from the backend instead."""


class PeerGoneError(PeerError):
    """The other host no longer has the requested data, does not have it yet, or is too busy."""


class InterruptedRestoreError(StateError, InterruptedError):
    """A restore was asked to stop."""


class EnvironmentSetupError(StateError):
    """A machine is not set up to run the job."""


class ExecutorPackageError(EnvironmentSetupError, ImportError):
    """The executors' Python cannot import this package. (Executors without it raise a class of the same name.)"""


class UserFunctionError(StateError, RuntimeError):
    """The user's function raised; the cause is attached, and the message names key, bucket and batch."""


def _publish() -> None:
    """Set `__module__` of each error to this module, where users look for it; tracebacks print it. Some are defined in
    `arrow_schemas`."""
    for name in __all__:
        globals()[name].__module__ = __name__


_publish()
