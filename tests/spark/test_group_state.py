"""Every method and misuse of `GroupState`, on Spark's operator and on ours with the same assertions."""

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

# 3.5 raises a RuntimeError without an error class if a feature is not enabled.
NOT_ENABLED = "PySparkRuntimeError CANNOT_WITHOUT" if SPARK >= (4, 0) else "RuntimeError None"
NOT_INT = "PySparkTypeError NOT_EXPECTED_TYPE" if SPARK >= (4, 2) else "PySparkTypeError NOT_INT"


def outcome_of(call: Callable[[], Any]) -> str:
    """Return the repr of a call's result, or the class, Spark's error class and the text of its error."""
    try:
        value = call()
    except Exception as error:
        # Spark's error class; 4.0 renamed the getter.
        getters = [getattr(error, name) for name in ("getCondition", "getErrorClass") if hasattr(error, name)]
        return f"{type(error).__name__} {getters[0]() if getters else None}: {error}"
    return repr(value)


def read_all(state: GroupState) -> dict[str, str]:
    """Return the outcome of every way to read a state, except for the clock."""
    return {
        "exists": outcome_of(lambda: state.exists),
        "get": outcome_of(lambda: state.get),
        "getOption": outcome_of(lambda: state.getOption),
        "hasTimedOut": outcome_of(lambda: state.hasTimedOut),
        "oldTimeoutTimestamp": outcome_of(lambda: state.oldTimeoutTimestamp),
        "str": outcome_of(lambda: str(state)),
    }


def misuse_setters(state: GroupState) -> dict[str, str]:
    """Return the outcome of every setter that fails with at least one kind of timeout."""
    return {
        "update none": outcome_of(lambda: state.update(None)),  # type: ignore[arg-type]  # the misuse that is tested
        "duration text": outcome_of(lambda: state.setTimeoutDuration("1 minute")),  # type: ignore[arg-type]
        "duration zero": outcome_of(lambda: state.setTimeoutDuration(0)),
        "duration": outcome_of(lambda: state.setTimeoutDuration(1_000_000)),
        "timestamp zero": outcome_of(lambda: state.setTimeoutTimestamp(0)),
        "timestamp past": outcome_of(lambda: state.setTimeoutTimestamp(4_000)),
        "timestamp": outcome_of(lambda: state.setTimeoutTimestamp(10**15)),
        "watermark": outcome_of(lambda: state.getCurrentWatermarkMs()),
    }


def make_job(session: Any, operator: str, folder: Path, timeout: str, watermark: bool) -> Job:
    def use_state(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        outcomes = {"isinstance": repr(isinstance(state, GroupState))}
        outcomes |= {f"fresh {name}": text for name, text in read_all(state).items()}
        outcomes |= misuse_setters(state)
        now_ms = state.getCurrentProcessingTimeMs()
        outcomes["clock"] = repr((type(now_ms).__name__, abs(now_ms / 1000 - time.time()) < 600))
        fields = json.loads(state.json())
        outcomes["json"] = repr((sorted(fields), fields["timeoutConf"], fields["timeoutTimestamp"] - now_ms))
        state.update((1,))
        state.update((2,))
        outcomes |= {f"updated {name}": text for name, text in read_all(state).items()}
        state.remove()
        outcomes |= {f"removed {name}": text for name, text in read_all(state).items()}
        state.update((3,))
        outcomes |= {f"again {name}": text for name, text in read_all(state).items()}
        yield pd.DataFrame({"what": list(outcomes), "text": list(outcomes.values())})

    conf = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    job = Job(
        session, operator, folder, use_state, "what string, text string", timeout=timeout, schema=TIMED, conf=conf
    )
    job.watermark = ("at", "0 seconds") if watermark else None
    return job


def expected_reading(exists: bool, value: tuple[Any, ...] | None) -> dict[str, str]:
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
def test_every_method_and_every_misuse_has_the_outcome_of_spark(
    session: Any, operator: str, timeout: str, watermark: bool, tmp_path: Path
) -> None:
    batches = make_job(session, operator, tmp_path, timeout, watermark).run(
        event_rows(("a", 5, 1)), event_rows(("a", 50, 2))
    )
    for batch, before in enumerate([None, (3,)]):
        outcomes: dict[str, str] = dict(batches[batch])
        expected = {"isinstance": "True", "clock": "('int', True)"}
        expected |= {f"fresh {name}": text for name, text in expected_reading(before is not None, before).items()}
        for when, value in (("updated", (2,)), ("removed", None), ("again", (3,))):
            expected |= {f"{when} {name}": text for name, text in expected_reading(value is not None, value).items()}
        assert {name: outcomes[name] for name in expected} == expected

        def assert_starts(what: str, text: str, outcomes: dict[str, str] = outcomes) -> None:
            assert outcomes[what].startswith(text), outcomes[what]

        assert_starts("update none", "PySparkTypeError CANNOT_BE_NONE: ")
        assert_starts("duration text", f"{NOT_INT}: ")
        if timeout == GroupStateTimeout.ProcessingTimeTimeout:
            assert_starts("duration zero", "PySparkValueError VALUE_NOT_POSITIVE: ")
            assert_starts("duration", "None")
        else:
            assert_starts("duration zero", f"{NOT_ENABLED}: ")
            assert_starts("duration", f"{NOT_ENABLED}: ")
            assert "timeout" in outcomes["duration"]
        if timeout == GroupStateTimeout.EventTimeTimeout:
            assert_starts("timestamp zero", "PySparkValueError VALUE_NOT_POSITIVE: ")
            assert_starts("timestamp past", "PySparkValueError INVALID_TIMEOUT_TIMESTAMP: " if batch else "None")
            assert_starts("timestamp", "None")
        else:
            for what in ("timestamp zero", "timestamp past", "timestamp"):
                assert_starts(what, f"{NOT_ENABLED}: ")
        if watermark:
            assert_starts("watermark", "5000" if batch else "0")
        else:
            assert_starts("watermark", f"{NOT_ENABLED}: ")
            assert "watermark" in outcomes["watermark"]
        names, conf, until_ms = ast.literal_eval(outcomes["json"])
        assert conf == timeout
        assert {"optionalValue", "batchProcessingTimeMs", "eventTimeWatermarkMs", "timeoutTimestamp"} <= set(names)
        if timeout == GroupStateTimeout.ProcessingTimeTimeout:
            assert until_ms == 1_000_000


@CLASSIC
def test_update_converts_values_as_spark_does(session: Any, operator: str, tmp_path: Path) -> None:
    """`get` returns the values in the same call, and in the next batch after a restart."""
    zone = dt.timezone(dt.timedelta(hours=2))

    def update_and_show(key: Any, pdfs: Iterable[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
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
    job = Job(session, operator, tmp_path, update_and_show, state=state, schema=TIMED)
    keys = ["bytearray", "numpy", "pandas", "python"]
    batch = event_rows(*[(key, 1, 1) for key in keys])
    first, second = job.run(batch)[0], job.run(batch)[1]
    null = "NoneType None"
    local = dt.datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=zone).astimezone()
    texts_of_call = [
        f"bytearray: {' | '.join([null] * 4)} | Decimal 3 | bytearray bytearray(b'abc')",
        f"numpy: int 7 | float 0.5 | datetime 2020-01-02 03:04:05.000006 | {' | '.join([null] * 3)}",
        f"pandas: int 1 | float 2.0 | datetime 2020-01-02 03:04:05.000006 | date 2020-01-02 | {null} | {null}",
        f"python: int {2**62} | float inf | datetime {local} | date 0001-01-01 | Decimal 1.50 | bytes b'\\x00\\xff'",
    ]
    assert [text for (text,) in first] == sorted(
        [*texts_of_call, *[f"{key}: " for key in keys]], key=lambda text: repr((text,))
    )
    texts_of_next_batch = [
        f"bytearray: {' | '.join([null] * 4)} | Decimal 3.00 | bytes b'abc'",
        *texts_of_call[1:3],
        texts_of_call[3].replace(str(local), str(local.replace(tzinfo=None))),
    ]
    if SPARK < (4, 1):
        texts_of_next_batch = [
            re.sub(r"bytes (b'.*')", r"bytearray bytearray(\1)", text) for text in texts_of_next_batch
        ]
    assert [text for (text,) in second] == sorted(
        [*texts_of_call, *texts_of_next_batch], key=lambda text: repr((text,))
    )
