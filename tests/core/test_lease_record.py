"""What a lease says, and what a run may do about it: values and decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lease_support import ME, OTHER, found_of, local_run, record_of

from spark_state_ext.errors import CorruptFileError, VersionSkewError
from spark_state_ext.ownership.lease_record import Decision, LeaseRecord, NumberedRecord, RunIdentity, Watch, decide
from spark_state_ext.worker import process

_WATCHED = Watch(found_of(OTHER), 10.0)


@pytest.mark.parametrize(
    ("found", "watch", "now_s", "over", "expected"),
    [
        (None, None, 0.0, False, Decision.RENEW),
        (found_of(ME), None, 0.0, False, Decision.RENEW),
        # Of one application and query, only one run is active at a time; tasks may not be told their query.
        (found_of(replace(ME, plan="earlier plan")), None, 0.0, False, Decision.RENEW),
        (found_of(replace(ME, query="")), None, 0.0, False, Decision.RENEW),
        (found_of(replace(ME, query="another query")), None, 0.0, False, Decision.WATCH),
        # Others have to be over, or silent for a whole lease on one's own clock.
        (found_of(OTHER), None, 1e9, False, Decision.WATCH),
        (found_of(OTHER), None, 0.0, True, Decision.RENEW),
        (found_of(OTHER, released=True), None, 0.0, False, Decision.RENEW),
        (found_of(OTHER), _WATCHED, 10.5, False, Decision.WATCH),
        (found_of(OTHER), _WATCHED, 10.6, False, Decision.TAKE_OVER),
        (found_of(OTHER, 8, nonce="renewed"), _WATCHED, 10.6, False, Decision.LIVE),
        # The number of a lease of format 1 is that of the newest record beside it, which another run may have renewed.
        (found_of(OTHER, 8), _WATCHED, 10.6, False, Decision.TAKE_OVER),
        (found_of(OTHER, 8, released=True), _WATCHED, 10.1, False, Decision.RENEW),
        # The longer of both leases counts.
        (found_of(OTHER, lease_ms=2_000), Watch(found_of(OTHER, lease_ms=2_000), 10.0), 11.9, False, Decision.WATCH),
        (
            found_of(OTHER, lease_ms=2_000),
            Watch(found_of(OTHER, lease_ms=2_000), 10.0),
            12.1,
            False,
            Decision.TAKE_OVER,
        ),
        # Who was replaced does not come back, whoever holds it now.
        (found_of(OTHER, replaced=("plan",)), None, 0.0, False, Decision.REPLACED),
        (found_of(OTHER, replaced=("plan",), released=True), None, 0.0, True, Decision.REPLACED),
    ],
)
def test_decide(
    found: NumberedRecord | None, watch: Watch | None, now_s: float, over: bool, expected: Decision
) -> None:
    assert decide(found, ME, watch, now_s, 500, over) is expected


def test_a_job_group_is_no_part_of_a_run() -> None:
    """`foreachBatch` may set it: two drivers that did have runs of their own all the same, and one driver's restart is
    a run like the one before."""
    assert "job" not in " ".join(RunIdentity.__dataclass_fields__)
    assert not ME.is_same_run(OTHER)
    assert not replace(ME, application="app-1 10.0.0.1:7001").is_same_run(
        replace(ME, application="app-1 10.0.0.2:7001")
    )


def test_records_round_trip_and_damage_is_said() -> None:
    record = record_of(OTHER, replaced=("a", "b"), released=True)
    assert LeaseRecord.decode(record.encode(), "1.json") == record
    for damaged in (b"", b"{", b"[]", b"null", b'{"owner": {}}', b"\xff", record.encode()[:-5]):
        with pytest.raises(CorruptFileError, match=r"1\.json"):
            LeaseRecord.decode(damaged, "1.json")
    newer = record.encode().replace(b'"format": 3', b'"format": 4')
    with pytest.raises(VersionSkewError, match=r"1\.json has format 4"):
        LeaseRecord.decode(newer, "1.json")


def test_a_process_of_another_user_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may hide them (hidepid), and lives on all the same."""
    here = local_run()
    monkeypatch.setattr(process, "get_start_ticks", lambda pid: "")
    assert not here.is_over()
    assert replace(here, pid=2**22 - 1).is_over()


def test_is_over_only_when_it_is_certain() -> None:
    here = local_run()
    assert not here.is_over()
    assert not replace(here, host="elsewhere", pid=2**22 - 1).is_over()
    # A machine of the same name, as clones of one image have, or this one before it was restarted.
    assert not replace(here, boot="another boot", pid=2**22 - 1).is_over()
    # A container with the machine's own name.
    assert not replace(here, pid_namespace="pid:[1]", pid=2**22 - 1).is_over()
    assert not replace(here, pid_namespace="", pid=2**22 - 1).is_over()
    # Nobody has that number.
    assert replace(here, pid=2**22 - 1).is_over()
    # The pid is in use again, by another process.
    assert replace(here, pid_start=str(int(here.pid_start) - 1)).is_over()
    # Not known (no /proc): then nobody is declared over.
    assert not replace(here, pid=2**22 - 1, pid_start="").is_over()


def test_only_in_local_mode_a_process_is_looked_for() -> None:
    """On a cluster the process above a worker is an executor; that it ends is not the end of the run."""
    on_cluster = RunIdentity.here("application", "plan", "query")
    assert (on_cluster.pid, on_cluster.pid_start) == (0, "")
    assert not on_cluster.is_over()
    # There is no JVM above this test either.
    assert RunIdentity.here("application", "plan", local=True).pid == 0
