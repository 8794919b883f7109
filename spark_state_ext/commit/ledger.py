"""Upload records in a bucket's local store, shared by the processes of a machine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from spark_state_ext.backends import Markers
from spark_state_ext.commit.failures import NO_RUN, Run
from spark_state_ext.store import LocalStore

__all__ = ["DONE", "FAILED", "RUNNING", "UploadRecord", "record_name", "read_upload_records"]

RUNNING, DONE, FAILED = "running", "done", "failed"


@dataclass(frozen=True)
class UploadRecord:
    """The state of the upload of a checkpoint file to a backend.

    Parameters
    ----------
    state
        `RUNNING`, `DONE` or `FAILED`.
    owner
        The process that started the upload.
    since_s
        Start time, in seconds of the machine's monotonic clock.
    markers
        Markers that the backend returned; empty before the upload is done.
    error
        Text of the error, if the upload failed.
    run
        The run whose call started the upload.
    """

    state: str
    owner: str
    since_s: float
    markers: Markers = field(default_factory=dict)
    error: str = ""
    run: Run = NO_RUN

    def encode(self) -> bytes:
        """Return the record's value."""
        fields = [self.state, self.owner, self.since_s, dict(self.markers), self.error, self.run.id, self.run.stage]
        return json.dumps(fields).encode()

    @staticmethod
    def decode(value: bytes) -> UploadRecord | None:
        """Return the record from its value; None if the value is not an upload record."""
        try:
            fields = json.loads(value)
            if not isinstance(fields, list):
                return None
            # Earlier releases did not store the run.
            state, owner, since_s, markers, error, *run = fields
            if state not in (RUNNING, DONE, FAILED):
                return None
            return UploadRecord(state, owner, since_s, markers, error, Run(*run))
        except (ValueError, TypeError):
            return None


def record_name(backend: str, file: str) -> str:
    """Return the name of the record about a file in a backend."""
    # Hashed, because backend names may be long and LMDB's keys must be short.
    return f"{hashlib.blake2b(backend.encode(), digest_size=8).hexdigest()} {file}"


def read_upload_records(store: LocalStore) -> dict[str, UploadRecord]:
    """Return all upload records of a store, by `record_name`."""
    decoded = {name: UploadRecord.decode(value) for name, value in store.records().items()}
    return {name: record for name, record in decoded.items() if record is not None}
