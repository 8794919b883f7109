"""`enable` and `disable`: run unchanged code with ``df.groupBy(…).applyInPandasWithState(…)`` on Arrow state.

Two methods of Spark's DataFrame and GroupedData classes, classic or Connect, are wrapped. For sessions that were not
enabled the wrappers call the original methods. The wrapper of `groupBy` stores the grouping columns on its result,
because GroupedData has no public way to read them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_state_ext.engine.limits import check_flags
from spark_state_ext.errors import UsageError
from spark_state_ext.spark.client.plain import uses_spark_state
from spark_state_ext.spark.client.state import ArrowState
from spark_state_ext.spark.client.tuning import Change, untune
from spark_state_ext.spark.client.tuning import tune as _tune

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["disable", "enable"]

_NOTE = "_spark_state_ext_grouping"


# Attribute of a session that holds its `Client`.
_CLIENT = "_spark_state_ext_client"
# Attribute of a wrapped method that holds the original method.
_WRAPS = "_spark_state_ext_wraps"
_lock = threading.Lock()


@dataclass(frozen=True)
class Client:
    """Data that `enable` attaches to a session.

    Parameters
    ----------
    state
        Where and how the session's queries keep state.
    tuned
        Settings that `enable` changed, with their values before and after.
    """

    state: ArrowState
    tuned: Mapping[str, Change]

    @staticmethod
    def of(session: Any) -> Client | None:
        """Return the client of a session; None if the session was not enabled."""
        client: Client | None = vars(session).get(_CLIENT)
        return client


def enable(spark: SparkSession, state: ArrowState, *, tune: bool = False) -> dict[str, Change]:
    """Run every later `applyInPandasWithState` of a session on `state`.

    Parameters
    ----------
    spark
        A classic or Connect session. Queries planned before this call are not affected.
    state
        Where and how state is kept. A session has one at a time; another call of `enable` replaces it.
    tune
        Also change settings that make every query of the session faster and affect neither results nor checkpoints: so
        far ``spark.sql.execution.arrow.maxBytesPerBatch``, to no limit. A value that was set explicitly stays.
        `disable` undoes it; running queries keep the settings with which they began.

    Returns
    -------
    dict of str to Change
        The settings that `tune` changed in this call, by name, with the values ``before`` and ``after``; also logged at
        INFO.

    Raises
    ------
    UsageError
        When `spark` is not a session, `state` is not an `ArrowState`, or `tune` is not a bool.
    """
    # Checked by the attributes that are used, as Connect's sessions are of another class.
    if isinstance(spark, type) or not (callable(getattr(spark, "range", None)) and hasattr(spark, "conf")):
        raise UsageError(f"enable(spark, state) takes a Spark session and then an ArrowState; the session is {spark!r}")
    if not isinstance(state, ArrowState):
        raise UsageError(f"enable(spark, state) takes a Spark session and then an ArrowState, not {state!r}")
    check_flags(tune=tune)
    with _lock:
        frame = spark.range(0)
        _patch_frame(type(frame))
        _patch_grouped(type(frame.groupBy()))
        changed = _tune(spark) if tune else {}
        earlier = Client.of(spark)
        # Keep the changes of an earlier call, so that `disable` undoes them too.
        setattr(spark, _CLIENT, Client(state, {**(earlier.tuned if earlier else {}), **changed}))
    return changed


def disable(spark: SparkSession) -> None:
    """Undo `enable` and its tuning: later queries of the session run on Spark's own state.

    Parameters
    ----------
    spark
        The session. Queries planned before are not affected; for a session that was not enabled this does nothing.
    """
    with _lock:
        client = Client.of(spark)
        if client is not None:
            delattr(spark, _CLIENT)
            untune(spark, client.tuned)


def _patch_frame(cls: type) -> None:
    for name in ("groupBy", "groupby"):
        if not hasattr(getattr(cls, name), _WRAPS):
            setattr(cls, name, _wrap_group_by(getattr(cls, name)))


def _wrap_group_by(original: Any) -> Any:
    @functools.wraps(original)
    def group_by(self: Any, *cols: Any, **options: Any) -> Any:
        grouped = original(self, *cols, **options)
        flat = tuple(cols[0]) if len(cols) == 1 and isinstance(cols[0], (list, tuple)) else cols
        # Since PySpark 4.0 a column may be given by its position, counted from 1.
        flat = tuple(
            f"`{self.columns[column - 1].replace('`', '``')}`" if type(column) is int else column for column in flat
        )
        setattr(grouped, _NOTE, (self, flat))
        return grouped

    setattr(group_by, _WRAPS, original)
    return group_by


def _find_session(grouped: Any) -> Any:
    """Return the session of a GroupedData; None if it cannot be found. A classic one has it as `session`. A Connect one
    has no public way to it, but has `_df` in every release so far; without that it behaves as before `enable`."""
    session = getattr(grouped, "session", None)
    return session if session is not None else getattr(getattr(grouped, "_df", None), "sparkSession", None)


def _patch_grouped(cls: type) -> None:
    original = cls.applyInPandasWithState  # type: ignore[attr-defined]  # the class is known only at run time
    if hasattr(original, _WRAPS):
        return

    @functools.wraps(original)
    def apply_in_pandas_with_state(
        self: Any, func: Any, outputStructType: Any, stateStructType: Any, outputMode: str, timeoutConf: str
    ) -> Any:
        noted: tuple[Any, tuple[Any, ...]] | None = getattr(self, _NOTE, None)
        session = _find_session(self) if noted is None else noted[0].sparkSession
        client = None if session is None else Client.of(session)
        if client is None or uses_spark_state():
            return original(self, func, outputStructType, stateStructType, outputMode, timeoutConf)
        if noted is None:
            raise UsageError(
                "the session runs applyInPandasWithState on Arrow state, but the grouping columns of this GroupedData "
                "are unknown: it was made before enable(spark, state), or not by groupBy. Call df.groupBy(…) after "
                "enable."
            )
        frame, columns = noted
        return client.state.apply_in_pandas_with_state(
            frame, list(columns), func, outputStructType, stateStructType, outputMode, timeoutConf
        )

    setattr(apply_in_pandas_with_state, _WRAPS, original)
    cls.applyInPandasWithState = apply_in_pandas_with_state  # type: ignore[attr-defined]
