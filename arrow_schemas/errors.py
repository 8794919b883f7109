"""The base class of all errors, and the errors that bytes and schemas can raise.

The whole tree is published as `spark_state_ext.errors`; it begins here because all other layers use the formats.
"""

from __future__ import annotations

__all__ = [
    "BucketCountChangedError",
    "BucketMapChangedError",
    "ChangedJobError",
    "CorruptError",
    "CorruptFileError",
    "CorruptPointerError",
    "FunctionChangedError",
    "LineageError",
    "PartitionsChangedError",
    "SchemaChangedError",
    "StateError",
    "StateValueError",
    "UnsupportedTypeError",
    "UsageError",
    "VersionSkewError",
]


class StateError(Exception):
    """Base class of every error that this package raises on purpose."""


# -- change the call ------------------------------------------------------------------------------


class UsageError(StateError, ValueError):
    """The call or the plan cannot work as written; it was not run."""


class UnsupportedTypeError(UsageError, TypeError):
    """A key or state column has a type that cannot be stored or compared."""


class StateValueError(UsageError):
    """A value given to `GroupState.update` does not fit the state schema."""


# -- the job and its state no longer belong together ------------------------------------------------


class ChangedJobError(StateError):
    """The job changed in a way that its stored state cannot follow; the state is unchanged."""


class SchemaChangedError(ChangedJobError):
    """The key or state schema changed beyond the allowed additions and widenings."""


class FunctionChangedError(ChangedJobError):
    """A built-in operator has other parameters than the ones its state was made with."""


class BucketCountChangedError(ChangedJobError):
    """The job asks for another number of buckets than its state has."""


class BucketMapChangedError(ChangedJobError):
    """The job asks for another bucket map than its state has."""


class PartitionsChangedError(ChangedJobError):
    """The source's partitions differ from the plan's, or the plan's differ from the state's."""


class VersionSkewError(ChangedJobError):
    """The versions of client, executors and files do not understand each other."""


# -- bytes are not what was written -----------------------------------------------------------------


class CorruptError(StateError, ValueError):
    """Stored bytes fail a check; they were not used."""


class CorruptFileError(CorruptError):
    """A checkpoint or operator file is damaged or truncated, or this package did not write it."""


class CorruptPointerError(CorruptError):
    """The pointer in Spark's state is damaged, or this package did not write it."""


class LineageError(CorruptError):
    """Checkpoint files contradict each other or their pointer: a wrong parent, a cycle, a lineage that does not fit."""
