"""The restore rate of a host and the estimate of its recovery time: the computation, and the values of a real follower."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading_support import Job

from arrow_schemas.standby import BucketKey, MemberRecord, StandbyReplica, StandbySettings
from spark_state_ext.cli.output import Output, write_table
from spark_state_ext.cli.standby import (
    build_host_rows,
    build_host_table,
    build_replica_rows,
    build_replica_table,
    format_recovery,
)
from spark_state_ext.standby.recovery import (
    Reading,
    Readings,
    RestoreRate,
    estimate_host_recovery_s,
    estimate_recovery_s,
    recover_all_s,
    restore_rate,
)
from spark_state_ext.standby.roots import RootFollower
from spark_state_ext.standby.status import StandbyStatus
from spark_state_ext.standby.values import FollowedRoot
from spark_state_ext.testing.model import KEYS, Row
from tests.helpers.soak import examples
from tests.helpers.waiting import WAIT_S

_TENTHS = st.integers(0, 200)
_READINGS = st.lists(
    st.builds(
        lambda begun, took, size, rows: Reading(begun / 10, (begun + took) / 10, size, rows),
        _TENTHS,
        _TENTHS,
        st.integers(1, 10**9),
        st.integers(0, 10**6),
    ),
    max_size=12,
)


def make_replica(bucket: int, versions: int = 0, size_bytes: int = 0, in_sync: bool = False) -> StandbyReplica:
    return StandbyReplica(
        BucketKey("o", "q", bucket), 7, 9, in_sync, active="a", lag_versions=versions, lag_bytes=size_bytes
    )


@settings(max_examples=examples(100))
@given(_READINGS)
def test_the_rate_is_bytes_per_time_in_which_a_reading_was_under_way(readings: list[Reading]) -> None:
    # The tenths of a second in which at least one reading was under way.
    busy = {tenth for reading in readings for tenth in range(round(reading.begun_s * 10), round(reading.ended_s * 10))}
    rate = restore_rate(readings)
    assert rate == restore_rate(readings[::-1])
    if not busy:
        assert rate == RestoreRate()
        return
    assert rate.bytes_per_s == pytest.approx(10 * sum(reading.size_bytes for reading in readings) / len(busy))
    assert rate.rows_per_s == pytest.approx(10 * sum(reading.rows for reading in readings) / len(busy))


def test_unfinished_readings_count_for_bytes_and_idle_time_is_ignored() -> None:
    ended = [Reading(0.0, 1.0, 100, 10), Reading(1_000.0, 1_001.0, 300, 30)]
    assert restore_rate(ended) == RestoreRate(200.0, 20.0)
    assert restore_rate(ended, [Reading(1_001.0, 1_003.0, 1_600, 0)]) == RestoreRate(500.0, 20.0)
    assert restore_rate([], [Reading(0.0, 2.0, 500, 0)]) == RestoreRate(250.0, None)
    # A step that waits for its first byte does not affect the rate.
    assert restore_rate([], [Reading(0.0, 2.0, 0, 0)]) == RestoreRate()
    assert restore_rate([]) == RestoreRate()


def test_the_rate_follows_the_last_readings() -> None:
    readings = Readings()
    for at in range(100):
        readings.add(Reading(2.0 * at, 2.0 * at + 1, 1_000, 1))
    assert readings.rate() == RestoreRate(1_000.0, 1.0)
    for at in range(100, 130):
        readings.add(Reading(2.0 * at, 2.0 * at + 1, 3_000, 3))
    assert readings.rate() == RestoreRate(2_000.0, 2.0)
    for at in range(130, 160):
        readings.add(Reading(2.0 * at, 2.0 * at + 1, 3_000, 3))
    assert readings.rate() == RestoreRate(3_000.0, 3.0)
    # The last reading counts even if it took longer than the window.
    readings.add(Reading(1_000.0, 2_000.0, 5_000, 0))
    assert readings.rate() == RestoreRate(5.0, 0.0)


def test_only_a_bounded_number_of_readings_counts() -> None:
    readings = Readings()
    for at in range(5_000):
        readings.add(Reading(float(at), at + 0.001, 10 if at < 4_000 else 20, 0))
    assert readings.rate().bytes_per_s == pytest.approx(20_000)


def test_recovery_time_is_estimated_from_lag_and_rate() -> None:
    behind, far = make_replica(0, 1, 100), make_replica(1, 9, 300)
    in_sync, unseen = make_replica(2, in_sync=True), make_replica(3)
    assert [estimate_recovery_s(replica, 50.0) for replica in (behind, far, in_sync, unseen)] == [2.0, 6.0, 0.0, None]
    assert [estimate_recovery_s(replica, None) for replica in (behind, in_sync)] == [None, 0.0]
    assert estimate_recovery_s(behind, 0.0) is None
    # The replicas of one host share its rate; hosts restore at the same time.
    assert estimate_host_recovery_s([behind, far, in_sync], 50.0) == 8.0
    assert estimate_host_recovery_s([behind, unseen], 50.0) is None
    assert estimate_host_recovery_s([in_sync], None) == 0.0
    fast, slow = MemberRecord("f", restore_bytes_per_s=100.0), MemberRecord("s", restore_bytes_per_s=10.0)
    assert recover_all_s([(fast, [far]), (slow, [behind])]) == 10.0
    assert recover_all_s([(fast, [far]), (MemberRecord("n"), [behind])]) is None
    assert recover_all_s([]) == 0.0


def make_status(rate: float | None) -> StandbyStatus:
    keys = [BucketKey("o", "q", bucket) for bucket in range(3)]
    # The store of the active host for its own bucket is not a replica, so it does not have to recover.
    own = StandbyReplica(keys[0], active="b", version=3)
    held = (make_replica(1, 2, 500), make_replica(2, in_sync=True))
    records = [
        MemberRecord("b", replicas=(own, *held), restore_bytes_per_s=rate, restore_rows_per_s=3.0),
        MemberRecord("a", active=dict.fromkeys(keys[1:], 9)),
    ]
    return StandbyStatus.of(StandbySettings(), records, ["gone"], keys)


def test_status_shows_the_recovery_time_by_replica_by_host_and_in_total() -> None:
    known = make_status(200.0)
    hosts = {row["host"]: row for row in build_host_rows(known)}
    assert (hosts["b"]["restore_bytes_per_s"], hosts["b"]["restore_rows_per_s"], hosts["b"]["recover_s"]) == (
        200.0,
        3.0,
        2.5,
    )
    assert (hosts["a"]["recover_s"], hosts["gone"]["recover_s"]) == (0.0, None)
    by_bucket = {row["bucket"]: row["recover_s"] for row in build_replica_rows(known)}
    assert by_bucket == {0: None, 1: 2.5, 2: 0.0}
    # Bucket 0 has no replica yet.
    assert format_recovery(known) == "unknown"
    first = StandbyReplica(BucketKey("o", "q", 0), version=3, active="b", in_sync=True)
    a, b = known.records["a"], known.records["b"]
    complete = StandbyStatus.of(StandbySettings(), [replace(a, replicas=(first,)), b], ["gone"], list(known.buckets))
    assert format_recovery(complete) == "2.5"


def test_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [BucketKey("counts", folder, 123) for folder in ("5ee1e7a2-3f0c-4d0b", "6ff1e7a2-3f0c-4d0b")]
    hosts = ["ip-10-0-1-34", "ip-10-0-1-35"]
    lag: dict[str, Any] = {
        "version": 123_456,
        "lag_versions": 7,
        "lag_bytes": 10**9,
        "lag_s": 9_999.123,
        "active": hosts[0],
    }
    records = [
        MemberRecord(hosts[0], active=dict.fromkeys(keys, 123_463)),
        MemberRecord(
            hosts[1],
            rack="eu-west-1a",
            replicas=tuple(StandbyReplica(key, **lag) for key in keys),
            restore_bytes_per_s=5e4,
            failing={keys[0]: "StorageError: the disk fails"},
        ),
    ]
    status = StandbyStatus.of(StandbySettings(), records, [], keys)
    for table in (build_host_table(status), build_replica_table(status)):
        write_table(table, Output.TABLE)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        assert max(map(len, lines)) <= 80
    assert build_replica_table(status).column("folder").to_pylist() == ["5ee1e7", "6ff1e7"]


def test_the_recovery_time_is_unknown_without_a_measured_rate() -> None:
    status = make_status(None)
    words = {row["host"]: row["recover_s"] for row in build_host_table(status).to_pylist()}
    assert words == {"a": "0.0", "b": "unknown", "gone": None}
    replicas = {row["bucket"]: row["recover_s"] for row in build_replica_table(status).to_pylist()}
    assert replicas == {0: None, 1: "unknown", 2: "0.0"}
    assert format_recovery(status) == "unknown"
    # In other forms of output, an unknown time is null, and a known one is a number.
    assert json.dumps([row["recover_s"] for row in build_host_rows(status)]) == "[0.0, null, null]"


def test_a_follower_reports_its_restore_rate_and_its_lag(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    job = Job(tmp_path / "root", tmp_path / "scratch")
    for number in range(4):
        job.batch({key: Row(number) for key in KEYS})
    job.close()
    (tmp_path / "b").mkdir()
    limit = 12_000.0
    root = FollowedRoot(str(tmp_path / "root"), local_dir=str(tmp_path / "b"))
    follower = RootFollower(root, threads_max=1, bandwidth_max_bytes_s=limit)
    assert follower.restore_rate() == RestoreRate()
    follower.hold(follower.find().operators)
    begun_s = time.monotonic()
    left: dict[BucketKey, set[int]] = {}
    while time.monotonic() < begun_s + WAIT_S:
        follower.tick()
        for key, lag in follower.collect_lags().items():
            left.setdefault(key, set()).add(lag.size_bytes)
        followed = follower.collect_results()
        if len(followed) == len(follower.list_held()) and all(result.is_caught_up for result in followed.values()):
            break
        time.sleep(0.005)
    took_s = time.monotonic() - begun_s
    # At least one bucket had a lag while its files were read, and no bucket has one at the end.
    assert any(len(sizes) > 1 for sizes in left.values())
    assert set(follower.collect_lags()) == set(follower.list_held())
    assert all(lag.size_bytes == 0 for lag in follower.collect_lags().values())
    rate = follower.restore_rate()
    assert rate.bytes_per_s is not None
    assert rate.rows_per_s is not None
    # Each row was read once for each batch; the limit does not apply to the first second of a bucket.
    assert rate.rows_per_s / rate.bytes_per_s == pytest.approx(4 * len(KEYS) / follower.work.read_bytes)
    assert follower.work.read_bytes / took_s <= rate.bytes_per_s <= limit + limit / follower.work.step_s
    again = follower.restore_rate()
    time.sleep(0.1)
    follower.tick()
    assert follower.drain(WAIT_S)
    # Idle time does not change the rate.
    assert follower.restore_rate() == again
    follower.close()
