"""Arrow-native state for PySpark Structured Streaming.

The core (`store`, `bucket`, `checkpoint`, `lineage`) needs no PySpark; what does is loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_state_ext.version import __version__

if TYPE_CHECKING:
    from spark_state_ext.backends.registry import Backend
    from spark_state_ext.operators.agg import Agg
    from spark_state_ext.spark.chain import Step, chain
    from spark_state_ext.spark.operators import aggregate, deduplicate, sessionize, top_k
    from spark_state_ext.spark.plan import ArrowState
    from spark_state_ext.spark.session import disable, enable
    from spark_state_ext.state_batch import StateBatch
    from spark_state_ext.ttl import Ttl

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
    "ArrowState": "spark_state_ext.spark.plan",
    "Backend": "spark_state_ext.backends.registry",
    "StateBatch": "spark_state_ext.state_batch",
    "Step": "spark_state_ext.spark.chain",
    "Ttl": "spark_state_ext.ttl",
    "aggregate": "spark_state_ext.spark.operators",
    "chain": "spark_state_ext.spark.chain",
    "deduplicate": "spark_state_ext.spark.operators",
    "disable": "spark_state_ext.spark.session",
    "enable": "spark_state_ext.spark.session",
    "sessionize": "spark_state_ext.spark.operators",
    "top_k": "spark_state_ext.spark.operators",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
