"""Arrow-native state for PySpark Structured Streaming.

The core (`store`, `bucket`, `checkpoint`, `lineage`) needs no PySpark; what does is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_state_ext.version import __version__

if TYPE_CHECKING:
    from spark_state_ext.backends.registry import Backend
    from spark_state_ext.functions.state_batch import StateBatch
    from spark_state_ext.functions.ttl import Ttl
    from spark_state_ext.operators.agg import Agg
    from spark_state_ext.spark.client.chain import Step, chain
    from spark_state_ext.spark.client.operators import aggregate, deduplicate, sessionize, top_k
    from spark_state_ext.spark.client.session import disable, enable
    from spark_state_ext.spark.client.state import ArrowState

__all__ = [
    "Agg",
    "ArrowState",
    "Backend",
    "StateBatch",
    "Step",
    "Ttl",
    "__version__",
    "aggregate",
    "chain",
    "deduplicate",
    "disable",
    "enable",
    "sessionize",
    "top_k",
]

_LAZY = {
    "Agg": "spark_state_ext.operators.agg",
    "ArrowState": "spark_state_ext.spark.client.state",
    "Backend": "spark_state_ext.backends.registry",
    "StateBatch": "spark_state_ext.functions.state_batch",
    "Step": "spark_state_ext.spark.client.chain",
    "Ttl": "spark_state_ext.functions.ttl",
    "aggregate": "spark_state_ext.spark.client.operators",
    "chain": "spark_state_ext.spark.client.chain",
    "deduplicate": "spark_state_ext.spark.client.operators",
    "disable": "spark_state_ext.spark.client.session",
    "enable": "spark_state_ext.spark.client.session",
    "sessionize": "spark_state_ext.spark.client.operators",
    "top_k": "spark_state_ext.spark.client.operators",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
