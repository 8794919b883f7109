"""Lease records, and what a run may do about them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lease_support import ME, OTHER, found_of, local_run, record_of

from spark_state_ext.errors import CorruptFileError, VersionSkewError
from spark_state_ext.ownership.lease_record import Decision, LeaseRecord, NumberedRecord, RunIdentity, Watch, decide
from spark_state_ext.worker import process

_WATCHED = Watch(found_of(OTHER), 10.0)


@pytest.mark.parametrize(
    ("latest", "watch", "now_s", "over", "expected"),
    [
        (None, None, 0.0, False, Decision.RENEW),
        (found_of(ME), None, 0.0, False, Decision.RENEW),
        # One application runs one plan of a query at a time; some tasks do not know their query.
        (found_of(replace(ME, plan="earlier plan")), None, 0.0, False, Decision.RENEW),
        (found_of(replace(ME, query="")), None, 0.0, False, Decision.RENEW),
        (found_of(replace(ME, query="another query")), None, 0.0, False, Decision.WATCH),
        # Another run must be over, or silent for a whole lease by the reader's own clock.
        (found_of(OTHER), None, 1e9, False, Decision.WATCH),
        (found_of(OTHER), None, 0.0, True, Decision.RENEW),
        (found_of(OTHER, released=True), None, 0.0, False, Decision.RENEW),
        (found_of(OTHER), _WATCHED, 10.5, False, Decision.WATCH),
        (found_of(OTHER), _WATCHED, 10.6, False, Decision.TAKE_OVER),
        (found_of(OTHER, 8, nonce="renewed"), _WATCHED, 10.6, False, Decision.LIVE),
        # A format-1 lease has the number of the newest record, which another run may have renewed.
        (found_of(OTHER, 8), _WATCHED, 10.6, False, Decision.TAKE_OVER),
        (found_of(OTHER, 8, released=True), _WATCHED, 10.1, False, Decision.RENEW),
        # The longer of the two lease times counts.
        (found_of(OTHER, lease_ms=2_000), Watch(found_of(OTHER, lease_ms=2_000), 10.0), 11.9, False, Decision.WATCH),
        (
            found_of(OTHER, lease_ms=2_000),
            Watch(found_of(OTHER, lease_ms=2_000), 10.0),
            12.1,
            False,
            Decision.TAKE_OVER,
        ),
        # A run that was replaced stays out, whoever holds the lease now.
        (found_of(OTHER, replaced=("plan",)), None, 0.0, False, Decision.REPLACED),
        (found_of(OTHER, replaced=("plan",), released=True), None, 0.0, True, Decision.REPLACED),
    ],
)
def test_decide_returns_what_a_run_may_do_about_a_lease(
    latest: NumberedRecord | None, watch: Watch | None, now_s: float, over: bool, expected: Decision
) -> None:
    assert decide(latest, ME, watch, now_s, 500, over) is expected


def test_a_job_group_does_not_identify_a_run() -> None:
    """Two drivers may have the same job group, and a driver's restart a new one, if `foreachBatch` sets it."""
    assert "job" not in " ".join(RunIdentity.__dataclass_fields__)
    assert not ME.is_same_run(OTHER)
    assert not replace(ME, application="app-1 10.0.0.1:7001").is_same_run(
        replace(ME, application="app-1 10.0.0.2:7001")
    )


def test_records_round_trip_and_damaged_ones_are_refused() -> None:
    record = record_of(OTHER, replaced=("a", "b"), released=True)
    assert LeaseRecord.decode(record.encode(), "1.json") == record
    for damaged in (b"", b"{", b"[]", b"null", b'{"owner": {}}', b"\xff", record.encode()[:-5]):
        with pytest.raises(CorruptFileError, match=r"1\.json"):
            LeaseRecord.decode(damaged, "1.json")
    newer = record.encode().replace(b'"format": 3', b'"format": 4')
    with pytest.raises(VersionSkewError, match=r"1\.json has format 4"):
        LeaseRecord.decode(newer, "1.json")


def test_a_process_hidden_from_proc_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide the processes of other users (hidepid)."""
    here = local_run()
    monkeypatch.setattr(process, "get_start_ticks", lambda pid: "")
    assert not here.is_over()
    assert replace(here, pid=2**22 - 1).is_over()


def test_a_run_is_over_only_if_its_process_is_certainly_gone() -> None:
    here = local_run()
    assert not here.is_over()
    assert not replace(here, host="elsewhere", pid=2**22 - 1).is_over()
    # Another machine of the same name, such as a clone of an image, or this one before a restart.
    assert not replace(here, boot="another boot", pid=2**22 - 1).is_over()
    # A container that has the machine's name.
    assert not replace(here, pid_namespace="pid:[1]", pid=2**22 - 1).is_over()
    assert not replace(here, pid_namespace="", pid=2**22 - 1).is_over()
    # No process has this pid.
    assert replace(here, pid=2**22 - 1).is_over()
    # Another process has reused the pid.
    assert replace(here, pid_start=str(int(here.pid_start) - 1)).is_over()
    # The start time is unknown (no /proc), so the process may still be running.
    assert not replace(here, pid=2**22 - 1, pid_start="").is_over()


def test_only_a_local_run_names_its_process() -> None:
    """The worker's parent process on a cluster is an executor, whose end is not the end of the run."""
    on_cluster = RunIdentity.here("application", "plan", "query")
    assert (on_cluster.pid, on_cluster.pid_start) == (0, "")
    assert not on_cluster.is_over()
    # This test has no JVM as a parent process either.
    assert RunIdentity.here("application", "plan", local=True).pid == 0
