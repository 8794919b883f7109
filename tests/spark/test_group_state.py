"""Every method and every misuse of `GroupState`, on Spark's operator and on ours with the same assertions."""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from jobs import CLASSIC, SPARK, TIMED, Job, event_rows
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

pytestmark = pytest.mark.spark

# 3.5 raises plain RuntimeErrors without an error class for what is not enabled.
NOT_ENABLED = "PySparkRuntimeError CANNOT_WITHOUT" if SPARK >= (4, 0) else "RuntimeError None"
NOT_INT = "PySparkTypeError NOT_EXPECTED_TYPE" if SPARK >= (4, 2) else "PySparkTypeError NOT_INT"


def outcome(call: Callable[[], Any]) -> str:
    """What a call returns, or class, Spark's error class and text of what it raises."""
    try:
        value = call()
    except Exception as error:
        # Spark's error class; 4.0 renamed the getter.
        getters = [getattr(error, name) for name in ("getCondition", "getErrorClass") if hasattr(error, name)]
        return f"{type(error).__name__} {getters[0]() if getters else None}: {error}"
    return repr(value)


def everything(state: GroupState) -> dict[str, str]:
    """Outcome of every way to read a state, but for the clock."""
    return {
        "exists": outcome(lambda: state.exists),
        "get": outcome(lambda: state.get),
        "getOption": outcome(lambda: state.getOption),
        "hasTimedOut": outcome(lambda: state.hasTimedOut),
        "oldTimeoutTimestamp": outcome(lambda: state.oldTimeoutTimestamp),
        "str": outcome(lambda: str(state)),
    }


def misuse(state: GroupState) -> dict[str, str]:
    """Outcome of every setter that cannot work under some timeout kind."""
    return {
        "update none": outcome(lambda: state.update(None)),  # type: ignore[arg-type]  # the misuse that is tested
        "duration text": outcome(lambda: state.setTimeoutDuration("1 minute")),  # type: ignore[arg-type]
        "duration zero": outcome(lambda: state.setTimeoutDuration(0)),
        "duration": outcome(lambda: state.setTimeoutDuration(1_000_000)),
        "timestamp zero": outcome(lambda: state.setTimeoutTimestamp(0)),
        "timestamp past": outcome(lambda: state.setTimeoutTimestamp(4_000)),
        "timestamp": outcome(lambda: state.setTimeoutTimestamp(10**15)),
        "watermark": outcome(lambda: state.getCurrentWatermarkMs()),
    }


def job_of(session: Any, operator: str, folder: Path, timeout: str, watermark: bool) -> Job:
    def tell(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        found = {"isinstance": repr(isinstance(state, GroupState))}
        found |= {f"fresh {name}": text for name, text in everything(state).items()}
        found |= misuse(state)
        now_ms = state.getCurrentProcessingTimeMs()
        found["clock"] = repr((type(now_ms).__name__, abs(now_ms / 1000 - time.time()) < 600))
        shown = json.loads(state.json())
        found["json"] = repr((sorted(shown), shown["timeoutConf"], shown["timeoutTimestamp"] - now_ms))
        state.update((1,))
        state.update((2,))
        found |= {f"updated {name}": text for name, text in everything(state).items()}
        state.remove()
        found |= {f"removed {name}": text for name, text in everything(state).items()}
        state.update((3,))
        found |= {f"again {name}": text for name, text in everything(state).items()}
        yield pd.DataFrame({"what": list(found), "text": list(found.values())})

    conf = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    job = Job(session, operator, folder, tell, "what string, text string", timeout=timeout, schema=TIMED, conf=conf)
    job.watermark = ("at", "0 seconds") if watermark else None
    return job


def reading(exists: bool, value: tuple[Any, ...] | None) -> dict[str, str]:
    missing = "PySparkValueError STATE_NOT_EXISTS: [STATE_NOT_EXISTS] State is either not defined or has already been removed."
    return {
        "exists": repr(exists),
        "get": repr(value) if exists else missing,
        "getOption": repr(value),
        "hasTimedOut": "False",
        "oldTimeoutTimestamp": "-1",
        "str": f"'GroupState({value})'" if exists else "'GroupState(<undefined>)'",
    }


@CLASSIC
@pytest.mark.parametrize(
    ("timeout", "watermark"),
    [
        (GroupStateTimeout.NoTimeout, False),
        (GroupStateTimeout.NoTimeout, True),
        (GroupStateTimeout.ProcessingTimeTimeout, False),
        (GroupStateTimeout.EventTimeTimeout, True),
    ],
)
def test_every_method_and_every_misuse(
    session: Any, operator: str, timeout: str, watermark: bool, tmp_path: Path
) -> None:
    batches = job_of(session, operator, tmp_path, timeout, watermark).run(
        event_rows(("a", 5, 1)), event_rows(("a", 50, 2))
    )
    for batch, before in enumerate([None, (3,)]):
        found: dict[str, str] = dict(batches[batch])
        expected = {"isinstance": "True", "clock": "('int', True)"}
        expected |= {f"fresh {name}": text for name, text in reading(before is not None, before).items()}
        for when, value in (("updated", (2,)), ("removed", None), ("again", (3,))):
            expected |= {f"{when} {name}": text for name, text in reading(value is not None, value).items()}
        assert {name: found[name] for name in expected} == expected

        def starts(what: str, text: str, found: dict[str, str] = found) -> None:
            assert found[what].startswith(text), found[what]

        starts("update none", "PySparkTypeError CANNOT_BE_NONE: ")
        starts("duration text", f"{NOT_INT}: ")
        if timeout == GroupStateTimeout.ProcessingTimeTimeout:
            starts("duration zero", "PySparkValueError VALUE_NOT_POSITIVE: ")
            starts("duration", "None")
        else:
            starts("duration zero", f"{NOT_ENABLED}: ")
            starts("duration", f"{NOT_ENABLED}: ")
            assert "timeout" in found["duration"]
        if timeout == GroupStateTimeout.EventTimeTimeout:
            starts("timestamp zero", "PySparkValueError VALUE_NOT_POSITIVE: ")
            starts("timestamp past", "PySparkValueError INVALID_TIMEOUT_TIMESTAMP: " if batch else "None")
            starts("timestamp", "None")
        else:
            for what in ("timestamp zero", "timestamp past", "timestamp"):
                starts(what, f"{NOT_ENABLED}: ")
        if watermark:
            starts("watermark", "5000" if batch else "0")
        else:
            starts("watermark", f"{NOT_ENABLED}: ")
            assert "watermark" in found["watermark"]
        names, conf, until_ms = ast.literal_eval(found["json"])
        assert conf == timeout
        assert {"optionalValue", "batchProcessingTimeMs", "eventTimeWatermarkMs", "timeoutTimestamp"} <= set(names)
        if timeout == GroupStateTimeout.ProcessingTimeTimeout:
            assert until_ms == 1_000_000


@CLASSIC
def test_what_update_makes_of_values(session: Any, operator: str, tmp_path: Path) -> None:
    """Values as `get` shows them in the same call, and in the next batch after a restart."""
    zone = dt.timezone(dt.timedelta(hours=2))

    def keep(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        def show() -> str:
            return " | ".join(f"{type(v).__name__} {v}" for v in state.getOption or ())

        texts = [show()]
        values = {
            "numpy": (np.int32(7), np.float64(0.5), np.datetime64("2020-01-02T03:04:05.000006"), None, None, None),
            "pandas": (
                1,
                2.0,
                pd.Timestamp("2020-01-02 03:04:05.000006"),
                pd.Timestamp("2020-01-02").date(),
                None,
                None,
            ),
            "python": (
                2**62,
                float("inf"),
                dt.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=zone).astimezone(),
                dt.date(1, 1, 1),
                decimal.Decimal("1.50"),
                b"\x00\xff",
            ),
            "bytearray": (None, None, None, None, decimal.Decimal(3), bytearray(b"abc")),
        }
        state.update(values[key[0]])
        texts.append(show())
        yield pd.DataFrame({"text": [f"{key[0]}: {text}" for text in texts]})

    state = "a bigint, b double, c timestamp, d date, e decimal(10, 2), f binary"
    job = Job(session, operator, tmp_path, keep, state=state, schema=TIMED)
    keys = ["bytearray", "numpy", "pandas", "python"]
    batch = event_rows(*[(key, 1, 1) for key in keys])
    first, second = job.run(batch)[0], job.run(batch)[1]
    nothing = "NoneType None"
    local = dt.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=zone).astimezone()
    given = [
        f"bytearray: {' | '.join([nothing] * 4)} | Decimal 3 | bytearray bytearray(b'abc')",
        f"numpy: int 7 | float 0.5 | datetime 2020-01-02 03:04:05.000006 | {' | '.join([nothing] * 3)}",
        f"pandas: int 1 | float 2.0 | datetime 2020-01-02 03:04:05.000006 | date 2020-01-02 | {nothing} | {nothing}",
        f"python: int {2**62} | float inf | datetime {local} | date 0001-01-01 | Decimal 1.50 | bytes b'\\x00\\xff'",
    ]
    assert [text for (text,) in first] == sorted(
        [*given, *[f"{key}: " for key in keys]], key=lambda text: repr((text,))
    )
    kept = [
        f"bytearray: {' | '.join([nothing] * 4)} | Decimal 3.00 | bytes b'abc'",
        *given[1:3],
        given[3].replace(str(local), str(local.replace(tzinfo=None))),
    ]
    if SPARK < (4, 1):
        kept = [re.sub(r"bytes (b'.*')", r"bytearray bytearray(\1)", text) for text in kept]
    assert [text for (text,) in second] == sorted([*given, *kept], key=lambda text: repr((text,)))
