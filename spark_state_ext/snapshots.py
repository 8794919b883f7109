"""Full snapshots of a bucket in its backends: who needs one, and what became of it.

A pointer says since which snapshot a backend has caught up, or that it waits for one (`Standing.since`). Notes in the
local store tell the processes of this machine how it stands.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from arrow_schemas.lineage import SNAPSHOT, CheckpointRef, file_name
from arrow_schemas.pointer import Pointer, Standing
from spark_state_ext.backends import STATE, Markers
from spark_state_ext.background import HUNG_S, Runner
from spark_state_ext.checkpoint import verify_checkpoint
from spark_state_ext.commit import CommitOptions, Place, is_complete, settled
from spark_state_ext.errors import CorruptError, MissingCheckpointError, StateError, StorageError, UploadFailedError
from spark_state_ext.lineage import recent_beats
from spark_state_ext.sealed import SealedFile
from spark_state_ext.store import LocalStore
from spark_state_ext.uploads import DONE, FAILED, RUNNING, Note, Uploads, note_name, notes_of

__all__ = ["Snapshots", "check_name"]

_LOGGER = logging.getLogger("spark_state_ext")
# Checkpoints until a full snapshot that nobody here knows of is taken for lost.
_PATIENCE_VERSIONS = 10
# In the place of a file's name, in notes about a backend that lacks some, and about the full backups that it got since.
_LOST, _ANSWERED = "lost", "answered"


class Snapshots:
    """The snapshots of one bucket, in one call.

    Parameters
    ----------
    store
        The bucket's local store, where notes are.
    places
        The configured backends, by name, in the order of configuration.
    uploads
        Tells which processes live.
    options
        Limits.
    batches_retained
        Spark's ``minBatchesToRetain``.
    runner
        Reads back what another machine has sent.
    scratch
        Local folder for temporary files.
    clock_s
        The machine's monotonic clock.
    """

    def __init__(
        self,
        store: LocalStore,
        places: Mapping[str, Place],
        uploads: Uploads,
        options: CommitOptions,
        batches_retained: int,
        runner: Runner,
        scratch: Path,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._places = places
        self._uploads = uploads
        self._options = options
        self._batches_retained = batches_retained
        self._runner = runner
        self._scratch = scratch
        self._clock_s = clock_s
        # Backends that were found to lack files, and get a full backup by this commit.
        self.lost: set[str] = set()

    # -- files that somebody has deleted -----------------------------------------------------------

    def lose(self, name: str, beats: int) -> None:
        """Note that a backend cannot give back what it had confirmed, as a clean-up found.

        Parameters
        ----------
        name
            The backend.
        beats
            `Pointer.beats` of the clean-up's pointer.
        """
        # What was sent in full before may be among it.
        self._store.note({note_name(name, _LOST): str(beats).encode()}, [note_name(name, _ANSWERED)])

    def without_lost(self, pointer: Pointer) -> Pointer:
        """The pointer without the standings of backends from which somebody has deleted files: these are `behind`.

        Parameters
        ----------
        pointer
            The input pointer.
        """
        notes = self._store.notes()
        standings = dict(pointer.standings)
        mine = {str(entry.ref) for entry in pointer.lineage}
        for name in pointer.standings:
            lost, answered = note_name(name, _LOST), note_name(name, _ANSWERED)
            if lost not in notes:
                continue
            # What a clean-up that came late missed may have been deleted rightly.
            old = int(notes[lost]) < pointer.beats - recent_beats(max(self._batches_retained, pointer.retained))
            # Forgotten when a pointer that has the answer is committed. The commit that gave it may have failed since,
            # or the pointer of another attempt counts, which knows nothing of it.
            if old or mine & set(json.loads(notes.get(answered, b"[]"))):
                self._store.note({}, [lost, answered])
                continue
            if name not in self.lost:
                _LOGGER.error("somebody has deleted files from %s: it gets a fresh full backup", name)
            del standings[name]
            self.lost.add(name)
        return replace(pointer, standings=standings)

    # -- who needs one -----------------------------------------------------------------------------

    def behind(self, pointer: Pointer) -> list[str]:
        """Backends that need a full snapshot of the next checkpoint: they have nothing, or the one they got is lost.

        Where no backend holds everything, it is all of them.
        """
        if pointer.ref is None:
            return []
        if not any(is_complete(standing) for standing in pointer.standings.values()):
            return list(self._places)
        notes = notes_of(self._store)
        return [
            name
            for name in self._places
            if name not in pointer.standings or self._stalled(pointer, name, pointer.standings[name], notes)
        ]

    def _stalled(self, pointer: Pointer, name: str, standing: Standing, notes: Mapping[str, Note]) -> bool:
        """Whether the full snapshot that a backend waits for will not come."""
        if standing.since is None:
            return False
        file = file_name(standing.since, SNAPSHOT)
        note = notes.get(note_name(name, file))
        if note is not None and note.state == RUNNING:
            return not self._is_at_it(note)
        if note is not None:
            return note.state == FAILED
        check = notes.get(check_name(name, file))
        if check is not None and self._is_at_it(check):
            return False
        try:
            there = self._has(name, file)
        except StorageError as error:
            # Others hold the state, so nothing depends on this one.
            _LOGGER.warning("the backend %s does not tell whether it has caught up: %s", name, error)
            there = False
        if there and self._begin_check(name, standing.since):
            return False
        # Another machine may be at it.
        return pointer.version >= standing.since.version + _PATIENCE_VERSIONS

    def _is_at_it(self, note: Note) -> bool:
        """Whether the process that noted that it begins lives, and is not taken for hanging."""
        # One that is long over may not have been noted.
        if self._clock_s() - note.since_s > HUNG_S:
            return False
        return note.owner == self._uploads.owner or self._uploads.is_alive(note.owner)

    def caught_up(self, pointer: Pointer, names: Sequence[str], known: bool = False) -> Pointer:
        """The pointer of which backends get a full snapshot.

        Parameters
        ----------
        pointer
            Whose last checkpoint it is of.
        names
            The backends.
        known
            They have confirmed it.
        """
        if not names:
            return pointer
        assert pointer.ref is not None, "there is a state to catch up with"
        since = None if known else pointer.ref
        file = file_name(pointer.ref, SNAPSHOT)
        notes = self._answers(pointer.ref, names)
        if not known:
            note = Note(RUNNING, self._uploads.owner, self._clock_s()).encode()
            notes |= {note_name(name, file): note for name in names}
        if notes:
            self._store.note(notes)
        standings = {**pointer.standings, **{name: Standing(pointer.ref, since) for name in names}}
        markers = {**pointer.markers, **{name: {STATE: file} for name in names}}
        return settled(replace(pointer, standings=standings, markers=markers), {})

    def _answers(self, ref: CheckpointRef, names: Sequence[str]) -> dict[str, bytes]:
        """Notes that backends which had lost files get a full backup with a checkpoint."""
        notes = self._store.notes()
        answered = [note_name(name, _ANSWERED) for name in names if note_name(name, _LOST) in notes]
        return {name: json.dumps([*json.loads(notes.get(name, b"[]")), str(ref)]).encode() for name in answered}

    # -- what becomes of it -------------------------------------------------------------------------

    def send(self, ref: CheckpointRef, sealed: SealedFile, names: Sequence[str]) -> None:
        """Have backends keep a snapshot, side by side.

        Raises
        ------
        StorageError
            When one of them failed, or took longer than ``commit_timeout_ms``; the others have it.
        """
        failure: Exception | None = None
        futures: dict[str, Future[Markers]] = {}
        for name in names:
            manager = self._places[name].backup
            try:
                futures[name] = manager.upload(ref, manager.snapshot(ref, {STATE: sealed}))
            except Exception as raised:
                futures[name] = Future()
                futures[name].set_exception(raised)
        for name, future in futures.items():
            state, error = DONE, ""
            try:
                future.result(self._options.commit_timeout_ms / 1000)
            except Exception as raised:
                failure, state, error = raised, FAILED, str(raised) or repr(raised)
            self._tell(ref, [name], Note(state, self._uploads.owner, self._clock_s(), error=error))
        if isinstance(failure, StateError):
            raise failure
        if failure is not None:
            raise UploadFailedError(f"{sealed.name} could not be kept: {failure!r}") from failure

    def not_sent(self, ref: CheckpointRef, names: Sequence[str], why: str) -> None:
        """Note that a snapshot which backends may wait for was not made."""
        self._tell(ref, names, Note(FAILED, self._uploads.owner, self._clock_s(), error=why))

    def _tell(self, ref: CheckpointRef, names: Sequence[str], note: Note) -> None:
        """Note what became of a checkpoint's snapshot."""
        try:
            self._store.note({note_name(name, file_name(ref, SNAPSHOT)): note.encode() for name in names})
        except StateError as error:
            # It comes to light when this process ends, or after a while.
            _LOGGER.warning("that the snapshot of checkpoint %s is %s could not be noted: %s", ref, note.state, error)

    def _begin_check(self, name: str, ref: CheckpointRef) -> bool:
        """Have a snapshot read that another machine has sent, beside batches; whether that was taken on.

        That a file is there says nothing of its bytes: whoever sent it may have died before it compared them.
        """
        noted = check_name(name, file_name(ref, SNAPSHOT))
        self._store.note({noted: Note(RUNNING, self._uploads.owner, self._clock_s()).encode()})
        taken = self._runner.submit(f"check of {self._store.folder} {ref} in {name}", partial(self._check, name, ref))
        if not taken:
            self._store.note({}, [noted])
        return taken

    def _check(self, name: str, ref: CheckpointRef) -> None:
        owner = self._uploads.owner
        try:
            verify_checkpoint(self._places[name].restore.restore(), ref, SNAPSHOT, self._scratch)
            self._tell(ref, [name], Note(DONE, owner, self._clock_s()))
        except CorruptError as error:
            _LOGGER.error("the backend %s did not catch up: %s. It gets another full snapshot.", name, error)
            self._tell(ref, [name], Note(FAILED, owner, self._clock_s(), error=str(error)))
        finally:
            # After what was found. Where nothing was, as the backend could not be read, the next call begins anew.
            self._store.note({}, [check_name(name, file_name(ref, SNAPSHOT))])

    def has_snapshot(self, pointer: Pointer, ref: CheckpointRef) -> bool:
        """Whether a backend that holds everything has the snapshot of a checkpoint."""
        file = file_name(ref, SNAPSHOT)
        names = [name for name, standing in pointer.standings.items() if is_complete(standing)]
        notes = notes_of(self._store)
        found = [notes.get(note_name(name, file)) for name in names]
        return any(note is not None and note.state == DONE for note in found) or any(
            self._has(name, file) for name in names
        )

    def _has(self, name: str, file: str) -> bool:
        try:
            return self._places[name].restore.restore().size(file) > 0
        except MissingCheckpointError:
            return False


def check_name(backend: str, file: str) -> str:
    """Name of the note that a process reads a file back which it has not sent.

    Parameters
    ----------
    backend, file
        As for `note_name`.
    """
    return note_name(backend, f"check {file}")
