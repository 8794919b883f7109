"""Plain values that followers receive and return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.standby import BucketKey
from spark_state_ext.errors import StateError
from spark_state_ext.files.folder import Folder
from spark_state_ext.worker.local_folders import scratch_folder, store_folder, stores_folder

__all__ = ["Followed", "FollowedRoot", "Lag"]


@dataclass(frozen=True)
class FollowedRoot:
    """A root, and the place of this host's local stores for it.

    Parameters
    ----------
    root
        Exactly the `root` that `ArrowState` was given: the names of local stores depend on it.
    storage_options
        Options for its fsspec file system.
    local_dir
        The same `local_dir` as for `ArrowState`.
    gives_bytes_min
        Replicas keep snapshots of at least this size whole, because peers may ask for them. None: peers never ask.
    """

    root: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    local_dir: str | None = None
    gives_bytes_min: int | None = None

    @property
    def folder(self) -> Folder:
        """The root as a folder."""
        return Folder(self.root, self.storage_options)

    @property
    def stores(self) -> Path:
        """The folder of the local stores."""
        return stores_folder(self.local_dir)

    @property
    def scratch(self) -> Path:
        """The local folder for temporary files."""
        return scratch_folder(self.local_dir)

    def store_folder(self, key: BucketKey, schema_id: int) -> Path:
        """Return the folder of the local store that a task on this host opens for a bucket."""
        return store_folder(self.stores, self.root, key.operator, key.query_folder, schema_id, key.bucket)


@dataclass(frozen=True)
class Lag:
    """How far a copy is behind the newest file of a listing.

    Parameters
    ----------
    versions
        Missing checkpoints.
    size_bytes
        Bytes of their delta files.
    seconds
        Between the newest loaded file and the newest file, by the store's clock. 0 if the store reports no times.
    """

    versions: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Followed:
    """The result of following a bucket for one step.

    Parameters
    ----------
    key
        The bucket.
    newest
        The newest loaded checkpoint of the bucket's line; None if there is none.
    committed
        The newest checkpoint that is known to be committed; None if there is none.
    host
        The host that wrote the newest file seen, so where the bucket's task ran last. Empty before a file was seen.
    batch
        The batch of that file; -1 before a file was seen.
    behind
        The lag when the step began.
    lag
        The lag when the step ended, by the same listing.
    files_read, bytes_read
        Files and bytes that the step read.
    rows_read
        Rows in what the step loaded.
    begun_s, spent_s
        When the step began, by its follower's clock, and how long it took, seconds.
    size_bytes, rows
        Bytes of the copy's runs, and an upper bound of the number of live rows in them.
    is_new
        True if there were files that the previous step had not seen.
    error
        Why the copy is not up to date; None if it is.
    missing_at_move
        How many checkpoints the copy was missing when the bucket moved to `host`; None if no move was seen.
    """

    key: BucketKey
    newest: CheckpointRef | None = None
    committed: CheckpointRef | None = None
    host: str = ""
    batch: int = -1
    behind: Lag = Lag()
    lag: Lag = Lag()
    files_read: int = 0
    bytes_read: int = 0
    rows_read: int = 0
    begun_s: float = 0.0
    spent_s: float = 0.0
    size_bytes: int = 0
    rows: int = 0
    is_new: bool = False
    error: StateError | None = None
    missing_at_move: int | None = None

    @property
    def is_caught_up(self) -> bool:
        """True if the local store has every listed file that belongs to the bucket's line."""
        return self.error is None and self.lag == Lag()
