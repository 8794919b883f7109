"""The ledger of uploads in a bucket's local store: what processes of this machine know of files on their way."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from spark_state_ext.backends import Markers
from spark_state_ext.commit.failures import NO_RUN, Run
from spark_state_ext.store import LocalStore

__all__ = ["DONE", "FAILED", "RUNNING", "UploadRecord", "record_name", "upload_records"]

RUNNING, DONE, FAILED = "running", "done", "failed"


@dataclass(frozen=True)
class UploadRecord:
    """What is known on this machine of the upload of a checkpoint's file to a backend.

    Parameters
    ----------
    state
        `RUNNING`, `DONE` or `FAILED`.
    owner
        The process that took it on.
    since_s
        When: seconds of the machine's monotonic clock.
    markers
        What the backend said, when it is done.
    error
        What failed.
    run
        Whose call took it on.
    """

    state: str
    owner: str
    since_s: float
    markers: Markers = field(default_factory=dict)
    error: str = ""
    run: Run = NO_RUN

    def encode(self) -> bytes:
        """The record's value."""
        fields = [self.state, self.owner, self.since_s, dict(self.markers), self.error, self.run.id, self.run.stage]
        return json.dumps(fields).encode()

    @staticmethod
    def decode(value: bytes) -> UploadRecord | None:
        """Inverse of `encode`; None for a value that is none of ours."""
        try:
            found = json.loads(value)
            if not isinstance(found, list):
                return None
            # Earlier releases did not tell the run.
            state, owner, since_s, markers, error, *run = found
            if state not in (RUNNING, DONE, FAILED):
                return None
            return UploadRecord(state, owner, since_s, markers, error, Run(*run))
        except (ValueError, TypeError):
            return None


def record_name(backend: str, file: str) -> str:
    """Name of the record about a file in a backend."""
    # Backends may have long names, and LMDB's keys are short.
    return f"{hashlib.blake2b(backend.encode(), digest_size=8).hexdigest()} {file}"


def upload_records(store: LocalStore) -> dict[str, UploadRecord]:
    """The records about files in backends, by `record_name`."""
    found = {name: UploadRecord.decode(value) for name, value in store.records().items()}
    return {name: record for name, record in found.items() if record is not None}
