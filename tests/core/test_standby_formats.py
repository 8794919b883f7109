"""Standby settings and records of members: round trips, refused values and damage, and sizes."""

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

_EXAMPLES = settings(max_examples=examples(50))
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
    st.lists(_REPLICAS, max_size=12, unique_by=lambda replica: replica.key).map(tuple),
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


@_EXAMPLES
@given(_RECORDS)
def test_a_record_is_decoded_as_it_was_encoded(record: MemberRecord) -> None:
    again = MemberRecord.decode(record.encode(), "it")
    assert again == record
    assert again.encode() == record.encode()
    assert again.decided_by == record.decided_by


@_EXAMPLES
@given(st.booleans(), _COUNTS, st.floats(1e-6, 1e9))
def test_settings_are_decoded_as_they_were_encoded(enabled: bool, replicas: int, heartbeat_s: float) -> None:
    standby = StandbySettings(enabled, replicas, heartbeat_s)
    assert StandbySettings.decode(standby.encode(), "it") == standby
    assert standby.replicas == (replicas if enabled else 0)


def test_the_order_of_replicas_does_not_matter() -> None:
    replicas = tuple(StandbyReplica(BucketKey(operator, "q", at)) for operator in "ba" for at in (10, 9, 2))
    one, other = MemberRecord("h", replicas=replicas), MemberRecord("h", replicas=replicas[::-1])
    assert one == other
    assert one.encode() == other.encode()
    assert [replica.key.bucket for replica in one.replicas] == [2, 9, 10] * 2


def test_values_that_change_with_every_batch_are_not_part_of_decided_by() -> None:
    def make_record(**changed: Any) -> MemberRecord:
        fields = {"version": 3, "in_sync": True, "active": "other", **changed}
        return MemberRecord("h", replicas=(StandbyReplica(_KEY, **fields),))

    same = [make_record(), make_record(version=4, bytes=7, lag_versions=1, lag_bytes=2, lag_s=0.5)]
    others = [
        make_record(in_sync=False),
        make_record(active=None),
        MemberRecord("h"),
        MemberRecord("h", "rack"),
        MemberRecord("h", active={_KEY: 1}),
    ]
    rates = MemberRecord("h", restore_bytes_per_s=1.0, restore_rows_per_s=2.0)
    assert rates.decided_by == MemberRecord("h").decided_by
    assert len({record.decided_by for record in same}) == 1
    assert len({record.decided_by for record in (*same, *others)}) == 6


def test_records_stay_small() -> None:
    """One query has 10,000 buckets with one replica each, on 100 hosts or on 3."""

    def make_record(buckets: range) -> MemberRecord:
        folder = "0b1c2d3e-0000-4000-8000-000000000000"
        held = (
            StandbyReplica(BucketKey("counts", folder, at), 123_456, 10**8 + at, True, f"host-{at % 100}.example.org")
            for at in buckets
        )
        active = {BucketKey("counts", folder, at + 1): 123_456 for at in buckets}
        return MemberRecord("host-17.example.org", "rack", 10**12, tuple(held), active=active)

    assert len(make_record(range(0, 10_000, 100)).encode()) < 8_000
    assert len(make_record(range(0, 10_000, 3)).encode()) < 60 * 3_334


@pytest.mark.parametrize(
    ("make", "text"),
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
def test_invalid_values_are_refused(make: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


@pytest.mark.parametrize("value", [_RECORD, _SETTINGS], ids=["record", "settings"])
def test_damaged_and_truncated_files_are_refused(value: MemberRecord | StandbySettings) -> None:
    data = value.encode()
    for at in range(len(data)):
        for flip in (0x01, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= flip
            try:
                decoded = type(value).decode(bytes(damaged), "members/it.json")
            except (CorruptFileError, VersionSkewError):
                continue
            # The checksum covers all bytes except white space.
            assert decoded == value
    for cut in range(len(data)):
        with pytest.raises(CorruptFileError, match="members/it"):
            type(value).decode(data[:cut], "members/it.json")


def sign(fields: dict[str, Any]) -> bytes:
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
def test_invalid_records_with_a_correct_checksum_are_refused(change: dict[str, Any]) -> None:
    fields = json.loads(_RECORD.encode())
    inner = fields["replicas"][0]
    if set(change) <= set(inner) and not (
        isinstance(change.get("active"), dict) or "versions" in str(change.get("active"))
    ):
        fields["replicas"] = [{**inner, **change}]
    else:
        fields |= change
    with pytest.raises(CorruptFileError, match=r"^it "):
        MemberRecord.decode(sign(fields), "it")


def test_a_record_of_format_1_has_no_rates() -> None:
    fields = json.loads(_RECORD.encode())
    old = {name: value for name, value in fields.items() if not name.startswith("restore_")} | {"format": 1}
    decoded = MemberRecord.decode(sign(old), "it")
    assert decoded == replace(_RECORD, restore_bytes_per_s=None, restore_rows_per_s=None)


@pytest.mark.parametrize("value", [_RECORD, _SETTINGS], ids=["record", "settings"])
def test_a_missing_field_and_a_newer_format_are_refused(value: MemberRecord | StandbySettings) -> None:
    fields = json.loads(value.encode())
    for name in fields.keys() - {"checksum"}:
        with pytest.raises(StateError, match=r"^it "):
            type(value).decode(sign({key: value for key, value in fields.items() if key != name}), "it")
    assert (MEMBER_FORMAT, STANDBY_SETTINGS_FORMAT) == (2, 1)
    newer = fields["format"] + 1
    with pytest.raises(VersionSkewError, match=f"format {newer}"):
        type(value).decode(sign({**fields, "format": newer}), "it")
