"""Arrow-native state for PySpark Structured Streaming.

The core (`store`, `bucket`, `checkpoint`, `lineage`) needs no PySpark; what does is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_state_ext.version import __version__

if TYPE_CHECKING:
    from spark_state_ext.backends.registry import Backend
    from spark_state_ext.engine.start_from import RetainedCheckpoint, Savepoint
    from spark_state_ext.functions.state_batch import StateBatch
    from spark_state_ext.functions.ttl import Ttl
    from spark_state_ext.operators.agg import Agg
    from spark_state_ext.savepoints.offsets import starting_offsets
    from spark_state_ext.savepoints.reading import savepoint_tables
    from spark_state_ext.spark.client.chain import Step, chain
    from spark_state_ext.spark.client.operators import aggregate, deduplicate, sessionize, top_k
    from spark_state_ext.spark.client.savepoints import TakenSavepoint, stop_with_savepoint, take_savepoint
    from spark_state_ext.spark.client.session import disable, enable
    from spark_state_ext.spark.client.state import ArrowState
    from spark_state_ext.spark.client.tables import read_savepoint, write_savepoint
    from spark_state_ext.spark.native.exporting import export_native
    from spark_state_ext.spark.native.importing import ImportedJob, import_native

__all__ = [
    "Agg",
    "ArrowState",
    "Backend",
    "ImportedJob",
    "RetainedCheckpoint",
    "Savepoint",
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
    "export_native",
    "import_native",
    "read_savepoint",
    "savepoint_tables",
    "sessionize",
    "starting_offsets",
    "stop_with_savepoint",
    "take_savepoint",
    "top_k",
    "write_savepoint",
]

_LAZY = {
    "Agg": "spark_state_ext.operators.agg",
    "ArrowState": "spark_state_ext.spark.client.state",
    "Backend": "spark_state_ext.backends.registry",
    "ImportedJob": "spark_state_ext.spark.native.importing",
    "RetainedCheckpoint": "spark_state_ext.engine.start_from",
    "Savepoint": "spark_state_ext.engine.start_from",
    "StateBatch": "spark_state_ext.functions.state_batch",
    "Step": "spark_state_ext.spark.client.chain",
    "TakenSavepoint": "spark_state_ext.spark.client.savepoints",
    "Ttl": "spark_state_ext.functions.ttl",
    "aggregate": "spark_state_ext.spark.client.operators",
    "chain": "spark_state_ext.spark.client.chain",
    "deduplicate": "spark_state_ext.spark.client.operators",
    "disable": "spark_state_ext.spark.client.session",
    "enable": "spark_state_ext.spark.client.session",
    "export_native": "spark_state_ext.spark.native.exporting",
    "import_native": "spark_state_ext.spark.native.importing",
    "read_savepoint": "spark_state_ext.spark.client.tables",
    "savepoint_tables": "spark_state_ext.savepoints.reading",
    "sessionize": "spark_state_ext.spark.client.operators",
    "starting_offsets": "spark_state_ext.savepoints.offsets",
    "stop_with_savepoint": "spark_state_ext.spark.client.savepoints",
    "take_savepoint": "spark_state_ext.spark.client.savepoints",
    "top_k": "spark_state_ext.spark.client.operators",
    "write_savepoint": "spark_state_ext.spark.client.tables",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
