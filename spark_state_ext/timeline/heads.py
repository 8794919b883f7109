"""The newest checkpoints of a query's buckets: those that count, of all that its runs have left.

Epochs say which files count (`epochs`); of these the newest of each bucket is its head. Files without a recorded epoch
are judged by what their headers tell (`before_epochs`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from arrow_schemas.lineage import CheckpointRef, LineageHeader
from spark_state_ext.timeline.before_epochs import EarlierRuns
from spark_state_ext.timeline.bucket_files import BucketFiles, read_side_by_side
from spark_state_ext.timeline.epochs import Epochs, Made, Verdict

__all__ = ["Heads", "heads_of"]


@dataclass(frozen=True)
class Heads:
    """The newest checkpoints of a bucket.

    Parameters
    ----------
    certain
        Those that count; several where attempts were made side by side.
    unsure
        Later ones, which may be given up or not.
    """

    certain: tuple[CheckpointRef, ...] = ()
    unsure: tuple[CheckpointRef, ...] = ()


def heads_of(buckets: Sequence[BucketFiles], epochs: Epochs, renamed: bool = False) -> dict[int, Heads]:
    """The heads of each bucket; `renamed`: files without an epoch may be the query's, whatever they call it.

    Of most buckets one header is read: that of the newest version. Where it does not count, all are.
    """
    tops = {files.bucket: files.of_newest_version() for files in buckets}
    read_side_by_side([(files, ref) for files in buckets for ref in tops[files.bucket]])
    found: dict[int, Heads] = {}
    left: list[BucketFiles] = []
    for files in buckets:
        headers = [files.header(ref) for ref in tops[files.bucket]]
        if all(epochs.judge(Made.of(it)) is Verdict.COUNTS for it in headers):
            found[files.bucket] = Heads(_newest(headers))
        else:
            left.append(files)
    if left:
        read_side_by_side([(files, ref) for files in left for ref in files.kinds])
        own = None if epochs.newest is None else epochs.newest.after.query_id
        mine = (it for files in left for it in _headers(files) if own in (None, it.writer.query_id))
        # What was given up in one bucket tells of runs that have left nothing in another.
        wanted = buckets if any(_is_unrecorded(it, epochs) for it in mine) else left
        read_side_by_side([(files, ref) for files in wanted for ref in files.kinds])
        unrecorded = [it for files in wanted for it in _headers(files) if _is_unrecorded(it, epochs)]
        runs = EarlierRuns(unrecorded, _own_query(epochs, unrecorded), renamed)
        earlier = {it.writer.run_id for it in unrecorded}
        found |= {files.bucket: _heads(files, epochs, runs, earlier) for files in left}
    return found


def _headers(files: BucketFiles) -> list[LineageHeader]:
    return [files.header(ref) for ref in files.kinds]


def _is_unrecorded(header: LineageHeader, epochs: Epochs) -> bool:
    return epochs.judge(Made.of(header)) is Verdict.UNRECORDED


def _own_query(epochs: Epochs, unrecorded: Sequence[LineageHeader]) -> str:
    """The query whose runs went back or not; what others made is what it began with."""
    if epochs.newest is not None:
        return epochs.newest.after.query_id
    return max(((it.writer.heartbeat, it.writer.query_id) for it in unrecorded), default=(0, ""))[1]


def _heads(files: BucketFiles, epochs: Epochs, runs: EarlierRuns, earlier: Collection[str]) -> Heads:
    certain: dict[CheckpointRef, tuple[int, ...]] = {}
    unsure: dict[CheckpointRef, tuple[int, ...]] = {}
    for header in _headers(files):
        verdict, place = epochs.judge(Made.of(header)), _place(header)
        if verdict is Verdict.UNRECORDED:
            verdict, place = runs.judge(header), runs.place(header)
        elif verdict is Verdict.UNTOLD and not header.writer.epoch and header.writer.run_id in earlier:
            # Its run was there before there were epochs, and none has written in between.
            verdict = Verdict.GIVEN_UP if epochs.line_is_known else verdict
        if verdict is Verdict.COUNTS:
            certain[header.ref] = place
        elif verdict is Verdict.UNTOLD:
            unsure[header.ref] = place
    newest = max(certain.values(), default=())
    heads = tuple(ref for ref, place in certain.items() if place == newest)
    # What a release without epochs wrote in between may be later than all that has one.
    later = [ref for ref, place in unsure.items() if place >= newest or not files.header(ref).writer.epoch]
    built_on = {ref for it in (*heads, *later) for ref in files.header(it).lineage}
    return Heads(heads, tuple(ref for ref in later if ref not in built_on))


def _newest(headers: Iterable[LineageHeader]) -> tuple[CheckpointRef, ...]:
    places = {it.ref: _place(it) for it in headers}
    newest = max(places.values(), default=())
    return tuple(ref for ref, place in places.items() if place == newest)


def _place(header: LineageHeader) -> tuple[int, ...]:
    """Of files that count, when one was made, compared with others of its bucket."""
    writer = header.writer
    return writer.epoch, writer.heartbeat, writer.batch
