"""Every format of spark_state_ext: rows, runs, lineage headers, pointers, operator files.

This package only encodes, decodes and checks; it never touches a file or the network.
"""

from __future__ import annotations

from arrow_schemas.bucket_map import BucketMap
from arrow_schemas.equality import group_by_key, rows_equal
from arrow_schemas.evolution import check_state_change, conform
from arrow_schemas.labels import bucket_label, label_bucket
from arrow_schemas.lineage import BodyRecord, CheckpointRef, LineageHeader, Writer, new_checkpoint_id
from arrow_schemas.operator import OperatorFile
from arrow_schemas.partitions import PartitionAssignment
from arrow_schemas.pointer import LineageEntry, Pointer
from arrow_schemas.row import RowSchema
from arrow_schemas.spark_types import key_fields, normalise_type, state_fields

__all__ = [
    "BodyRecord",
    "BucketMap",
    "CheckpointRef",
    "LineageEntry",
    "LineageHeader",
    "OperatorFile",
    "PartitionAssignment",
    "Pointer",
    "RowSchema",
    "Writer",
    "bucket_label",
    "conform",
    "group_by_key",
    "key_fields",
    "label_bucket",
    "new_checkpoint_id",
    "normalise_type",
    "rows_equal",
    "check_state_change",
    "state_fields",
]
