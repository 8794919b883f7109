"""Checkpoint files as a table: what each says of itself at its two ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from arrow_schemas.lineage import CheckpointRef, file_name
from spark_state_ext.files.checkpoint import announced
from spark_state_ext.timeline.bucket_files import BucketFiles

__all__ = ["FILES", "files_table"]

FILES = pa.schema(
    [
        ("bucket", pa.int32()),
        ("version", pa.int64()),
        ("id", pa.string()),
        ("kind", pa.string()),
        ("parent_version", pa.int64()),
        ("parent_id", pa.string()),
        ("batch", pa.int64()),
        ("heartbeat", pa.int64()),
        ("query_id", pa.string()),
        ("run_id", pa.string()),
        ("rows", pa.int64()),
        ("tombstones", pa.int64()),
        ("size_bytes", pa.int64()),
        ("name", pa.string()),
        ("state", pa.string()),
    ]
)
READ, ANCESTOR = "read", "ancestor"


def files_table(buckets: Sequence[BucketFiles], read: Mapping[int, CheckpointRef | None]) -> pa.Table:
    """The files of some buckets."""
    rows = []
    for files in buckets:
        ancestors = _ancestors(files, read.get(files.bucket))
        for ref in sorted(files.kinds):
            state = READ if ref == read.get(files.bucket) else ANCESTOR if ref in ancestors else None
            rows += [_row(files, ref, kind, state) for kind in sorted(files.kinds[ref])]
    return pa.Table.from_pylist(rows, schema=FILES)


def _row(files: BucketFiles, ref: CheckpointRef, kind: str, state: str | None) -> dict[str, object]:
    it = announced(files.folder, ref, kind)
    parent, writer = it.header.parent, it.header.writer
    return {
        "bucket": files.bucket,
        "version": ref.version,
        "id": ref.id,
        "kind": kind,
        "parent_version": None if parent is None else parent.version,
        "parent_id": None if parent is None else parent.id,
        "batch": writer.batch,
        "heartbeat": writer.heartbeat,
        "query_id": writer.query_id,
        "run_id": writer.run_id,
        "rows": it.body.rows,
        "tombstones": it.body.tombstones,
        "size_bytes": it.size_bytes,
        "name": file_name(ref, kind),
        "state": state,
    }


def _ancestors(files: BucketFiles, ref: CheckpointRef | None) -> set[CheckpointRef]:
    """What a checkpoint was built on, as far back as there are files."""
    found: set[CheckpointRef] = set()
    while ref is not None and ref in files:
        lineage = files.header(ref).lineage
        found.update(lineage)
        ref = lineage[0] if lineage else None
    return found
