"""Ways in which what is sent, what fails and what is lost could be dealt with wrongly. The simulator has to find each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim_broken import committing
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


def _sent_anew(self: FilesBackup, file: SealedFile) -> None:
    """What is there is removed where a rename does not replace it, though somebody may have been told that it is safe."""
    if not self.folder.replaces:
        self.folder.remove(file.name)
    self.folder.put(file.name, file.get_range(0, file.size_bytes))


def _has_its_size(self: FilesBackup, file: SealedFile) -> bool | None:
    """A large file counts as confirmed when it has the right size."""
    try:
        return self.folder.size(file.name) == file.size_bytes
    except MissingCheckpointError:
        return None


def _whoever_failed(*_: Any) -> bool:
    """What is noted matters to every run."""
    return True


class ToldOnce(Committer):
    """A failure is forgotten when it is told, so that the next attempt at the task takes it for mended."""

    def _raise_failed(self, pointer: Pointer, records: Mapping[str, UploadRecord]) -> None:
        try:
            super()._raise_failed(pointer, records)
        except UploadFailedError:
            names = [record_name(name, delta.name) for name in self._replicas for delta in pointer.inline]
            self._store.record({}, names)
            raise


class ForgottenAtOnce(Snapshots):
    """That a backend lacks files is forgotten when a commit begins to see to it."""

    def without_lost(self, pointer: Pointer) -> Pointer:
        found = super().without_lost(pointer)
        self._store.record({}, [record_name(name, _LOST) for name in self.lost])
        return found


class ForgottenWhenAnswered(Snapshots):
    """That a backend lacks files is forgotten when an attempt has seen to it, whichever attempt Spark takes."""

    def with_full_snapshot(self, pointer: Pointer, names: Sequence[str], confirmed: bool = False) -> Pointer:
        made = super().with_full_snapshot(pointer, names, confirmed)
        self._store.record({}, [record_name(name, _LOST) for name in names])
        return made


class CaughtUpByItsSize(Snapshots):
    """A backend that joins counts as whole when the full snapshot that another machine sent is found, whatever its bytes."""

    def _begin_check(self, name: str, ref: CheckpointRef) -> bool:
        self._note_outcome(ref, [name], self._create_record(DONE))
        return True


BROKEN_UPLOADS = {
    "a confirmed delta removed to be sent again": Variant(patches=((FilesBackup, "_put", _sent_anew),)),
    "confirmed by its size": Variant(patches=((FilesBackup, "_compare", _has_its_size),)),
    "caught up by its size": Variant(bucket=committing(Committer, CaughtUpByItsSize)),
    "failures of dead runs told": Variant(patches=((committer_module, "still_counts", _whoever_failed),)),
    "a failure told once": Variant(bucket=committing(ToldOnce)),
    "losses forgotten at once": Variant(bucket=committing(Committer, ForgottenAtOnce)),
    "losses forgotten when answered": Variant(bucket=committing(Committer, ForgottenWhenAnswered)),
}
