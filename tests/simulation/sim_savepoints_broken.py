"""Ways in which savepoints, holds and claims could have been built wrong. The simulator has to find each."""

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


def _read_before_the_hold(spark: Any, path: str, location: str, state: Any, **others: Any) -> Any:
    """The pointers are read, and then the hold is written."""
    reader = SimReader(spark, location)
    committed = reader.batch()
    with reader.pointers(reader.stores()[0], committed.batch) as pointers:
        rows = [(row.pointer,) for row in pointers.collect()]

    class Read(SimReader):
        """Gives what was read before."""

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


def _clean_up_blind(files: Any, request: Any, *args: Any, **kwargs: Any) -> int:
    """Nobody looks for holds."""
    return _CLEAN_UP(files, replace(request, held=lambda: False), *args, **kwargs)


_CLEAN_UP = retention.clean_up


def _looked_once(self: HoldWatch, query_folder: Folder) -> list[HoldRecord]:
    """A process looks for holds once."""
    known = self.__dict__.setdefault("looked", {})
    if query_folder.identity not in known:
        known[query_folder.identity] = _LIVING(self, query_folder)
    return list(known[query_folder.identity])


_LIVING = HoldWatch.living


def _by_the_first_look(self: HoldWatch, query_folder: Folder) -> list[HoldRecord]:
    """A hold is over when its time has passed since it was seen first, however often it was renewed."""
    now_s, first = self._clock_s(), self.__dict__.setdefault("first", {})
    living = []
    for record in _LIVING(self, query_folder):
        if now_s - first.setdefault(record.id, now_s) <= HOLD_S:
            living.append(record)
    return living


def _never_over(self: HoldWatch, query_folder: Folder) -> list[HoldRecord]:
    """Whoever dies holds for ever."""
    names = query_folder.child(HOLDS_FOLDER).names()
    return [HoldRecord(name[:32], "somebody", 1) for name in names]


def _renewed_anew(self: Hold) -> HoldRecord:
    """Who renews a hold that is gone makes another one, and goes on."""
    try:
        return _RENEW(self)
    except MissingCheckpointError:
        record = HoldRecord(self.id, "somebody", int(1000 * HOLD_S))
        self._files.put(record.name, record.encode())
        return record


_RENEW = Hold.renew


def _not_renewed(self: Hold) -> HoldRecord:
    """Renewing says that the hold lives, and writes nothing."""
    numbers = self._numbers()
    if not numbers:
        raise MissingCheckpointError("it is gone")
    return HoldRecord(self.id, "somebody", int(1000 * HOLD_S), max(numbers))


def _unconfirmed(pointer: Pointer, sources: Sources, scratch: Path | None = None) -> Needed:
    """The lineage begins where the pointer says, whether that snapshot is there or not."""
    found = find_needed_files(pointer, sources, scratch)
    refs = [entry.ref for entry in pointer.lineage]
    files = tuple(it for it in found.files if it.fetch.ref in refs)
    return Needed(pointer.lineage, files)


def _without_inline(pointer: Pointer, sources: Sources, scratch: Path | None = None) -> Needed:
    """What is only inline in the pointer does not become a file."""
    found = find_needed_files(pointer, sources, scratch)
    inline = {delta.ref for delta in pointer.inline}
    return Needed(found.lineage, tuple(it for it in found.files if it.fetch.ref not in inline))


class Uncommitted(SimReader):
    """What executors have in memory is taken for what is committed."""

    def read(self, batch: int) -> dict[int, BucketState]:
        found = super().read(batch)
        for executor in self.world.executors:
            for newer in sorted(executor.loaded):
                if newer >= batch:
                    found.update(executor.loaded[newer])
        return found


def _claimed_by_looking(savepoint: Folder, claim: SavepointClaim, mine: Any) -> SavepointClaim:
    """Whoever comes writes down that the savepoint is his."""
    savepoint.child(claims.CLAIM_FOLDER).put("claim.json", claim.encode())
    return claim


def _consumed_by_anybody(savepoint: Folder, claim_id: str, still_ours: Callable[[], None], *rest: Any) -> int:
    """Who lets go of a savepoint does not look whether the claim is still his."""
    there = claims.read_claim(savepoint)
    return 0 if there is None else _CONSUME(savepoint, there.id, still_ours, *rest)


_CONSUME = claims.delete_claimed_savepoint


def _consumed_whoever_started(job: Any, query_folder: Folder, still_ours: Callable[[], None]) -> None:
    """Also a query that claims nothing deletes what it was started from."""
    record = read_start(query_folder)
    _DETACH(job, query_folder, still_ours)
    if record is not None and record.mode != CLAIM:
        folder = Folder(record.source, job.options.start_from.storage_options)
        try:
            delete_files(folder, read_manifest(folder))
        except MissingCheckpointError:
            return


_DETACH = detachment.detach


def _all_below(
    savepoint: Folder,
    manifest: SavepointManifest,
    still_ours: Callable[[bool], None] = lambda last: None,
    operator: str | None = None,
) -> int:
    """The savepoint's folder goes with all that is in it."""
    for bucket in manifest.buckets:
        savepoint.child(bucket.operator).remove_tree(str(bucket.bucket))
    savepoint.remove("savepoint.arrow")
    return len(manifest.buckets)


def _manifest_first(
    savepoint: Folder,
    manifest: SavepointManifest,
    still_ours: Callable[[bool], None] = lambda last: None,
    operator: str | None = None,
) -> int:
    """The manifest goes first: who is stopped then does not know what is left."""
    savepoint.remove("savepoint.arrow")
    return _DELETE(savepoint, manifest, still_ours, operator)


_DELETE = delete_files


def _detached_at_once(folder: Folder, record: StartRecord) -> None:
    """The first call says that the query is detached, and not the first that gets a committed pointer."""
    _NOTE_START(folder, record)
    start_records.note_detached(folder)


_NOTE_START = start_records.note_start


def _let_go_at_once(state: Any, job: Any, query_folder: str, *others: Any) -> Any:
    """The first call that has its files lets go of the savepoint."""
    begun = _BRING(state, job, query_folder, *others)
    if state.record.mode == CLAIM and job.options.clean_up:
        start = job.options.start_from
        claims.delete_claimed_savepoint(Folder(start.path, start.storage_options), query_folder, lambda: None)
    return begun


_BRING = first_call.bring_files


def _released_anyway(savepoint: Folder) -> SavepointClaim:
    """A claim is freed, whatever its owner has done."""
    claim = claims.read_claim(savepoint)
    if claim is None:
        raise MissingCheckpointError("nobody has claimed it")
    savepoint.child(claims.CLAIM_FOLDER).remove("claim.json")
    return claim


def _released_by_a_look(savepoint: Folder) -> SavepointClaim:
    """Who releases a claim looks whether its owner deletes, and then removes the claim."""
    claim = claims.read_claim(savepoint)
    if claim is None:
        raise MissingCheckpointError("nobody has claimed it")
    if claims.is_consumed(savepoint):
        raise NotClaimableError("its owner deletes it")
    savepoint.child(claims.CLAIM_FOLDER).remove("claim.json")
    return claim


def _deleted_by_a_look(savepoint: Folder, claim_id: str, still_ours: Callable[[], None], *rest: Any) -> int:
    """Who deletes a savepoint looks whose the claim is, and then marks that he deletes."""
    claim = claims.read_claim(savepoint)
    if claim is None or claim.id != claim_id:
        return 0
    savepoint.child(claims.CLAIM_FOLDER).create("consumed.json", b"{}")
    return claims._delete_and_free(savepoint, claim, lambda now: None, None)


def _files_left_where_they_are(files: Any, file: SavedFile, target: Folder, scratch: Any) -> CopyMethod:
    """Only the newest file of a bucket comes into the query's own folder."""
    if SNAPSHOT in file.name:
        return CopyMethod.THERE
    return copy_file(files, file, target, scratch)


BROKEN_SAVEPOINTS: dict[str, Variant] = {
    "a hold is written after the pointers are read": Variant(
        patches=((savepoints, "take_savepoint", _read_before_the_hold),)
    ),
    "clean-up ignores holds": Variant(patches=((retention, "clean_up", _clean_up_blind),)),
    "a process looks for holds only once": Variant(patches=((HoldWatch, "living", _looked_once),)),
    "a hold ends although it is renewed": Variant(patches=((HoldWatch, "living", _by_the_first_look),)),
    "a hold never ends": Variant(patches=((HoldWatch, "living", _never_over),)),
    "a holder does not notice that its hold is lost": Variant(patches=((Hold, "renew", _renewed_anew),)),
    "a renewal writes nothing": Variant(patches=((Hold, "renew", _not_renewed),)),
    "an unconfirmed snapshot counts as existing": Variant(patches=((bucket_copy, "find_needed_files", _unconfirmed),)),
    "inline deltas are not saved": Variant(patches=((bucket_copy, "find_needed_files", _without_inline),)),
    "uncommitted pointers are saved": Variant(patches=((savepoints, "StateReader", Uncommitted),)),
    "a new query does not copy all files": Variant(patches=((first_call, "copy_file", _files_left_where_they_are),)),
    "the last query to claim a savepoint gets it": Variant(
        patches=((first_call, "claim_savepoint", _claimed_by_looking),)
    ),
    "a claim is not checked before deleting": Variant(
        patches=((detachment, "delete_claimed_savepoint", _consumed_by_anybody),)
    ),
    "a savepoint without a claim is deleted": Variant(patches=((detachment, "detach", _consumed_whoever_started),)),
    "more files are deleted than the manifest names": Variant(patches=((claims, "delete_files", _all_below),)),
    "the manifest is deleted first": Variant(patches=((claims, "delete_files", _manifest_first),)),
    "a query is detached at its first call": Variant(patches=((first_call, "note_start", _detached_at_once),)),
    "a savepoint is deleted at the first call": Variant(patches=((first_call, "bring_files", _let_go_at_once),)),
    "a release checks the mark before it removes the claim": Variant(
        patches=((claims, "release_claim", _released_by_a_look),)
    ),
    "an owner checks the claim before it makes its mark": Variant(
        patches=((detachment, "delete_claimed_savepoint", _deleted_by_a_look),)
    ),
    "a release ignores that files were deleted": Variant(patches=((claims, "release_claim", _released_anyway),)),
}
