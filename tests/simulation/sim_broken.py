"""Broken variants of buckets, commits, clean-up and timeouts. The simulator must find each of them."""

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

# The world replaces `retention.classify`, so keep the original.
_CLASSIFY = retention.classify


class IdentityFromBatch(Bucket):
    """A checkpoint's id follows from its batch, so all attempts at a batch have the same id."""

    def _create_ref(self) -> CheckpointRef:
        digest = hashlib.md5(str(self._writer.batch).encode()).hexdigest()
        return CheckpointRef(self.pointer.version + 1, digest)


class NoParentCheck(Bucket):
    """A local store with the requested version is taken for the requested state."""

    def _run_on_view(self, pointer: Pointer, work: Callable[[View], T]) -> T:
        for run in self._store.runs():
            if run.newest.version == pointer.version and pointer.ref != run.newest:
                try:
                    return work(self._store.view(run.newest))
                except MissingRunError:
                    continue  # the lineage is not complete here
        return super()._run_on_view(pointer, work)


class DeltaOnASibling(Bucket):
    """Files are found by version and kind; their ids and parents are not checked."""

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

    def _apply(self, chain: Chain, fetch: Fetch, checkpoint: CheckpointFile | LazySnapshot) -> None:
        assert isinstance(checkpoint, CheckpointFile), "the simulation restores nothing lazily"
        at = chain.refs.index(fetch.ref)
        parent = chain.refs[at - 1] if at else None
        self._store.restore(checkpoint.batches, fetch.ref, parent, snapshot=fetch.kind == SNAPSHOT)


def clean_up_by_version(
    entries: Iterable[Entry], pointer: Pointer, batches_retained: int, *args: Any, **kwargs: Any
) -> Decision:
    """Delete all files that are older than a number of versions."""
    names = []
    for entry in entries:
        parsed = parse_file_name(entry.name)
        if parsed is not None and parsed[0].version < pointer.version - batches_retained:
            names.append(entry.name)
    return Decision(tuple(names))


def _split_by_lineage(entries: Iterable[Entry], pointer: Pointer, headers: Headers) -> tuple[list[Entry], list[Entry]]:
    """Return the files of a pointer's lineage, and the other files."""
    entries = list(entries)
    refs = [(parse_file_name(entry.name) or (None,))[0] for entry in entries]
    known = dict.fromkeys(ref for ref in refs if ref is not None)
    kinds = {ref: {""} for ref in known}
    lineage = set(retention._walk_back(pointer.ref, kinds, headers)) if pointer.ref in kinds else set()
    lineage_entries = [entry for entry, ref in zip(entries, refs, strict=True) if ref in lineage]
    return lineage_entries, [entry for entry, ref in zip(entries, refs, strict=True) if ref not in lineage]


def clean_up_trusting_the_lineage(
    entries: Iterable[Entry], pointer: Pointer, retained: int, now_s: float, headers: Headers, *args: Any
) -> Decision:
    """Ignore lineages that continue in parallel."""
    lineage_entries, others = _split_by_lineage(entries, pointer, headers)
    decision = _CLASSIFY(lineage_entries, pointer, retained, now_s, headers, *args)
    if not decision.lean_on:
        return decision
    border = min(decision.lean_on).version
    names = [e.name for e in others if (parsed := parse_file_name(e.name)) and parsed[0].version < border]
    return replace(decision, delete=(*decision.delete, *names))


def clean_up_where_versions_repeat(
    entries: Iterable[Entry], pointer: Pointer, retained: int, now_s: float, headers: Headers, *args: Any
) -> Decision:
    """If each version has only one id, assume that all files are of one lineage."""
    refs = {parsed[0] for entry in entries if (parsed := parse_file_name(entry.name))}
    linear = len({ref.version for ref in refs}) == len(refs)
    decide = clean_up_trusting_the_lineage if linear else _CLASSIFY
    return decide(entries, pointer, retained, now_s, headers, *args)


def clean_up_without_retention(entries: Iterable[Entry], pointer: Pointer, retained: int, *args: Any) -> Decision:
    """Delete all files that the pointer does not need."""
    return _CLASSIFY(entries, replace(pointer, retained=0), 0, *args)


def clean_up_after_the_batches_retained(
    entries: Iterable[Entry], pointer: Pointer, retained: int, *args: Any
) -> Decision:
    """Assume that no pointer names a checkpoint from before the retained batches."""
    return _CLASSIFY(entries, replace(pointer, heartbeats=pointer.heartbeats + 2 * retained), retained, *args)


def clean_up_by_calls(entries: Iterable[Entry], pointer: Pointer, *args: Any) -> Decision:
    """Count the pointer's calls instead of its heartbeats."""
    return _CLASSIFY(entries, replace(pointer, heartbeats=pointer.calls), *args)


def clean_up_unverified(*args: Any) -> Decision:
    """Depend on snapshots without verifying them."""
    return replace(_CLASSIFY(*args), lean_on=())


class EveryCallAHeartbeat(Bucket):
    """Every call counts as a heartbeat."""

    def commit(self, rows: SpillBuffer, heartbeat: bool = True, **kwargs: Any) -> CommitResult:
        return super().commit(rows, **kwargs)


class NeverRenewed(Bucket):
    """A quiet bucket's checkpoint is never renewed."""

    def _renewal_due(self, pointer: Pointer) -> bool:
        return False


class LeakedPins(Bucket):
    """Runs that a snapshot read stay pinned."""

    def unpin(self, pin: str) -> None:
        return


class InlineDeltasDropped(Committer):
    """A delta counts as confirmed once its upload has begun."""

    def finish(self, pointer: Pointer, submitted: SubmittedDelta) -> Phase:
        if submitted.handling == DeltaHandling.INLINE:
            return Phase(assume_confirmed(pointer, {}))
        return super().finish(pointer, submitted)


class UploadsRecordedAtOnce(Committer):
    """An upload is recorded as done when it begins."""

    def _submit(self, uploads: Sequence[Upload], *also: Any) -> None:
        super()._submit(uploads, *also)
        for upload in uploads:
            upload.store.record(upload.record(DONE, self._context.uploads.owner, markers={}))


class DeferredUploadsIgnored(Committer):
    """The last call of a task does not wait for deferred uploads."""

    def finish(self, pointer: Pointer, submitted: SubmittedDelta) -> Phase:
        return replace(super().finish(pointer, submitted), deferred=())


class EarlierUploadsIgnored(Committer):
    """A call waits for its own delta, but not for earlier deltas that another process uploads."""

    def _resume(self, pointer: Pointer, mine: bool = False) -> list[Upload]:
        return super()._resume(pointer)


class GapIgnored(Committer):
    """A backend counts as having all deltas before the newest one that it has confirmed."""

    def _settle(self, pointer: Pointer) -> Pointer:
        records = read_upload_records(self._store)
        settled = super()._settle(pointer)
        replication = dict(settled.replication)
        for delta in pointer.inline:
            for name, status in replication.items():
                record = records.get(record_name(name, delta.name))
                if record is not None and record.state == DONE:
                    replication[name] = replace(status, through=delta.ref)
        return settle(replace(settled, replication=replication), {})


class CompleteAtOnce(Snapshots):
    """A backend that joins counts as complete while its full snapshot is under way."""

    def with_full_snapshot(self, pointer: Pointer, names: Sequence[str], confirmed: bool = False) -> Pointer:
        return super().with_full_snapshot(pointer, names, confirmed=True)


class NeverLate(Committer):
    """Commits continue however many batches uploads lag behind."""

    def begin(self, pointer: Pointer) -> Phase:
        self._context = replace(self._context, batches_retained=1 << 30)
        return super().begin(pointer)


def call_for_own_timeouts(earliest_timeout_ms: int | None, now_ms: int, *, alone: bool) -> int | None:
    """Call a bucket when its own timeouts are due, independently of its neighbours."""
    return aligned_timeouts.compute_next_call_ms(earliest_timeout_ms, now_ms, alone=True)


def skip_probe(*args: Any) -> None:
    """Do not look at the root if the local store has the state."""


def probe_by_pointer(key: str, run: str, committer: Committer, *args: Any) -> None:
    """Do not look for files that were confirmed after the pointer was made."""
    replicas, pointer = args
    names = [
        replica.name
        for replica in replicas
        if is_complete(status := pointer.replication.get(replica.name)) and status.through
    ]
    if names:
        probe(key, run, committer, *args)


def has_newest_file(files: Readable, pointer: Pointer, through: CheckpointRef) -> bool:
    """Assume that the newest delta implies all earlier files, even if it was sent after the root was removed."""
    return has_checkpoint(files, through)


def erase_at_once(ages: Ages | None) -> int | None:
    """Assume that no query goes back to anything before the newest pointer."""
    return ages.marks[-1][1] if ages is not None and ages.marks else None


def erase_with_the_window(ages: Ages | None) -> int | None:
    """Assume that no pointer of the window needs a file from before the window."""
    if ages is None or not ages.marks:
        return None
    older = [heartbeat for time_ms, heartbeat in ages.marks if time_ms <= ages.marks[-1][0] - ages.window_ms]
    return older[-1] if older else None


def renew_by_heartbeats_only(ages: Ages, now_ms: int) -> bool:
    """Let a checkpoint grow old if few batches come."""
    return erasure.is_snapshot_due(ages, now_ms)


def make_bucket(kind: type[Committer], snapshots: type[Snapshots] = Snapshots) -> type[Bucket]:
    """Make a class of buckets with another committer or other snapshots."""

    class Committing(Bucket):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.committer = kind(self._store, self._replicas, self._context)
            replicas = {replica.name: replica for replica in self._replicas}
            self.committer.snapshots = snapshots(self._store, replicas, self._context)
            self._snapshots = SnapshotWriter(self._store, self._context, self.committer.snapshots, self)

    return Committing


BROKEN = {
    "a checkpoint's id follows from its batch": Variant(bucket=IdentityFromBatch),
    "parents are not checked": Variant(bucket=NoParentCheck),
    "clean-up goes by version only": Variant(classify=clean_up_by_version),
    "a delta is applied on a sibling": Variant(bucket=DeltaOnASibling),
    "clean-up ignores parallel lineages": Variant(classify=clean_up_trusting_the_lineage),
    "clean-up sees parallel lineages only if versions repeat": Variant(classify=clean_up_where_versions_repeat),
    "clean-up ignores retained batches": Variant(classify=clean_up_without_retention),
    "clean-up keeps only what retained batches wrote": Variant(classify=clean_up_after_the_batches_retained),
    "clean-up depends on unverified snapshots": Variant(classify=clean_up_unverified),
    "clean-up counts calls instead of heartbeats": Variant(classify=clean_up_by_calls),
    "every call counts as a heartbeat": Variant(bucket=EveryCallAHeartbeat),
    "quiet buckets are not renewed": Variant(bucket=NeverRenewed),
    "pins are never released": Variant(bucket=LeakedPins),
    "inline deltas are dropped at once": Variant(bucket=make_bucket(InlineDeltasDropped)),
    "uploads are recorded as done when they begin": Variant(bucket=make_bucket(UploadsRecordedAtOnce)),
    "deferred uploads are not awaited": Variant(bucket=make_bucket(DeferredUploadsIgnored)),
    "earlier uploads are not awaited": Variant(bucket=make_bucket(EarlierUploadsIgnored)),
    "a gap before a confirmed delta is ignored": Variant(bucket=make_bucket(GapIgnored)),
    "a joining backend is complete at once": Variant(bucket=make_bucket(Committer, CompleteAtOnce)),
    "uploads may lag without limit": Variant(bucket=make_bucket(NeverLate)),
    "neighbours come from different attempts": Variant(next_call_ms=call_for_own_timeouts),
    "a removed root is not noticed": Variant(probe=skip_probe),
    "the probe goes by the pointer alone": Variant(probe=probe_by_pointer),
    "files before the newest pointer are erased": Variant(patches=((retention, "erased_before", erase_at_once),)),
    "files before the window are erased": Variant(patches=((retention, "erased_before", erase_with_the_window),)),
    "checkpoints are not renewed by time": Variant(patches=((bucket_module, "is_old", renew_by_heartbeats_only),)),
    "the probe looks for the newest file only": Variant(patches=((probes, "has_state", has_newest_file),)),
}

__all__ = ["BROKEN", "make_bucket"]
