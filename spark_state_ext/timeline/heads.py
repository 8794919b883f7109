"""Find the heads of a query's buckets: the newest checkpoints that count, among all that its runs have left.

Epochs say which files count (`epochs`); the newest of these in each bucket is its head. Files without a recorded epoch
are judged by their headers (`before_epochs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.timeline.before_epochs import EarlierRuns
from spark_state_ext.timeline.bucket_files import BucketFiles, read_in_parallel
from spark_state_ext.timeline.epochs import Epochs, MadeAt, Verdict

__all__ = ["Heads", "find_heads"]


@dataclass(frozen=True)
class Heads:
    """The newest checkpoints of a bucket.

    Parameters
    ----------
    certain
        The newest ones that count; there are several after parallel attempts.
    unsure
        Later ones, which may have been given up.
    """

    certain: tuple[CheckpointRef, ...] = ()
    unsure: tuple[CheckpointRef, ...] = ()


def find_heads(buckets: Sequence[BucketFiles], epochs: Epochs, renamed: bool = False) -> dict[int, Heads]:
    """Find the heads of each bucket; with `renamed`, files without an epoch may be the query's under another id.

    For most buckets, only the header of the newest version is read. If that one does not count, all are read.
    """
    tops = {files.bucket: files.find_newest_version() for files in buckets}
    read_in_parallel([(files, ref) for files in buckets for ref in tops[files.bucket]])
    heads: dict[int, Heads] = {}
    undecided: list[BucketFiles] = []
    for files in buckets:
        headers = [files.header(ref) for ref in tops[files.bucket]]
        if all(epochs.judge(MadeAt.of(header)) is Verdict.COUNTS for header in headers):
            heads[files.bucket] = Heads(_newest_refs(headers))
        else:
            undecided.append(files)
    if undecided:
        read_in_parallel([(files, ref) for files in undecided for ref in files.kinds])
        own_query = None if epochs.newest is None else epochs.newest.after.query_id
        own_headers = (
            header
            for files in undecided
            for header in _read_headers(files)
            if own_query in (None, header.writer.query_id)
        )
        # Files that were given up in one bucket may be the only trace of a run that matters in another bucket.
        relevant = buckets if any(_is_unrecorded(header, epochs) for header in own_headers) else undecided
        read_in_parallel([(files, ref) for files in relevant for ref in files.kinds])
        unrecorded = [header for files in relevant for header in _read_headers(files) if _is_unrecorded(header, epochs)]
        runs = EarlierRuns(unrecorded, _find_own_query(epochs, unrecorded), renamed)
        earlier = {header.writer.run_id for header in unrecorded}
        heads |= {files.bucket: _judge_heads(files, epochs, runs, earlier) for files in undecided}
    return heads


def _read_headers(files: BucketFiles) -> list[LineageHeader]:
    return [files.header(ref) for ref in files.kinds]


def _is_unrecorded(header: LineageHeader, epochs: Epochs) -> bool:
    return epochs.judge(MadeAt.of(header)) is Verdict.UNRECORDED


def _find_own_query(epochs: Epochs, unrecorded: Sequence[LineageHeader]) -> str:
    """Return the id of the query that owns the folder; files of other queries are those that it began with."""
    if epochs.newest is not None:
        return epochs.newest.after.query_id
    return max(((header.writer.heartbeat, header.writer.query_id) for header in unrecorded), default=(0, ""))[1]


def _judge_heads(files: BucketFiles, epochs: Epochs, runs: EarlierRuns, earlier: Collection[str]) -> Heads:
    certain: dict[CheckpointRef, tuple[int, ...]] = {}
    unsure: dict[CheckpointRef, tuple[int, ...]] = {}
    for header in _read_headers(files):
        verdict, place = epochs.judge(MadeAt.of(header)), _sort_key(header)
        if verdict is Verdict.UNRECORDED:
            verdict, place = runs.judge(header), runs.place(header)
        elif verdict is Verdict.UNKNOWN and not header.writer.epoch and header.writer.run_id in earlier:
            # Its run is older than epochs, and no release without epochs has written in between.
            verdict = Verdict.GIVEN_UP if epochs.line_is_known else verdict
        if verdict is Verdict.COUNTS:
            certain[header.ref] = place
        elif verdict is Verdict.UNKNOWN:
            unsure[header.ref] = place
    newest = max(certain.values(), default=())
    heads = tuple(ref for ref, place in certain.items() if place == newest)
    # A file that a release without epochs wrote in between may be later than all files with an epoch.
    later = [ref for ref, place in unsure.items() if place >= newest or not files.header(ref).writer.epoch]
    built_on = {ancestor for ref in (*heads, *later) for ancestor in files.header(ref).lineage}
    return Heads(heads, tuple(ref for ref in later if ref not in built_on))


def _newest_refs(headers: Iterable[LineageHeader]) -> tuple[CheckpointRef, ...]:
    places = {header.ref: _sort_key(header) for header in headers}
    newest = max(places.values(), default=())
    return tuple(ref for ref, place in places.items() if place == newest)


def _sort_key(header: LineageHeader) -> tuple[int, ...]:
    """Return a sort key for when a file that counts was made, among its bucket's files."""
    writer = header.writer
    return writer.epoch, writer.heartbeat, writer.batch
