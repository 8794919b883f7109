"""How fast a host restores, and how long it will take to catch up: the computation, and figures of a follower at work."""

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


def replica(bucket: int, versions: int = 0, size_bytes: int = 0, in_sync: bool = False) -> StandbyReplica:
    return StandbyReplica(
        BucketKey("o", "q", bucket), 7, 9, in_sync, active="a", lag_versions=versions, lag_bytes=size_bytes
    )


@settings(max_examples=examples(100), deadline=None)
@given(_READINGS)
def test_the_rate_is_bytes_over_the_time_in_which_anything_was_read(readings: list[Reading]) -> None:
    # Tenths of a second in which at least one reading was under way, one by one.
    busy = {at for it in readings for at in range(round(it.begun_s * 10), round(it.ended_s * 10))}
    found = restore_rate(readings)
    assert found == restore_rate(readings[::-1])
    if not busy:
        assert found == RestoreRate()
        return
    assert found.bytes_per_s == pytest.approx(10 * sum(it.size_bytes for it in readings) / len(busy))
    assert found.rows_per_s == pytest.approx(10 * sum(it.rows for it in readings) / len(busy))


def test_what_is_under_way_counts_for_bytes_and_idle_time_for_nothing() -> None:
    ended = [Reading(0.0, 1.0, 100, 10), Reading(1_000.0, 1_001.0, 300, 30)]
    assert restore_rate(ended) == RestoreRate(200.0, 20.0)
    assert restore_rate(ended, [Reading(1_001.0, 1_003.0, 1_600, 0)]) == RestoreRate(500.0, 20.0)
    assert restore_rate([], [Reading(0.0, 2.0, 500, 0)]) == RestoreRate(250.0, None)
    # A step that waits for its first byte says nothing of the rate.
    assert restore_rate([], [Reading(0.0, 2.0, 0, 0)]) == RestoreRate()
    assert restore_rate([]) == RestoreRate()


def test_the_rate_moves() -> None:
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
    # However long it took, the last one counts.
    readings.add(Reading(1_000.0, 2_000.0, 5_000, 0))
    assert readings.rate() == RestoreRate(5.0, 0.0)


def test_very_many_short_readings_are_bounded() -> None:
    readings = Readings()
    for at in range(5_000):
        readings.add(Reading(float(at), at + 0.001, 10 if at < 4_000 else 20, 0))
    assert readings.rate().bytes_per_s == pytest.approx(20_000)


def test_estimates() -> None:
    behind, far, there, unseen = replica(0, 1, 100), replica(1, 9, 300), replica(2, in_sync=True), replica(3)
    assert [estimate_recovery_s(it, 50.0) for it in (behind, far, there, unseen)] == [2.0, 6.0, 0.0, None]
    assert [estimate_recovery_s(it, None) for it in (behind, there)] == [None, 0.0]
    assert estimate_recovery_s(behind, 0.0) is None
    # One host's replicas share its rate; hosts restore side by side.
    assert estimate_host_recovery_s([behind, far, there], 50.0) == 8.0
    assert estimate_host_recovery_s([behind, unseen], 50.0) is None
    assert estimate_host_recovery_s([there], None) == 0.0
    fast, slow = MemberRecord("f", restore_bytes_per_s=100.0), MemberRecord("s", restore_bytes_per_s=10.0)
    assert recover_all_s([(fast, [far]), (slow, [behind])]) == 10.0
    assert recover_all_s([(fast, [far]), (MemberRecord("n"), [behind])]) is None
    assert recover_all_s([]) == 0.0


def status(rate: float | None) -> StandbyStatus:
    keys = [BucketKey("o", "q", bucket) for bucket in range(3)]
    # What the active host follows of its own bucket is no replica, and nothing that has to recover.
    mine = StandbyReplica(keys[0], active="b", version=3)
    held = (replica(1, 2, 500), replica(2, in_sync=True))
    records = [
        MemberRecord("b", replicas=(mine, *held), restore_bytes_per_s=rate, restore_rows_per_s=3.0),
        MemberRecord("a", active=dict.fromkeys(keys[1:], 9)),
    ]
    return StandbyStatus.of(StandbySettings(), records, ["gone"], keys)


def test_status_tells_it_by_replica_by_host_and_in_all() -> None:
    known = status(200.0)
    hosts = {row["host"]: row for row in build_host_rows(known)}
    assert (hosts["b"]["restore_bytes_per_s"], hosts["b"]["restore_rows_per_s"], hosts["b"]["recover_s"]) == (
        200.0,
        3.0,
        2.5,
    )
    assert (hosts["a"]["recover_s"], hosts["gone"]["recover_s"]) == (0.0, None)
    by_bucket = {row["bucket"]: row["recover_s"] for row in build_replica_rows(known)}
    assert by_bucket == {0: None, 1: 2.5, 2: 0.0}
    # Nobody has begun with the replica of bucket 0.
    assert format_recovery(known) == "unknown"
    begun = StandbyReplica(BucketKey("o", "q", 0), version=3, active="b", in_sync=True)
    a, b = known.records["a"], known.records["b"]
    whole = StandbyStatus.of(StandbySettings(), [replace(a, replicas=(begun,)), b], ["gone"], list(known.buckets))
    assert format_recovery(whole) == "2.5"


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
    found = StandbyStatus.of(StandbySettings(), records, [], keys)
    for table in (build_host_table(found), build_replica_table(found)):
        write_table(table, Output.TABLE)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        assert max(map(len, lines)) <= 80
    assert build_replica_table(found).column("folder").to_pylist() == ["5ee1e7", "6ff1e7"]


def test_where_no_rate_was_measured_it_is_unknown() -> None:
    found = status(None)
    words = {row["host"]: row["recover_s"] for row in build_host_table(found).to_pylist()}
    assert words == {"a": "0.0", "b": "unknown", "gone": None}
    replicas = {row["bucket"]: row["recover_s"] for row in build_replica_table(found).to_pylist()}
    assert replicas == {0: None, 1: "unknown", 2: "0.0"}
    assert format_recovery(found) == "unknown"
    # In other forms it has none, and stays a number where it is known.
    assert json.dumps([row["recover_s"] for row in build_host_rows(found)]) == "[0.0, null, null]"


def test_a_follower_measures_what_it_reads_and_tells_what_is_left(tmp_path: Path) -> None:
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
        if len(followed) == len(follower.list_held()) and all(it.is_caught_up for it in followed.values()):
            break
        time.sleep(0.005)
    took_s = time.monotonic() - begun_s
    # It was seen that a bucket lacked something while it was read, and nothing is lacking at the end.
    assert any(len(sizes) > 1 for sizes in left.values())
    assert set(follower.collect_lags()) == set(follower.list_held())
    assert all(lag.size_bytes == 0 for lag in follower.collect_lags().values())
    rate = follower.restore_rate()
    assert rate.bytes_per_s is not None
    assert rate.rows_per_s is not None
    # Each of the rows was read once in each batch; a bucket's first second is free of the limit.
    assert rate.rows_per_s / rate.bytes_per_s == pytest.approx(4 * len(KEYS) / follower.work.read_bytes)
    assert follower.work.read_bytes / took_s <= rate.bytes_per_s <= limit + limit / follower.work.step_s
    again = follower.restore_rate()
    time.sleep(0.1)
    follower.tick()
    assert follower.drain(WAIT_S)
    # Idle time changes nothing.
    assert follower.restore_rate() == again
    follower.close()
