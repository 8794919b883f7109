"""Root of the error tree and the errors that bytes and schemas can raise.

The whole tree is published as `spark_state_ext.errors`; it begins here because the formats lie below
every other layer.
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
    """Anything this package raises on purpose."""


# -- change the call ------------------------------------------------------------------------------


class UsageError(StateError, ValueError):
    """The call or the plan cannot work as written; nothing was run."""


class UnsupportedTypeError(UsageError, TypeError):
    """A key or state column has a type that cannot be stored or compared."""


class StateValueError(UsageError):
    """A value given to `GroupState.update` does not fit the state schema."""


# -- the job and its state no longer belong together ------------------------------------------------


class ChangedJobError(StateError):
    """The job changed in a way its stored state cannot follow; the state is untouched."""


class SchemaChangedError(ChangedJobError):
    """The key or state schema changed beyond the allowed additions and widenings."""


class FunctionChangedError(ChangedJobError):
    """A built-in operator was given other parameters than those its state was made with."""


class BucketCountChangedError(ChangedJobError):
    """The job asks for another number of buckets than the state was written with."""


class BucketMapChangedError(ChangedJobError):
    """The job spreads rows over its buckets in another way than the state was written with."""


class PartitionsChangedError(ChangedJobError):
    """The source's partitions are not those that the plan declares, or the plan's are not those of the state."""


class VersionSkewError(ChangedJobError):
    """Client, executors or files belong to versions that do not understand each other."""


# -- bytes are not what was written -----------------------------------------------------------------


class CorruptError(StateError, ValueError):
    """Stored bytes fail a check; nothing was read from them."""


class CorruptFileError(CorruptError):
    """A checkpoint or operator file is damaged, truncated or not one of ours."""


class CorruptPointerError(CorruptError):
    """The pointer in Spark's state is damaged or not one of ours."""


class LineageError(CorruptError):
    """Checkpoint files contradict each other or their pointer: a wrong parent, a cycle, a lineage that does not fit."""
