"""The functions that are sent to the executors.

They are nested, so that Spark pickles them by value: they arrive even if this package is not installed there, and can
then say so plainly, instead of raising a ModuleNotFoundError inside a Java stack trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

__all__ = ["bucket_entry", "pack_entry", "task_entry", "unpack_entry"]


def pack_entry(plain: dict[str, Any], combiner: Any = None) -> Callable[[Any], Any]:
    """Return the function for the `mapInArrow` that packs rows before the shuffle."""
    load = _make_loader()

    def pack_rows(batches: Any) -> Any:
        run_and_rewrite_errors = load("spark_state_ext.spark.executor.error_border").run_and_rewrite_errors
        return run_and_rewrite_errors(None, load("spark_state_ext.spark.shuffle.pack").pack, plain, batches, combiner)

    return pack_rows


def bucket_entry(plain: dict[str, Any], function: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """Return the function for `applyInPandasWithState`. Query plans and Spark's UI show its name."""
    load = _make_loader()

    def run_bucket(key: Any, frames: Any, state: Any) -> Any:
        run_and_rewrite_errors = load("spark_state_ext.spark.executor.error_border").run_and_rewrite_errors
        return run_and_rewrite_errors(
            function, load("spark_state_ext.spark.executor.call").run_bucket, plain, function, key, frames, state
        )

    run_bucket.__name__ = run_bucket.__qualname__ = _make_entry_name(plain, function)
    return run_bucket


def unpack_entry() -> Callable[[Any], Any]:
    """Return the function for the `mapInArrow` that unpacks the Arrow output of an operator."""
    load = _make_loader()

    def unpack_rows(batches: Any) -> Any:
        return load("spark_state_ext.spark.executor.error_border").run_and_rewrite_errors(
            None, load("spark_state_ext.spark.shuffle.output").unpack, batches
        )

    return unpack_rows


def task_entry(task: str, plain: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function for `mapInArrow` that runs a task: ``<module>.<function>`` in `spark.executor`."""
    load = _make_loader()
    module, _, function = task.partition(".")

    def savepoint(batches: Any) -> Any:
        work = getattr(load(f"spark_state_ext.spark.executor.{module}"), function)
        return load("spark_state_ext.spark.executor.error_border").run_and_rewrite_errors(None, work, plain, batches)

    return savepoint


def _make_entry_name(plain: dict[str, Any], function: Callable[..., Any]) -> str:
    """Return ``arrow_state_<operator>_<function>``, with the user's function or the built-in operator."""
    built_in = json.loads(plain["function"])["name"] if plain["function"] else None
    # A partial has no name: use its function's.
    unwrapped = getattr(function, "func", function)
    name = built_in or getattr(unwrapped, "__name__", type(unwrapped).__name__)
    return re.sub(r"\W", "_", f"arrow_state_{plain['options']['operator']}_{name}")


def _make_loader() -> Callable[[str], Any]:
    def load(name: str) -> Any:
        import importlib
        import os
        import sys

        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in (
                "spark_state_ext",
                "arrow_schemas",
                "lmdb",
                "fsspec",
                "pyarrow",
                "numpy",
                "pandas",
                "tenacity",
            ):
                raise
            what = f"has no module {error.name!r}. Install it there ({sys.executable} -m pip install spark_state_ext)"
            if missing == "spark_state_ext" and error.name != missing:
                what = f"has another release of spark_state_ext, without {error.name!r}: install the client's release"
            # As in `error_border`, which is in the missing package: print the message without a traceback.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            sys.tracebacklimit = 0
            # The error classes are in the missing package, so a class of the same name stands in.
            executor_package_error = type(
                "ExecutorPackageError", (ImportError,), {"__module__": "spark_state_ext.errors"}
            )
            raise executor_package_error(
                f"the executors' Python {sys.executable} (version {sys.version.split()[0]}) {what}, or point "
                "PYSPARK_PYTHON or spark.pyspark.python at the Python that has it."
            ) from None

    return load
