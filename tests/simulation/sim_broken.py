"""Ways in which this could have been built wrong. The simulator has to find each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sim_parts import Variant, probe

from arrow_schemas import CheckpointRef, Pointer
from arrow_schemas.ages import Ages
from arrow_schemas.lineage import SNAPSHOT, parse_file_name
from spark_state_ext.backends.files import FilesBackup
from spark_state_ext.backends.replication import is_complete
from spark_state_ext.commit.committer import Committer, Phase, SubmittedDelta
from spark_state_ext.commit.decisions import DeltaHandling, assume_confirmed, settle
from spark_state_ext.commit.ledger import DONE, read_upload_records, record_name
from spark_state_ext.commit.snapshot_writer import SnapshotWriter
from spark_state_ext.commit.snapshots import Snapshots
from spark_state_ext.commit.uploads import Upload
from spark_state_ext.engine import aligned_timeouts, probes
from spark_state_ext.engine import bucket as bucket_module
from spark_state_ext.engine.bucket import Bucket, CommitResult
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError, MissingRunError
from spark_state_ext.files import erasure, retention
from spark_state_ext.files.checkpoint import CheckpointFile, read_checkpoint
from spark_state_ext.files.existence import has_checkpoint
from spark_state_ext.files.folder import Entry, Folder, Readable
from spark_state_ext.files.retention import Decision, Headers
from spark_state_ext.restore.lazy import LazySnapshot
from spark_state_ext.restore.load_plan import Chain, Fetch
from spark_state_ext.restore.loader import Loader
from spark_state_ext.restore.trace import Failure
from spark_state_ext.store import View
from spark_state_ext.worker.spill import SpillBuffer

T = TypeVar("T")

# The world puts others in its place.
_CLASSIFY = retention.classify


class IdentityFromBatch(Bucket):
    """A checkpoint's id follows from its batch: every attempt at a batch has the same."""

    def _create_ref(self) -> CheckpointRef:
        digest = hashlib.md5(str(self._writer.batch).encode()).hexdigest()
        return CheckpointRef(self.pointer.version + 1, digest)


class NoParentCheck(Bucket):
    """A local store that is at the version asked for is taken for the state asked for."""

    def _run_on_view(self, pointer: Pointer, work: Callable[[View], T]) -> T:
        for run in self._store.runs():
            if run.newest.version == pointer.version and pointer.ref != run.newest:
                try:
                    return work(self._store.view(run.newest))
                except MissingRunError:
                    continue  # the end of a lineage that is not whole here
        return super()._run_on_view(pointer, work)


class DeltaOnASibling(Bucket):
    """Files are found by version and kind; which of several it is, and what it was built on, is not looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loader = _ByVersion(
            self._store, self._sources, [self.pointer.operator], self.pointer.bucket, self._context.scratch
        )
        loader.folders = [
            replica.backup.folder for replica in self._replicas if isinstance(replica.backup, FilesBackup)
        ]
        self._loader = loader


class _ByVersion(Loader):
    folders: Sequence[Folder] = ()

    def _read(self, fetch: Fetch) -> CheckpointFile | Failure:
        for files, name in [(folder, name) for folder in self.folders for name in folder.names()]:
            parsed = parse_file_name(name)
            if parsed is not None and (parsed[0].version, parsed[1]) == (fetch.ref.version, fetch.kind):
                try:
                    return read_checkpoint(files, parsed[0], fetch.kind, self._store.schema, self._scratch)
                except (CorruptFileError, LineageError, MissingCheckpointError) as error:
                    return error
        return MissingCheckpointError(f"no {fetch.kind} of version {fetch.ref.version}")

    def _apply(self, chain: Chain, fetch: Fetch, found: CheckpointFile | LazySnapshot) -> None:
        assert isinstance(found, CheckpointFile), "the simulation restores nothing lazily"
        at = chain.refs.index(fetch.ref)
        parent = chain.refs[at - 1] if at else None
        self._store.restore(found.batches, fetch.ref, parent, snapshot=fetch.kind == SNAPSHOT)


def clean_up_by_version(
    entries: Iterable[Entry], pointer: Pointer, batches_retained: int, *args: Any, **kwargs: Any
) -> Decision:
    """What is older than so many versions goes."""
    names = []
    for entry in entries:
        parsed = parse_file_name(entry.name)
        if parsed is not None and parsed[0].version < pointer.version - batches_retained:
            names.append(entry.name)
    return Decision(tuple(names))


def _beside(entries: Iterable[Entry], pointer: Pointer, headers: Headers) -> tuple[list[Entry], list[Entry]]:
    """The files of a pointer's lineage, and the others."""
    entries = list(entries)
    refs = [(parse_file_name(entry.name) or (None,))[0] for entry in entries]
    known = dict.fromkeys(ref for ref in refs if ref is not None)
    kinds = {ref: {""} for ref in known}
    mine = set(retention._walk_back(pointer.ref, kinds, headers)) if pointer.ref in kinds else set()
    line = [entry for entry, ref in zip(entries, refs, strict=True) if ref in mine]
    return line, [entry for entry, ref in zip(entries, refs, strict=True) if ref not in mine]


def clean_up_trusting_the_lineage(
    entries: Iterable[Entry], pointer: Pointer, retained: int, now_s: float, headers: Headers, *args: Any
) -> Decision:
    """Blind to lineages that go on in parallel."""
    line, beside = _beside(entries, pointer, headers)
    decision = _CLASSIFY(line, pointer, retained, now_s, headers, *args)
    if not decision.lean_on:
        return decision
    border = min(decision.lean_on).version
    names = [e.name for e in beside if (parsed := parse_file_name(e.name)) and parsed[0].version < border]
    return replace(decision, delete=(*decision.delete, *names))


def clean_up_where_versions_repeat(
    entries: Iterable[Entry], pointer: Pointer, retained: int, now_s: float, headers: Headers, *args: Any
) -> Decision:
    """Where each version has one id only, all are taken for one lineage."""
    refs = {parsed[0] for entry in entries if (parsed := parse_file_name(entry.name))}
    linear = len({ref.version for ref in refs}) == len(refs)
    decide = clean_up_trusting_the_lineage if linear else _CLASSIFY
    return decide(entries, pointer, retained, now_s, headers, *args)


def clean_up_without_retention(entries: Iterable[Entry], pointer: Pointer, retained: int, *args: Any) -> Decision:
    """What the pointer does not need goes."""
    return _CLASSIFY(entries, replace(pointer, retained=0), 0, *args)


def clean_up_after_the_batches_retained(
    entries: Iterable[Entry], pointer: Pointer, retained: int, *args: Any
) -> Decision:
    """A checkpoint from before the retained batches is taken for one that no pointer names."""
    return _CLASSIFY(entries, replace(pointer, heartbeats=pointer.heartbeats + 2 * retained), retained, *args)


def clean_up_by_calls(entries: Iterable[Entry], pointer: Pointer, *args: Any) -> Decision:
    """Time is counted in the pointer's own calls, whatever they are for."""
    return _CLASSIFY(entries, replace(pointer, heartbeats=pointer.calls), *args)


def clean_up_unverified(*args: Any) -> Decision:
    """Snapshots are leaned on as they are."""
    return replace(_CLASSIFY(*args), lean_on=())


class EveryCallAHeartbeat(Bucket):
    """Calls are counted whatever they are for."""

    def commit(self, rows: SpillBuffer, heartbeat: bool = True, **kwargs: Any) -> CommitResult:
        return super().commit(rows, **kwargs)


class NeverRenewed(Bucket):
    """The file of a quiet bucket grows old."""

    def _renewal_due(self, pointer: Pointer) -> bool:
        return False


class LeakedPins(Bucket):
    """What a snapshot read stays pinned."""

    def unpin(self, pin: str) -> None:
        return


class DroppedAtOnce(Committer):
    """A delta counts as confirmed once its upload has begun."""

    def finish(self, pointer: Pointer, submitted: SubmittedDelta) -> Phase:
        if submitted.handling == DeltaHandling.INLINE:
            return Phase(assume_confirmed(pointer, {}))
        return super().finish(pointer, submitted)


class NotedAtOnce(Committer):
    """The record that an upload is done is made before it is."""

    def _submit(self, uploads: Sequence[Upload], *also: Any) -> None:
        super()._submit(uploads, *also)
        for upload in uploads:
            upload.store.record(upload.record(DONE, self._context.uploads.owner, markers={}))


class LeftAlone(Committer):
    """What the last call of a task has to wait for is forgotten."""

    def finish(self, pointer: Pointer, submitted: SubmittedDelta) -> Phase:
        return replace(super().finish(pointer, submitted), deferred=())


class NobodyBefore(Committer):
    """A delta that is waited for is waited for without those before it that another process has under way."""

    def _resume(self, pointer: Pointer, mine: bool = False) -> list[Upload]:
        return super()._resume(pointer)


class GapPassedBy(Committer):
    """A backend is taken to have everything before the newest delta that it has confirmed."""

    def _settle(self, pointer: Pointer) -> Pointer:
        records = read_upload_records(self._store)
        found = super()._settle(pointer)
        replication = dict(found.replication)
        for delta in pointer.inline:
            for name, status in replication.items():
                record = records.get(record_name(name, delta.name))
                if record is not None and record.state == DONE:
                    replication[name] = replace(status, through=delta.ref)
        return settle(replace(found, replication=replication), {})


class CaughtUpAtOnce(Snapshots):
    """A backend that is added counts as whole when its full snapshot is under way."""

    def with_full_snapshot(self, pointer: Pointer, names: Sequence[str], confirmed: bool = False) -> Pointer:
        return super().with_full_snapshot(pointer, names, confirmed=True)


class NeverLate(Committer):
    """Commits go on however many batches uploads lag behind."""

    def begin(self, pointer: Pointer) -> Phase:
        self._context = replace(self._context, batches_retained=1 << 30)
        return super().begin(pointer)


def called_for_its_own(earliest_timeout_ms: int | None, now_ms: int, *, alone: bool) -> int | None:
    """A bucket is called when its own timeouts are over, whatever becomes of its neighbours."""
    return aligned_timeouts.compute_next_call_ms(earliest_timeout_ms, now_ms, alone=True)


def removed_root_unnoticed(*args: Any) -> None:
    """Where the local store is warm, nobody looks at the root."""


def looking_by_the_pointer(key: str, run: str, committer: Committer, *args: Any) -> None:
    """What was confirmed since the pointer was made is not looked for."""
    replicas, pointer = args
    names = [
        replica.name for replica in replicas if is_complete(it := pointer.replication.get(replica.name)) and it.through
    ]
    if names:
        probe(key, run, committer, *args)


def newest_file_only(files: Readable, pointer: Pointer, through: CheckpointRef) -> bool:
    """Deltas that were sent since a root was removed are taken for all of it."""
    return has_checkpoint(files, through)


def erased_at_once(ages: Ages | None) -> int | None:
    """What was made before the newest pointer is taken for what nobody goes back to."""
    return ages.marks[-1][1] if ages is not None and ages.marks else None


def erased_with_the_window(ages: Ages | None) -> int | None:
    """What was made before the window is taken for what no pointer of the window needs."""
    if ages is None or not ages.marks:
        return None
    before = [heartbeat for time_ms, heartbeat in ages.marks if time_ms <= ages.marks[-1][0] - ages.window_ms]
    return before[-1] if before else None


def renewed_by_heartbeats_only(ages: Ages, now_ms: int) -> bool:
    """A checkpoint may be as old as it likes, if few batches came."""
    return erasure.is_snapshot_due(ages, now_ms)


def committing(kind: type[Committer], snapshots: type[Snapshots] = Snapshots) -> type[Bucket]:
    """A bucket with another committer or other snapshots."""

    class Committing(Bucket):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.committer = kind(self._store, self._replicas, self._context)
            replicas = {replica.name: replica for replica in self._replicas}
            self.committer.snapshots = snapshots(self._store, replicas, self._context)
            self._snapshots = SnapshotWriter(self._store, self._context, self.committer.snapshots, self)

    return Committing


BROKEN = {
    "identity from the batch": Variant(bucket=IdentityFromBatch),
    "no parent check": Variant(bucket=NoParentCheck),
    "clean-up by version only": Variant(classify=clean_up_by_version),
    "delta applied on a sibling": Variant(bucket=DeltaOnASibling),
    "clean-up blind to parallel lineages": Variant(classify=clean_up_trusting_the_lineage),
    "clean-up looking aside where versions repeat": Variant(classify=clean_up_where_versions_repeat),
    "clean-up without retention": Variant(classify=clean_up_without_retention),
    "clean-up after the batches retained": Variant(classify=clean_up_after_the_batches_retained),
    "clean-up leaning on what it did not verify": Variant(classify=clean_up_unverified),
    "clean-up by calls": Variant(classify=clean_up_by_calls),
    "every call counted as a heartbeat": Variant(bucket=EveryCallAHeartbeat),
    "no renewal": Variant(bucket=NeverRenewed),
    "leaked pins": Variant(bucket=LeakedPins),
    "inline copies dropped at once": Variant(bucket=committing(DroppedAtOnce)),
    "uploads noted before they are done": Variant(bucket=committing(NotedAtOnce)),
    "deferred uploads left alone": Variant(bucket=committing(LeftAlone)),
    "uploads before forgotten": Variant(bucket=committing(NobodyBefore)),
    "a gap passed by": Variant(bucket=committing(GapPassedBy)),
    "caught up at once": Variant(bucket=committing(Committer, CaughtUpAtOnce)),
    "never late": Variant(bucket=committing(NeverLate)),
    "neighbours on different attempts": Variant(next_call_ms=called_for_its_own),
    "a removed root unnoticed": Variant(probe=removed_root_unnoticed),
    "a look at what the pointer says only": Variant(probe=looking_by_the_pointer),
    "erased at once": Variant(patches=((retention, "erased_before", erased_at_once),)),
    "erased with the window": Variant(patches=((retention, "erased_before", erased_with_the_window),)),
    "erased and not renewed": Variant(patches=((bucket_module, "is_old", renewed_by_heartbeats_only),)),
    "a look at the newest file only": Variant(patches=((probes, "has_state", newest_file_only),)),
}

__all__ = ["BROKEN", "committing"]
