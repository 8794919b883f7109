"""Settings of standby and records of members: round trips, what is refused, and how small they are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrow_schemas.checksum import compute_checksum
from arrow_schemas.errors import CorruptFileError, StateError, UsageError, VersionSkewError
from arrow_schemas.standby import (
    MEMBER_FORMAT,
    STANDBY_SETTINGS_FORMAT,
    BucketKey,
    MemberRecord,
    StandbyReplica,
    StandbySettings,
)
from tests.helpers.soak import examples

_UNHURRIED = settings(max_examples=examples(50), deadline=None)
_NAMES = st.text(min_size=1, max_size=5)
_COUNTS = st.integers(0, 2**62)
_KEYS = st.builds(BucketKey, _NAMES, _NAMES, st.integers(0, 9_999))
_REPLICAS = st.builds(
    StandbyReplica,
    _KEYS,
    _COUNTS,
    _COUNTS,
    st.booleans(),
    st.none() | _NAMES,
    _COUNTS,
    _COUNTS,
    st.floats(0, 1e9) | st.integers(0, 1_000),
)
_RECORDS = st.builds(
    MemberRecord,
    _NAMES,
    st.none() | _NAMES,
    _COUNTS,
    st.lists(_REPLICAS, max_size=12, unique_by=lambda it: it.key).map(tuple),
    st.dictionaries(_NAMES, _NAMES, max_size=2),
    st.dictionaries(_KEYS, _COUNTS, max_size=5),
    st.none() | st.floats(0, 1e12),
    st.none() | st.floats(0, 1e12) | _COUNTS,
    st.dictionaries(_KEYS, _NAMES, max_size=2),
    st.booleans(),
)
_KEY = BucketKey("counts", "q", 3)
_RECORD = MemberRecord(
    "h", "r", 7, (StandbyReplica(_KEY, 41, 900, True, "other", 1, 20, 0.5),), {"flight": "h:1"}, {_KEY: 7}, 5e7, 1e6
)
_SETTINGS = StandbySettings(True, 2, 5)


@_UNHURRIED
@given(_RECORDS)
def test_records_come_back(record: MemberRecord) -> None:
    again = MemberRecord.decode(record.encode(), "it")
    assert again == record
    assert again.encode() == record.encode()
    assert again.decided_by == record.decided_by


@_UNHURRIED
@given(st.booleans(), _COUNTS, st.floats(1e-6, 1e9))
def test_settings_come_back(enabled: bool, replicas: int, heartbeat_s: float) -> None:
    told = StandbySettings(enabled, replicas, heartbeat_s)
    assert StandbySettings.decode(told.encode(), "it") == told
    assert told.replicas == (replicas if enabled else 0)


def test_the_order_of_replicas_does_not_matter() -> None:
    replicas = tuple(StandbyReplica(BucketKey(operator, "q", at)) for operator in "ba" for at in (10, 9, 2))
    one, other = MemberRecord("h", replicas=replicas), MemberRecord("h", replicas=replicas[::-1])
    assert one == other
    assert one.encode() == other.encode()
    assert [it.key.bucket for it in one.replicas] == [2, 9, 10] * 2


def test_what_changes_with_every_batch_does_not_decide() -> None:
    def record(**changed: Any) -> MemberRecord:
        fields = {"version": 3, "in_sync": True, "active": "other", **changed}
        return MemberRecord("h", replicas=(StandbyReplica(_KEY, **fields),))

    same = [record(), record(version=4, bytes=7, lag_versions=1, lag_bytes=2, lag_s=0.5)]
    others = [
        record(in_sync=False),
        record(active=None),
        MemberRecord("h"),
        MemberRecord("h", "rack"),
        MemberRecord("h", active={_KEY: 1}),
    ]
    rates = MemberRecord("h", restore_bytes_per_s=1.0, restore_rows_per_s=2.0)
    assert rates.decided_by == MemberRecord("h").decided_by
    assert len({it.decided_by for it in same}) == 1
    assert len({it.decided_by for it in (*same, *others)}) == 6


def test_records_stay_small() -> None:
    """10,000 buckets of one query and one replica each, on 100 hosts and on 3."""

    def record(buckets: range) -> MemberRecord:
        folder = "0b1c2d3e-0000-4000-8000-000000000000"
        held = (
            StandbyReplica(BucketKey("counts", folder, at), 123_456, 10**8 + at, True, f"host-{at % 100}.example.org")
            for at in buckets
        )
        active = {BucketKey("counts", folder, at + 1): 123_456 for at in buckets}
        return MemberRecord("host-17.example.org", "rack", 10**12, tuple(held), active=active)

    assert len(record(range(0, 10_000, 100)).encode()) < 8_000
    assert len(record(range(0, 10_000, 3)).encode()) < 60 * 3_334


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StandbySettings(cast(Any, 1)), "enabled"),
        (lambda: StandbySettings(standby_replicas=-1), "standby_replicas"),
        (lambda: StandbySettings(standby_replicas=True), "standby_replicas"),
        (lambda: StandbySettings(heartbeat_s=0), "heartbeat_s"),
        (lambda: StandbySettings(heartbeat_s=float("nan")), "heartbeat_s"),
        (lambda: StandbySettings(heartbeat_s=cast(Any, "10")), "heartbeat_s"),
        (lambda: StandbyReplica(BucketKey("", "q", 1)), "an operator"),
        (lambda: StandbyReplica(BucketKey("o", "q", -1)), "an operator"),
        (lambda: StandbyReplica(_KEY, version=-1), "at least 0"),
        (lambda: StandbyReplica(_KEY, lag_s=-0.5), "at least 0"),
        (lambda: StandbyReplica(_KEY, in_sync=cast(Any, 1)), "in_sync must be a bool, not 1"),
        (lambda: StandbyReplica(_KEY, active=""), "active a host or None, not ''"),
        (lambda: MemberRecord(""), "a member must have a host"),
        (lambda: MemberRecord("h", ""), "a member must have a host"),
        (lambda: MemberRecord("h", generation=-1), "a member must have a host"),
        (lambda: MemberRecord("h", replicas=(StandbyReplica(_KEY), StandbyReplica(_KEY, 1))), "twice"),
        (lambda: MemberRecord("h", addresses={"flight": ""}), "addresses of h"),
        (lambda: MemberRecord("h", active={_KEY: -1}), "must be versions by bucket"),
        (lambda: MemberRecord("h", restore_bytes_per_s=-1.0), "rates of h"),
        (lambda: MemberRecord("h", restore_rows_per_s=float("inf")), "rates of h"),
        (lambda: MemberRecord("h", restore_rows_per_s=cast(Any, "1")), "rates of h"),
        (lambda: MemberRecord("h", active={BucketKey("o", "", 1): 1}), "must be versions by bucket"),
        (lambda: MemberRecord("h", failing={_KEY: cast(Any, 1)}), "failing must be a reason by bucket"),
        (lambda: MemberRecord("h", doubled=cast(Any, 1)), "doubled a bool"),
    ],
)
def test_wrong_values_are_refused(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize("it", [_RECORD, _SETTINGS], ids=["record", "settings"])
def test_damaged_bytes_are_noticed(it: MemberRecord | StandbySettings) -> None:
    data = it.encode()
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= flip
            try:
                found = type(it).decode(bytes(damaged), "members/it.json")
            except (CorruptFileError, VersionSkewError):
                continue
            # Only white space is outside the checksum.
            assert found == it
    for cut in range(len(data)):
        with pytest.raises(CorruptFileError, match="members/it"):
            type(it).decode(data[:cut], "members/it.json")


def _signed(fields: dict[str, Any]) -> bytes:
    fields.pop("checksum", None)
    return json.dumps({**fields, "checksum": compute_checksum(fields)}).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"host": ""},
        {"host": 5},
        {"rack": 5},
        {"generation": "7"},
        {"addresses": []},
        {"addresses": {"flight": 5}},
        {"active_hosts": None},
        {"active": {"buckets": [1]}},
        {"active": [{"operator": "o", "query_folder": "q", "buckets": [1, 1], "versions": [1, 2]}]},
        {"active": [{"operator": "o", "query_folder": "q", "buckets": [1], "versions": []}]},
        {"replicas": [5]},
        {"buckets": [1, 2]},
        {"buckets": ["1"]},
        {"in_sync": [2]},
        {"in_sync": [True]},
        {"active": [1]},
        {"active": [-2]},
        {"versions": [None]},
        {"lag_s": ["x"]},
        {"operator": 5},
        {"restore_bytes_per_s": "5"},
        {"restore_rows_per_s": -5},
        {"restore_rows_per_s": True},
    ],
    ids=str,
)
def test_senseless_records_with_a_right_checksum_are_refused(change: dict[str, Any]) -> None:
    fields = json.loads(_RECORD.encode())
    inner = fields["replicas"][0]
    if set(change) <= set(inner) and not (
        isinstance(change.get("active"), dict) or "versions" in str(change.get("active"))
    ):
        fields["replicas"] = [{**inner, **change}]
    else:
        fields |= change
    with pytest.raises(CorruptFileError, match=r"^it "):
        MemberRecord.decode(_signed(fields), "it")


def test_a_record_of_format_1_tells_no_rates() -> None:
    fields = json.loads(_RECORD.encode())
    old = {name: it for name, it in fields.items() if not name.startswith("restore_")} | {"format": 1}
    found = MemberRecord.decode(_signed(old), "it")
    assert found == replace(_RECORD, restore_bytes_per_s=None, restore_rows_per_s=None)


@pytest.mark.parametrize("it", [_RECORD, _SETTINGS], ids=["record", "settings"])
def test_every_field_is_needed_and_newer_formats_are_refused(it: MemberRecord | StandbySettings) -> None:
    fields = json.loads(it.encode())
    for name in fields.keys() - {"checksum"}:
        with pytest.raises(StateError, match=r"^it "):
            type(it).decode(_signed({key: value for key, value in fields.items() if key != name}), "it")
    assert (MEMBER_FORMAT, STANDBY_SETTINGS_FORMAT) == (2, 1)
    newer = fields["format"] + 1
    with pytest.raises(VersionSkewError, match=f"format {newer}"):
        type(it).decode(_signed({**fields, "format": newer}), "it")
