"""Lists checkpoint files as a table, from their headers and footers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from arrow_schemas.lineage import CheckpointRef, file_name
from spark_state_ext.files.checkpoint import read_announced
from spark_state_ext.timeline.bucket_files import BucketFiles

__all__ = ["FILES", "list_files"]

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


def list_files(buckets: Sequence[BucketFiles], read: Mapping[int, CheckpointRef | None]) -> pa.Table:
    """Return a table of the checkpoint files of some buckets; `read` is the checkpoint that is read of each."""
    rows = []
    for files in buckets:
        ancestors = _find_ancestors(files, read.get(files.bucket))
        for ref in sorted(files.kinds):
            state = READ if ref == read.get(files.bucket) else ANCESTOR if ref in ancestors else None
            rows += [_make_row(files, ref, kind, state) for kind in sorted(files.kinds[ref])]
    return pa.Table.from_pylist(rows, schema=FILES)


def _make_row(files: BucketFiles, ref: CheckpointRef, kind: str, state: str | None) -> dict[str, object]:
    file = read_announced(files.folder, ref, kind)
    parent, writer = file.header.parent, file.header.writer
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
        "rows": file.body.rows,
        "tombstones": file.body.tombstones,
        "size_bytes": file.size_bytes,
        "name": file_name(ref, kind),
        "state": state,
    }


def _find_ancestors(files: BucketFiles, ref: CheckpointRef | None) -> set[CheckpointRef]:
    """Return the ancestors of a checkpoint, as far back as there are files."""
    ancestors: set[CheckpointRef] = set()
    while ref is not None and ref in files:
        lineage = files.header(ref).lineage
        ancestors.update(lineage)
        ref = lineage[0] if lineage else None
    return ancestors
