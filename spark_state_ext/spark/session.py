"""`enable` and `disable`: untouched ``df.groupBy(…).applyInPandasWithState(…)`` on Arrow state.

Spark's DataFrame and GroupedData classes, classic or Connect, get two wrapped methods each. The wrappers do nothing for
sessions that were not enabled. `groupBy` notes its arguments on the result, because GroupedData does not tell its
columns.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spark_state_ext.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_state_ext.spark.plan import ArrowState

__all__ = ["disable", "enable", "unpatched"]

_NOTE = "_spark_state_ext_grouping"
_enabled: weakref.WeakKeyDictionary[Any, ArrowState] = weakref.WeakKeyDictionary()
_patched: set[type] = set()
_lock = threading.Lock()
_thread = threading.local()


def enable(spark: SparkSession, state: ArrowState) -> None:
    """Run every later `applyInPandasWithState` of a session on `state`.

    Parameters
    ----------
    spark
        A classic or Connect session. Queries planned before are not affected.
    state
        Where and how state is kept. A session has one at a time; another call replaces it.

    Raises
    ------
    UsageError
        When `state` is no `ArrowState`.
    """
    from spark_state_ext.spark.plan import ArrowState  # which imports this module

    if not isinstance(state, ArrowState):
        raise UsageError(f"enable(spark, state) takes a Spark session and then an ArrowState, not {state!r}")
    with _lock:
        frame = spark.range(0)
        _patch_frame(type(frame))
        _patch_grouped(type(frame.groupBy()))
        _enabled[spark] = state


def disable(spark: SparkSession) -> None:
    """Undo `enable`: later queries of the session run on Spark's own state.

    Parameters
    ----------
    spark
        The session. Queries planned before are not affected; one that was not enabled stays as it is.
    """
    with _lock:
        _enabled.pop(spark, None)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """Within this block the thread plans on Spark's own state: our own plan needs it."""
    before = getattr(_thread, "plain", False)
    _thread.plain = True
    try:
        yield
    finally:
        _thread.plain = before


def _patch_frame(cls: type) -> None:
    if cls in _patched:
        return
    _patched.add(cls)
    for name in ("groupBy", "groupby"):
        setattr(cls, name, _noting(getattr(cls, name)))


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def group_by(self: Any, *cols: Any, **options: Any) -> Any:
        grouped = original(self, *cols, **options)
        flat = tuple(cols[0]) if len(cols) == 1 and isinstance(cols[0], (list, tuple)) else cols
        # Since 4.0 a column may be told by its place, from 1 on.
        flat = tuple(f"`{self.columns[at - 1].replace('`', '``')}`" if type(at) is int else at for at in flat)
        setattr(grouped, _NOTE, (self, flat))
        return grouped

    return group_by


def _patch_grouped(cls: type) -> None:
    if cls in _patched:
        return
    _patched.add(cls)
    original = cls.applyInPandasWithState  # type: ignore[attr-defined]  # the class is known only at run time

    @functools.wraps(original)
    def apply_in_pandas_with_state(
        self: Any, func: Any, outputStructType: Any, stateStructType: Any, outputMode: str, timeoutConf: str
    ) -> Any:
        noted: tuple[Any, tuple[Any, ...]] = getattr(self, _NOTE, (None, ()))
        frame, columns = noted
        state = None if frame is None else _enabled.get(frame.sparkSession)
        if state is None or getattr(_thread, "plain", False):
            return original(self, func, outputStructType, stateStructType, outputMode, timeoutConf)
        return state.apply_in_pandas_with_state(
            frame, list(columns), func, outputStructType, stateStructType, outputMode, timeoutConf
        )

    cls.applyInPandasWithState = apply_in_pandas_with_state  # type: ignore[attr-defined]
