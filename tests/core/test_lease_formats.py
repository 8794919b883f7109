"""Leases of format 1: library versions that know only this format take part in the protocol."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from lease_support import LEASE_MS, LEASE_S, ME, OTHER, Virtual, newest_in, record_of

from spark_state_ext.errors import LiveRunError
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.lease import Lease
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LeaseRecord, NumberedRecord
from tests.helpers.waiting import eventually


def encode_format_1(run: str = "other run", renewed_ms: int = 1000) -> str:
    """Return a format-1 file as older library versions write it."""
    owner: dict[str, object] = {"run_id": run, "application_id": "other application", "host": "other host"}
    owner |= {"boot": "boot", "pid": 11, "pid_start": "101"}
    return json.dumps({"format": 1, "owner": owner, "renewed_ms": renewed_ms, "replaced": ["one", "two"]})


@pytest.mark.parametrize("records", [0, 1, 3])
def test_a_format_1_lease_is_watched_before_it_is_taken_over(tmp_path: Path, records: int) -> None:
    clock, files = Virtual(), Folder(str(tmp_path))
    log = LeaseLog(files)
    for number in range(records):
        assert log.append(log.newest(), record_of(OTHER, nonce=str(number), released=True))
    (tmp_path / "lease.json").write_text(encode_format_1())
    latest = LeaseLog(files).newest(first=True)
    assert latest is not None
    assert latest.number == records
    assert (latest.record.owner.application, latest.record.owner.plan) == ("other application", "other run")
    Lease(files, ME, LEASE_MS, clock.clock).hold()
    assert clock.now_s >= LEASE_S, "the old lease was watched first"
    assert newest_in(tmp_path).replaced == ("one", "two", "other run")
    assert not (tmp_path / "lease.json").exists()


def test_a_live_run_with_format_1_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text(encode_format_1())

    clock = Virtual()
    clock.meanwhile = lambda: (tmp_path / "lease.json").write_text(encode_format_1(renewed_ms=int(clock.now_s * 1000)))
    with pytest.raises(LiveRunError, match="is being written by application other application on other host"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()


def test_a_lease_can_be_written_in_both_formats(tmp_path: Path) -> None:
    clock, files = Virtual(), Folder(str(tmp_path))
    lease = Lease(files, ME, LEASE_MS, clock.clock, format_1_too=True)
    lease.hold()
    clock.now_s += LEASE_S / 2
    lease.hold()
    eventually(lambda: '"record": 2' in (tmp_path / "lease.json").read_text())
    old = json.loads((tmp_path / "lease.json").read_text())
    assert (old["format"], old["owner"]["run_id"], old["record"]) == (1, ME.plan, 2)
    # A third run reads the record, not its format-1 copy.
    latest = LeaseLog(files).newest(first=True)
    assert latest is not None
    assert latest.record.owner == ME
    # An older library version has taken the lease over and writes format 1 only: this run stops.
    (tmp_path / "lease.json").write_text(encode_format_1())
    clock.now_s += LEASE_S
    with pytest.raises(LiveRunError, match="was taken over by application other application"):
        lease.check()
    # Late tasks of this run do not get the lease back.
    (tmp_path / "lease.json").write_text(encode_format_1().replace("two", ME.plan))
    with pytest.raises(LiveRunError):
        Lease(files, ME, LEASE_MS, clock.clock, format_1_too=True).hold()


def test_a_released_lease_is_also_released_in_format_1(tmp_path: Path) -> None:
    log = LeaseLog(Folder(str(tmp_path)))
    assert log.append(None, record_of(ME, released=True, format_1_too=True))
    assert json.loads((tmp_path / "lease.json").read_text())["renewed_ms"] == 0


def renew_as_driver(log: LeaseLog) -> None:
    """Renew the newest record, as the driver of an active query does."""
    latest = log.newest()
    assert latest is not None
    assert log.append(latest, replace(latest.record, released=False, nonce=uuid.uuid4().hex))


def test_a_run_takes_the_lease_while_the_driver_renews_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, an older library version would not see that the new run is alive."""
    files, append = Folder(str(tmp_path)), LeaseLog.append
    log = LeaseLog(files)
    assert log.append(None, record_of(ME, released=True))

    def append_after_the_driver(self: LeaseLog, after: NumberedRecord | None, record: LeaseRecord) -> bool:
        monkeypatch.setattr(LeaseLog, "append", append)
        renew_as_driver(log)
        return append(self, after, record)

    monkeypatch.setattr(LeaseLog, "append", append_after_the_driver)
    Lease(files, replace(ME, plan="planned again"), LEASE_MS, Virtual().clock, format_1_too=True).hold()
    assert newest_in(tmp_path).owner.plan == "planned again"
    assert json.loads((tmp_path / "lease.json").read_text())["owner"]["run_id"] == "planned again"


def test_a_renewal_by_the_driver_does_not_keep_a_format_1_lease_alive(
    tmp_path: Path,
) -> None:
    files, clock = Folder(str(tmp_path)), Virtual()
    log = LeaseLog(files)
    assert log.append(None, record_of(ME, released=True))
    (tmp_path / "lease.json").write_text(encode_format_1())
    clock.meanwhile = lambda: renew_as_driver(log) if clock.now_s < LEASE_S else None
    Lease(files, replace(ME, plan="planned again"), LEASE_MS, clock.clock).hold()
    assert clock.now_s >= LEASE_S, "the old lease was watched first"
    assert newest_in(tmp_path).owner.plan == "planned again"
