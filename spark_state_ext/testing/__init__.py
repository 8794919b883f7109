"""What users, and packages that extend this one, test with: `run` runs a function without Spark, and `run_operator` a
built-in operator; the contract of backends is a suite for pytest (`testing.backends`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_state_ext.testing.batches import BatchResult, RunResult
    from spark_state_ext.testing.function_run import run
    from spark_state_ext.testing.operator_columns import Window
    from spark_state_ext.testing.operator_run import run_operator

__all__ = ["WAIT_S", "BatchResult", "RunResult", "Window", "run", "run_operator"]

# How long anything is waited for. That never decides whether a contract is kept: it ends what would hang.
WAIT_S = 600
# The contracts need no PySpark, and `run` needs no pytest.
_LAZY = {
    "BatchResult": "batches",
    "RunResult": "batches",
    "Window": "operator_columns",
    "run": "function_run",
    "run_operator": "operator_run",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
