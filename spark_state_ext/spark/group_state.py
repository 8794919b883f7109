"""The `GroupState` a user's function gets: Spark's own class, with the outcome of the call written down."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import StructType, TimestampType

from spark_state_ext.errors import StateValueError

__all__ = ["NO_TIMEOUT", "KeyState", "watermark_of"]

# Spark's own value for "no timeout".
NO_TIMEOUT = -1
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_KNOWN = _PLAIN | {np.float64, np.int64, np.float32, np.int32, np.bool_}


class KeyState(GroupState):
    """State of one key during one call.

    Every method and every error is Spark's; the methods that change something also note it in these attributes:

    Attributes
    ----------
    touched
        `update` or `remove` was called.
    value
        The state as it is now; None when there is none.
    timeout_ms
        The timeout set in this call, milliseconds since 1970, or `NO_TIMEOUT`. Spark begins every call without one,
        so an
        `update` that sets none clears the old.
    """

    def __init__(
        self,
        value: tuple[Any, ...] | None,
        processing_time_ms: int,
        watermark_ms: int,
        timeout_conf: str,
        timed_out: bool,
        watermark_present: bool,
        schema: StructType,
    ) -> None:
        super().__init__(
            optionalValue=value,  # type: ignore[arg-type]  # a tuple serves as the Row it is declared as
            batchProcessingTimeMs=processing_time_ms,
            eventTimeWatermarkMs=watermark_ms,
            timeoutConf=timeout_conf,
            hasTimedOut=timed_out,
            watermarkPresent=watermark_present,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=NO_TIMEOUT,
            keyAsUnsafe=b"",
            valueSchema=schema,
        )
        self.value = value
        self._columns = schema.names
        self.touched = False
        self.timeout_ms = NO_TIMEOUT

    @property
    def exists(self) -> bool:
        return self.value is not None

    @property
    def get(self) -> tuple[Any, ...]:
        return self.value if self.value is not None else super().get

    @property
    def getOption(self) -> tuple[Any, ...] | None:
        return self.value

    def update(self, newValue: tuple[Any, ...]) -> None:
        # Spark's conversion of these types, in a tenth of its time.
        value: tuple[Any, ...] | None
        if type(newValue) is tuple and _PLAIN.issuperset(map(type, newValue)):
            value = newValue
        elif type(newValue) is tuple and _KNOWN.issuperset(map(type, newValue)):
            value = tuple([v.tolist() if isinstance(v, np.generic) else v for v in newValue])
        else:
            super().update(newValue)
            before = self.value
            self.value = ()  # it exists now, says `exists`, and so the base class gives what it converted
            value = super().getOption
            self.value = before
        if value is None or len(value) != len(self._columns):
            raise StateValueError(
                f"update() was given {value!r} and the state has the columns {', '.join(self._columns)}: "
                "give a tuple of one value each"
            )
        self.value = value
        self.touched = True

    def remove(self) -> None:
        super().remove()
        self.value = None
        self.touched = True

    def json(self) -> str:
        if self.touched and self.value is not None:
            super().update(self.value)
        return super().json()

    def setTimeoutDuration(self, durationMs: int) -> None:
        super().setTimeoutDuration(durationMs)
        self.timeout_ms = int(durationMs) + self.getCurrentProcessingTimeMs()

    def setTimeoutTimestamp(self, timestampMs: int | datetime.datetime) -> None:
        super().setTimeoutTimestamp(timestampMs)  # type: ignore[arg-type]  # Spark takes a datetime and says int
        if isinstance(timestampMs, datetime.datetime):
            # Whole milliseconds, as the JVM's long holds them.
            timestampMs = TimestampType().toInternal(timestampMs) // 1000
        self.timeout_ms = int(timestampMs)


def watermark_of(state: GroupState) -> tuple[int, bool]:
    """The batch's watermark in milliseconds since 1970, and whether the query has one."""
    try:
        return state.getCurrentWatermarkMs(), True
    except RuntimeError:  # Spark's way to say that it has none; PySparkRuntimeError from 4.0 on
        return GroupState.NO_TIMESTAMP, False
