"""What users, and packages that extend this one, test with: `run` runs a function without Spark, and the contracts of
backends and of local stores are suites for pytest (`testing.backends`, `testing.store`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_state_ext.testing.function_run import BatchResult, RunResult, run

__all__ = ["WAIT_S", "BatchResult", "RunResult", "run"]

# How long anything is waited for. That never decides whether a contract is kept: it ends what would hang.
WAIT_S = 600


def __getattr__(name: str) -> Any:
    # The contracts need no PySpark, and `run` needs no pytest.
    if name not in ("BatchResult", "RunResult", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spark_state_ext.testing import function_run

    return getattr(function_run, name)
