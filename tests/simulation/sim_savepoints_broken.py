"""Broken variants of savepoints, holds and claims. The simulator must find each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from sim_parts import BucketState, Variant
from sim_taking import HOLD_S, SimReader

from arrow_schemas.lineage import SNAPSHOT
from arrow_schemas.pointer import Pointer
from arrow_schemas.savepoint import SavedFile, SavepointManifest
from spark_state_ext.beginning import detachment, first_call
from spark_state_ext.engine.start_from import CLAIM
from spark_state_ext.errors import MissingCheckpointError, NotClaimableError
from spark_state_ext.files import retention
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.layout import HOLDS_FOLDER
from spark_state_ext.ownership.holds import Hold, HoldRecord, HoldWatch
from spark_state_ext.restore.needed_files import Needed, find_needed_files
from spark_state_ext.restore.sources import Sources
from spark_state_ext.savepoints import bucket_copy, claims, start_records
from spark_state_ext.savepoints.claims import SavepointClaim
from spark_state_ext.savepoints.deletion import delete_files
from spark_state_ext.savepoints.file_copy import CopyMethod, copy_file
from spark_state_ext.savepoints.manifest_file import read_manifest
from spark_state_ext.savepoints.start_records import StartRecord, read_start
from spark_state_ext.spark.client import savepoints

__all__ = ["BROKEN_SAVEPOINTS"]


def _read_before_hold(spark: Any, path: str, location: str, state: Any, **others: Any) -> Any:
    """Read the pointers first, and then make the hold."""
    reader = SimReader(spark, location)
    committed = reader.batch()
    with reader.pointers(reader.stores()[0], committed.batch) as pointers:
        rows = [(row.pointer,) for row in pointers.collect()]

    class Read(SimReader):
        """Returns what was read before the hold."""

        def batch(self, batch: int | None = None) -> Any:
            return committed

        def has(self, batch: int) -> bool:
            return False

        def pointers(self, store: Any, batch: int) -> Any:
            return nullcontext(spark.createDataFrame(rows, "pointer binary"))

    setattr(savepoints, _READER, Read)
    try:
        return _TAKE(spark, path, location, state, **others)
    finally:
        setattr(savepoints, _READER, SimReader)


_TAKE, _READER = savepoints.take_savepoint, "StateReader"


def _clean_up_without_holds(files: Any, request: Any, *args: Any, **kwargs: Any) -> int:
    """Do not look for holds."""
    return _CLEAN_UP(files, replace(request, held=lambda: False), *args, **kwargs)


_CLEAN_UP = retention.clean_up


def _look_once(self: HoldWatch, query_folder: Folder) -> list[HoldRecord]:
    """Look for holds only once in each process."""
    known = self.__dict__.setdefault("looked", {})
    if query_folder.identity not in known:
        known[query_folder.identity] = _LIVING(self, query_folder)
    return list(known[query_folder.identity])


_LIVING = HoldWatch.living


def _end_by_first_look(self: HoldWatch, query_folder: Folder) -> list[HoldRecord]:
    """End a hold when its time has passed since it was first seen, even if it was renewed."""
    now_s, first = self._clock_s(), self.__dict__.setdefault("first", {})
    living = []
    for record in _LIVING(self, query_folder):
        if now_s - first.setdefault(record.id, now_s) <= HOLD_S:
            living.append(record)
    return living


def _never_end(self: HoldWatch, query_folder: Folder) -> list[HoldRecord]:
    """Keep the holds of dead processes for ever."""
    names = query_folder.child(HOLDS_FOLDER).names()
    return [HoldRecord(name[:32], "a process", 1) for name in names]


def _renew_lost_hold(self: Hold) -> HoldRecord:
    """Make a new hold if the hold to renew is lost, and continue."""
    try:
        return _RENEW(self)
    except MissingCheckpointError:
        record = HoldRecord(self.id, "a process", int(1000 * HOLD_S))
        self._files.put(record.name, record.encode())
        return record


_RENEW = Hold.renew


def _renew_without_writing(self: Hold) -> HoldRecord:
    """Report a renewal without writing it."""
    numbers = self._numbers()
    if not numbers:
        raise MissingCheckpointError("the hold is lost")
    return HoldRecord(self.id, "a process", int(1000 * HOLD_S), max(numbers))


def _believe_unconfirmed(pointer: Pointer, sources: Sources, scratch: Path | None = None) -> Needed:
    """Begin the lineage where the pointer says, even if that snapshot does not exist."""
    needed = find_needed_files(pointer, sources, scratch)
    refs = [entry.ref for entry in pointer.lineage]
    files = tuple(needed_file for needed_file in needed.files if needed_file.fetch.ref in refs)
    return Needed(pointer.lineage, files)


def _omit_inline(pointer: Pointer, sources: Sources, scratch: Path | None = None) -> Needed:
    """Do not write files for inline deltas."""
    needed = find_needed_files(pointer, sources, scratch)
    inline = {delta.ref for delta in pointer.inline}
    return Needed(
        needed.lineage, tuple(needed_file for needed_file in needed.files if needed_file.fetch.ref not in inline)
    )


class Uncommitted(SimReader):
    """Takes what executors have in memory for committed."""

    def read(self, batch: int) -> dict[int, BucketState]:
        states = super().read(batch)
        for executor in self.world.executors:
            for loaded_batch in sorted(executor.loaded):
                if loaded_batch >= batch:
                    states.update(executor.loaded[loaded_batch])
        return states


def _overwrite_claim(savepoint: Folder, claim: SavepointClaim, mine: Any) -> SavepointClaim:
    """Write the claim even if another query has claimed the savepoint."""
    savepoint.child(claims.CLAIM_FOLDER).put("claim.json", claim.encode())
    return claim


def _delete_without_check(savepoint: Folder, claim_id: str, still_ours: Callable[[], None], *rest: Any) -> int:
    """Delete a savepoint without checking who has claimed it."""
    claim = claims.read_claim(savepoint)
    return 0 if claim is None else _CONSUME(savepoint, claim.id, still_ours, *rest)


_CONSUME = claims.delete_claimed_savepoint


def _delete_without_claim(job: Any, query_folder: Folder, still_ours: Callable[[], None]) -> None:
    """Delete a savepoint even for a query that did not claim it."""
    record = read_start(query_folder)
    _DETACH(job, query_folder, still_ours)
    if record is not None and record.mode != CLAIM:
        folder = Folder(record.source, job.options.start_from.storage_options)
        try:
            delete_files(folder, read_manifest(folder))
        except MissingCheckpointError:
            return


_DETACH = detachment.detach


def _delete_all_below(
    savepoint: Folder,
    manifest: SavepointManifest,
    still_ours: Callable[[bool], None] = lambda last: None,
    operator: str | None = None,
) -> int:
    """Delete a savepoint's folder with everything in it."""
    for bucket in manifest.buckets:
        savepoint.child(bucket.operator).remove_tree(str(bucket.bucket))
    savepoint.remove("savepoint.arrow")
    return len(manifest.buckets)


def _delete_manifest_first(
    savepoint: Folder,
    manifest: SavepointManifest,
    still_ours: Callable[[bool], None] = lambda last: None,
    operator: str | None = None,
) -> int:
    """Delete the manifest first: if the process stops then, it is unknown which files are left."""
    savepoint.remove("savepoint.arrow")
    return _DELETE(savepoint, manifest, still_ours, operator)


_DELETE = delete_files


def _detach_at_once(folder: Folder, record: StartRecord) -> None:
    """Record that the query is detached in the first call, instead of the first call with a committed pointer."""
    _NOTE_START(folder, record)
    start_records.note_detached(folder)


_NOTE_START = start_records.note_start


def _delete_at_first_call(state: Any, job: Any, query_folder: str, *others: Any) -> Any:
    """Delete the savepoint in the first call that has copied its files."""
    begun = _BRING(state, job, query_folder, *others)
    if state.record.mode == CLAIM and job.options.clean_up:
        start = job.options.start_from
        claims.delete_claimed_savepoint(Folder(start.path, start.storage_options), query_folder, lambda: None)
    return begun


_BRING = first_call.bring_files


def _release_anyway(savepoint: Folder) -> SavepointClaim:
    """Release a claim, whatever its owner has done."""
    claim = claims.read_claim(savepoint)
    if claim is None:
        raise MissingCheckpointError("it has no claim")
    savepoint.child(claims.CLAIM_FOLDER).remove("claim.json")
    return claim


def _release_after_look(savepoint: Folder) -> SavepointClaim:
    """Check whether the owner deletes, and remove the claim afterwards."""
    claim = claims.read_claim(savepoint)
    if claim is None:
        raise MissingCheckpointError("it has no claim")
    if claims.is_consumed(savepoint):
        raise NotClaimableError("its owner deletes it")
    savepoint.child(claims.CLAIM_FOLDER).remove("claim.json")
    return claim


def _delete_after_look(savepoint: Folder, claim_id: str, still_ours: Callable[[], None], *rest: Any) -> int:
    """Check who has claimed the savepoint, and make the mark afterwards."""
    claim = claims.read_claim(savepoint)
    if claim is None or claim.id != claim_id:
        return 0
    savepoint.child(claims.CLAIM_FOLDER).create("consumed.json", b"{}")
    return claims._delete_and_free(savepoint, claim, lambda now: None, None)


def _leave_snapshots(files: Any, file: SavedFile, target: Folder, scratch: Any) -> CopyMethod:
    """Do not copy snapshots to the query's own folder."""
    if SNAPSHOT in file.name:
        return CopyMethod.THERE
    return copy_file(files, file, target, scratch)


BROKEN_SAVEPOINTS: dict[str, Variant] = {
    "a hold is written after the pointers are read": Variant(
        patches=((savepoints, "take_savepoint", _read_before_hold),)
    ),
    "clean-up ignores holds": Variant(patches=((retention, "clean_up", _clean_up_without_holds),)),
    "a process looks for holds only once": Variant(patches=((HoldWatch, "living", _look_once),)),
    "a hold ends although it is renewed": Variant(patches=((HoldWatch, "living", _end_by_first_look),)),
    "a hold never ends": Variant(patches=((HoldWatch, "living", _never_end),)),
    "a holder does not notice that its hold is lost": Variant(patches=((Hold, "renew", _renew_lost_hold),)),
    "a renewal writes nothing": Variant(patches=((Hold, "renew", _renew_without_writing),)),
    "an unconfirmed snapshot counts as existing": Variant(
        patches=((bucket_copy, "find_needed_files", _believe_unconfirmed),)
    ),
    "inline deltas are not saved": Variant(patches=((bucket_copy, "find_needed_files", _omit_inline),)),
    "uncommitted pointers are saved": Variant(patches=((savepoints, "StateReader", Uncommitted),)),
    "a new query does not copy all files": Variant(patches=((first_call, "copy_file", _leave_snapshots),)),
    "the last query to claim a savepoint gets it": Variant(
        patches=((first_call, "claim_savepoint", _overwrite_claim),)
    ),
    "a claim is not checked before deleting": Variant(
        patches=((detachment, "delete_claimed_savepoint", _delete_without_check),)
    ),
    "a savepoint without a claim is deleted": Variant(patches=((detachment, "detach", _delete_without_claim),)),
    "more files are deleted than the manifest names": Variant(patches=((claims, "delete_files", _delete_all_below),)),
    "the manifest is deleted first": Variant(patches=((claims, "delete_files", _delete_manifest_first),)),
    "a query is detached at its first call": Variant(patches=((first_call, "note_start", _detach_at_once),)),
    "a savepoint is deleted at the first call": Variant(patches=((first_call, "bring_files", _delete_at_first_call),)),
    "a release checks the mark before it removes the claim": Variant(
        patches=((claims, "release_claim", _release_after_look),)
    ),
    "an owner checks the claim before it makes its mark": Variant(
        patches=((detachment, "delete_claimed_savepoint", _delete_after_look),)
    ),
    "a release ignores that files were deleted": Variant(patches=((claims, "release_claim", _release_anyway),)),
}
