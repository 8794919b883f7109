"""The `GroupState` of a user's function: Spark's own class, which also records the outcome of the call."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.types import StringType, StructType, TimestampType

from spark_state_ext.errors import StateValueError
from spark_state_ext.spark.callers.results import shorten

__all__ = ["NO_TIMEOUT", "Clock", "KeyState", "get_watermark"]

# Spark's own value for "no timeout".
NO_TIMEOUT = -1
_LONG_MAX = 2**63 - 1
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
# Spark would unpack them into a tuple: a dict into its keys, text into letters.
_NOT_TUPLES = (Mapping, str, bytes, bytearray, Set)
_NUMPY_TIMES = (np.datetime64, np.timedelta64)
_CONVERTED = _PLAIN | {np.float64, np.int64, np.float32, np.int32, np.bool_}


@dataclass(frozen=True)
class Clock:
    """Values that are the same for the states of all keys that are called together.

    Parameters
    ----------
    processing_time_ms, watermark_ms
        Milliseconds since 1970.
    timeout_conf
        Spark's name of the timeout kind.
    timed_out
        True if the keys are called because they timed out.
    watermark_present
        True if the query has a watermark.
    schema
        Spark's type of the state.
    """

    processing_time_ms: int
    watermark_ms: int
    timeout_conf: str
    timed_out: bool
    watermark_present: bool
    schema: StructType


class KeyState(GroupState):
    """State of one key during one call.

    Every method and every error is Spark's. Methods that change something also set `value`, `touched` and
    `timeout_ms`.
    """

    # Spark's own constructor takes longer than many functions, so it runs only when needed (`__getattr__`).
    def __init__(self, value: tuple[Any, ...] | None, clock: Clock) -> None:
        self.value = self.before = value
        self.clock = clock
        self.touched = False
        self.timeout_ms = NO_TIMEOUT

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for missing attributes, which Spark's constructor sets.
        if self._is_initialised() or not name.startswith("_") or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._initialise()
        return getattr(self, name)

    def _is_initialised(self) -> bool:
        return "spark_made" in self.__dict__

    def _initialise(self) -> None:
        if self._is_initialised():
            return
        self.spark_made = True
        clock, before = self.clock, self.before
        super().__init__(
            optionalValue=before,  # type: ignore[arg-type]  # a tuple serves as the Row it is declared as
            batchProcessingTimeMs=clock.processing_time_ms,
            eventTimeWatermarkMs=clock.watermark_ms,
            timeoutConf=clock.timeout_conf,
            hasTimedOut=clock.timed_out,
            watermarkPresent=clock.watermark_present,
            defined=before is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=NO_TIMEOUT,
            keyAsUnsafe=b"",
            valueSchema=clock.schema,
        )

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
        # The same conversion of these types as Spark's, in a tenth of its time.
        value: tuple[Any, ...] | None
        if type(newValue) is tuple and _PLAIN.issuperset(map(type, newValue)):
            value = newValue
        elif type(newValue) is tuple and _CONVERTED.issuperset(map(type, newValue)):
            value = tuple([v.tolist() if isinstance(v, np.generic) else v for v in newValue])
        else:
            self._initialise()
            if newValue is not None and (isinstance(newValue, _NOT_TUPLES) or not hasattr(newValue, "__iter__")):
                raise self._make_width_error(newValue)
            if newValue is not None:
                newValue = tuple(newValue)
                self._refuse_times_as_text(newValue)
            super().update(newValue)
            before = self.value
            self.value = ()  # so that `exists` is True and the base class returns the converted value
            value = super().getOption
            self.value = before
        if value is None or len(value) != len(self.clock.schema.names):
            raise self._make_width_error(value)
        self.value = value
        self.touched = True

    def _refuse_times_as_text(self, values: tuple[Any, ...]) -> None:
        # Spark converts NumPy's times to whole numbers, and a string column accepts numbers.
        for value, field in zip(values, self.clock.schema.fields, strict=False):
            if isinstance(value, _NUMPY_TIMES) and isinstance(field.dataType, StringType) and not np.isnat(value):
                raise StateValueError(
                    f"update() was given {value!r} for the state column {field.name!r}, which is a string: convert "
                    "it to text in the function"
                )

    def _make_width_error(self, value: Any) -> StateValueError:
        return StateValueError(
            f"update() was given {shorten(value)} and the state has the columns {', '.join(self.clock.schema.names)}: "
            "give a tuple with one value for each"
        )

    def remove(self) -> None:
        self._initialise()
        super().remove()
        self.value = None
        self.touched = True

    def json(self) -> str:
        self._initialise()
        if self.touched and self.value is not None:
            super().update(self.value)
        return super().json()

    def setTimeoutDuration(self, durationMs: int) -> None:
        super().setTimeoutDuration(durationMs)
        self.timeout_ms = _check_long(
            int(durationMs) + self.getCurrentProcessingTimeMs(), "setTimeoutDuration", durationMs
        )

    def setTimeoutTimestamp(self, timestampMs: int | datetime.datetime) -> None:
        super().setTimeoutTimestamp(timestampMs)  # type: ignore[arg-type]  # Spark takes a datetime and says int
        if isinstance(timestampMs, datetime.datetime):
            # Whole milliseconds, as the JVM's long holds them.
            timestampMs = TimestampType().toInternal(timestampMs) // 1000
        self.timeout_ms = _check_long(int(timestampMs), "setTimeoutTimestamp", timestampMs)


def _check_long(time_ms: int, call: str, argument: object) -> int:
    """Return a timeout if 64 bits hold it. Spark would let it wrap around to the past and fire in the next batch."""
    if time_ms > _LONG_MAX:
        raise StateValueError(
            f"{call}() was given {argument!r}, and that timeout would be {time_ms} ms after 1970, more than a long "
            f"holds ({_LONG_MAX}): give an earlier timeout, or none for state that must stay"
        )
    return time_ms


def get_watermark(state: GroupState) -> tuple[int, bool]:
    """Return the batch's watermark in milliseconds since 1970, and whether the query has one."""
    try:
        return state.getCurrentWatermarkMs(), True
    except RuntimeError:  # the query has no watermark; PySparkRuntimeError from 4.0 on
        return GroupState.NO_TIMESTAMP, False
