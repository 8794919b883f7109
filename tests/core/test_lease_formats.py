"""A lease in format 1, beside the present one: releases that know no other take part."""

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


def _old_lease(run: str = "other run", renewed_ms: int = 1000) -> str:
    """A file of format 1, as the releases write it that know no other."""
    owner: dict[str, object] = {"run_id": run, "application_id": "other application", "host": "other host"}
    owner |= {"boot": "boot", "pid": 11, "pid_start": "101"}
    return json.dumps({"format": 1, "owner": owner, "renewed_ms": renewed_ms, "replaced": ["one", "two"]})


@pytest.mark.parametrize("records", [0, 1, 3])
def test_a_lease_of_format_1_is_watched_like_any_other(tmp_path: Path, records: int) -> None:
    clock, files = Virtual(), Folder(str(tmp_path))
    log = LeaseLog(files)
    for number in range(records):
        assert log.append(log.newest(), record_of(OTHER, nonce=str(number), released=True))
    (tmp_path / "lease.json").write_text(_old_lease())
    found = LeaseLog(files).newest(first=True)
    assert found is not None
    assert found.number == records
    assert (found.record.owner.application, found.record.owner.plan) == ("other application", "other run")
    Lease(files, ME, LEASE_MS, clock.clock).hold()
    assert clock.now_s >= LEASE_S, "it has watched first"
    assert newest_in(tmp_path).replaced == ("one", "two", "other run")
    assert not (tmp_path / "lease.json").exists()


def test_a_run_that_lives_and_knows_format_1_only_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text(_old_lease())

    clock = Virtual()
    clock.meanwhile = lambda: (tmp_path / "lease.json").write_text(_old_lease(renewed_ms=int(clock.now_s * 1000)))
    with pytest.raises(LiveRunError, match="is being written by application other application on other host"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()


def test_a_lease_in_both_formats(tmp_path: Path) -> None:
    clock, files = Virtual(), Folder(str(tmp_path))
    lease = Lease(files, ME, LEASE_MS, clock.clock, format_1_too=True)
    lease.hold()
    clock.now_s += LEASE_S / 2
    lease.hold()
    eventually(lambda: '"record": 2' in (tmp_path / "lease.json").read_text())
    old = json.loads((tmp_path / "lease.json").read_text())
    assert (old["format"], old["owner"]["run_id"], old["record"]) == (1, ME.plan, 2)
    # Another run sees the records, and not what repeats them.
    found = LeaseLog(files).newest(first=True)
    assert found is not None
    assert found.record.owner == ME
    # A release that knows format 1 only has taken it over: it writes what it knows, and this run stops.
    (tmp_path / "lease.json").write_text(_old_lease())
    clock.now_s += LEASE_S
    with pytest.raises(LiveRunError, match="was taken over by application other application"):
        lease.check()
    # And its late tasks do not get it back.
    (tmp_path / "lease.json").write_text(_old_lease().replace("two", ME.plan))
    with pytest.raises(LiveRunError):
        Lease(files, ME, LEASE_MS, clock.clock, format_1_too=True).hold()


def test_who_ends_says_so_in_format_1_too(tmp_path: Path) -> None:
    log = LeaseLog(Folder(str(tmp_path)))
    assert log.append(None, record_of(ME, released=True, format_1_too=True))
    assert json.loads((tmp_path / "lease.json").read_text())["renewed_ms"] == 0


def _driver_renews(log: LeaseLog) -> None:
    """The driver renews the newest record, as its query is active."""
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=False, nonce=uuid.uuid4().hex))


def test_a_run_takes_the_lease_although_the_driver_renews_that_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a release that knows format 1 only would not see that the run lives."""
    files, append = Folder(str(tmp_path)), LeaseLog.append
    log = LeaseLog(files)
    assert log.append(None, record_of(ME, released=True))

    def append_after_the_driver(self: LeaseLog, after: NumberedRecord | None, record: LeaseRecord) -> bool:
        monkeypatch.setattr(LeaseLog, "append", append)
        _driver_renews(log)
        return append(self, after, record)

    monkeypatch.setattr(LeaseLog, "append", append_after_the_driver)
    Lease(files, replace(ME, plan="planned again"), LEASE_MS, Virtual().clock, format_1_too=True).hold()
    assert newest_in(tmp_path).owner.plan == "planned again"
    assert json.loads((tmp_path / "lease.json").read_text())["owner"]["run_id"] == "planned again"


def test_what_the_driver_renews_meanwhile_is_no_sign_of_life_of_a_release_that_knows_format_1_only(
    tmp_path: Path,
) -> None:
    files, clock = Folder(str(tmp_path)), Virtual()
    log = LeaseLog(files)
    assert log.append(None, record_of(ME, released=True))
    (tmp_path / "lease.json").write_text(_old_lease())
    clock.meanwhile = lambda: _driver_renews(log) if clock.now_s < LEASE_S else None
    Lease(files, replace(ME, plan="planned again"), LEASE_MS, clock.clock).hold()
    assert clock.now_s >= LEASE_S, "it has watched first"
    assert newest_in(tmp_path).owner.plan == "planned again"
