"""What a peer gives, what it shows, and what it counts: plain values, for whoever needs no server."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.standby import BucketKey

__all__ = ["OUTCOMES", "Found", "PeerWork", "Shelf", "Tls"]

# What becomes of a question: all was given; it is not here; too many are answered at once; the secret is another one,
# or it is no question; a file or a store fails; the one who asked did not wait.
OUTCOMES = ("given", "gone", "busy", "refused", "failed", "left")


@dataclass(frozen=True)
class Found:
    """A snapshot that is here whole.

    Parameters
    ----------
    path
        Its file, whose first bytes are the snapshot's body.
    body_bytes
        How many.
    """

    path: Path
    body_bytes: int


class Shelf(Protocol):
    """What there is to give."""

    def find(self, key: BucketKey, ref: CheckpointRef, body_digest: str) -> Found | None:
        """A snapshot that is here whole; None: it is not. Several threads may ask."""
        ...


@dataclass(frozen=True)
class Tls:
    """What a server shows, each as PEM.

    Parameters
    ----------
    certificate, key
        Its certificate chain, and the private key of that.
    """

    certificate: bytes
    key: bytes = field(repr=False)


class PeerWork:
    """What a server has done since it began; several threads may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.questions = dict.fromkeys(OUTCOMES, 0)
        self.given_bytes = 0

    def count(self, outcome: str) -> None:
        """A question came to its end."""
        with self._lock:
            self.questions[outcome] += 1

    def give(self, size_bytes: int) -> None:
        """Bytes were given."""
        with self._lock:
            self.given_bytes += size_bytes
