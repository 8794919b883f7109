"""What checkpoint files a root has, and how many deltas lie upon each bucket's snapshot. Nothing is written."""

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
from spark_state_ext.worker.threads import side_by_side

__all__ = ["BucketFiles", "QueryFiles", "count_deltas_upon_snapshot", "list_query_files"]

# Headers are read side by side, as a store may be far away.
_THREADS = 16


@dataclass(frozen=True)
class BucketFiles:
    """The checkpoint files of a bucket.

    Parameters
    ----------
    bucket
        Its number.
    deltas, snapshots
        How many of each kind there are.
    delta_bytes, snapshot_bytes
        Their sizes.
    newest_s
        When the newest was written, seconds since 1970; None where the store does not tell.
    version
        The newest checkpoint's.
    chain
        How many deltas lie upon the newest snapshot below the newest checkpoint; None where its header does not tell.
    problem
        Why it does not; empty where it does.
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
        Whose.
    buckets
        Those that have files, by number.
    other_files, other_bytes
        What lies in the query folder beside them: operator files, the lease, rows in transit.
    """

    operator: str
    query_folder: str
    buckets: tuple[BucketFiles, ...]
    other_files: int = 0
    other_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Of all checkpoint files."""
        return sum(it.delta_bytes + it.snapshot_bytes for it in self.buckets)


@dataclass
class _Found:
    """Files of a query folder, as a listing tells of them."""

    buckets: defaultdict[int, list[tuple[CheckpointRef, str, Entry]]] = field(default_factory=lambda: defaultdict(list))
    others: list[Entry] = field(default_factory=list)
    is_ours: bool = False


def list_query_files(root: Folder) -> list[QueryFiles]:
    """The state that lies below a root."""
    found = _sorted_by_folder(root.tree())
    work = [
        (operator, query_folder, bucket, files)
        for (operator, query_folder), it in found.items()
        for bucket, files in sorted(it.buckets.items())
    ]

    def told(item: tuple[str, str, int, list[tuple[CheckpointRef, str, Entry]]]) -> BucketFiles:
        operator, query_folder, bucket, files = item
        return _bucket(root.child(operator, query_folder, str(bucket)), bucket, files)

    buckets: defaultdict[tuple[str, str], list[BucketFiles]] = defaultdict(list)
    for item, bucket in zip(work, side_by_side("report", _THREADS, told, work), strict=True):
        buckets[item[:2]].append(bucket)
    return [
        QueryFiles(*key, tuple(buckets[key]), len(it.others), sum(entry.size_bytes for entry in it.others))
        for key, it in sorted(found.items())
    ]


def _sorted_by_folder(tree: Iterable[Entry]) -> dict[tuple[str, str], _Found]:
    """Entries by operator and query folder; only of folders that have an operator file."""
    found: defaultdict[tuple[str, str], _Found] = defaultdict(_Found)
    for entry in tree:
        parts = entry.name.split("/")
        if len(parts) < 3:
            continue
        mine = found[parts[0], parts[1]]
        mine.is_ours |= len(parts) == 3 and parse_operator_file_name(parts[2]) is not None
        parsed = parse_file_name(parts[-1]) if len(parts) == 4 and parts[2].isdecimal() else None
        if parsed is None:
            mine.others.append(entry)
        else:
            mine.buckets[int(parts[2])].append((*parsed, entry))
    return {key: it for key, it in found.items() if it.is_ours}


def _bucket(folder: Folder, bucket: int, files: list[tuple[CheckpointRef, str, Entry]]) -> BucketFiles:
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
        # Clean-up may have removed it since it was listed. What is damaged is told.
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
    """How many deltas a load of a checkpoint lays upon a snapshot, or upon nothing where there is none."""
    line = [*header.lineage, header.ref]
    upon = [at for at, ref in enumerate(line) if SNAPSHOT in kinds.get(ref, ())]
    return len(line) - 1 - upon[-1] if upon else len(line)
