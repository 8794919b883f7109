"""What followers are told and what they tell: plain values."""

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
    """A root, and where this host's local stores of it lie.

    Parameters
    ----------
    root
        As `ArrowState` has it, to the letter: local stores are named by it.
    storage_options
        Options for its fsspec file system.
    local_dir
        As for `ArrowState`.
    gives_bytes_min
        Peers may ask for snapshots of so many bytes and more, so replicas of that size keep them as they are. None:
        nobody asks.
    """

    root: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    local_dir: str | None = None
    gives_bytes_min: int | None = None

    @property
    def folder(self) -> Folder:
        """The root."""
        return Folder(self.root, self.storage_options)

    @property
    def stores(self) -> Path:
        """Where the local stores lie."""
        return stores_folder(self.local_dir)

    @property
    def scratch(self) -> Path:
        """Local folder for temporary files."""
        return scratch_folder(self.local_dir)

    def store_folder(self, key: BucketKey, schema_id: int) -> Path:
        """The local store that a task on this host opens for a bucket."""
        return store_folder(self.stores, self.root, key.operator, key.query_folder, schema_id, key.bucket)


@dataclass(frozen=True)
class Lag:
    """How far a copy is behind the newest file, as a listing tells.

    Parameters
    ----------
    versions
        Checkpoints.
    size_bytes
        Bytes of their deltas.
    seconds
        Between the newest file that is loaded and the newest one, by the store's clock. 0 where it does not tell.
    """

    versions: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Followed:
    """What became of following a bucket for one step.

    Parameters
    ----------
    key
        The bucket.
    newest
        The newest checkpoint that is loaded on the bucket's line; None: there is none.
    committed
        The newest one that is known to be committed; None: there is none.
    host
        Which host wrote the newest file that was seen: where the bucket's task ran last. Empty: none was seen.
    batch
        Of which batch that file is; -1 where none was seen.
    behind
        How far the copy was behind when the step began.
    lag
        How far it is when it ended, as of the same listing.
    files_read, bytes_read
        What the step read.
    rows_read
        Rows of what it has loaded.
    begun_s, spent_s
        When the step began, by its follower's clock, and how long it took, seconds.
    size_bytes, rows
        Of the copy: bytes of its runs, and the most rows that are live in them.
    is_new
        There were files that the step before had not seen.
    error
        Why the copy is not as it should be; None: it is.
    lacked
        How many checkpoints the copy lacked when the bucket moved to `host`; None: this follower did not see it move.
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
    lacked: int | None = None

    @property
    def is_caught_up(self) -> bool:
        """Whether the local store has all that was listed, as far as it may count."""
        return self.error is None and self.lag == Lag()
