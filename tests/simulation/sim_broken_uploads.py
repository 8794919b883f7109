"""Broken variants of uploads, of failures and of lost files. The simulator must find each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim_broken import make_bucket
from sim_parts import Variant

from arrow_schemas.lineage import CheckpointRef
from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.files import FilesBackup
from spark_state_ext.commit import committer as committer_module
from spark_state_ext.commit.committer import Committer
from spark_state_ext.commit.ledger import DONE, UploadRecord, record_name
from spark_state_ext.commit.snapshots import _LOST, Snapshots
from spark_state_ext.errors import MissingCheckpointError, UploadFailedError
from spark_state_ext.files.sealed_file import SealedFile

__all__ = ["BROKEN_UPLOADS"]


def _send_again(self: FilesBackup, file: SealedFile) -> None:
    """Remove the existing file if a rename does not replace it, although a call may have reported it as confirmed."""
    if not self.folder.replaces:
        self.folder.remove(file.name)
    self.folder.put(file.name, file.get_range(0, file.size_bytes))


def _has_expected_size(self: FilesBackup, file: SealedFile) -> bool | None:
    """A large file counts as confirmed if it has the right size."""
    try:
        return self.folder.size(file.name) == file.size_bytes
    except MissingCheckpointError:
        return None


def _always_counts(*_: Any) -> bool:
    """A recorded failure counts for every run."""
    return True


class ReportedOnce(Committer):
    """A failure is forgotten once it is reported, so the next attempt at the task ignores it."""

    def _raise_failed(self, pointer: Pointer, records: Mapping[str, UploadRecord]) -> None:
        try:
            super()._raise_failed(pointer, records)
        except UploadFailedError:
            names = [record_name(name, delta.name) for name in self._replicas for delta in pointer.inline]
            self._store.record({}, names)
            raise


class ForgottenAtOnce(Snapshots):
    """A backend's loss is forgotten when a commit begins to repair it."""

    def without_lost(self, pointer: Pointer) -> Pointer:
        renewed = super().without_lost(pointer)
        self._store.record({}, [record_name(name, _LOST) for name in self.lost])
        return renewed


class ForgottenWhenRepaired(Snapshots):
    """A backend's loss is forgotten when an attempt has repaired it, even if Spark takes another attempt."""

    def with_full_snapshot(self, pointer: Pointer, names: Sequence[str], confirmed: bool = False) -> Pointer:
        renewed = super().with_full_snapshot(pointer, names, confirmed)
        self._store.record({}, [record_name(name, _LOST) for name in names])
        return renewed


class BootstrappedBySize(Snapshots):
    """A joining backend counts as complete once another machine's full snapshot exists, whatever its bytes are."""

    def _begin_check(self, name: str, ref: CheckpointRef) -> bool:
        self._note_outcome(ref, [name], self._create_record(DONE))
        return True


BROKEN_UPLOADS = {
    "a confirmed delta is removed to be sent again": Variant(patches=((FilesBackup, "_put", _send_again),)),
    "an upload is confirmed by its size": Variant(patches=((FilesBackup, "_compare", _has_expected_size),)),
    "a bootstrap snapshot is confirmed by its size": Variant(bucket=make_bucket(Committer, BootstrappedBySize)),
    "failures of ended runs are reported": Variant(patches=((committer_module, "still_counts", _always_counts),)),
    "a failure is reported only once": Variant(bucket=make_bucket(ReportedOnce)),
    "a loss is forgotten when its repair begins": Variant(bucket=make_bucket(Committer, ForgottenAtOnce)),
    "a loss is forgotten when an attempt repairs it": Variant(bucket=make_bucket(Committer, ForgottenWhenRepaired)),
}
