"""The first call of a bucket whose query starts from a snapshot, step by step: claim, folder, files, pointer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from arrow_schemas.pointer import Pointer
from spark_state_ext.backends.registry import FSSPEC, Backend
from spark_state_ext.backends.replication import Replica, Restorable, close_all, is_complete
from spark_state_ext.engine.job import Job
from spark_state_ext.engine.replicas import Replicas
from spark_state_ext.engine.start_from import CLAIM, RetainedCheckpoint, Savepoint
from spark_state_ext.errors import (
    ClaimedError,
    ExistingStateError,
    NotClaimableError,
    OwnershipError,
    StateElsewhereError,
)
from spark_state_ext.files.existence import has_checkpoint
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.left_behind import note_left_behind
from spark_state_ext.files.operator_catalog import others_beside, query_folders_of_batch
from spark_state_ext.ownership.holds import Hold
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import Claim, refuse_written_since
from spark_state_ext.savepoints.captured import Captured
from spark_state_ext.savepoints.claims import SavepointClaim, claim_savepoint, refuse_claimed
from spark_state_ext.savepoints.records import StartRecord, note_held, note_start, start_of
from spark_state_ext.savepoints.starting import Beginning, Begun, borrowed

__all__ = ["FirstStep"]


class FirstStep:
    """What a bucket's first call does before its state is opened."""

    def __init__(
        self,
        job: Job,
        root: Folder,
        query_folder: str,
        batch_ms: int,
        beside: Callable[[Beginning, Sequence[Backend]], Sequence[Restorable]] = lambda part, backends: (),
    ) -> None:
        self._beside = beside
        self._job = job
        self._root = root
        self._query_folder = query_folder
        self._batch_ms = batch_ms
        # Of the savepoint's claim.
        self._claim_id = ""

    def folder_of(self, beginning: Beginning) -> str:
        """The query folder in which the state is from now on: the other query's where that is claimed."""
        return beginning.pointer.query_folder if beginning.adopts else self._query_folder

    def claim(self, beginning: Beginning) -> Claim | None:
        """Make the claim, where one is asked for; that to a query folder is made with its lease."""
        start = self._job.options.start_from
        by = self._root.child(self._query_folder).root
        if self._job.options.strict and not beginning.adopts:
            self._refuse_begun_before(beginning.record)
        if isinstance(start, Savepoint):
            folder = Folder(start.path, start.storage_options)
            if start.mode == CLAIM:
                wanted = SavepointClaim(beginning.record.source_id, by, self._query_folder)
                self._claim_id = claim_savepoint(folder, wanted, self._attempts()).id
            else:
                refuse_claimed(folder)
        if not beginning.adopts:
            return None
        assert isinstance(start, RetainedCheckpoint), "that is what is adopted"
        assert beginning.captured is not None, "and it was captured"
        try:
            return self._adopted(start, beginning.pointer, beginning.captured, by)
        except OwnershipError:
            # Else the owner's clean-up would wait for a query that never begins.
            held = self._root.child(beginning.pointer.query_folder)
            Hold(held, beginning.captured.hold_id).release()
            raise

    def _refuse_begun_before(self, record: StartRecord) -> None:
        """A lost checkpoint is to be noticed, also where the program still says where its query once began."""
        for name in others_beside(self._root, self._query_folder, self._batch_ms):
            there = start_of(self._root.child(name))
            if there is not None and there.is_of(record.source, record.source_id):
                raise ExistingStateError(
                    f"operator {self._job.operator!r} would begin anew under {self._root.root} from {record}, from "
                    f"which the query {name} there was begun before: to go on with that query's state, start it with "
                    "its checkpointLocation. (strict=True refuses to begin anew here; use another operator name or "
                    "root.)"
                )

    def _adopted(self, start: RetainedCheckpoint, pointer: Pointer, captured: Captured, by: str) -> Claim:
        """The claim to another query's folder, where this one may have it."""
        folder = self._root.child(pointer.query_folder)
        if not folder.creates_exclusively:
            raise NotClaimableError(
                f"the state at {folder.root} cannot be claimed: its store does not let exactly one of several make a "
                "file, so two queries might own it. Start with mode='no_claim', and delete it yourself."
            )
        found = LeaseLog(folder).newest(first=True)
        there = None if found is None else found.record.claim
        if there is not None and (there.id == self._query_folder or there.id in self._attempts()):
            return there
        if there is not None and there.id != pointer.claim:
            raise ClaimedError(
                f"the state at {folder.root} belongs to {there}, which claimed it since the checkpoint "
                f"{start.checkpoint_location} was written. Go on with that query's checkpointLocation, or start from a "
                "savepoint of it with mode='no_claim'. Where that query never committed a batch, and is gone for good, "
                f"free the folder with spark-state-ext savepoint release {folder.root}"
            )
        if captured.later and not start.force:
            raise NotClaimableError(
                f"batch {captured.batch} of {start.checkpoint_location} cannot be claimed: the later batches "
                f"{', '.join(map(str, captured.later))} build upon its files, which the new query deletes when it "
                "needs them no more. Claim the last batch, or accept that the later ones are lost with force=True."
            )
        # The other query may have claimed the folder itself: who claims it from that one goes by its pointers.
        made = Claim(
            self._query_folder,
            by,
            int(time.time() * 1000),
            instead_of=pointer.claim,
            # The lease looks again, as it may have to wait before it makes the record.
            after=captured.lease_number,
        )
        refuse_written_since(made, found, folder.root)
        return made

    def _attempts(self) -> set[str]:
        """Query folders that attempts at this very batch took."""
        return query_folders_of_batch(self._root, self._batch_ms)

    def begun(self, beginning: Beginning, claim: Claim | None, replicas: Replicas, scratch: Path) -> Begun:
        """The pointer to begin with; what it needs is in the query's folder, or is read from where it is."""
        note_left_behind(self._root.child(self.folder_of(beginning)), beginning.left_behind(self._job))
        if self._job.captured is not None and beginning.captured is not None:
            note_held(self._root.child(self.folder_of(beginning)), self._job.captured)
        if beginning.adopts:
            assert claim is not None, "what is adopted is claimed"
            return Begun(replace(beginning.pointer, batch=-1, partitioning=None, made_by=None, claim=claim.id))
        query_folder = self._root.child(self._query_folder)
        if beginning.captured is None:
            note_start(query_folder, replace(beginning.record, claim=self._claim_id))
            return beginning.detached_from(self._job, self._query_folder, [()] * len(beginning.parts), scratch)
        start = self._job.options.start_from
        assert isinstance(start, RetainedCheckpoint), "that is what was captured"
        pointer = beginning.parts[0].pointer
        held = Folder(start.root, start.storage_options).child(pointer.operator, pointer.query_folder)
        Hold(held, beginning.captured.hold_id).renew()
        places = list(start.places)
        if all(backend.kind != FSSPEC for backend in self._job.options.backends):
            # They are asked beside the query's own backends, of which one may have the same name.
            places = [replace(it, name=borrowed(it.name)) for it in places]
        timeout_s = self._job.options.commit.commit_timeout_ms / 1000
        backends = [replicas.reading(places, part.pointer, scratch, timeout_s) for part in beginning.parts]
        sources = [
            [*of_one, *self._beside(part, start.places)] for part, of_one in zip(beginning.parts, backends, strict=True)
        ]
        every = [replica for of_one in sources for replica in of_one]
        try:
            for part, of_one in zip(beginning.parts, backends, strict=True):
                _refuse_elsewhere(start, part.pointer, of_one)
            note_start(query_folder, beginning.record)
            begun = beginning.detached_from(self._job, self._query_folder, sources, scratch)
        except BaseException:
            close_all(every)
            raise
        if not begun.sources:
            close_all(every)
        return begun


def _refuse_elsewhere(start: RetainedCheckpoint, pointer: Pointer, sources: Sequence[Replica]) -> None:
    """Refuse a start that names none of the backends which hold the state, unless its files were moved to one."""
    named = [it.name for it in start.places]
    confirmed = {it.through for it in pointer.replication.values() if is_complete(it)}
    if not pointer.replication.keys().isdisjoint(named) or confirmed <= {None}:
        return
    there = [source.files() for source in sources]
    if not any(has_checkpoint(files, ref) for files in there for ref in confirmed if ref is not None):
        raise StateElsewhereError(
            f"{start} has its state in {', '.join(pointer.replication)}, and start_from names {', '.join(named)}, "
            "where it is not: name the backends that it is in, RetainedCheckpoint(…, backends=[…]). Where its files "
            "were moved, give their new place the old name."
        )
