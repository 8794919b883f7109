"""List the checkpoint files below a root, and count the deltas on top of each bucket's snapshot. Writes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from arrow_schemas.lineage import DELTA, SNAPSHOT, CheckpointRef, LineageHeader, parse_file_name
from arrow_schemas.operator import parse_operator_file_name
from spark_state_ext.errors import CorruptError, MissingCheckpointError
from spark_state_ext.files.checkpoint import read_header
from spark_state_ext.files.folder import Folder
from spark_state_ext.files.listing import Entry
from spark_state_ext.worker.threads import map_in_parallel

__all__ = ["BucketFiles", "QueryFiles", "count_deltas_upon_snapshot", "list_query_files"]

# Headers are read in parallel, because a store may be slow to answer.
_THREADS = 16


@dataclass(frozen=True)
class BucketFiles:
    """The checkpoint files of a bucket.

    Parameters
    ----------
    bucket
        The number of the bucket.
    deltas, snapshots
        The number of files of each kind.
    delta_bytes, snapshot_bytes
        Their total sizes.
    newest_s
        When the newest file was written, seconds since 1970; None if the store does not report it.
    version
        The version of the newest checkpoint.
    chain
        How many deltas a load of the newest checkpoint applies to a snapshot; None if its header is unreadable.
    problem
        Why the header is unreadable; empty if it is not.
    """

    bucket: int
    deltas: int = 0
    snapshots: int = 0
    delta_bytes: int = 0
    snapshot_bytes: int = 0
    newest_s: float | None = None
    version: int = 0
    chain: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class QueryFiles:
    """The files of one operator of one query.

    Parameters
    ----------
    operator, query_folder
        The operator and the query folder.
    buckets
        The buckets that have files, by number.
    other_files, other_bytes
        The other files in the query folder: operator files, the lease, rows in transit.
    """

    operator: str
    query_folder: str
    buckets: tuple[BucketFiles, ...]
    other_files: int = 0
    other_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """The size of all checkpoint files."""
        return sum(bucket.delta_bytes + bucket.snapshot_bytes for bucket in self.buckets)


@dataclass
class _Listing:
    """The files of a query folder, from a listing."""

    buckets: defaultdict[int, list[tuple[CheckpointRef, str, Entry]]] = field(default_factory=lambda: defaultdict(list))
    others: list[Entry] = field(default_factory=list)
    has_operator_file: bool = False


def list_query_files(root: Folder) -> list[QueryFiles]:
    """Return the files of each query folder below a root."""
    listings = _group_by_folder(root.tree())
    work = [
        (operator, query_folder, bucket, files)
        for (operator, query_folder), listing in listings.items()
        for bucket, files in sorted(listing.buckets.items())
    ]

    def read_bucket(item: tuple[str, str, int, list[tuple[CheckpointRef, str, Entry]]]) -> BucketFiles:
        operator, query_folder, bucket, files = item
        return _summarize_bucket(root.child(operator, query_folder, str(bucket)), bucket, files)

    buckets: defaultdict[tuple[str, str], list[BucketFiles]] = defaultdict(list)
    for item, bucket in zip(work, map_in_parallel("report", _THREADS, read_bucket, work), strict=True):
        buckets[item[:2]].append(bucket)
    return [
        QueryFiles(*key, tuple(buckets[key]), len(listing.others), sum(entry.size_bytes for entry in listing.others))
        for key, listing in sorted(listings.items())
    ]


def _group_by_folder(tree: Iterable[Entry]) -> dict[tuple[str, str], _Listing]:
    """Group entries by operator and query folder; skip folders without an operator file."""
    listings: defaultdict[tuple[str, str], _Listing] = defaultdict(_Listing)
    for entry in tree:
        parts = entry.name.split("/")
        if len(parts) < 3:
            continue
        listing = listings[parts[0], parts[1]]
        listing.has_operator_file |= len(parts) == 3 and parse_operator_file_name(parts[2]) is not None
        ref_and_kind = parse_file_name(parts[-1]) if len(parts) == 4 and parts[2].isdecimal() else None
        if ref_and_kind is None:
            listing.others.append(entry)
        else:
            listing.buckets[int(parts[2])].append((*ref_and_kind, entry))
    return {key: listing for key, listing in listings.items() if listing.has_operator_file}


def _summarize_bucket(folder: Folder, bucket: int, files: list[tuple[CheckpointRef, str, Entry]]) -> BucketFiles:
    kinds: defaultdict[str, list[Entry]] = defaultdict(list)
    by_ref: defaultdict[CheckpointRef, set[str]] = defaultdict(set)
    for ref, kind, entry in files:
        kinds[kind].append(entry)
        by_ref[ref].add(kind)
    newest = max(by_ref)
    times = [entry.modified_s for _, _, entry in files if entry.modified_s is not None]
    chain, problem = None, ""
    try:
        header = read_header(folder, newest, SNAPSHOT if SNAPSHOT in by_ref[newest] else DELTA)
        chain = count_deltas_upon_snapshot(header, by_ref)
    except (CorruptError, MissingCheckpointError) as error:
        # Clean-up may have removed it since it was listed. Damage is reported.
        problem = str(error)
    return BucketFiles(
        bucket,
        len(kinds[DELTA]),
        len(kinds[SNAPSHOT]),
        sum(entry.size_bytes for entry in kinds[DELTA]),
        sum(entry.size_bytes for entry in kinds[SNAPSHOT]),
        max(times, default=None),
        newest.version,
        chain,
        problem,
    )


def count_deltas_upon_snapshot(header: LineageHeader, kinds: Mapping[CheckpointRef, set[str]]) -> int:
    """Count the deltas that a load of a checkpoint applies on top of its newest snapshot, or all if it has none."""
    refs = [*header.lineage, header.ref]
    snapshot_indices = [index for index, ref in enumerate(refs) if SNAPSHOT in kinds.get(ref, ())]
    return len(refs) - 1 - snapshot_indices[-1] if snapshot_indices else len(refs)
