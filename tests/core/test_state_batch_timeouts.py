"""`StateBatch.set_timeout`: the forms of times, the order with an update, and the values that are refused."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from batch_driver import Stored
from default_batch import (
    EVENT_TIME,
    MASK,
    PROCESSING_TIME,
    A,
    B,
    C,
    D,
    after,
    batch_of,
    key,
)

from spark_state_ext.errors import StateValueError, UsageError


@pytest.mark.parametrize("conf", [EVENT_TIME, PROCESSING_TIME])
def test_a_timeout_keeps_the_state_and_an_update_without_one_clears_it(conf: str) -> None:
    name, base = ("timestamp_ms", 0) if conf == EVENT_TIME else ("duration_ms", 1_000)
    batch = batch_of(timeout_conf=conf, watermark_ms=3)
    batch.set_timeout(**{name: 20})
    assert after(batch) == {
        A: Stored((10, "ten"), base + 20),
        key(B): Stored(None, base + 20),
        key(C): Stored(None, base + 20),
        D: Stored((40, None), base + 20),
    }
    batch = batch_of(timeout_conf=conf, watermark_ms=3)
    batch.update(batch.state.slice(3, 1), where=[False, False, False, True])
    assert after(batch)[D] == Stored((40, None), None), "an update without a timeout must clear the earlier timeout"
    batch.set_timeout(**{name: [None, 30, None, 40]})
    assert after(batch) == {
        A: Stored((10, "ten")),
        key(B): Stored(None, base + 30),
        D: Stored((40, None), base + 40),
    }


TIMES: dict[str, Any] = {
    "a list": [30, 40],
    "numpy": np.array([30, 40]),
    "numpy of another width": np.array([30, 40], dtype=np.int32),
    "arrow": pa.array([30, 40]),
    "chunks": pa.chunked_array([[30], [40]]),
    "whole floats": pa.array([30.0, 40.0]),
    "decimals": pa.array([decimal.Decimal(30), decimal.Decimal(40)]),
    "for each key": [1, 30, None, 40],
    "a slice": pa.array([1, 30, 40, 1]).slice(1, 2),
    "pandas": pd.Series([30, 40]),
    "timestamps": pa.array([30_000, 40_999], pa.timestamp("us", "UTC")),
    "naive timestamps": pa.array([30, 40], pa.timestamp("ms")),
    "datetimes": [dt.datetime(1970, 1, 1, 0, 0, 0, ms * 1000, dt.timezone.utc) for ms in (30, 40)],
}


@pytest.mark.parametrize("form", TIMES)
def test_timestamps_of_many_forms_are_accepted(form: str) -> None:
    batch = batch_of(timeout_conf=EVENT_TIME)
    batch.set_timeout(timestamp_ms=TIMES[form], where=MASK)
    assert batch.outcome.timeouts_ms.tolist() == [-1, 30, -1, 40]
    assert batch.outcome.touched.tolist() == MASK


DURATIONS: dict[str, Any] = {
    "a number": 50,
    "numpy's number": np.int32(50),
    "arrow's number": pa.scalar(50),
    "a timedelta": dt.timedelta(milliseconds=50),
    "arrow's durations": pa.array([50_000] * 4, pa.duration("us")),
}


@pytest.mark.parametrize("form", DURATIONS)
def test_durations_of_many_forms_are_accepted(form: str) -> None:
    batch = batch_of(timeout_conf=PROCESSING_TIME)
    batch.set_timeout(duration_ms=DURATIONS[form])
    assert batch.outcome.timeouts_ms.tolist() == [1_050] * 4


def test_a_single_datetime_applies_to_all_keys() -> None:
    batch = batch_of(timeout_conf=EVENT_TIME)
    batch.set_timeout(timestamp_ms=dt.datetime(1970, 1, 1, 0, 0, 5, tzinfo=dt.timezone.utc))
    assert batch.outcome.timeouts_ms.tolist() == [5_000] * 4


def test_a_null_timeout_clears_the_old_one() -> None:
    batch = batch_of(timeout_conf=EVENT_TIME)
    batch.set_timeout(timestamp_ms=[None] * 4)
    assert after(batch) == {A: Stored((10, "ten")), D: Stored((40, None))}


TIMEOUT_ERRORS: list[tuple[str, str, dict[str, Any], type[Exception], str]] = [
    ("no timeouts in this query", "NoTimeout", {"timestamp_ms": 5}, UsageError, r"set_timeout\(\) under NoTimeout takes nothing: give timeout_conf='EventTimeTimeout' or 'ProcessingTimeTimeout'"),
    ("a duration for event time", EVENT_TIME, {"duration_ms": 5}, UsageError, "under EventTimeTimeout takes timestamp_ms"),
    ("a timestamp for processing time", PROCESSING_TIME, {"timestamp_ms": 5}, UsageError, "under ProcessingTimeTimeout takes duration_ms"),
    ("neither argument", EVENT_TIME, {}, UsageError, "under EventTimeTimeout takes timestamp_ms"),
    ("both arguments", EVENT_TIME, {"timestamp_ms": 500, "duration_ms": 5}, UsageError, "under EventTimeTimeout takes timestamp_ms"),
    ("both arguments in processing time", PROCESSING_TIME, {"timestamp_ms": 500, "duration_ms": 5}, UsageError, "takes duration_ms"),
    ("a negative duration", PROCESSING_TIME, {"duration_ms": -1}, StateValueError, r"given -1 for key \{'name': 'a', 'x': 1.0\}: a duration must be positive"),
    ("a duration of 0", PROCESSING_TIME, {"duration_ms": 0}, StateValueError, "a duration must be positive"),
    ("too few", EVENT_TIME, {"timestamp_ms": [200]}, StateValueError, r"set_timeout\(\) was given 1 times for 4 keys"),
    ("too few of the chosen", EVENT_TIME, {"timestamp_ms": [200], "where": MASK}, StateValueError, r"given 1 times for 2 keys"),
    ("a text", EVENT_TIME, {"timestamp_ms": ["soon"] * 4}, StateValueError, r"set_timeout\(\) .*soon"),
    ("a text of digits", EVENT_TIME, {"timestamp_ms": "1234"}, StateValueError, r"set_timeout\(\) takes timestamps.* given '1234': not str"),
    ("bytes", PROCESSING_TIME, {"duration_ms": b"abcd"}, StateValueError, r"given b'abcd': not bytes"),
    ("texts of digits", EVENT_TIME, {"timestamp_ms": ["1600000000000"] * 4}, StateValueError, "not string"),
    ("a dict", EVENT_TIME, {"timestamp_ms": dict.fromkeys(range(4))}, StateValueError, "not dict"),
    ("a fraction", EVENT_TIME, {"timestamp_ms": 200.5}, StateValueError, r"set_timeout\(\) takes timestamps.* given \[200.5\]: .*truncated"),
    ("a boolean", EVENT_TIME, {"timestamp_ms": True}, StateValueError, r"set_timeout\(\)"),
    ("timestamps for durations", PROCESSING_TIME, {"duration_ms": pa.array([5] * 4, pa.timestamp("ms"))}, StateValueError, r"set_timeout\(\)"),
    ("durations for timestamps", EVENT_TIME, {"timestamp_ms": pa.array([500] * 4, pa.duration("ms"))}, StateValueError, r"set_timeout\(\)"),
    ("the largest number", PROCESSING_TIME, {"duration_ms": 2**63 - 1}, StateValueError, r"set_timeout\(\) was given 9223372036854775807 for key \{'name': 'a', 'x': 1.0\}: that long after 1000, the batch's processing time, is past .* give a shorter duration, or NULL for no timeout"),
    ("a millisecond too long", PROCESSING_TIME, {"duration_ms": 2**63 - 1_000}, StateValueError, "given 9223372036854774808 for key .* give a shorter duration"),
    ("one of several", PROCESSING_TIME, {"duration_ms": [1, None, 2**63 - 1, 1]}, StateValueError, r"given 9223372036854775807 for key \{'name': None, 'x': 0.0\}: that long"),
    ("one of the chosen", PROCESSING_TIME, {"duration_ms": pa.array([1, 2**63 - 1], pa.duration("ms")), "where": MASK}, StateValueError, r"for key \{'name': 'd', 'x': None\}: that long"),
    ("seconds past 64 bits", PROCESSING_TIME, {"duration_ms": pa.array([2**62] * 4, pa.duration("s"))}, StateValueError, r"(?s)set_timeout\(\) takes durations.*out of bounds"),
    ("a timestamp past 64 bits", EVENT_TIME, {"timestamp_ms": pa.array([2**62] * 4, pa.timestamp("s"))}, StateValueError, r"(?s)set_timeout\(\) takes timestamps.*out of bounds"),
    ("more than 64 bits", PROCESSING_TIME, {"duration_ms": 2**63}, StateValueError, r"set_timeout\(\) takes durations"),
    ("many more than 64 bits", EVENT_TIME, {"timestamp_ms": [2**70] * 4}, StateValueError, r"set_timeout\(\) takes timestamps"),
    ("unsigned past 63 bits", PROCESSING_TIME, {"duration_ms": np.array([2**63] * 4, dtype=np.uint64)}, StateValueError, r"set_timeout\(\) takes durations"),
    ("the longest timedelta", PROCESSING_TIME, {"duration_ms": dt.timedelta.max}, StateValueError, r"set_timeout\(\) takes durations"),
    ("a DataFrame", EVENT_TIME, {"timestamp_ms": pd.DataFrame({"t": [500] * 4})}, StateValueError, "not DataFrame"),
    ("an object", EVENT_TIME, {"timestamp_ms": object()}, StateValueError, r"set_timeout\(\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("conf", "arguments", "kind", "text"), [e[1:] for e in TIMEOUT_ERRORS], ids=[e[0] for e in TIMEOUT_ERRORS]
)
def test_set_timeout_refuses_invalid_times(
    conf: str, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    batch = batch_of(timeout_conf=conf, watermark_ms=100 if conf == EVENT_TIME else None)
    with pytest.raises(kind, match=text):
        batch.set_timeout(**arguments)
    assert not batch.outcome.touched.any()


def test_the_largest_possible_times_are_accepted() -> None:
    batch = batch_of(timeout_conf=PROCESSING_TIME)
    batch.set_timeout(duration_ms=[1, 2**63 - 1_001, None, 2])
    assert batch.outcome.timeouts_ms.tolist() == [1_001, 2**63 - 1, -1, 1_002]
    batch = batch_of(timeout_conf=EVENT_TIME, watermark_ms=100)
    batch.set_timeout(timestamp_ms=2**63 - 1)
    assert batch.outcome.timeouts_ms.tolist() == [2**63 - 1] * 4


def test_durations_are_rounded_down_to_milliseconds() -> None:
    batch = batch_of(timeout_conf=PROCESSING_TIME)
    batch.set_timeout(duration_ms=pa.array([1_999, None, 2_000, 1_000_000], pa.duration("us")))
    assert batch.outcome.timeouts_ms.tolist() == [1_001, -1, 1_002, 2_000]


def test_a_time_before_the_watermark_counts_as_the_watermark() -> None:
    """The late time of one key must not fail the whole batch; it times out when the watermark moves."""
    batch = batch_of(timeout_conf=EVENT_TIME, watermark_ms=100)
    batch.set_timeout(timestamp_ms=[200, 99, None, 100])
    assert batch.outcome.timeouts_ms.tolist() == [200, 100, -1, 100]


def test_a_timestamp_of_0_is_refused() -> None:
    """As in Spark, a timestamp must be positive, even while the watermark is still 0."""
    batch = batch_of(timeout_conf=EVENT_TIME, watermark_ms=0)
    with pytest.raises(StateValueError, match=r"given 0 for key .*: a timestamp must be positive"):
        batch.set_timeout(timestamp_ms=0)
    batch.set_timeout(timestamp_ms=1)
    batch = batch_of(timeout_conf=EVENT_TIME, watermark_ms=100)
    batch.set_timeout(timestamp_ms=100)
    assert batch.outcome.timeouts_ms.tolist() == [100] * 4
