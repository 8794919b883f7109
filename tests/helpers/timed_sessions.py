"""Sessions by event time, as a function for `applyInPandasWithState` in a module that Spark's workers can import."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming.state import GroupState

__all__ = ["START", "at", "sessions"]

START = dt.datetime(2024, 5, 6, tzinfo=dt.timezone.utc)


def sessions(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Count a key's rows until ten seconds of event time have passed without one."""
    if state.hasTimedOut:
        yield pd.DataFrame({"user": [key[0]], "n": [state.get[0]]})
        state.remove()
        return
    latest, n = max((pdf["at"].max(), len(pdf)) for pdf in pdfs)
    state.update((n + (state.get[0] if state.exists else 0),))
    timeout_ms = int(latest.timestamp() * 1000) + 10_000
    state.setTimeoutTimestamp(max(timeout_ms, state.getCurrentWatermarkMs() + 1))


def at(user: str, second: int) -> dict[str, Any]:
    """Return a row that many seconds after the start."""
    return {"user": user, "at": START + dt.timedelta(seconds=second)}
