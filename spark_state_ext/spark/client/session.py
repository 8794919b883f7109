"""`enable` and `disable`: untouched ``df.groupBy(…).applyInPandasWithState(…)`` on Arrow state.

Spark's DataFrame and GroupedData classes, classic or Connect, get two wrapped methods each. The wrappers do nothing for
sessions that were not enabled. `groupBy` notes its arguments on the result, because GroupedData does not tell its
columns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_state_ext.engine.limits import check_flags
from spark_state_ext.errors import UsageError
from spark_state_ext.spark.client.plain import is_plain
from spark_state_ext.spark.client.state import ArrowState
from spark_state_ext.spark.client.tuning import Change, untune
from spark_state_ext.spark.client.tuning import tune as _tune

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["disable", "enable"]

_NOTE = "_spark_state_ext_grouping"


# Where a session has its `Client`.
_CLIENT = "_spark_state_ext_client"
# Set on the methods that are wrapped.
_WRAPS = "_spark_state_ext_wraps"
_lock = threading.Lock()


@dataclass(frozen=True)
class Client:
    """What a session that was enabled owns.

    Parameters
    ----------
    state
        Where and how its queries keep state.
    tuned
        What `enable` set, and what it was.
    """

    state: ArrowState
    tuned: Mapping[str, Change]

    @staticmethod
    def of(session: Any) -> Client | None:
        """That of a session; None where it was not enabled."""
        found: Client | None = vars(session).get(_CLIENT)
        return found


def enable(spark: SparkSession, state: ArrowState, *, tune: bool = False) -> dict[str, Change]:
    """Run every later `applyInPandasWithState` of a session on `state`.

    Parameters
    ----------
    spark
        A classic or Connect session. Queries planned before are not affected.
    state
        Where and how state is kept. A session has one at a time; another call replaces it.
    tune
        Also set what makes every query of the session faster and changes neither results nor checkpoints: so far
        ``spark.sql.execution.arrow.maxBytesPerBatch``, to no limit. A value that somebody has chosen stays.
        `disable` takes it back; queries that run keep what they began with.

    Returns
    -------
    dict of str to Change
        By name what `tune` set in this call, with the value ``before`` and ``after``; it is logged as well, at INFO.

    Raises
    ------
    UsageError
        When `spark` is no session, `state` no `ArrowState`, or `tune` no bool.
    """
    # By what is used of it: Connect's sessions are of another class.
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
        known = Client.of(spark)
        # What an earlier call set stays set, and is for `disable` to take back.
        setattr(spark, _CLIENT, Client(state, {**(known.tuned if known else {}), **changed}))
    return changed


def disable(spark: SparkSession) -> None:
    """Undo `enable`, and what it tuned: later queries of the session run on Spark's own state.

    Parameters
    ----------
    spark
        The session. Queries planned before are not affected; one that was not enabled stays as it is.
    """
    with _lock:
        enabled = Client.of(spark)
        if enabled is not None:
            delattr(spark, _CLIENT)
            untune(spark, enabled.tuned)


def _patch_frame(cls: type) -> None:
    for name in ("groupBy", "groupby"):
        if not hasattr(getattr(cls, name), _WRAPS):
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

    setattr(group_by, _WRAPS, original)
    return group_by


def _session_of(grouped: Any) -> Any:
    """The session of a GroupedData; None where it does not tell. Classic ones have it as `session`. Those of Connect
    have no public way to it, and `_df` in every release so far; without that they are as they were before `enable`."""
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
        session = _session_of(self) if noted is None else noted[0].sparkSession
        enabled = None if session is None else Client.of(session)
        if enabled is None or is_plain():
            return original(self, func, outputStructType, stateStructType, outputMode, timeoutConf)
        if noted is None:
            raise UsageError(
                "the session runs applyInPandasWithState on Arrow state, and the columns of this GroupedData are not "
                "known: it was made before enable(spark, state), or by something else than groupBy. Call "
                "df.groupBy(…) after enable."
            )
        frame, columns = noted
        return enabled.state.apply_in_pandas_with_state(
            frame, list(columns), func, outputStructType, stateStructType, outputMode, timeoutConf
        )

    setattr(apply_in_pandas_with_state, _WRAPS, original)
    cls.applyInPandasWithState = apply_in_pandas_with_state  # type: ignore[attr-defined]
