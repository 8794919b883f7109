"""Plain values of serving peers, for modules that need no server: snapshots, certificates and counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.standby import BucketKey

__all__ = ["OUTCOMES", "SnapshotFile", "PeerWork", "Shelf", "Tls"]

# Outcomes of a question: all was sent; the snapshot is not here; too many questions at the same time; the secret is
# wrong or it is not a question; a file or a store failed; the peer did not wait.
OUTCOMES = ("given", "gone", "busy", "refused", "failed", "left")


@dataclass(frozen=True)
class SnapshotFile:
    """A complete snapshot on this host.

    Parameters
    ----------
    path
        The file that begins with the snapshot's body.
    body_bytes
        Length of the body.
    """

    path: Path
    body_bytes: int


class Shelf(Protocol):
    """The snapshots that a server can send."""

    def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> SnapshotFile | None:
        """Return a complete snapshot on this host; None if there is none. Thread-safe."""
        ...


@dataclass(frozen=True)
class Tls:
    """What a server presents to its clients, each as PEM.

    Parameters
    ----------
    certificate, key
        The certificate chain, and the private key of the certificate.
    """

    certificate: bytes
    key: bytes = field(repr=False)


class PeerWork:
    """What a server has done since it began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.questions = dict.fromkeys(OUTCOMES, 0)
        self.given_bytes = 0

    def count(self, outcome: str) -> None:
        """Count a question that has ended."""
        with self._lock:
            self.questions[outcome] += 1

    def give(self, size_bytes: int) -> None:
        """Count bytes that were sent."""
        with self._lock:
            self.given_bytes += size_bytes
