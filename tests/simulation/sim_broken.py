"""Four ways in which this could have been built wrong. The simulator has to find each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from arrow_schemas import CheckpointRef, Pointer
from arrow_schemas.lineage import DELTA, SNAPSHOT, file_name, parse_file_name
from spark_state_ext import cleanup
from spark_state_ext.backend import Entry
from spark_state_ext.bucket import Bucket
from spark_state_ext.checkpoint import CheckpointFile, read_checkpoint
from spark_state_ext.cleanup import Decision
from spark_state_ext.errors import CorruptFileError, LineageError, MissingCheckpointError
from spark_state_ext.lineage import Chain, Fetch
from spark_state_ext.loading import Failure, Loader
from spark_state_ext.store import View

T = TypeVar("T")

# The world puts others in its place.
_CLASSIFY = cleanup.classify


class IdentityFromBatch(Bucket):
    """A checkpoint's id follows from its batch: every attempt at a batch has the same."""

    def _next_ref(self) -> CheckpointRef:
        digest = hashlib.md5(str(self._writer.batch).encode()).hexdigest()
        return CheckpointRef(self.pointer.version + 1, digest)


class NoParentCheck(Bucket):
    """A local store that is at the version asked for is taken for the state asked for."""

    def _reconciled(self, pointer: Pointer, work: Callable[[View], T]) -> T:
        for run in self._store.runs():
            if run.newest.version == pointer.version and pointer.ref != run.newest:
                return work(self._store.view(run.newest))
        return super()._reconciled(pointer, work)


class DeltaOnASibling(Bucket):
    """Files are found by version and kind; which of several it is, and what it was built on, is not looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loader = _ByVersion(self._store, self._files, self.pointer.operator, self.pointer.bucket, self._scratch)


class _ByVersion(Loader):
    def _read(self, fetch: Fetch) -> CheckpointFile | Failure:
        for name in self._files.names():
            parsed = parse_file_name(name)
            if parsed is not None and (parsed[0].version, parsed[1]) == (fetch.ref.version, fetch.kind):
                try:
                    return read_checkpoint(self._files, parsed[0], fetch.kind, self._store.schema, self._scratch)
                except (CorruptFileError, LineageError, MissingCheckpointError) as error:
                    return error
        return MissingCheckpointError(f"no {fetch.kind} of version {fetch.ref.version}")

    def _apply(self, chain: Chain, fetch: Fetch, found: CheckpointFile) -> None:
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


def clean_up_trusting_the_lineage(
    entries: Iterable[Entry], pointer: Pointer, batches_retained: int, now_s: float, *args: Any, **kwargs: Any
) -> Decision:
    """As the real one, but blind to lineages that go on in parallel."""
    entries = list(entries)
    refs = {entry.ref for entry in (*pointer.snapshots, *pointer.lineage)}
    linear = [e for e in entries if (parse_file_name(e.name) or (None,))[0] in refs]
    decision = _CLASSIFY(linear, pointer, batches_retained, now_s, *args, **kwargs)
    if not decision.lean_on:
        return decision
    border = decision.lean_on[0].version
    names = [e.name for e in entries if (parsed := parse_file_name(e.name)) and parsed[0].version < border]
    return Decision(tuple(names), decision.lean_on)


# Name, class of the bucket, decision of the clean-up.
BROKEN: list[tuple[str, type[Bucket], Callable[..., Decision]]] = [
    ("identity from the batch", IdentityFromBatch, cleanup.classify),
    ("no parent check", NoParentCheck, cleanup.classify),
    ("clean-up by version only", Bucket, clean_up_by_version),
    ("delta applied on a sibling", DeltaOnASibling, cleanup.classify),
    ("clean-up blind to parallel lineages", Bucket, clean_up_trusting_the_lineage),
]

__all__ = ["BROKEN", "DELTA", "file_name"]
