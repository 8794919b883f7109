"""A claim to a query folder: the query that began it is stopped, and nobody else gets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lease_support import LEASE_MS, LEASE_S, ME, OTHER, Virtual, newest_in, record_of

from spark_state_ext.__main__ import main
from spark_state_ext.errors import (
    ClaimedError,
    LiveRunError,
    MissingCheckpointError,
    NotClaimableError,
    VersionSkewError,
)
from spark_state_ext.files.folder import Folder
from spark_state_ext.ownership.free import until_free
from spark_state_ext.ownership.lease import Lease, LeaseRegistry
from spark_state_ext.ownership.lease_log import LeaseLog
from spark_state_ext.ownership.lease_record import LEASE_FORMAT, Claim, Found, LeaseRecord
from spark_state_ext.ownership.release import note_handed_over, release_query_folder
from tests.helpers.waiting import eventually

CLAIM = Claim("new-query", "/state/counts/new-query", 1_000)
NEW = replace(OTHER, query="new query")


@pytest.fixture
def clock() -> Virtual:
    return Virtual()


def _claimed(root: Path, clock: Virtual) -> Lease:
    lease = Lease(Folder(str(root)), NEW, LEASE_MS, clock.clock, claim=CLAIM, claims=True)
    lease.hold()
    return lease


def _free(log: LeaseLog, claim: str | None, clock: Virtual) -> int:
    """Number of the record from which on nobody holds the lease."""
    found = until_free(log, claim, lambda found: LiveRunError("it lives"), clock.clock)
    return 0 if found is None else found.number


def _ended(root: Path) -> None:
    """The old query has run, and ended."""
    log = LeaseLog(Folder(str(root)))
    assert log.append(log.newest(), record_of(ME, released=True))


def test_the_old_query_is_stopped_where_it_begins_again(tmp_path: Path, clock: Virtual) -> None:
    _ended(tmp_path)
    _claimed(tmp_path, clock)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    # However long the new one is silent: it is no lease that runs out.
    clock.now_s += 100 * LEASE_S
    with pytest.raises(ClaimedError):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_the_old_query_is_stopped_where_it_cleans_up_late(tmp_path: Path, clock: Virtual) -> None:
    old = Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock)
    old.hold()
    # Its machine sleeps; the new query watches for a whole lease, and takes it.
    _claimed(tmp_path, clock)
    with pytest.raises(ClaimedError):
        old.check()
    with pytest.raises(ClaimedError):
        old.hold()


def test_an_old_query_that_lives_is_not_claimed_from(tmp_path: Path, clock: Virtual) -> None:
    old = Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock)
    old.hold()
    log = LeaseLog(Folder(str(tmp_path)))
    clock.meanwhile = lambda: log.append(log.newest(), record_of(ME, nonce=str(clock.now_s)))
    with pytest.raises(LiveRunError, match="is being written by"):
        _claimed(tmp_path, clock)
    assert newest_in(tmp_path).claim is None


def test_pointers_are_read_for_a_claim_once_the_lease_is_free(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    assert _free(log, None, clock) == 0
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    begun_s = clock.now_s
    # Between two renewals it commits batch after batch, and its record stays the same: only time tells.
    assert _free(log, None, clock) == 1
    assert clock.now_s > begun_s + LEASE_S
    assert log.append(log.newest(), record_of(ME, released=True))
    # Somebody wrote meanwhile, so the pointers may be those of the batch before.
    with pytest.raises(LiveRunError, match="stop the old query first"):
        Lease(folder, NEW, LEASE_MS, clock.clock, claim=replace(CLAIM, after=1), claims=True).hold()
    begun_s = clock.now_s
    assert _free(log, None, clock) == 2
    assert clock.now_s == begun_s


def test_a_query_that_runs_is_not_captured_for_a_claim(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    clock.meanwhile = lambda: log.append(log.newest(), record_of(ME, nonce=str(clock.now_s)))
    with pytest.raises(LiveRunError, match="it lives"):
        _free(log, None, clock)


def test_a_release_that_comes_late_is_waited_for(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()

    def released() -> None:
        clock.meanwhile = lambda: None
        assert log.append(log.newest(), record_of(ME, released=True))

    clock.meanwhile = released
    assert _free(log, None, clock) == 2
    assert clock.now_s < LEASE_S


def test_one_that_claimed_its_folder_must_have_ended_to_be_claimed_from(tmp_path: Path, clock: Virtual) -> None:
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    _claimed(tmp_path, clock)
    found = log.newest()
    assert found is not None
    # A restart of it plans with the old query's pointers, and waits for nobody.
    assert _free(log, None, clock) == found.number
    assert clock.now_s == 0
    # Who comes with its own pointers waits as for any query: it may commit without a new record.
    assert _free(log, CLAIM.id, clock) == found.number
    assert clock.now_s > LEASE_S
    assert log.append(found, replace(found.record, released=True))
    third = Claim("third", "/state/counts/third", 2_000, instead_of=CLAIM.id)
    me = replace(OTHER, query="third query", plan="third plan")
    with pytest.raises(LiveRunError):
        Lease(folder, me, LEASE_MS, clock.clock, claim=replace(third, after=found.number), claims=True).hold()
    after = _free(log, CLAIM.id, clock)
    assert after == found.number + 1
    Lease(folder, me, LEASE_MS, clock.clock, claim=replace(third, after=after), claims=True).hold()
    assert newest_in(tmp_path).claim == third


@pytest.mark.parametrize("released", [False, True])
def test_a_claim_follows_the_record_from_before_its_pointers_were_read(
    tmp_path: Path, clock: Virtual, released: bool
) -> None:
    """The old query's machine sleeps, wakes up while the claim is made, commits a batch, and perhaps ends."""
    folder, log = Folder(str(tmp_path)), LeaseLog(Folder(str(tmp_path)))
    Lease(folder, ME, LEASE_MS, clock.clock).hold()
    after = _free(log, None, clock)

    def written() -> None:
        clock.meanwhile = lambda: None
        assert log.append(log.newest(), record_of(ME, released=released))

    clock.meanwhile = written
    claim = replace(CLAIM, after=after)
    with pytest.raises(LiveRunError):
        Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    assert newest_in(tmp_path).claim is None
    # Planned anew it goes by the batch that was committed meanwhile.
    claim = replace(CLAIM, after=_free(log, None, clock))
    Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    # Another task of the first batch read the lease before that: the claim is its own.
    Lease(folder, NEW, LEASE_MS, clock.clock, claim=claim, claims=True).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_a_second_claim_is_refused_with_the_first_ones_owner(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    other = Claim("third", "/state/counts/third", 2_000)
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()


def test_who_claimed_it_may_be_claimed_from(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True))
    third = Claim("third", "/state/counts/third", 2_000)
    me = replace(OTHER, query="third query", plan="third plan")

    def claimed(instead_of: str | None) -> None:
        claim = replace(third, instead_of=instead_of)
        made = Lease(Folder(str(tmp_path)), me, LEASE_MS, clock.clock, claim=claim, claims=True)
        made.hold()

    # By pointers of the first query, which are the new one's no longer, nobody gets it.
    with pytest.raises(ClaimedError, match="belongs to /state/counts/new-query"):
        claimed(None)
    claimed(CLAIM.id)
    assert newest_in(tmp_path).claim == third
    claimed(CLAIM.id)
    # From now on the one before is another query.
    with pytest.raises(ClaimedError, match="belongs to /state/counts/third"):
        Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()
    with pytest.raises(ClaimedError, match="belongs to /state/counts/third"):
        other = Claim("fourth", "/state/counts/fourth", 3_000, instead_of=CLAIM.id)
        Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()


def test_all_tasks_of_the_first_batch_have_one_claim(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=replace(CLAIM, claimed_ms=9_000), claims=True).hold()
    assert newest_in(tmp_path).claim == CLAIM


def test_the_new_query_goes_on_by_its_pointers(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    clock.now_s += LEASE_S / 2
    later = Lease(Folder(str(tmp_path)), replace(NEW, plan="after a restart"), LEASE_MS, clock.clock, claim=CLAIM)
    later.hold()
    clock.now_s += LEASE_S / 2
    before = newest_in(tmp_path)
    later.hold()
    eventually(lambda: newest_in(tmp_path) != before)
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_a_query_whose_claim_was_released_is_stopped(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, claim=None, released=True, nonce="released"))
    with pytest.raises(ClaimedError, match="was released"):
        Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()


def test_where_somebody_removed_the_lease_the_claim_is_made_anew(tmp_path: Path, clock: Virtual) -> None:
    Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM).hold()
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_releases_that_know_no_claims_refuse_the_folder(tmp_path: Path, clock: Virtual) -> None:
    (tmp_path / "lease.json").write_text(json.dumps({"format": 1, "record": 1}))
    _claimed(tmp_path, clock)
    refused = json.loads((tmp_path / "lease.json").read_text())
    assert refused["format"] == LEASE_FORMAT
    with pytest.raises(VersionSkewError):
        LeaseRecord.decode_format_1((tmp_path / "lease.json").read_bytes(), "it")
    # And the claim counts for this one, whatever stands there.
    assert newest_in(tmp_path).claim == CLAIM


def test_a_claim_that_is_made_between_two_looks(
    tmp_path: Path, clock: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks reads the records first and what is of format 1 then, which a claim replaces."""
    _ended(tmp_path)
    real = LeaseLog._newest_record

    def looks(log: LeaseLog) -> Found | None:
        found = real(log)
        monkeypatch.setattr(LeaseLog, "_newest_record", real)
        _claimed(tmp_path, clock)
        return found

    monkeypatch.setattr(LeaseLog, "_newest_record", looks)
    found = LeaseLog(Folder(str(tmp_path))).newest(first=True)
    assert found is not None
    assert found.record.claim == CLAIM


def test_a_process_tells_the_two_queries_apart(tmp_path: Path) -> None:
    registry, folder = LeaseRegistry(), Folder(str(tmp_path))
    one = registry.of(folder, ME, LEASE_MS, claim=CLAIM, claims=True)
    assert registry.of(folder, ME, LEASE_MS, claim=replace(CLAIM, claimed_ms=5)) is one
    assert registry.of(folder, ME, LEASE_MS) is not one


# -- releasing it ---------------------------------------------------------------------------------


def _release(root: Path, clock: Virtual, **also: bool) -> Claim:
    return release_query_folder(Folder(str(root)), clock=clock.clock, **also)


def test_a_claim_whose_owner_died_is_released(tmp_path: Path, clock: Virtual) -> None:
    _ended(tmp_path)
    owner = _claimed(tmp_path, clock)
    assert _release(tmp_path, clock) == CLAIM
    assert clock.now_s > LEASE_S, "it was watched for a whole lease"
    # Should it live after all, it stops before it writes or cleans up.
    clock.now_s += LEASE_S
    with pytest.raises(ClaimedError, match="was released"):
        owner.check()
    with pytest.raises(ClaimedError, match="was released"):
        owner.hold()
    # The old query goes on at once, and so may another claim.
    Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock).hold()
    assert newest_in(tmp_path).claim is None
    with pytest.raises(MissingCheckpointError, match="nobody has claimed the state at"):
        _release(tmp_path, clock)


def test_a_claim_whose_owner_ended_in_order_is_released_at_once(tmp_path: Path, clock: Virtual) -> None:
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True, nonce="ended"))
    _release(tmp_path, clock)
    assert clock.now_s == 0
    other = Claim("third", "/state/counts/third", 2_000)
    Lease(Folder(str(tmp_path)), ME, LEASE_MS, clock.clock, claim=other, claims=True).hold()
    assert newest_in(tmp_path).claim == other


def test_a_claim_whose_owner_lives_is_not_released(tmp_path: Path, clock: Virtual) -> None:
    owner = _claimed(tmp_path, clock)

    def renewed() -> None:
        log = LeaseLog(Folder(str(tmp_path)))
        found = log.newest()
        assert found is not None
        assert log.append(found, replace(found.record, nonce=str(clock.now_s)))

    clock.meanwhile = renewed
    with pytest.raises(LiveRunError, match="its owner lives"):
        _release(tmp_path, clock)
    clock.meanwhile = lambda: None
    owner.check()
    assert newest_in(tmp_path).claim == CLAIM


def _builds(lease: Lease) -> None:
    """A later batch, which comes with a pointer that is committed."""
    lease.told(NEW, claims=False)
    lease.hold()


def test_what_was_built_upon_is_not_released(tmp_path: Path, clock: Virtual) -> None:
    owner = _claimed(tmp_path, clock)
    assert newest_in(tmp_path).claim == CLAIM
    # At once, though no renewal is due.
    _builds(owner)
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)
    clock.now_s += 100 * LEASE_S
    for force in (False, True):
        with pytest.raises(NotClaimableError, match="a batch of it is committed"):
            _release(tmp_path, clock, force=force)
    # It stays so, whoever of the query renews it.
    later = Lease(Folder(str(tmp_path)), replace(NEW, plan="after a restart"), LEASE_MS, clock.clock, claim=CLAIM)
    later.hold()
    assert newest_in(tmp_path).claim == replace(CLAIM, built=True)


def test_one_process_says_for_all_that_the_claim_is_built_upon(tmp_path: Path, clock: Virtual) -> None:
    one = _claimed(tmp_path, clock)
    other = Lease(Folder(str(tmp_path)), NEW, LEASE_MS, clock.clock, claim=CLAIM, claims=True)
    other.hold()
    _builds(one)
    log = LeaseLog(Folder(str(tmp_path)))
    before = log.newest()
    _builds(other)
    assert log.newest() == before


def test_a_release_that_comes_first_stops_the_owner_before_it_builds(tmp_path: Path, clock: Virtual) -> None:
    owner = _claimed(tmp_path, clock)
    release_query_folder(Folder(str(tmp_path)), clock=Virtual().clock)
    with pytest.raises(ClaimedError, match="was released"):
        _builds(owner)
    assert newest_in(tmp_path).claim is None


def test_a_claim_whose_first_batch_may_be_committed_is_released_by_force_only(
    tmp_path: Path, clock: Virtual, capsys: pytest.CaptureFixture[str]
) -> None:
    _ended(tmp_path)
    _claimed(tmp_path, clock)
    log = LeaseLog(Folder(str(tmp_path)))
    found = log.newest()
    assert found is not None
    assert log.append(found, replace(found.record, released=True, nonce="ended"))
    # Each bucket's call says so.
    for _ in range(2):
        note_handed_over(Folder(str(tmp_path)), CLAIM.id)
    assert main(["savepoint", "release", str(tmp_path)]) == 3
    assert f"NotClaimableError: the claim of {CLAIM} to the state at {tmp_path} is not" in capsys.readouterr().err
    assert main(["savepoint", "release", str(tmp_path), "--force"]) == 0
    assert capsys.readouterr().err == "released: the claim of /state/counts/new-query\n"
    assert main(["savepoint", "release", str(tmp_path)]) == 3
    assert "MissingCheckpointError: nobody has claimed the state at" in capsys.readouterr().err


def test_whether_a_claim_is_built_upon_is_in_the_record() -> None:
    for claim in (CLAIM, replace(CLAIM, built=True)):
        record = record_of(ME, claim=claim)
        assert LeaseRecord.decode(record.encode(), "it").claim == claim
