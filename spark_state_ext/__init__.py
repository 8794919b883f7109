"""Arrow-native state for PySpark Structured Streaming.

The core (`store`, `bucket`, `checkpoint`, `lineage`) needs no PySpark; modules that do are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_state_ext.version import __version__

if TYPE_CHECKING:
    from arrow_schemas.bucket_map import BucketMap
    from arrow_schemas.partitions import partition_before_expansion
    from spark_state_ext.backends.registry import Backend
    from spark_state_ext.engine.source_partition import SourcePartition
    from spark_state_ext.engine.start_from import RetainedCheckpoint, Savepoint
    from spark_state_ext.erasing.history import ErasedHistory, erase_history
    from spark_state_ext.erasing.receipt import EraseReceipt
    from spark_state_ext.erasing.requests import AskedErasure, EraseStatus, erase_keys, erase_status, withdraw_erasure
    from spark_state_ext.erasing.scan import erase_scan
    from spark_state_ext.functions.state_batch import StateBatch
    from spark_state_ext.functions.ttl import Ttl
    from spark_state_ext.operators.agg import Agg
    from spark_state_ext.reading.live import LiveState, open_live
    from spark_state_ext.reading.state import OpenState
    from spark_state_ext.reading.state_opener import open_state
    from spark_state_ext.reports.recommendation import Recommendation, recommend
    from spark_state_ext.reports.report_file import report
    from spark_state_ext.rescale.rescaled_savepoint import RescaledSavepoint, rescale_savepoint
    from spark_state_ext.savepoints.offsets import starting_offsets
    from spark_state_ext.savepoints.saved_rows import savepoint_tables
    from spark_state_ext.spark.client.chain import Step, chain
    from spark_state_ext.spark.client.operators import aggregate, deduplicate, sessionize, top_k
    from spark_state_ext.spark.client.savepoints import TakenSavepoint, stop_with_savepoint, take_savepoint
    from spark_state_ext.spark.client.session import disable, enable
    from spark_state_ext.spark.client.state import ArrowState
    from spark_state_ext.spark.client.tables import read_savepoint, write_savepoint
    from spark_state_ext.spark.native.job_import import ImportedJob, import_native
    from spark_state_ext.spark.native.savepoint_export import export_native
    from spark_state_ext.spark.source.committed_state import open_committed
    from spark_state_ext.spark.source.frames import read_state, register

__all__ = [
    "Agg",
    "ArrowState",
    "AskedErasure",
    "Backend",
    "BucketMap",
    "EraseReceipt",
    "EraseStatus",
    "ErasedHistory",
    "ImportedJob",
    "LiveState",
    "OpenState",
    "Recommendation",
    "RescaledSavepoint",
    "RetainedCheckpoint",
    "Savepoint",
    "SourcePartition",
    "StateBatch",
    "Step",
    "TakenSavepoint",
    "Ttl",
    "__version__",
    "aggregate",
    "chain",
    "deduplicate",
    "disable",
    "enable",
    "erase_history",
    "erase_keys",
    "erase_scan",
    "erase_status",
    "export_native",
    "import_native",
    "open_committed",
    "open_live",
    "open_state",
    "partition_before_expansion",
    "read_savepoint",
    "read_state",
    "recommend",
    "register",
    "report",
    "rescale_savepoint",
    "savepoint_tables",
    "sessionize",
    "starting_offsets",
    "stop_with_savepoint",
    "take_savepoint",
    "top_k",
    "withdraw_erasure",
    "write_savepoint",
]

_LAZY = {
    "Agg": "spark_state_ext.operators.agg",
    "ArrowState": "spark_state_ext.spark.client.state",
    "AskedErasure": "spark_state_ext.erasing.requests",
    "Backend": "spark_state_ext.backends.registry",
    "BucketMap": "arrow_schemas.bucket_map",
    "EraseReceipt": "spark_state_ext.erasing.receipt",
    "EraseStatus": "spark_state_ext.erasing.requests",
    "ErasedHistory": "spark_state_ext.erasing.history",
    "ImportedJob": "spark_state_ext.spark.native.job_import",
    "LiveState": "spark_state_ext.reading.live",
    "OpenState": "spark_state_ext.reading.state",
    "Recommendation": "spark_state_ext.reports.recommendation",
    "RescaledSavepoint": "spark_state_ext.rescale.rescaled_savepoint",
    "RetainedCheckpoint": "spark_state_ext.engine.start_from",
    "Savepoint": "spark_state_ext.engine.start_from",
    "SourcePartition": "spark_state_ext.engine.source_partition",
    "StateBatch": "spark_state_ext.functions.state_batch",
    "Step": "spark_state_ext.spark.client.chain",
    "TakenSavepoint": "spark_state_ext.spark.client.savepoints",
    "Ttl": "spark_state_ext.functions.ttl",
    "aggregate": "spark_state_ext.spark.client.operators",
    "chain": "spark_state_ext.spark.client.chain",
    "deduplicate": "spark_state_ext.spark.client.operators",
    "disable": "spark_state_ext.spark.client.session",
    "enable": "spark_state_ext.spark.client.session",
    "erase_history": "spark_state_ext.erasing.history",
    "erase_keys": "spark_state_ext.erasing.requests",
    "erase_scan": "spark_state_ext.erasing.scan",
    "erase_status": "spark_state_ext.erasing.requests",
    "export_native": "spark_state_ext.spark.native.savepoint_export",
    "import_native": "spark_state_ext.spark.native.job_import",
    "open_committed": "spark_state_ext.spark.source.committed_state",
    "open_live": "spark_state_ext.reading.live",
    "open_state": "spark_state_ext.reading.state_opener",
    "partition_before_expansion": "arrow_schemas.partitions",
    "read_savepoint": "spark_state_ext.spark.client.tables",
    "read_state": "spark_state_ext.spark.source.frames",
    "recommend": "spark_state_ext.reports.recommendation",
    "register": "spark_state_ext.spark.source.frames",
    "report": "spark_state_ext.reports.report_file",
    "rescale_savepoint": "spark_state_ext.rescale.rescaled_savepoint",
    "savepoint_tables": "spark_state_ext.savepoints.saved_rows",
    "sessionize": "spark_state_ext.spark.client.operators",
    "starting_offsets": "spark_state_ext.savepoints.offsets",
    "stop_with_savepoint": "spark_state_ext.spark.client.savepoints",
    "take_savepoint": "spark_state_ext.spark.client.savepoints",
    "top_k": "spark_state_ext.spark.client.operators",
    "withdraw_erasure": "spark_state_ext.erasing.requests",
    "write_savepoint": "spark_state_ext.spark.client.tables",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
