"""Testing for users and for packages that extend this one: `run` runs a function without Spark, `run_operator` runs a
built-in operator, and `testing.backends` has a pytest suite with the contract of state backends.
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

# How long tests wait for anything, seconds. It ends tests that would hang, and never decides if a contract is kept.
WAIT_S = 600
# Import lazily: the contracts must not need PySpark, and `run` must not need pytest.
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
