"""What this host's replicas have to give to peers: snapshots whose files lie in local stores."""

from __future__ import annotations

from collections.abc import Sequence

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.standby import BucketKey
from spark_state_ext.peers.serving import Found
from spark_state_ext.standby.roots import RootFollower

__all__ = ["ReplicaShelf"]


class ReplicaShelf:
    """A shelf of `PeerServer`."""

    def __init__(self, followers: Sequence[RootFollower]) -> None:
        self._followers = tuple(followers)

    def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> Found | None:
        """As `Shelf.find`."""
        for follower in self._followers:
            store = follower.store(key)
            found = None if store is None else store.lazy.whole_file(ref, body_digest)
            if found is not None:
                return Found(*found)
        return None
